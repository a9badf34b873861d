//! Cost of unmap and map without readers.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_softiommu::Reader;
use vm_memory::{GuestAddress, Permissions as Wanted};

use crate::interleaved::{run, side};
use crate::unit::{DISK, DOMAIN, PAGE, addresses, again, frame, iotlb, page, pages_of, unit};

/// A radix table without readers. It checks only if entries are present.
struct Bare {
    words: Vec<AtomicU64>,
    used: usize,
}

impl Bare {
    fn new(live: u64) -> Self {
        let mut bare = Self {
            words: (0..512 * 64).map(|_| AtomicU64::new(0)).collect(),
            used: 512,
        };
        for n in 0..live {
            bare.map(page(n).start().get(), frame(n) * PAGE);
        }
        bare
    }

    #[inline]
    fn leaf(&mut self, iova: u64) -> &AtomicU64 {
        let mut at = 0;
        for shift in [39, 30, 21] {
            let link = at | (iova >> shift) as usize & 511;
            at = self.words[link].load(Ordering::Relaxed) as usize;
            if at == 0 {
                at = self.used;
                self.words[link].store(at as u64, Ordering::Relaxed);
                self.used += 512;
            }
        }
        &self.words[at | (iova >> 12) as usize & 511]
    }

    #[inline]
    fn map(&mut self, iova: u64, to: u64) -> bool {
        let leaf = self.leaf(iova);
        let free = leaf.load(Ordering::Relaxed) == 0;
        leaf.store(to | 3, Ordering::Relaxed);
        free
    }

    #[inline]
    fn unmap(&mut self, iova: u64) -> bool {
        let leaf = self.leaf(iova);
        let was = leaf.load(Ordering::Relaxed) != 0;
        leaf.store(0, Ordering::Relaxed);
        was
    }
}

pub(crate) fn changes(live: u64, samples: usize) {
    let mut alone = unit(live);
    let mut idle = unit(live);
    let _readers: Vec<Reader<_>> = (0..2).filter_map(|_| idle.reader(DISK).ok()).collect();
    let mut bare = Bare::new(live);
    let mut tlb = iotlb(live);
    let ranges = pages_of(&addresses(live));
    let (mut alone, mut idle) = (
        alone.domain(DOMAIN).expect("there"),
        idle.domain(DOMAIN).expect("there"),
    );
    run(
        &format!("unmap and map of one page, {live} pages live"),
        samples,
        &mut [
            side("bare table, unsynchronised", || {
                for range in &ranges {
                    let at = range.start().get();
                    black_box((bare.unmap(at), bare.map(at, PAGE)));
                }
            }),
            side("vm-memory Iotlb", || {
                for range in &ranges {
                    let at = GuestAddress(range.start().get());
                    tlb.invalidate_mapping(at, PAGE as usize);
                    let set = tlb.set_mapping(at, GuestAddress(PAGE), PAGE as usize, Wanted::Read);
                    black_box(set.is_ok());
                }
            }),
            side("no reader", || {
                for range in &ranges {
                    again(&mut alone, *range);
                }
            }),
            side("two idle readers", || {
                for range in &ranges {
                    again(&mut idle, *range);
                }
            }),
        ],
    );
}
