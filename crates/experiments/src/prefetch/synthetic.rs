//! Streams of synthetic ring devices with configurable sizes, bursts and addresses.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use ringfence_dma::space::IoPageTable;
use ringfence_iova::{AllocRequest, CachedTree, IovaAllocator, Locked};
use ringfence_memory::{Arena, Frames};
use ringfence_types::{
    DomainId, Invalidation, Nanos, Pending, Pfn, PfnRange, PhysAddr, PhysRange, Unmapped,
};
use serde::Serialize;

use super::stream::DeviceStream;
use ringfence_lab::LabError;
use ringfence_lab::layer::{FreeInvalidator, LayerPlatform};
use ringfence_lab::meter::NullTable;

/// Highest page frame number that a 32-bit device can address.
const TOP: u64 = 0xf_ffff;

/// Source of the buffers' addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Addresses {
    /// An entry of a ring has the same address in every lap. Neighbours are adjacent, from the top
    /// down.
    Tidy,
    /// An entry of a ring has the same address in every lap, in an irregular order.
    Scattered,
    /// Addresses never recur, and consecutive ones are adjacent, as with the bitmap between two
    /// flushes.
    Fresh,
    /// Linux 3.4's allocator; the driver frees an address at its unmap (`strict`).
    Tree,
    /// Linux 3.4's allocator; addresses are freed in batches of 250 (`defer`).
    TreeDeferred,
}

impl Addresses {
    /// All sources of addresses.
    pub const ALL: [Self; 5] = [
        Self::Tidy,
        Self::Scattered,
        Self::Fresh,
        Self::Tree,
        Self::TreeDeferred,
    ];
}

/// A device with full rings of one-page buffers. The device uses a burst of the oldest buffers of a
/// ring; the driver unmaps them and maps as many new ones.
#[derive(Debug, Clone)]
pub struct Synthetic {
    /// Number of entries of each ring.
    pub rings: Vec<u32>,
    /// Burst limit. With one ring every burst has this length. With several, `seed` determines the
    /// ring of each burst, in proportion to the rings' sizes, and its length.
    pub burst: u32,
    /// Mean number of laps of each ring.
    pub laps: u32,
    /// Source of the addresses.
    pub addresses: Addresses,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Number of addresses that a deferred mode frees at a time.
const DEFERRED: usize = 250;

/// xorshift64. Equal seeds give equal runs on every platform.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The low bits of the first numbers resemble the seed.
        (self.0 >> 11) % bound.max(1)
    }
}

/// Page allocator of a stream.
enum Pages {
    /// Each slot of each ring has a fixed page.
    Fixed(Vec<Vec<Pfn>>),
    Fresh(u64),
    Tree(Box<AddressSource>),
}

/// An IOVA allocator, with the unmap and invalidation that precede each free.
struct AddressSource {
    allocator: Locked<CachedTree, RefCell<CachedTree>>,
    table: NullTable,
    bench: LayerPlatform<FreeInvalidator>,
    waiting: Vec<Unmapped>,
    batch: usize,
}

impl AddressSource {
    fn new(batch: usize) -> Result<Self, LabError> {
        let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(TOP));
        let space = space.ok_or(LabError::Internal("address space"))?;
        // No table uses this memory; the platform's type requires it.
        let arena = Rc::new(Arena::new(1 << 20)?);
        let region = PhysRange::new(PhysAddr::ZERO, 1 << 20);
        let region = region.ok_or(LabError::Internal("region"))?;
        Ok(Self {
            allocator: Locked::new(CachedTree::new(space), RefCell::new),
            table: NullTable(DomainId::new(1)),
            bench: LayerPlatform {
                frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
                arena,
                invalidator: FreeInvalidator,
                now: Nanos(0),
            },
            waiting: Vec::new(),
            batch,
        })
    }

    fn alloc(&mut self) -> Result<Pfn, LabError> {
        let request = AllocRequest::new(1, Pfn::new(TOP));
        let found = self.allocator.alloc(&mut (), &request);
        Ok(found.map_err(LabError::Alloc)?.range.lo())
    }

    fn free(&mut self, range: PfnRange) -> Result<(), LabError> {
        let cleared = self.table.unmap(&mut (), &mut self.bench, range);
        let (unmapped, _, ()) = cleared.map_err(|_| {
            LabError::Internal(
                "clearing without a table \
        failed",
            )
        })?;
        self.waiting.push(unmapped);
        if self.waiting.len() < self.batch {
            return Ok(());
        }
        for unmapped in self.waiting.drain(..) {
            let invalidator = &mut self.bench.invalidator;
            let flushed = Pending::submit(invalidator, Invalidation::Global, unmapped)
                .ok()
                .and_then(|pending| pending.wait(invalidator).ok());
            let flushed = flushed.ok_or(LabError::Internal(
                "an invalidation without hardware \
            failed",
            ))?;
            self.allocator.free(&mut (), flushed);
        }
        Ok(())
    }
}

