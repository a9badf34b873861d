//! `ringfence guest`: boots a Debian guest whose devices run in this process.

mod bench;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use ringfence_guest_harness::differential::{
    DifferentialReport, DifferentialSettings, DifferentialTest,
};
use ringfence_guest_harness::{
    Boot, GuestError, Initramfs, Kernel, LOG_WORDS, OwnModule, Qemu, boot, build_initramfs,
    build_module, check_kernel_log,
};
use ringfence_live::access::{SocketAccess, make_cache};
use ringfence_live::daemon::{DiskMode, GuestDevices, VfioUserDevices};
use ringfence_live::qemu::{COUNTED_WORDS, QemuArgs, QemuIommu};

use self::bench::{bench_net, bench_read};
use super::device_options::{Image, device_options};
use super::serve::{quote, start};
use crate::args::{
    DiskBusArg, GuestArgs, GuestCommand, GuestPrepareArgs, GuestRunArgs, GuestVerifyQemuArgs,
    IommuKind, ModuleArgs,
};
use crate::directory::PrivateDir;
use crate::failure::Failure;
use crate::out_file::{FileAccess, OutFile, write_into};
use crate::output::{print, print_error_line, print_status, print_unless_closed};

/// Driver of the standard IOMMU, virtio-iommu.
const VIRTIO_IOMMU: &str = "virtio_iommu";
/// Driver of the para-virtual IOMMU, a module of this project.
const PVIOMMU: &str = "pviommu";
/// The same with the cache of the PVIOMMU paper and its defects.
const PVIOMMU_AS_PUBLISHED: &str = "pviommu-as-published";
/// Driver of the ring IOMMU, a module of this project.
const RIOMMU: &str = "riommu";
/// The same with the bursts of the rIOMMU paper and their defect.
const RIOMMU_AS_PUBLISHED: &str = "riommu-as-published";
/// Drivers that the guest needs for the devices and a file system.
const MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "crc32c_generic",
    "ext4",
];
/// Driver of a disk with `bus=nvme`.
const NVME: &str = "nvme";
/// Size of the disk in bytes if no disk is named.
const SCRATCH_BYTES: u64 = 64 << 20;

/// Delay of the disk when instructions are counted, so that the driver waits for it on every host.
/// It is about ten times the time that the driver needs to begin waiting.
const LATE: Duration = Duration::from_millis(1);

/// Runs a `guest` subcommand; the exit code is that of the guest.
pub(crate) fn guest(command: &GuestCommand) -> Result<ExitCode, Failure> {
    match command {
        GuestCommand::Run(args) => run(args),
        GuestCommand::VerifyQemu(args) => verify_qemu(args),
        GuestCommand::BenchRead(args) => bench_read(args).map(|()| ExitCode::SUCCESS),
        GuestCommand::BenchNet(args) => bench_net(args).map(|()| ExitCode::SUCCESS),
        GuestCommand::Prepare(args) => prepare(args).map(|()| ExitCode::SUCCESS),
    }
}

/// The components of a guest, found or fetched.
struct Prepared {
    qemu: Qemu,
    kernel: Kernel,
    initramfs: Vec<u8>,
}

