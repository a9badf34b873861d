//! The options `--iommu` and `--disk`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::ValueEnum;

/// The IOMMU of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum IommuKind {
    /// virtio-iommu, in this process; the driver is Linux's own
    #[default]
    Virtio,
    /// Para-virtual IOMMU, in this process; the driver is this project's kernel module
    Pviommu,
    /// Ring IOMMU, in this process; the driver is this project's kernel module
    Riommu,
    /// No IOMMU: devices can access all guest memory
    None,
    /// QEMU's intel-iommu; the disk is a vhost-user back-end and the only device
    QemuIntel,
    /// QEMU's virtio-iommu-pci; the disk is a vhost-user back-end and the only device
    QemuVirtio,
}

/// Process that serves a disk, and unit that translates its accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DiskModeArg {
    /// This process, and the software IOMMU.
    #[default]
    Emulated,
    /// This process, and the hardware model.
    Assigned,
    /// A sandboxed process.
    Sandbox,
}

/// Interface of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DiskBusArg {
    /// A virtio block device.
    #[default]
    Virtio,
    /// An NVMe controller.
    Nvme,
}

/// A parsed `--disk`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskArg {
    /// Path of the image file.
    pub file: Option<PathBuf>,
    /// The interface, if the option names one.
    pub bus: Option<DiskBusArg>,
    /// The mode, if the option names one.
    pub mode: Option<DiskModeArg>,
    /// True for a disk that the guest cannot write.
    pub read_only: bool,
}

/// Parses the value of `--disk`: `[FILE][,bus=BUS][,mode=MODE][,readonly=on|off]`. A comma in FILE
/// is doubled.
pub(crate) fn disk(text: &OsStr) -> Result<DiskArg, String> {
    let mut disk = DiskArg::default();
    for (at, word) in words(text).into_iter().enumerate() {
        match word.to_str().and_then(|word| word.split_once('=')) {
            Some(("mode", mode)) => {
                disk.mode = Some(match mode {
                    "emulated" => DiskModeArg::Emulated,
                    "assigned" => DiskModeArg::Assigned,
                    "sandbox" => DiskModeArg::Sandbox,
                    _ => return Err("mode must be emulated, assigned or sandbox".into()),
                });
            }
            Some(("bus", bus)) => {
                disk.bus = Some(match bus {
                    "virtio" => DiskBusArg::Virtio,
                    "nvme" => DiskBusArg::Nvme,
                    _ => return Err("bus must be virtio or nvme".into()),
                });
            }
            Some(("readonly", switch)) => {
                disk.read_only = match switch {
                    "on" => true,
                    "off" => false,
                    _ => return Err("readonly must be on or off".into()),
                };
            }
            _ if at == 0 && !word.is_empty() => disk.file = Some(word.into()),
            _ => {
                return Err(format!(
                    "{word:?} is neither bus=BUS nor mode=MODE nor readonly=on; write a comma in \
                    the name of FILE twice"
                ));
            }
        }
    }
    Ok(disk)
}

/// Splits at commas. Two commas in a row stand for one in a word, as in QEMU's options.
fn words(text: &OsStr) -> Vec<OsString> {
    let mut words = vec![Vec::new()];
    let mut bytes = text.as_bytes().iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if byte == b',' && bytes.next_if_eq(&b',').is_none() {
            words.push(Vec::new());
        } else if let Some(word) = words.last_mut() {
            word.push(byte);
        }
    }
    words.into_iter().map(OsString::from_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_have_a_file_and_a_mode() {
        let read = |text: &str| {
            let disk = disk(text.as_ref()).ok()?;
            let file = disk.file.map(|file| file.to_str().unwrap().to_owned());
            Some((file, disk.mode, disk.read_only))
        };
        let file = |name: &str| Some(name.to_owned());
        let sandbox = Some(DiskModeArg::Sandbox);
        for (text, expected) in [
            ("a.img", (file("a.img"), None, false)),
            ("a,,b.img", (file("a,b.img"), None, false)),
            ("a=b", (file("a=b"), None, false)),
            ("./mode=sandbox", (file("./mode=sandbox"), None, false)),
            ("mode=sandbox", (None, sandbox, false)),
            ("readonly=on", (None, None, true)),
            ("a,mode=sandbox,readonly=on", (file("a"), sandbox, true)),
            (
                "a,readonly=off,mode=assigned",
                (file("a"), Some(DiskModeArg::Assigned), false),
            ),
            (
                "a,mode=emulated",
                (file("a"), Some(DiskModeArg::Emulated), false),
            ),
        ] {
            assert_eq!(read(text), Some(expected), "{text}");
        }
        for text in [
            "",
            ",",
            "a,",
            "a,b",
            "a,mode",
            "a,mode=",
            "a,mode=vhost-user",
            "a,readonly",
            "a,readonly=yes",
            "mode=sandbox,a",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_disk_has_an_interface() {
        let bus = |text: &str| disk(text.as_ref()).map(|disk| disk.bus);
        assert_eq!(bus("a,bus=nvme"), Ok(Some(DiskBusArg::Nvme)));
        assert_eq!(bus("bus=virtio,mode=sandbox"), Ok(Some(DiskBusArg::Virtio)));
        assert_eq!(bus("a"), Ok(None));
        assert!(bus("a,bus=scsi").is_err() && bus("a,bus").is_err());
    }

    /// A path need not be UTF-8.
    #[test]
    fn a_file_has_any_bytes_in_its_name() {
        let parsed = disk(OsStr::from_bytes(b"\xff,,\xfe,readonly=on")).unwrap();
        assert_eq!(parsed.file.unwrap().as_os_str().as_bytes(), b"\xff,\xfe");
        assert!(parsed.read_only);
    }
}