impl Synthetic {
    /// Generates the stream.
    ///
    /// # Errors
    /// [`LabError`] if the allocator runs out of pages.
    pub fn stream(&self) -> Result<DeviceStream, LabError> {
        let mut random = Random::new(self.seed);
        let mut pages = self.pages(&mut random)?;
        let mut stream = DeviceStream::new(format!(
            "{:?} addresses, rings of {:?}, bursts up to {}",
            self.addresses, self.rings, self.burst
        ));
        // Buffers of each ring, oldest first, with their slots.
        let mut rings: Vec<VecDeque<(u32, usize)>> = Vec::new();
        for (ring, &entries) in self.rings.iter().enumerate() {
            let number = stream.add_ring();
            let mut owned = VecDeque::new();
            for slot in 0..entries as usize {
                let page = pages.take(ring, slot)?;
                owned.push_back((stream.map(number, PfnRange::new(page, 1)), slot));
            }
            rings.push(owned);
        }
        let entries: u64 = self.rings.iter().map(|&ring| u64::from(ring)).sum();
        let mut left = entries * u64::from(self.laps);
        while left > 0 {
            let (ring, length) = self.turn(&mut random, entries);
            let Some(owned) = rings.get_mut(ring) else {
                break;
            };
            let used: Vec<_> = owned.drain(..length.min(owned.len())).collect();
            for &(buffer, _) in &used {
                stream.use_buffer(buffer);
            }
            for &(buffer, _) in &used {
                stream.unmap(buffer);
                if let (Pages::Tree(tree), [range]) = (&mut pages, stream.pages(buffer)) {
                    tree.free(*range)?;
                }
            }
            let number = ring as u16;
            stream.end_burst(number);
            for &(_, slot) in &used {
                let page = pages.take(ring, slot)?;
                owned.push_back((stream.map(number, PfnRange::new(page, 1)), slot));
            }
            left = left.saturating_sub((used.len() as u64).max(1));
        }
        Ok(stream)
    }

    /// Chooses the ring and the length of the next burst.
    fn turn(&self, random: &mut Random, entries: u64) -> (usize, usize) {
        let burst = u64::from(self.burst.max(1));
        if self.rings.len() == 1 {
            return (0, burst as usize);
        }
        let mut at = random.below(entries);
        let mut ring = 0;
        for &size in &self.rings {
            if at < u64::from(size) {
                break;
            }
            at -= u64::from(size);
            ring += 1;
        }
        (ring, 1 + random.below(burst) as usize)
    }

    fn pages(&self, random: &mut Random) -> Result<Pages, LabError> {
        let entries: usize = self.rings.iter().map(|&ring| ring as usize).sum();
        let fixed = |order: Vec<u64>| {
            let mut order = order.into_iter().map(Pfn::new);
            let rings = self.rings.iter();
            Pages::Fixed(
                rings
                    .map(|&ring| order.by_ref().take(ring as usize).collect())
                    .collect(),
            )
        };
        let down: Vec<u64> = (0..entries as u64).map(|at| TOP - (at & TOP)).collect();
        Ok(match self.addresses {
            Addresses::Tidy => fixed(down),
            Addresses::Scattered => {
                let mut order = down;
                for at in (1..order.len()).rev() {
                    order.swap(at, random.below(at as u64 + 1) as usize);
                }
                fixed(order)
            }
            Addresses::Fresh => Pages::Fresh(1),
            Addresses::Tree => Pages::Tree(Box::new(AddressSource::new(1)?)),
            Addresses::TreeDeferred => Pages::Tree(Box::new(AddressSource::new(DEFERRED)?)),
        })
    }
}

impl Pages {
    fn take(&mut self, ring: usize, slot: usize) -> Result<Pfn, LabError> {
        match self {
            Self::Fixed(rings) => {
                let page = rings.get(ring).and_then(|slots| slots.get(slot));
                page.copied()
                    .ok_or(LabError::Internal("a slot without a page"))
            }
            Self::Fresh(next) => {
                *next += 1;
                Ok(Pfn::new(*next))
            }
            Self::Tree(tree) => tree.alloc(),
        }
    }
}
