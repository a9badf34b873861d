//! Every mode against a brute-force model, under attack, with the oracle on.

use std::collections::BTreeMap;

use ringfence_lab::compose::compose;
use ringfence_lab::modes::{Alloc, FlushKind, Mode, Owner, Safety};
use ringfence_lab::oracle::Verdict;
use ringfence_types::{Access, Direction, IovaRange, PfnRange, PhysAddr, PhysRange};

use crate::bench::*;

/// Generator of random steps; the same seed gives the same steps on every host.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % sides
    }

    fn piece(&mut self) -> PhysRange {
        let page = self.roll(64);
        let offset = if self.roll(2) == 0 {
            0
        } else {
            self.roll(4096)
        };
        let bytes = match self.roll(3) {
            0 => 64,
            1 => 1500,
            _ => 1 + self.roll(5 * 4096),
        };
        memory((1 << 20) + page * 4096 + offset, bytes)
    }

    fn direction(&mut self) -> Direction {
        Direction::ALL[self.roll(3) as usize]
    }
}

/// A mapping in the model.
struct Live {
    device: usize,
    pieces: Vec<PhysRange>,
    direction: Direction,
    single: bool,
}

/// Returns true if memory belongs to a pool of copies.
fn is_copy(at: PhysAddr) -> bool {
    at.get() >= ringfence_lab::replay_platform::DATA_BYTES
}

/// Returns the bytes of `pieces` on whole pages.
fn whole_bytes(pieces: &[PhysRange]) -> u64 {
    let whole = pieces.iter().map(|piece| {
        let first = piece.start().get().next_multiple_of(4096);
        let end = (piece.last().get() + 1) / 4096 * 4096;
        end.saturating_sub(first)
    });
    whole.sum()
}

/// The brute-force model: a list of the live mappings.
struct Model {
    mode: Mode,
    bench: Box<dyn Bench>,
    live: BTreeMap<Handle, Live>,
    dead: Vec<(usize, IovaRange, Direction)>,
    unmapped: usize,
    stalls: usize,
}

impl Model {
    fn new(mode: &Mode) -> Self {
        Self {
            mode: mode.clone(),
            bench: bench(mode),
            live: BTreeMap::new(),
            dead: Vec::new(),
            unmapped: 0,
            stalls: 0,
        }
    }

    fn pages(range: &IovaRange) -> PfnRange {
        PfnRange::covering(range)
    }

    /// Returns true if a live mapping keeps its addresses. The as-published ring gives them to
    /// other mappings, and the as-published cache evicts mappings in use.
    fn keeps_addresses(&self) -> bool {
        self.mode.alloc != Alloc::RingTailAsPublished
            && self.mode.flush != FlushKind::PerCycleAsPublished
    }

    /// Returns true if buffers in the same pages can share addresses: in modes with a cache.
    fn shares_addresses(&self) -> bool {
        self.mode.flush.has_cache()
    }

    /// Checks that a new mapping overlaps no other of its domain and translates to the right
    /// memory, at the bytes of its ends and as a whole.
    fn made(&mut self, handle: Handle, live: Live) {
        let ranges = self.bench.ranges(handle).to_vec();
        let range = ranges[0];
        if self.mode.translates() && self.keeps_addresses() && !self.shares_addresses() {
            let others = self
                .live
                .iter()
                .filter(|(_, other)| other.device == live.device);
            for theirs in others.flat_map(|(other, _)| self.bench.ranges(*other)) {
                for range in &ranges {
                    assert!(
                        !Self::pages(theirs).overlaps(&Self::pages(range)),
                        "{}: {range} and {theirs} share a page",
                        self.mode.name,
                    );
                }
            }
        }
        if !self.keeps_addresses() {
            // An as-published ring does not guarantee the translation: its cache may hold an older
            // entry.
            self.live.insert(handle, live);
            return;
        }
        let access = match live.direction {
            Direction::ToDevice => Access::Read,
            _ => Access::Write,
        };
        let mut page = range.start().align_down(4096);
        for (nth, piece) in live.pieces.iter().enumerate() {
            let start = if self.mode.has_rings() || self.shares_addresses() {
                // Each piece, or all of a coherent buffer, has a separate slot or mapping.
                match ranges.get(nth) {
                    Some(range) => range.start(),
                    None => range.start().wrapping_add(4096 * nth as u64),
                }
            } else if self.mode.translates() {
                page.wrapping_add(piece.start().offset_in(4096))
            } else {
                ringfence_types::Iova::new(piece.start().get())
            };
            page = page.wrapping_add(piece.pages(ringfence_types::PageSize::Size4K) << 12);
            let reached = self
                .bench
                .access(device(live.device), start, piece.bytes(), access)
                .unwrap_or_else(|fault| panic!("{}: {fault}", self.mode.name));
            let mut at = piece.start();
            if self.mode.copies() && self.bench.lies_at(handle).is_empty() {
                if self.mode.alloc == Alloc::ShadowHybrid && whole_bytes(&live.pieces) >= SPLIT {
                    self.reaches_own_pages_and_copies(piece, &reached);
                    continue;
                }
                let bytes: u64 = live.pieces.iter().map(PhysRange::bytes).sum();
                if self.mode.alloc != Alloc::ShadowOrMap || bytes < SPLIT {
                    // The device reaches a copy above all buffers.
                    at = reached[0].start();
                    assert!(is_copy(at), "{at}");
                }
            }
            let end = at.wrapping_add(piece.bytes());
            for range in &reached {
                assert_eq!(range.start(), at, "{}", self.mode.name);
                at = at.wrapping_add(range.bytes());
            }
            assert_eq!(at, end);
            assert_eq!(self.bench.verdict(), Verdict::Granted, "{}", self.mode.name);
        }
        self.live.insert(handle, live);
    }