impl Prepared {
    fn new(
        args: &GuestArgs,
        (iommu, bus): (IommuKind, DiskBusArg),
        module: Option<&ModuleArgs>,
        command: &[String],
        files: &[(String, Vec<u8>)],
    ) -> Result<Self, Failure> {
        let mut say = |text: &str| print_status(text);
        // The guest executes the contents of the cache.
        let cache = make_cache(&args.cache).map_err(Failure::io(&args.cache))?;
        let qemu = Qemu::prepare(&cache, &mut say)?;
        let kernel = Kernel::prepare(&args.kernel, &cache, &mut say)?;
        let mut build = |args: &ModuleArgs, name| {
            build_module(&kernel, name, &args.module_source, &cache, &mut say)
        };
        let mut own = Vec::new();
        let mut files = files.to_vec();
        if let Some((args, name)) = module.and_then(|a| Some((a, loaded_module(iommu, a)?))) {
            own.push(OwnModule {
                bytes: build(args, name)?,
                name: name.to_owned(),
                parameters: args.module_args.clone(),
            });
        }
        if let Some((args, name)) = module.and_then(|a| Some((a, a.with_module.as_ref()?))) {
            files.push((format!("/modules/{name}.ko"), build(args, name)?));
        }
        let stock = module
            .is_none_or(|args| own_driver(iommu, args).is_none())
            .then_some(VIRTIO_IOMMU);
        let disk = (bus == DiskBusArg::Nvme).then_some(NVME);
        let drivers = module.into_iter().flat_map(|args| &args.driver);
        let modules: Vec<&str> = stock
            .into_iter()
            .chain(MODULES.iter().copied())
            .chain(disk)
            .chain(drivers.map(String::as_str))
            .collect();
        let initramfs = build_initramfs(
            &kernel,
            &Initramfs {
                modules: &modules,
                own: &own,
                command,
                files: &files,
            },
        )?;
        Ok(Self {
            qemu,
            kernel,
            initramfs,
        })
    }
}

/// Prints assignments for a shell.
fn prepare(args: &GuestPrepareArgs) -> Result<(), Failure> {
    check_module(args.iommu, &args.module)?;
    let files = program(args.with_ringfence)?;
    let module = Some(&args.module);
    let devices = (args.iommu, DiskBusArg::default());
    let prepared = Prepared::new(&args.guest, devices, module, &args.guest.command, &files)?;
    let path = &args.initramfs;
    let mut out = OutFile::create(path, FileAccess::Umask)?;
    out.write_all(&prepared.initramfs)
        .map_err(Failure::io(path))?;
    out.finish()?;
    let path = fs::canonicalize(path).map_err(Failure::io(path))?;
    let mut words = Vec::new();
    if let Some((name, value)) = prepared.qemu.environment() {
        words.push("env".to_owned());
        words.push(format!("{name}={}", value.display()));
    }
    words.extend(prepared.qemu.command_line());
    let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
    let mut text = String::new();
    for (name, value) in [
        ("QEMU", words.join(" ")),
        ("KERNEL", prepared.kernel.image.display().to_string()),
        ("APPEND", kernel_line(&args.guest, args.iommu)),
        ("INITRAMFS", path.display().to_string()),
    ] {
        text.push_str(&format!("{name}={}\n", quote(&value)));
    }
    print(&text)
}

fn kernel_line(args: &GuestArgs, iommu: IommuKind) -> String {
    let mut line = format!("{} {}", QemuArgs::kernel_line(!args.lazy), args.append);
    line.truncate(line.trim_end().len());
    let words = match iommu {
        IommuKind::QemuIntel => QemuIommu::Intel.kernel_words(),
        IommuKind::QemuVirtio => QemuIommu::Virtio.kernel_words(),
        IommuKind::Virtio | IommuKind::Pviommu | IommuKind::Riommu | IommuKind::None => {
            return line;
        }
    };
    format!("{line} {words}")
}

/// Refuses a second module, and parameters for a module that the guest does not load.
fn check_module(iommu: IommuKind, args: &ModuleArgs) -> Result<(), Failure> {
    let is_published = matches!(iommu, IommuKind::Pviommu | IommuKind::Riommu);
    if args.as_published && !is_published {
        return Err(Failure::Devices(
            "--as-published requires --iommu pviommu or riommu",
        ));
    }
    if own_driver(iommu, args).is_some() && args.module.is_some() {
        return Err(Failure::Devices(
            "--module requires an IOMMU whose driver is the kernel's, or none",
        ));
    }
    if loaded_module(iommu, args).is_some() || args.module_args.is_empty() {
        return Ok(());
    }
    Err(Failure::Devices(
        "--module-args requires --iommu pviommu, --iommu riommu or --module",
    ))
}

