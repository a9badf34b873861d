//! Injects illegal DMA into a disk's requests, to test protection.
//!
//! The injector tries a class as soon as a request offers a suitable address. It reports each
//! result here; the guest's driver reports an access that the IOMMU stops.

use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange};
use vm_memory::{Bytes, GuestAddress};

use super::chain::{Chain, ChainSegment};
use super::kept_data::KeptData;
use crate::counters::DeviceCounters;
use crate::dma::{Dma, EndpointMemory};
use crate::dma_fault_injection::{InjectedDma, InjectionResult, LARGE_BYTES, STORM};

const PAGE_BYTES: u64 = 4096;
/// Bytes of an injected access.
const BYTES: u64 = 8;

/// Injects each class once into one device, at most one class per request, and
/// [`InjectedDma::KeepReading`] after each write request.
pub struct DmaInjector {
    pending: Vec<InjectedDma>,
    other_endpoint: Option<EndpointMemory>,
    report: Box<dyn Fn(&InjectionResult) + Send>,
    counters: Arc<DeviceCounters>,
    /// Data buffers of an earlier large request.
    unmapped: Vec<ChainSegment>,
    keeps_reading: bool,
    /// Data of the last write request of this turn, for [`InjectedDma::KeepReading`].
    kept: Option<KeptData>,
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
        report: impl Fn(&InjectionResult) + Send + 'static,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        let (repeated, pending): (Vec<_>, Vec<_>) = classes
            .iter()
            .partition(|class| **class == InjectedDma::KeepReading);
        Self {
            pending,
            keeps_reading: !repeated.is_empty(),
            kept: None,
            other_endpoint,
            report: Box::new(report),
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
        if self.keeps_reading {
            self.kept = KeptData::of(chain, dma).or(self.kept.take());
        }
        let Some((at, injected, access, iova)) = found else {
            return;
        };
        self.pending.remove(at);
        if injected == InjectedDma::WriteReadOnly {
            // Read first: the IOTLB then holds the translation, which makes the write harder to
            // stop.
            reach(dma, Access::Read, iova);
        }
        let permitted = match (injected, &mut self.other_endpoint) {
            (InjectedDma::Foreign, Some(other)) => reach(other, access, iova),
            (InjectedDma::AfterRevoke, _) => {
                dma.use_stale(true);
                let permitted = reach(dma, access, iova);
                dma.use_stale(false);
                permitted
            }
            (InjectedDma::Storm(_), _) => {
                (0..STORM).fold(false, |permitted, _| reach(dma, access, iova) || permitted)
            }
            _ => reach(dma, access, iova),
        };
        if permitted {
            self.counters.injected_permitted.add(1);
        }
        (self.report)(&InjectionResult {
            injected,
            access,
            iova,
            stopped: !permitted,
        });
    }

    /// Returns true if [`keep_reading`](Self::keep_reading) is to be called after the interrupt.
    pub(crate) fn has_kept_data(&self) -> bool {
        self.kept.is_some()
    }

    /// Reads the data of a request that the driver has seen complete.
    pub(crate) fn keep_reading<A: Dma>(&mut self, dma: &mut A) {
        if let Some(kept) = self.kept.take() {
            kept.read(dma, &self.counters);
        }
    }

    fn opportunity(&self, injected: InjectedDma, chain: &Chain) -> Option<(Access, Iova)> {
        let start = |segment: &ChainSegment| Iova::new(segment.start.0);
        let long = |segment: &&ChainSegment| u64::from(segment.bytes) >= BYTES;
        match injected {
            // Its accesses come after the request.
            InjectedDma::KeepReading => None,
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
        let used = |past: u64| {
            let mut now = chain.readable.iter().chain(chain.writable.iter());
            now.any(|segment| (segment.start.0 / PAGE_BYTES).abs_diff(past) <= 1)
        };
        let mut pages = self.unmapped.iter().flat_map(pages);
        let free = pages.find(|page| !used(page / PAGE_BYTES))?;
        Some(Iova::new(free))
    }
}

/// Returns the first address of each page that begins in the segment, and the segment's own.
fn pages(segment: &ChainSegment) -> impl Iterator<Item = u64> {
    let (first, bytes) = (segment.start.0, u64::from(segment.bytes));
    let end = first.saturating_add(bytes);
    let rest = (first / PAGE_BYTES + 1..end.div_ceil(PAGE_BYTES)).map(|page| page * PAGE_BYTES);
    std::iter::once(first).chain(rest)
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

    fn read(start: u64, bytes: u32) -> Chain {
        let segment = ChainSegment {
            start: GuestAddress(start),
            bytes,
        };
        Chain {
            head: 0,
            readable: Default::default(),
            writable: std::iter::once(segment).collect(),
            malformed: false,
        }
    }

    /// The IOMMU gives a long request one range, and the next request the page below it.
    #[test]
    fn a_page_within_a_long_range_is_unmapped() {
        let mut injector = DmaInjector::new(
            &[InjectedDma::AfterUnmap],
            None,
            |_| {},
            Arc::new(DeviceCounters::default()),
        );
        injector.remember(&read(0xfffe_0200, 0x1_0000));
        let found = |start| injector.unmapped(&read(start, 4096));
        assert_eq!(found(0xfffd_f000), Some(Iova::new(0xfffe_1000)));
        assert_eq!(found(0xfffe_0000), Some(Iova::new(0xfffe_2000)));
        assert_eq!(found(0xffff_f000), Some(Iova::new(0xfffe_0200)));
        // A large request uses what it maps.
        assert_eq!(injector.unmapped(&read(0x1000, 0x1_0000)), None);
    }
}