    /// Checks that the device reaches the whole pages of `piece` themselves, and a copy of every
    /// other byte at its offset in the page.
    fn reaches_own_pages_and_copies(&self, piece: &PhysRange, reached: &[PhysRange]) {
        let (first, last) = (piece.start().get(), piece.last().get());
        let bytes = reached
            .iter()
            .flat_map(|range| range.start().get()..=range.last().get());
        let mut count = 0;
        for (byte, at) in (first..=last).zip(bytes) {
            count += 1;
            let page = byte - byte % 4096;
            if first <= page && page + 4095 <= last {
                assert_eq!(at, byte, "{}: a whole page is copied", self.mode.name);
            } else {
                let copied = is_copy(PhysAddr::new(at)) && at % 4096 == byte % 4096;
                assert!(copied, "{}: {byte:#x} is no copy", self.mode.name);
            }
        }
        assert_eq!(count, piece.bytes());
        assert_eq!(self.bench.verdict(), Verdict::Granted, "{}", self.mode.name);
    }

    fn gone(&mut self, handle: Handle) {
        let live = self.live.remove(&handle).unwrap();
        for range in self.bench.ranges(handle) {
            self.dead.push((live.device, *range, live.direction));
        }
        self.unmapped += 1;
        let withholds = match self.mode.flush {
            FlushKind::Burst | FlushKind::Descriptor => true,
            FlushKind::TransmitBatch => live.direction == Direction::ToDevice,
            _ => false,
        };
        if !withholds {
            assert!(
                self.bench.is_back(handle),
                "{}: buffer kept",
                self.mode.name
            );
        }
    }

    fn pick(&self, dice: &mut Dice) -> Option<Handle> {
        let nth = dice.roll(self.live.len().max(1) as u64) as usize;
        self.live.keys().nth(nth).copied()
    }

    fn step(&mut self, dice: &mut Dice) {
        let (dev, cpu) = (dice.roll(2) as usize, dice.roll(2) as usize);
        match dice.roll(if self.live.len() < 40 { 16 } else { 10 } + 4) {
            0..=5 => {
                if let Some(handle) = self.pick(dice) {
                    self.bench.unmap(handle, cpu);
                    self.gone(handle);
                }
            }
            6 => {
                let mut some: Vec<_> = self
                    .live
                    .iter()
                    .filter(|(_, l)| l.single && l.device == dev)
                    .map(|(h, _)| *h)
                    .collect();
                if self.mode.has_rings() {
                    // All of one ring.
                    let ring = some.first().map(|h| self.live[h].direction);
                    some.retain(|h| Some(self.live[h].direction) == ring);
                }
                some.truncate(dice.roll(6) as usize);
                self.bench.unmap_multi(&some, cpu);
                some.into_iter().for_each(|handle| self.gone(handle));
            }
            7 => self.bench.tick(cpu, dice.roll(4_000_000)),
            8 | 9 => self.bench.end_burst(dev, cpu, dice.direction()),
            10..=12 => {
                let count = 1 + dice.roll(4);
                let pieces: Vec<_> = (0..count).map(|_| dice.piece()).collect();
                let direction = dice.direction();
                let single = count == 1;
                let Some(handle) = self.bench.try_map(dev, cpu, &pieces, direction) else {
                    return self.waits();
                };
                self.made(
                    handle,
                    Live {
                        device: dev,
                        pieces,
                        direction,
                        single,
                    },
                );
            }
            13 => {
                let mut buffers: Vec<_> = (0..dice.roll(6))
                    .map(|_| (dice.piece(), dice.direction()))
                    .collect();
                if let (true, Some((_, ring))) = (self.mode.has_rings(), buffers.first().copied()) {
                    buffers
                        .iter_mut()
                        .for_each(|(_, direction)| *direction = ring);
                }
                let handles = self.bench.map_multi(dev, cpu, &buffers);
                if handles.len() < buffers.len() {
                    return self.waits();
                }
                for (handle, (piece, direction)) in handles.into_iter().zip(buffers) {
                    self.made(
                        handle,
                        Live {
                            device: dev,
                            pieces: vec![piece],
                            direction,
                            single: true,
                        },
                    );
                }
            }
            14 if self.mode.translates() => {
                let pages = 1 + dice.roll(4) as usize;
                let Some(handle) = self.bench.map_coherent(dev, cpu, pages) else {
                    // A ring needs contiguous frames and a free slot.
                    return self.waits();
                };
                let pieces = self.bench.lies_at(handle);
                self.made(
                    handle,
                    Live {
                        device: dev,
                        pieces,
                        direction: Direction::Bidirectional,
                        single: false,
                    },
                );
            }
            _ => {
                let piece = dice.piece();
                let direction = dice.direction();
                let Some(handle) = self.bench.try_map(dev, cpu, &[piece], direction) else {
                    return self.waits();
                };
                self.made(
                    handle,
                    Live {
                        device: dev,
                        pieces: vec![piece],
                        direction,
                        single: true,
                    },
                );
            }
        }
    }