/// Returns the name of this project's module that the guest loads before the drivers.
fn loaded_module(iommu: IommuKind, args: &ModuleArgs) -> Option<&str> {
    own_driver(iommu, args).or(args.module.as_deref())
}

/// Returns the name of the module that drives the IOMMU, if it is one of this project.
fn own_driver(iommu: IommuKind, args: &ModuleArgs) -> Option<&'static str> {
    match iommu {
        IommuKind::Pviommu if args.as_published => Some(PVIOMMU_AS_PUBLISHED),
        IommuKind::Pviommu => Some(PVIOMMU),
        IommuKind::Riommu if args.as_published => Some(RIOMMU_AS_PUBLISHED),
        IommuKind::Riommu => Some(RIOMMU),
        _ => None,
    }
}

fn run(args: &GuestRunArgs) -> Result<ExitCode, Failure> {
    let iommu = args.devices.iommu;
    // Check before anything is fetched.
    check_module(iommu, &args.module)?;
    let checked = device_options(&args.devices, Image::Later)?;
    let files = program(args.with_ringfence)?;
    let module = Some(&args.module);
    let bus = args.devices.disk.as_ref().and_then(|disk| disk.bus);
    let devices = (iommu, bus.unwrap_or_default());
    let prepared = Prepared::new(&args.guest, devices, module, &args.guest.command, &files)?;
    let dir = Directory::new(args.dir.as_deref(), checked.access)?;
    let named = args.devices.disk.as_ref();
    let mut options = if named.is_some_and(|disk| disk.file.is_some()) {
        checked
    } else {
        device_options(&args.devices, Image::At(&scratch(dir.path())?))?
    };
    let mut line = kernel_line(&args.guest, iommu);
    if args.icount {
        line = format!("{line} {COUNTED_WORDS}");
        delay_disk(&mut options.devices);
    }
    if args.check_kernel_log {
        line = format!("{line} {LOG_WORDS}");
    }
    let mut daemon = start(dir.path(), &options, &args.devices)?;
    let machine = daemon.qemu_args_mut();
    machine.icount = args.icount;
    let words = args.qemu_args.split_whitespace();
    machine.extra.extend(words.map(str::to_owned));
    let ended = boot(&Boot {
        machine: daemon.qemu_args_mut(),
        qemu: &prepared.qemu,
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        kernel_line: &line,
        limit: Duration::from_secs(args.timeout),
    });
    if args.metrics {
        // A closed pipe must not keep the daemon from its end.
        let _ = io::stderr().write_all(daemon.metrics().as_bytes());
    }
    daemon.stopper().stop();
    daemon.join().map_err(Failure::io(dir.path()))?;
    let ended = match args.check_kernel_log {
        true => check_kernel_log(dir.path(), ended, &mut |text| print_error_line(text)),
        false => ended,
    };
    let code = dir.keep_on_error(ended)?;
    Ok(ExitCode::from(code))
}

/// Delays the disk. A disk in another process, or behind QEMU, is slow enough.
fn delay_disk(devices: &mut GuestDevices) {
    if let GuestDevices::VfioUser(VfioUserDevices {
        disk: Some(disk), ..
    }) = devices
        && let DiskMode::Emulated { delay } | DiskMode::Assigned { delay } = &mut disk.mode
    {
        *delay = Some(LATE);
    }
}

/// Returns this program and its libraries if the guest is to have them.
fn program(wanted: bool) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    if !wanted {
        return Ok(Vec::new());
    }
    let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
    let mut files = vec![(PathBuf::from("/bin/ringfence"), own.clone())];
    let ldd = "ldd".as_ref();
    let output = Command::new("ldd").arg(&own).output();
    let output = output.map_err(Failure::io(ldd))?;
    for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        if word.starts_with('/') {
            files.push((word.into(), word.into()));
        }
    }
    let read = |(to, from): (PathBuf, PathBuf)| {
        let content = fs::read(&from).map_err(Failure::io(&from))?;
        Ok((to.display().to_string(), content))
    };
    files.into_iter().map(read).collect()
}

