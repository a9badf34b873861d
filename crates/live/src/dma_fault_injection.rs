//! Devices that misbehave on purpose, to see what stops them.
//!
//! A class is tried as soon as a request gives the opportunity: an address that the class is about.
//! What comes of it is told here and, if the IOMMU stops it, by the guest's own driver.

use std::str::FromStr;
use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange};
use vm_memory::{Bytes, GuestAddress};

use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::EndpointMemory;
use crate::virtio::chain::{Chain, ChainSegment};

/// What a disk does that no driver asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedDma {
    /// Writes at an address that nobody gave to it.
    Stray(Iova),
    /// Writes where the data of an earlier request went, whose mapping is gone. Needs a driver with
    /// one request at a time: one of [`LARGE_BYTES`] or more, then one of a page or less.
    AfterUnmap,
    /// Writes to the header of a request, which is mapped for reading.
    WriteReadOnly,
    /// Reads the buffer of a request for data, which is mapped for writing.
    ReadWriteOnly,
    /// Another endpoint writes to a buffer of this one, at an address that is not mapped for the
    /// other.
    Foreign,
    /// As [`AfterUnmap`](Self::AfterUnmap), by a device that translates for itself and goes on
    /// using what it knows: nothing but the page's rights stops it. For a device in a process of
    /// its own.
    AfterRevoke,
    /// Writes [`STORM`] times, one after the other, at an address that nobody gave to it: the guest
    /// is told of as many faults as it can take. It begins with a request of [`LARGE_BYTES`] or
    /// more, as a kernel makes none while it starts.
    Storm(Iova),
}

/// The names of all classes, as [`InjectedDma::from_str`] takes them.
pub const CLASSES: &[&str] = &[
    "stray:ADDRESS",
    "after-unmap",
    "write-read-only",
    "read-write-only",
    "foreign",
    "after-revoke",
    "storm:ADDRESS",
];

/// Writes of an [`InjectedDma::Storm`].
pub const STORM: u32 = 1_000_000;

/// Bytes of data from which on a request's pages are remembered for [`InjectedDma::AfterUnmap`],
/// and it begins an [`InjectedDma::Storm`].
pub const LARGE_BYTES: u64 = 32 * 1024;

const PAGE_BYTES: u64 = 4096;
/// Bytes of an errant access.
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

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectionResult {
    /// The class.
    pub injected: InjectedDma,
    /// What was tried.
    pub access: Access,
    /// Where.
    pub iova: Iova,
    /// Whether it was stopped.
    pub stopped: bool,
}

impl std::fmt::Display for InjectionResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            injected: errant,
            access,
            iova,
            stopped,
        } = self;
        let end = if *stopped { "stopped" } else { "not stopped" };
        write!(f, "errant {access} ({errant}) at {iova}: {end}")
    }
}

/// One device's misbehaviour: each class is tried once, one with a request.
pub struct DmaInjector {
    pending: Vec<InjectedDma>,
    other_endpoint: Option<EndpointMemory>,
    report: Box<dyn Fn(&InjectionResult) + Send>,
    counters: Arc<DeviceCounters>,
    /// Where the data of an earlier request went.
    unmapped: Vec<ChainSegment>,
}

impl std::fmt::Debug for DmaInjector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DmaInjector({:?})", self.pending)
    }
}

impl DmaInjector {
    /// Tries all of `classes`; `tell` hears what came of each. [`InjectedDma::Foreign`] is tried by
    /// `other`, if there is one.
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

    /// A request has come and is not served yet: its buffers are mapped.
    pub fn on_request<A: Dma>(&mut self, chain: &Chain, dma: &mut A) {
        let found = self.pending.iter().enumerate().find_map(|(at, errant)| {
            let (access, iova) = self.opportunity(*errant, chain)?;
            Some((at, *errant, access, iova))
        });
        self.remember(chain);
        let Some((at, errant, access, iova)) = found else {
            return;
        };
        self.pending.remove(at);
        if errant == InjectedDma::WriteReadOnly {
            // What was read is the harder to stop: an IOTLB has it.
            reach(dma, Access::Read, iova);
        }
        let through = match (errant, &mut self.other_endpoint) {
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
            injected: errant,
            access,
            iova,
            stopped: !through,
        });
    }

    fn opportunity(&self, errant: InjectedDma, chain: &Chain) -> Option<(Access, Iova)> {
        let start = |segment: &ChainSegment| Iova::new(segment.start.0);
        let long = |segment: &&ChainSegment| u64::from(segment.bytes) >= BYTES;
        match errant {
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

    /// A page of an earlier, large request that this small one does not use. The driver waits for
    /// each request, so it has unmapped it.
    fn unmapped(&self, chain: &Chain) -> Option<Iova> {
        // The status byte stands behind the data.
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

/// Whether an access goes through.
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
        for (class, errant) in CLASSES.iter().skip(1).zip([
            InjectedDma::AfterUnmap,
            InjectedDma::WriteReadOnly,
            InjectedDma::ReadWriteOnly,
            InjectedDma::Foreign,
            InjectedDma::AfterRevoke,
        ]) {
            assert_eq!(class.parse(), Ok(errant));
            assert_eq!(&errant.to_string(), class);
        }
        for wrong in [
            "", "stray", "stray:", "stray:x", "storm", "storm:x", "other:1", "other",
        ] {
            assert!(wrong.parse::<InjectedDma>().is_err(), "{wrong}");
        }
    }
}