    /// Counts a map that must wait, which only a ring may require.
    fn waits(&mut self) {
        assert!(self.mode.has_rings(), "{}: no room", self.mode.name);
        self.stalls += 1;
    }

    /// Accesses every unmapped address again, from the device that had it.
    fn touch_the_dead(&mut self) {
        for (dev, range, direction) in self.dead.clone() {
            let access = if direction == Direction::ToDevice {
                Access::Read
            } else {
                Access::Write
            };
            for iova in [range.start(), range.last()] {
                let _ = self.bench.access(device(dev), iova, 1, access);
            }
        }
    }
}

const STEPS: u64 = 600;

/// Calgary's flat table with allocators and flush policies that no named mode combines.
fn flat() -> impl Iterator<Item = Mode> {
    const ROWS: [(&str, &str); 6] = [
        ("table-bitmap", "per-unmap"),
        ("table-bitmap", "per-wrap"),
        ("table-bitmap", "burst"),
        ("cached-rbtree", "deferred"),
        ("linux-rcache", "per-cpu-queue"),
        ("magazine", "burst"),
    ];
    ROWS.iter().map(|(alloc, flush)| {
        compose(&format!("alloc={alloc},table=flat,flush={flush}")).expect("a mode")
    })
}

/// Copies and flush policies that no named mode combines.
fn hybrid() -> impl Iterator<Item = Mode> {
    const ROWS: [(&str, &str); 5] = [
        ("shadow-hybrid", "per-unmap"),
        ("shadow-hybrid", "transmit-batch"),
        ("shadow-or-map", "per-unmap"),
        ("shadow-or-map", "burst"),
        ("magazine", "transmit-batch"),
    ];
    ROWS.iter().map(|(alloc, flush)| {
        let row = format!("alloc={alloc},table=cached-radix,flush={flush}");
        compose(&row).expect("a mode")
    })
}

/// Tables that a host maintains, with other allocators and flush policies than those of Linux; no
/// named mode uses them.
fn hosted() -> impl Iterator<Item = Mode> {
    const ROWS: [(&str, &str, &str); 14] = [
        ("magazine", "burst", "emulated"),
        ("cached-rbtree", "deferred", "emulated"),
        ("magazine", "burst", "virtio-iommu"),
        ("cached-rbtree", "deferred", "virtio-iommu"),
        ("eiovar", "per-unmap", "virtio-iommu"),
        ("bitmap", "per-cpu-queue", "virtio-iommu"),
        ("magazine", "burst", "pviommu"),
        ("bitmap", "per-unmap", "pviommu"),
        ("linux-rcache", "per-unmap", "pviommu-hopt"),
        ("magazine", "burst", "pviommu-hopt"),
        ("magazine", "per-cpu-queue", "virtio-iommu-lazy"),
        ("cached-rbtree", "deferred", "virtio-iommu-lazy"),
        ("shadow", "per-unmap", "pviommu"),
        ("shadow", "per-unmap", "pviommu-hopt"),
    ];
    ROWS.iter().map(|(alloc, flush, owner)| {
        compose(&format!(
            "alloc={alloc},table=radix,flush={flush},owner={owner}"
        ))
        .expect("a mode")
    })
}