/// Reads and writes of several sizes, which map and unmap repeatedly.
const JUDGED: &str = "for n in $(seq 12); do
    dd if=/dev/vda of=/dev/null bs=4k count=4 iflag=direct
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct
    dd if=/dev/zero of=/dev/vda bs=16k count=2 oflag=direct
done 2>/dev/null";

fn verify_qemu(args: &GuestVerifyQemuArgs) -> Result<ExitCode, Failure> {
    let mut command = args.guest.command.clone();
    if command.is_empty() {
        command = ["sh", "-c", JUDGED].map(str::to_owned).to_vec();
    }
    let iommu = IommuKind::QemuIntel;
    let devices = (iommu, DiskBusArg::default());
    let prepared = Prepared::new(&args.guest, devices, None, &command, &[])?;
    let dir = Directory::new(None, SocketAccess::OwnUser)?;
    let disk = scratch(dir.path())?;
    let mut options = fs::File::options();
    let disk = options.read(true).write(true).open(&disk);
    let settings = DifferentialSettings {
        cases: args.cases,
        seed: args.seed,
    };
    let disk = disk.map_err(Failure::io(dir.path()))?;
    let judge =
        DifferentialTest::start(dir.path(), disk, settings).map_err(Failure::io(dir.path()))?;
    let line = kernel_line(&args.guest, iommu);
    let ended = boot(&Boot {
        machine: judge.machine(),
        qemu: &prepared.qemu,
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        kernel_line: &line,
        limit: Duration::from_secs(args.timeout),
    });
    let report = judge.finish().map_err(Failure::io(dir.path()))?;
    let DifferentialReport {
        allowed,
        rejected,
        write_only_reads,
        differing,
        most_mapped,
    } = &report;
    let mut text = format!(
        "seed {}: {} cases over at most {most_mapped} mappings: both permit {allowed} to the same \
        bytes, both reject {rejected}, only QEMU rejects {write_only_reads} reads of write-only \
        mappings, {} differ\n",
        args.seed,
        report.cases(),
        differing.len()
    );
    for one in differing.iter().take(20) {
        text.push_str(&format!("  {one}\n"));
    }
    print_unless_closed(&text)?;
    let code = dir.keep_on_error(ended)?;
    let passed = code == 0 && differing.is_empty() && report.cases() == args.cases;
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn scratch(dir: &Path) -> Result<PathBuf, Failure> {
    let path = write_into(dir, "disk.img", &[])?;
    let file = fs::File::options().write(true).open(&path);
    let sized = file.and_then(|file| file.set_len(SCRATCH_BYTES));
    sized.map_err(Failure::io(&path))?;
    Ok(path)
}

/// The directory of a guest's sockets. It is not below the cache, because socket paths must be
/// short.
enum Directory {
    /// A private directory, removed at the end.
    Private(PrivateDir),
    /// A directory named by the user.
    Named(PathBuf),
}

impl Directory {
    fn new(named: Option<&Path>, access: SocketAccess) -> Result<Self, Failure> {
        Ok(match named {
            None => Self::Private(PrivateDir::new()?),
            Some(path) => {
                let made = access.make_directory(path);
                Self::Named(made.map_err(Failure::io(path))?)
            }
        })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Private(dir) => dir.path(),
            Self::Named(path) => path,
        }
    }

    /// Ends the use of the directory. After a failure its files stay, because the error names its
    /// console.
    fn keep_on_error(self, ended: Result<u8, GuestError>) -> Result<u8, GuestError> {
        if let (Self::Private(dir), Err(_)) = (self, &ended) {
            dir.keep();
        }
        ended
    }
}

#[cfg(test)]
mod tests;
