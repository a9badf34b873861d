//! Injects illegal DMA into a disk's requests, to test protection.
//!
//! The injector tries a class as soon as a request offers a suitable address. It reports each
//! result here; the guest's driver reports an access that the IOMMU stops.

use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange};
use vm_memory::{Bytes, GuestAddress};

use super::chain::{Chain, ChainSegment};
use crate::counters::DeviceCounters;
use crate::dma::{Dma, EndpointMemory};
use crate::dma_fault_injection::{InjectedDma, InjectionResult, LARGE_BYTES, STORM};

const PAGE_BYTES: u64 = 4096;
/// Bytes of an injected access.
const BYTES: u64 = 8;

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
        report: impl Fn(&InjectionResult) + Send + 'static,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            pending: classes.to_vec(),
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
