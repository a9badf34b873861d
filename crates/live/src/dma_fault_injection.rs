//! Devices that issue illegal DMA on purpose, to test protection.
//!
//! The injector tries a class as soon as a request offers a suitable address. It reports each
//! result here; the guest's driver reports an access that the IOMMU stops.

use std::str::FromStr;
use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange};
use vm_memory::{Bytes, GuestAddress};

use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::EndpointMemory;
use crate::virtio::chain::{Chain, ChainSegment};

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
];

/// Number of writes of an [`InjectedDma::Storm`].
pub const STORM: u32 = 1_000_000;

/// Minimum data size of a request whose pages are remembered for [`InjectedDma::AfterUnmap`], or
/// that starts an [`InjectedDma::Storm`].
pub const LARGE_BYTES: u64 = 32 * 1024;

const PAGE_BYTES: u64 = 4096;
/// Bytes of an injected access.
const BYTES: u64 = 8;

impl FromStr for InjectedDma {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "after-unmap" => Self::AfterUnmap,
            "write-read-only" => Self::WriteReadOnly,
            "read-write-only" => Self::ReadWriteOnly,
            "foreign" => Self::Foreign,
            "after-revoke" => Self::AfterRevoke,
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
                        "there are {}, the address in hexadecimal",
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

/// Injects each class once into one device, at most one class per request.
pub struct DmaInjector {
    pending: Vec<InjectedDma>,
    other_endpoint: Option<EndpointMemory>,
    report: Box<dyn Fn(&InjectionResult) + Send>,
    counters: Arc<DeviceCounters>,
    /// Data buffers of an earlier large request.
    unmapped: Vec<ChainSegment>,
}

impl std::fmt::Debug for DmaInjector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DmaInjector({:?})", self.pending)
    }
}

impl DmaInjector {
    /// Creates an injector for all of `classes` that reports each result to `tell`.
    /// `other_endpoint`, if present, performs [`InjectedDma::Foreign`].
    pub fn new(
        classes: &[InjectedDma],
        other_endpoint: Option<EndpointMemory>,
        tell: impl Fn(&InjectionResult) + Send + 'static,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            pending: classes.to_vec(),
            other_endpoint,
            report: Box::new(tell),
            counters,
            unmapped: Vec::new(),
        }
    }

    /// Injects a class on a new request, which is not served yet: its buffers are mapped.
    pub fn on_request<A: Dma>(&mut self, chain: &Chain, dma: &mut A) {
        let found = self.pending.iter().enumerate().find_map(|(at, injected)| {
            let (access, iova) = self.opportunity(*injected, chain)?;
            Some((at, *injected, access, iova))
        });
        self.remember(chain);
        let Some((at, injected, access, iova)) = found else {
            return;
        };
        self.pending.remove(at);
        if injected == InjectedDma::WriteReadOnly {
            // Read first: the IOTLB then holds the translation, which makes the write harder to
            // stop.
            reach(dma, Access::Read, iova);
        }
        let through = match (injected, &mut self.other_endpoint) {
            (InjectedDma::Foreign, Some(other)) => reach(other, access, iova),
            (InjectedDma::AfterRevoke, _) => {
                dma.use_stale(true);
                let through = reach(dma, access, iova);
                dma.use_stale(false);
                through
            }
            (InjectedDma::Storm(_), _) => {
                (0..STORM).fold(false, |through, _| reach(dma, access, iova) || through)
            }
            _ => reach(dma, access, iova),
        };
        if through {
            self.counters.strays_through.add(1);
        }
        (self.report)(&InjectionResult {
            injected,
            access,
            iova,
            stopped: !through,
        });
    }

    fn opportunity(&self, injected: InjectedDma, chain: &Chain) -> Option<(Access, Iova)> {
        let start = |segment: &ChainSegment| Iova::new(segment.start.0);
        let long = |segment: &&ChainSegment| u64::from(segment.bytes) >= BYTES;
        match injected {
            InjectedDma::Stray(iova) => Some((Access::Write, iova)),
            InjectedDma::Storm(iova) => {
                (chain.writable.bytes() >= LARGE_BYTES).then_some((Access::Write, iova))
            }
            InjectedDma::AfterUnmap | InjectedDma::AfterRevoke => {
                Some((Access::Write, self.unmapped(chain)?))
            }
            InjectedDma::WriteReadOnly => {
                let header = chain.readable.iter().find(long)?;
                Some((Access::Write, start(header)))
            }
            InjectedDma::ReadWriteOnly => {
                let data = chain.writable.iter().find(long)?;
                Some((Access::Read, start(data)))
            }
            InjectedDma::Foreign => {
                let other = self.other_endpoint.as_ref()?;
                let mut all = chain.writable.iter().chain(chain.readable.iter());
                let buffer = all.find(|segment| {
                    let range = IovaRange::new(start(segment), BYTES);
                    long(segment) && range.is_some_and(|r| !other.reaches(r, Access::Write))
                })?;
                Some((Access::Write, start(buffer)))
            }
        }
    }

    fn remember(&mut self, chain: &Chain) {
        if chain.writable.bytes() >= LARGE_BYTES {
            self.unmapped = chain.writable.iter().copied().collect();
        }
    }

    /// Returns a page of an earlier, large request that this small one does not use. The driver
    /// waits for each request to complete, so it has unmapped that page.
    fn unmapped(&self, chain: &Chain) -> Option<Iova> {
        // The status byte follows the data.
        if chain.writable.bytes() > PAGE_BYTES + 1 {
            return None;
        }
        let page = |segment: &ChainSegment| segment.start.0 / PAGE_BYTES;
        let used = |past: &ChainSegment| {
            let mut now = chain.readable.iter().chain(chain.writable.iter());
            now.any(|segment| page(segment).abs_diff(page(past)) <= 1)
        };
        let free = self.unmapped.iter().find(|past| !used(past))?;
        Some(Iova::new(free.start.0))
    }
}

/// Returns true if the access succeeds.
fn reach<A: Dma>(dma: &mut A, access: Access, iova: Iova) -> bool {
    let at = GuestAddress(iova.get());
    let mut bytes = [0xff; BYTES as usize];
    dma.with_retry(|memory| match access {
        Access::Read => memory.read_slice(&mut bytes, at).is_ok(),
        Access::Write => memory.write_slice(&bytes, at).is_ok(),
    })
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
        for (class, injected) in CLASSES.iter().skip(1).zip([
            InjectedDma::AfterUnmap,
            InjectedDma::WriteReadOnly,
            InjectedDma::ReadWriteOnly,
            InjectedDma::Foreign,
            InjectedDma::AfterRevoke,
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