#[test]
fn every_mode_keeps_its_promise_under_attack() {
    // A bench drives the layer itself, without a sidecore, and maps a driver's own buffers. The
    // tests of `lab` judge sidecores and pools of buffers.
    let named = Mode::named().into_iter();
    let named = named.filter(|mode| mode.owner != Owner::Sidecore && mode.alloc != Alloc::Pool);
    for mode in named.chain(flat()).chain(hosted()).chain(hybrid()) {
        for seed in 1..=2 {
            let mut model = Model::new(&mode);
            let mut dice = Dice(seed);
            for _ in 0..STEPS {
                model.step(&mut dice);
            }
            let name = &mode.name;
            let tally = model.bench.tally();
            let attempts = model.bench.attempts();
            // The plain tail of a ring waits for the oldest slot, so fewer maps succeed.
            let enough = if mode.has_rings() { 50 } else { 100 };
            assert!(
                attempts as usize >= model.unmapped && model.unmapped > enough,
                "{name}: {attempts} attempts, {} unmaps, {} stalls",
                model.unmapped,
                model.stalls
            );
            // The as-published ring overwrites live entries, and the as-published cache evicts
            // them.
            let keeps = model.keeps_addresses();
            assert_eq!(tally.false_faults == 0, keeps, "{name}: {tally:?}");
            let waits = matches!(mode.alloc, Alloc::RingTail);
            assert!(model.stalls > 0 || !waits, "{name}: no map waited");
            match mode.safety() {
                Safety::ByteGranular => {
                    assert_eq!(tally.violations(), 0, "{name}: {tally:?}");
                    assert!(
                        tally.faults > 0 && tally.colocated == 0,
                        "{name}: {tally:?}"
                    );
                }
                Safety::Strict => {
                    assert_eq!(tally.violations(), 0, "{name}: {tally:?}");
                    // The attackers did try, and page granularity explains all that they reached.
                    assert!(tally.faults > 0 && tally.colocated > 0, "{name}: {tally:?}");
                }
                Safety::OwnPool => unreachable!("{name}"),
                Safety::Bounded => {
                    assert!(
                        tally.stale > 0,
                        "{name}: the oracle must see the stale window"
                    );
                    assert_eq!(tally.violations(), tally.stale, "{name}: {tally:?}");
                }
                Safety::None => {
                    let stops = mode.translates();
                    assert!(tally.violations() > 0, "{name}: {tally:?}");
                    assert_eq!(tally.faults > 0, stops, "{name}: {tally:?}");
                }
            }
            if mode.safety() == Safety::Bounded {
                // The stale window ends with the flush: afterwards no unmapped range is reachable.
                model.bench.attackers(false);
                model.bench.flush();
                if mode.flush == FlushKind::PerWrap {
                    // This policy flushes at the wrap, which is 2^20 pages away.
                    model.bench.invalidate_all();
                }
                let before = model.bench.tally().violations();
                model.touch_the_dead();
                assert_eq!(model.bench.tally().violations(), before, "{name}");
            }
            // At the end, every buffer returns exactly once.
            let handles: Vec<_> = model.live.keys().copied().collect();
            let all = handles.iter().max().map_or(0, |last| last + 1);
            for handle in handles {
                model.bench.unmap(handle, 0);
                model.gone(handle);
            }
            model.bench.flush();
            for handle in 0..all {
                assert!(model.bench.is_back(handle), "{name}: {handle} is lost");
            }
        }
    }
}

/// Checks the number of invalidations of each policy on a workload that determines it exactly: 600
/// single pages, one CPU, no time.
#[test]
fn invalidations_match_the_policy() {
    for (name, expected) in [
        ("none", 0),
        ("hwpt", 0),
        ("strict", 600),
        ("freebsd", 600),
        ("fence", 600),
        ("defer", 600 / 250),
        ("linux-lazy", 599 / 256),
        ("bitmap", 0),
        ("fence-burst", 599 / 256),
        ("kvm-baseline", 0),
        ("emulated-strict", 600),
        ("emulated-lazy", 599 / 256),
        ("nested-strict", 600),
        ("virtio-strict", 600),
        ("pviommu", 600),
        // No mapping leaves the cache before a cycle ends.
        ("pviommu+rtc", 0),
        ("pviommu+rtc+hopt", 0),
        // All unmaps except the last one are sent with the next map.
        ("virtio-lazy", 599),
        ("virtio-bounce", 0),
        // The flush queue alone invalidates.
        ("virtio-lazy-domain", 599 / 256),
        ("premap", 0),
        ("calgary", 600),
        ("calgary-lazy", 0),
        ("xen", 600),
        ("xen-multicall", 600),
        ("xen-grant", 600),
        ("xen-lazy", 0),
    ] {
        let mut bench = named(name);
        bench.attackers(false);
        for _ in 0..600 {
            let handle = bench.map(0, 0, &[memory(0x10_0000, 64)], Direction::ToDevice);
            bench.unmap(handle, 0);
        }
        assert_eq!(bench.counts(), (600, expected), "{name}");
    }
}
