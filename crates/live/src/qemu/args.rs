//! QEMU's command line for a guest whose devices this project serves.

use std::io;
use std::path::{Path, PathBuf};

use super::viot;
use crate::access::SocketAccess;

/// A device number on PCI bus 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciSlot(pub u8);

impl PciSlot {
    /// Returns bus, device and function as one number, which is also the endpoint ID at the IOMMU.
    pub const fn address(self) -> u16 {
        (self.0 as u16) << 3
    }
}

/// Arguments of a guest's virtual machine.
#[derive(Clone, Debug)]
pub struct QemuArgs {
    /// Directory of sockets and tables.
    pub dir: PathBuf,
    /// Users who may access the files there.
    pub access: SocketAccess,
    /// Slot of the virtio-iommu, if the guest has one. Its socket is `iommu.sock`.
    pub iommu: Option<PciSlot>,
    /// Slots and names of the devices. The socket of each is `NAME.sock` in `dir`.
    pub devices: Vec<(PciSlot, &'static str)>,
    /// QEMU's IOMMU in front of the devices, which are then vhost-user back-ends.
    pub qemu_iommu: Option<QemuIommu>,
    /// Guest memory in MiB.
    pub memory: u32,
    /// File that backs the memory. `None` for a sealed memfd.
    pub memory_file: Option<PathBuf>,
    /// Number of CPUs.
    pub processors: u32,
    /// True to count instructions as time and complete doorbells before the guest continues, so
    /// that two runs make the same requests.
    pub icount: bool,
    /// Further arguments, placed between the IOMMU and the devices.
    pub extra: Vec<String>,
}

/// An IOMMU that QEMU emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuIommu {
    /// `intel-iommu`, with device IOTLBs.
    Intel,
    /// `virtio-iommu-pci`, which needs no kernel parameters.
    Virtio,
}

impl QemuIommu {
    /// Returns the kernel command line that enables it.
    pub fn kernel_words(self) -> &'static str {
        match self {
            Self::Intel => "intel_iommu=on",
            Self::Virtio => "",
        }
    }

    fn argument(self) -> &'static str {
        match self {
            Self::Intel => "intel-iommu,intremap=off,device-iotlb=on",
            Self::Virtio => "virtio-iommu-pci,addr=3.0",
        }
    }
}

/// Name of the virtio-iommu's socket.
pub const IOMMU: &str = "iommu";
/// Name of the para-virtual IOMMU's socket.
pub const PVIOMMU: &str = "pviommu";
/// Name of the ring IOMMU's socket.
pub const RIOMMU: &str = "riommu";

impl QemuArgs {
    /// Returns the path of the socket of the device `name`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.sock"))
    }

    /// Returns the arguments for the devices and the memory. Writes the VIOT table into `dir`.
    ///
    /// # Errors
    /// The path of the table and the error, if it cannot be written.
    pub fn device_arguments(&self) -> Result<Vec<String>, (PathBuf, io::Error)> {
        let memory = self.memory;
        let mut arguments: Vec<String> = [
            "-accel",
            "tcg",
            "-M",
            "q35,memory-backend=m",
            "-cpu",
            "max",
            "-smp",
            &self.processors.to_string(),
            "-m",
            &format!("{memory}M"),
            "-object",
            &match &self.memory_file {
                None => format!("memory-backend-memfd,id=m,size={memory}M,share=on"),
                // Nothing needs the file's contents after the guest's end.
                Some(path) => format!(
                    "memory-backend-file,id=m,size={memory}M,share=on,discard-data=on,mem-path={}",
                    path.display().to_string().replace(',', ",,")
                ),
            },
            "-nodefaults",
            "-no-reboot",
            // The default firmware would read the disk itself, before an IOMMU driver has mapped
            // memory.
            "-bios",
            "qboot.rom",
        ]
        .map(str::to_owned)
        .to_vec();
        if self.icount {
            arguments.extend(COUNTED.map(str::to_owned));
        }
        if let Some(slot) = self.iommu {
            let path = self.dir.join("viot.bin");
            let endpoints: Vec<u16> = self.devices.iter().map(|(s, _)| s.address()).collect();
            let table = viot::table(slot.address(), &endpoints);
            let saved = self.access.write(&path, &table);
            saved.map_err(|error| (path.clone(), error))?;
            arguments.push("-acpitable".into());
            arguments.push(format!("file={}", path.display()));
            arguments.extend(self.device(slot, &self.socket(IOMMU)));
        }
        if let Some(foreign) = self.qemu_iommu {
            arguments.extend(["-device".into(), foreign.argument().into()]);
        }
        arguments.extend(self.extra.iter().cloned());
        for (slot, name) in &self.devices {
            if self.qemu_iommu.is_some() {
                arguments.extend(self.back_end(*slot, name));
            } else {
                arguments.extend(self.device(*slot, &self.socket(name)));
            }
        }
        Ok(arguments)
    }

    fn device(&self, slot: PciSlot, socket: &Path) -> [String; 2] {
        let answered = if self.icount {
            r#""x-no-posted-writes":true,"#
        } else {
            ""
        };
        [
            "-device".into(),
            format!(
                "{{\"driver\":\"vfio-user-pci\",{answered}\
                \"socket\":{{\"type\":\"unix\",\"path\":\"{}\"}},\"addr\":\"{:x}.0\"}}",
                socket.display(),
                slot.0
            ),
        ]
    }

    /// Arguments for a disk whose back-end listens here.
    fn back_end(&self, slot: PciSlot, name: &str) -> [String; 4] {
        [
            "-chardev".into(),
            format!("socket,id={name},path={}", self.socket(name).display()),
            "-device".into(),
            format!(
                "vhost-user-blk-pci,chardev={name},num-queues=1,disable-legacy=on,\
                iommu_platform=on,ats=on,addr={:x}.0",
                slot.0
            ),
        ]
    }

    /// Returns the kernel command line. With `strict`, the kernel invalidates on every unmap;
    /// otherwise it batches invalidations (lazy mode).
    pub fn kernel_line(strict: bool) -> String {
        // On a busy host the kernel's timer check takes too long and fails. During the boot of
        // Linux 7.2 with two CPUs, `watchdog_check_skew` can wait forever for the other CPU: it has
        // disabled interrupts, so its time limit, counted in jiffies until the switch to the TSC,
        // does not pass. A device probed before its IOMMU would get untranslated memory, so its
        // driver waits for the IOMMU instead.
        format!(
            "console=ttyS0 quiet panic=-1 no_timer_check tsc=nowatchdog deferred_probe_timeout=-1 \
             iommu.strict={}",
            u8::from(strict)
        )
    }
}

/// One nanosecond per instruction, a fixed start of the clock, and no CPU instruction whose result
/// differs between runs.
const COUNTED: [&str; 8] = [
    "-icount",
    "shift=0,sleep=off",
    "-rtc",
    "base=2024-01-01T00:00:00,clock=vm",
    "-seed",
    "7",
    "-cpu",
    "max,rdrand=off,rdseed=off",
];
/// Kernel command line for reproducible runs, with the TSC frequency of such a run.
pub const COUNTED_WORDS: &str =
    "nokaslr norandmaps randomize_kstack_offset=off tsc_early_khz=1000000";
