//! Converts the options of a command line to the devices of a guest.

use std::path::Path;

use ringfence_live::MemoryRules;
use ringfence_live::access::{Gid, SocketAccess};
use ringfence_live::daemon::{
    DeviceOptions, Disk, DiskBus, DiskMode, GuestDevices, Iommu, VfioUserDevices, VhostUserDisk,
};
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;
use ringfence_live::qemu::QemuIommu;
use ringfence_live::sandbox::SandboxProgram;

use crate::args::{DeviceArgs, DiskArg, DiskBusArg, DiskModeArg, GuestLimitArgs, IommuKind};
use crate::failure::Failure;
use crate::same_file::same_file;

/// File of a disk for which the command line names no file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Image<'a> {
    /// No file: `--disk` requires one, and without `--disk` there is no disk.
    None,
    /// A file that the command creates after the check of the options.
    Later,
    /// An existing file.
    At(&'a Path),
}

/// Returns the devices of a guest. A disk without a file uses `image`, and with an `image` there is
/// always a disk. For [`Image::Later`] the path of the disk is a placeholder.
pub(super) fn device_options(
    args: &DeviceArgs,
    image: Image<'_>,
) -> Result<DeviceOptions, Failure> {
    let named = args.disk.as_ref().and_then(|disk| disk.file.as_deref());
    let (known, path) = match image {
        Image::None => (named, named),
        Image::Later => (named, named.or(Some(Path::new("disk.img")))),
        Image::At(path) => (named.or(Some(path)), named.or(Some(path))),
    };
    let disk = match (&args.disk, path) {
        (None, None) => None,
        (Some(_), None) => return Err(Failure::Devices("--disk requires a FILE")),
        (disk, Some(path)) => Some((disk.clone().unwrap_or_default(), path)),
    };
    let devices = match args.iommu {
        IommuKind::QemuIntel => vhost_user_disk(args, QemuIommu::Intel, disk)?,
        IommuKind::QemuVirtio => vhost_user_disk(args, QemuIommu::Virtio, disk)?,
        _ => {
            refuse_shared_files(args, known)?;
            vfio_user_devices(args, disk)?
        }
    };
    let options = DeviceOptions {
        access: access(args),
        limits: limits(&args.caps),
        devices,
    };
    options.check().map_err(Failure::Devices)?;
    Ok(options)
}

fn vfio_user_devices(
    args: &DeviceArgs,
    disk: Option<(DiskArg, &Path)>,
) -> Result<GuestDevices, Failure> {
    let is_pviommu = args.iommu == IommuKind::Pviommu;
    refuse(&[
        (
            args.record_requests.is_some() && args.iommu != IommuKind::Virtio,
            "--record-requests requires --iommu virtio",
        ),
        (
            args.record_dmas.is_some() && args.iommu != IommuKind::Virtio,
            "--record-dmas requires --iommu virtio",
        ),
        (
            args.host_page_pool && !is_pviommu,
            "--host-page-pool requires --iommu pviommu",
        ),
        (
            args.inject_reply.is_some() && !is_pviommu,
            "--inject-reply requires --iommu pviommu",
        ),
        (
            !args.inject_dma.is_empty() && disk.is_none(),
            "--inject-dma requires --disk",
        ),
    ])?;
    let iommu = match args.iommu {
        IommuKind::Pviommu => Iommu::Pviommu {
            host_page_pool: host_page_pool(args),
            inject_reply: args.inject_reply,
        },
        IommuKind::Virtio => Iommu::Virtio {
            requests: args.record_requests.clone(),
            dmas: args.record_dmas.clone(),
        },
        IommuKind::Riommu => Iommu::Ring,
        _ => Iommu::None,
    };
    let disk = disk.map(|(disk, path)| -> Result<Disk, Failure> {
        Ok(Disk {
            path: path.to_owned(),
            read_only: disk.read_only,
            bus: match disk.bus.unwrap_or_default() {
                DiskBusArg::Virtio => DiskBus::Virtio,
                DiskBusArg::Nvme => DiskBus::Nvme,
            },
            mode: match disk.mode.unwrap_or_default() {
                DiskModeArg::Emulated => DiskMode::default(),
                DiskModeArg::Assigned => DiskMode::ASSIGNED,
                DiskModeArg::Sandbox => DiskMode::Sandbox(own_program()?),
            },
            inject_dma: args.inject_dma.clone(),
        })
    });
    Ok(GuestDevices::VfioUser(VfioUserDevices {
        iommu,
        disk: disk.transpose()?,
        entropy: args.rng,
        net: args.net.clone(),
        memory: memory(args),
    }))
}

