//! QEMU's command line for a guest whose devices are served from here.

use std::path::{Path, PathBuf};

use super::GuestError;
use super::viot;
use crate::access::SocketAccess;

/// A device's place on bus 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciSlot(pub u8);

impl PciSlot {
    /// Bus, device and function as one number; also the endpoint's number at the IOMMU.
    pub const fn address(self) -> u16 {
        (self.0 as u16) << 3
    }
}

/// A guest's machine.
#[derive(Clone, Debug)]
pub struct QemuArgs {
    /// Where sockets and tables are.
    pub dir: PathBuf,
    /// Who may use the files there.
    pub access: SocketAccess,
    /// The IOMMU's place, if there is one. Its socket is `iommu.sock`.
    pub iommu: Option<PciSlot>,
    /// The devices: place and name. The socket of each is `NAME.sock` in `dir`.
    pub devices: Vec<(PciSlot, &'static str)>,
    /// The devices are vhost-user back-ends behind this IOMMU of QEMU's.
    pub qemu_iommu: Option<QemuIommu>,
    /// Memory in MiB.
    pub memory: u32,
    /// What the memory is kept in; without, a sealed file in memory.
    pub memory_file: Option<PathBuf>,
    /// Processors.
    pub processors: u32,
    /// Time is the number of instructions, and doorbells are answered before the guest goes on: two
    /// runs ask for the same.
    pub icount: bool,
    /// More arguments, before the devices.
    pub extra: Vec<String>,
}

/// An IOMMU that QEMU emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuIommu {
    /// `intel-iommu`, which tells of device IOTLBs.
    Intel,
    /// `virtio-iommu-pci`.
    Virtio,
}

impl QemuIommu {
    /// What the kernel's command line has to say for it.
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

/// Name of the IOMMU's socket.
pub const IOMMU: &str = "iommu";
/// Name of the para-virtual IOMMU's socket.
pub const PVIOMMU: &str = "pviommu";

impl QemuArgs {
    /// Where the socket of the device `name` is.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.sock"))
    }

    /// Arguments that attach the devices and their memory. The table that names the IOMMU is
    /// written into `dir`.
    ///
    /// # Errors
    /// [`GuestError`] if the table cannot be written.
    pub fn device_arguments(&self) -> Result<Vec<String>, GuestError> {
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
                // What is left in it at the end is of use to nobody.
                Some(path) => format!(
                    "memory-backend-file,id=m,size={memory}M,share=on,discard-data=on,mem-path={}",
                    path.display().to_string().replace(',', ",,")
                ),
            },
            "-nodefaults",
            "-no-reboot",
            // The usual firmware reads the disk itself, before anybody has allowed it to.
            "-bios",
            "qboot.rom",
        ]
        .map(str::to_owned)
        .to_vec();
        if self.icount {
            arguments.extend(COUNTED.map(str::to_owned));
        }
        arguments.extend(self.extra.iter().cloned());
        if let Some(slot) = self.iommu {
            let path = self.dir.join("viot.bin");
            let endpoints: Vec<u16> = self.devices.iter().map(|(s, _)| s.address()).collect();
            let table = viot::table(slot.address(), &endpoints);
            let saved = self.access.write(&path, &table);
            saved.map_err(GuestError::io(&path))?;
            arguments.push("-acpitable".into());
            arguments.push(format!("file={}", path.display()));
            arguments.extend(self.device(slot, &self.socket(IOMMU)));
        }
        if let Some(foreign) = self.qemu_iommu {
            arguments.extend(["-device".into(), foreign.argument().into()]);
        }
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
                r#"{{"driver":"vfio-user-pci",{answered}"socket":{{"type":"unix","path":"{}"}},"addr":"{:x}.0"}}"#,
                socket.display(),
                slot.0
            ),
        ]
    }

    /// A disk whose back-end listens here.
    fn back_end(&self, slot: PciSlot, name: &str) -> [String; 4] {
        [
            "-chardev".into(),
            format!("socket,id={name},path={}", self.socket(name).display()),
            "-device".into(),
            format!(
                "vhost-user-blk-pci,chardev={name},num-queues=1,disable-legacy=on,iommu_platform=on,ats=on,addr={:x}.0",
                slot.0
            ),
        ]
    }

    /// The kernel's command line. With `strict`, an unmapped page is out of reach when unmapping
    /// returns; otherwise unmaps gather.
    pub fn kernel_line(strict: bool) -> String {
        // On a busy host the kernel's look at its timer takes too long, and fails. A device that is
        // probed without its IOMMU would be given the memory as it is: its driver waits for the
        // IOMMU instead.
        format!(
            "console=ttyS0 quiet panic=-1 no_timer_check deferred_probe_timeout=-1 iommu.strict={}",
            u8::from(strict)
        )
    }
}

/// One nanosecond an instruction, the clock's beginning, and no processor instruction that differs
/// from run to run.
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
/// What the kernel has to do for the same; and the frequency that the counter has then.
pub const COUNTED_WORDS: &str =
    "nokaslr norandmaps randomize_kstack_offset=off tsc_early_khz=1000000";
