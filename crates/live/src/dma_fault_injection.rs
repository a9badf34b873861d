//! Classes of illegal DMA that a device issues on purpose, to test protection.
//! [`DmaInjector`](crate::virtio::DmaInjector) injects them.

use std::str::FromStr;

use ringfence_types::{Access, Iova};

/// A class of illegal DMA by a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedDma {
    /// Writes to an address that no driver mapped for the disk.
    Stray(Iova),
    /// Writes to the data buffer of an earlier request, which is unmapped. Needs a driver with one
    /// request in flight: one of [`LARGE_BYTES`] or more, then one of at most a page.
    AfterUnmap,
    /// Writes to a request's header, which is mapped read-only.
    WriteReadOnly,
    /// Reads a request's data buffer, which is mapped write-only.
    ReadWriteOnly,
    /// Another endpoint writes to a buffer of this one, at an address that is not mapped for that
    /// endpoint.
    Foreign,
    /// As [`AfterUnmap`](Self::AfterUnmap), by a device that translates for itself and keeps using
    /// stale translations. Only the page protection of its process stops it. For a sandboxed
    /// device.
    AfterRevoke,
    /// Writes [`STORM`] times in a row to an address that no driver mapped, so that the guest
    /// receives as many faults as it can handle. It begins with a request of [`LARGE_BYTES`] or
    /// more: a kernel makes none while it boots.
    Storm(Iova),
    /// Goes on reading the data of each write request after its completion and the interrupt, until
    /// the IOMMU stops a read, at most [`KEPT_READS`] times. Counted, not reported.
    KeepReading,
}

/// Names of all classes, in the syntax of [`InjectedDma::from_str`].
pub const CLASSES: &[&str] = &[
    "stray:ADDRESS",
    "after-unmap",
    "write-read-only",
    "read-write-only",
    "foreign",
    "after-revoke",
    "storm:ADDRESS",
    "keep-reading",
];

/// Number of writes of an [`InjectedDma::Storm`].
pub const STORM: u32 = 1_000_000;

/// Most reads of an [`InjectedDma::KeepReading`] after one request.
pub const KEPT_READS: u32 = 100_000;

/// Minimum data size of a request whose pages are remembered for [`InjectedDma::AfterUnmap`], or
/// that starts an [`InjectedDma::Storm`].
pub const LARGE_BYTES: u64 = 32 * 1024;

impl FromStr for InjectedDma {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "after-unmap" => Self::AfterUnmap,
            "write-read-only" => Self::WriteReadOnly,
            "read-write-only" => Self::ReadWriteOnly,
            "foreign" => Self::Foreign,
            "after-revoke" => Self::AfterRevoke,
            "keep-reading" => Self::KeepReading,
            _ => {
                let found = text.split_once(':').and_then(|(class, digits)| {
                    let digits = digits.strip_prefix("0x").unwrap_or(digits);
                    let iova = Iova::new(u64::from_str_radix(digits, 16).ok()?);
                    match class {
                        "stray" => Some(Self::Stray(iova)),
                        "storm" => Some(Self::Storm(iova)),
                        _ => None,
                    }
                });
                found.ok_or_else(|| {
                    format!(
                        "expected {}, with the address in hexadecimal",
                        CLASSES.join(", ")
                    )
                })?
            }
        })
    }
}

impl std::fmt::Display for InjectedDma {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stray(_) => "stray",
            Self::AfterUnmap => "after-unmap",
            Self::WriteReadOnly => "write-read-only",
            Self::ReadWriteOnly => "read-write-only",
            Self::Foreign => "foreign",
            Self::AfterRevoke => "after-revoke",
            Self::Storm(_) => "storm",
            Self::KeepReading => "keep-reading",
        })
    }
}

/// Result of one injected access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectionResult {
    /// Class that was injected.
    pub injected: InjectedDma,
    /// Direction of the access.
    pub access: Access,
    /// Address of the access.
    pub iova: Iova,
    /// True if the access was stopped.
    pub stopped: bool,
}

impl std::fmt::Display for InjectionResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            injected,
            access,
            iova,
            stopped,
        } = self;
        let end = if *stopped { "stopped" } else { "not stopped" };
        write!(f, "injected {access} ({injected}) at {iova}: {end}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_names() {
        let stray = InjectedDma::Stray(Iova::new(0xdead_0000));
        let storm = InjectedDma::Storm(Iova::new(0xdead_0000));
        assert_eq!("storm:dead0000".parse(), Ok(storm));
        assert_eq!("stray:dead0000".parse(), Ok(stray));
        assert_eq!("stray:0xdead0000".parse(), Ok(stray));
        let without_address = CLASSES.iter().filter(|class| !class.contains(':'));
        for (class, injected) in without_address.zip([
            InjectedDma::AfterUnmap,
            InjectedDma::WriteReadOnly,
            InjectedDma::ReadWriteOnly,
            InjectedDma::Foreign,
            InjectedDma::AfterRevoke,
            InjectedDma::KeepReading,
        ]) {
            assert_eq!(class.parse(), Ok(injected));
            assert_eq!(&injected.to_string(), class);
        }
        for wrong in [
            "", "stray", "stray:", "stray:x", "storm", "storm:x", "other:1", "other",
        ] {
            assert!(wrong.parse::<InjectedDma>().is_err(), "{wrong}");
        }
    }
}