fn vhost_user_disk(
    args: &DeviceArgs,
    iommu: QemuIommu,
    disk: Option<(DiskArg, &Path)>,
) -> Result<GuestDevices, Failure> {
    let (disk, path) = disk.ok_or(Failure::Devices(
        "--iommu qemu-intel and --iommu qemu-virtio require --disk, a vhost-user back-end",
    ))?;
    refuse(&[
        (
            disk.bus.is_some(),
            "--disk bus= requires --iommu virtio, pviommu, riommu or none: behind QEMU's IOMMU the \
            disk is a vhost-user back-end",
        ),
        (
            disk.mode.is_some(),
            "--disk mode= requires --iommu virtio, pviommu or none: behind QEMU's IOMMU the disk \
            is a vhost-user back-end",
        ),
        (
            args.rng,
            "--rng requires --iommu virtio, pviommu, riommu or none: behind QEMU's IOMMU the disk \
            is the only device",
        ),
        (
            args.net.is_some(),
            "--net requires --iommu virtio, pviommu, riommu or none: behind QEMU's IOMMU the disk \
            is the only device",
        ),
        (
            args.memory_file.is_some(),
            "--memory-file requires --iommu virtio, pviommu, riommu or none: a vhost-user back-end \
            accepts sealed memory only",
        ),
        (
            args.lock.is_some(),
            "--lock requires --iommu virtio, pviommu, riommu or none: a vhost-user back-end locks \
            no memory",
        ),
        (
            args.record_requests.is_some(),
            "--record-requests requires --iommu virtio",
        ),
        (
            args.record_dmas.is_some(),
            "--record-dmas requires --iommu virtio",
        ),
        (
            args.host_page_pool,
            "--host-page-pool requires --iommu pviommu",
        ),
        (
            args.inject_reply.is_some(),
            "--inject-reply requires --iommu pviommu",
        ),
    ])?;
    Ok(GuestDevices::VhostUser(VhostUserDisk {
        iommu,
        path: path.to_owned(),
        read_only: disk.read_only,
        inject_dma: args.inject_dma.clone(),
    }))
}

/// Refuses one file for two purposes: a record empties its file, and the memory file must keep its
/// size.
fn refuse_shared_files(args: &DeviceArgs, image: Option<&Path>) -> Result<(), Failure> {
    let (requests, dmas) = (args.record_requests.as_deref(), args.record_dmas.as_deref());
    let memory = args.memory_file.as_deref();
    let same = |one: Option<&Path>, other: Option<&Path>| {
        one.zip(other)
            .is_some_and(|(one, other)| same_file(one, other))
    };
    refuse(&[
        (
            same(requests, image) || same(dmas, image),
            "the disk and a record (--record-requests, --record-dmas) have the same file",
        ),
        (
            same(requests, dmas),
            "--record-requests and --record-dmas name the same file",
        ),
        (
            same(requests, memory) || same(dmas, memory),
            "--memory-file and a record (--record-requests, --record-dmas) name the same file",
        ),
        (
            same(image, memory),
            "the disk and --memory-file have the same file",
        ),
    ])
}

/// Fails with the message of the first rule that is broken.
fn refuse(rules: &[(bool, &'static str)]) -> Result<(), Failure> {
    let broken = rules.iter().find(|(broken, _)| *broken);
    broken.map_or(Ok(()), |(_, why)| Err(Failure::Devices(why)))
}

/// Returns this program, as the program of a disk's process.
pub(super) fn own_program() -> Result<SandboxProgram, Failure> {
    let path = std::env::current_exe().map_err(Failure::system("find this program"))?;
    let arguments = vec!["device".into()];
    Ok(SandboxProgram { path, arguments })
}

pub(super) fn host_page_pool(args: &DeviceArgs) -> HostPagePool {
    if args.host_page_pool {
        HostPagePool::On
    } else {
        HostPagePool::Off
    }
}

pub(super) fn access(args: &DeviceArgs) -> SocketAccess {
    let group = args.group.map(Gid::from_raw);
    group.map_or(SocketAccess::OwnUser, SocketAccess::Group)
}

pub(super) fn memory(args: &DeviceArgs) -> MemoryRules {
    MemoryRules {
        file: args.memory_file.clone(),
        locked: args.lock.unwrap_or_default(),
    }
}

pub(super) fn limits(args: &GuestLimitArgs) -> GuestLimits {
    GuestLimits {
        mappings: args.max_mappings,
        domains: args.max_domains,
        tables: args.max_tables,
        queue_size: args.max_queue,
        request_bytes: args.max_request << 10,
        iotlb_pages: args.max_iotlb,
        iotlb_misses: args.max_misses,
        record_bytes: args.max_record << 20,
    }
}

#[cfg(test)]
mod tests;
