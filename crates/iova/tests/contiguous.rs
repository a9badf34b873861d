//! Blocks of contiguous addresses, checked against a brute-force model of every page.

#[path = "support/common.rs"]
mod common;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;

use common::{Random, flushed, pages};
use ringfence_iova::*;
use ringfence_types::{Permissions, Pfn, PfnRange};

const BLOCK: u64 = 64;
const LIMIT: Pfn = Pfn::new(0xf_ffff);
const KINDS: [Permissions; 3] = [
    Permissions::READ,
    Permissions::WRITE,
    Permissions::READ_WRITE,
];

type OneThread = Contiguous<Magazines<RefCell<Depot>>, RefCell<FreeBlocks>>;

fn allocator(most: usize) -> OneThread {
    let space = pages(1, 1 << 30);
    let below = Magazines::new(space, MagazineLimits::DEFAULT, RefCell::new).unwrap();
    Contiguous::new(below, most, RefCell::new).unwrap()
}

fn request(pages: u64, permissions: Permissions) -> AllocRequest {
    AllocRequest {
        permissions,
        ..AllocRequest::new(pages, LIMIT)
    }
}

#[test]
fn a_descriptor_is_one_run_of_64_pages() {
    let allocator = allocator(8);
    let mut cpus = [allocator.per_cpu(), allocator.per_cpu()];
    // Two CPUs and two directions in turn: each has its own run.
    let mut runs: BTreeMap<(usize, usize), Vec<u64>> = BTreeMap::new();
    for _ in 0..BLOCK {
        for (cpu, handle) in cpus.iter_mut().enumerate() {
            for (kind, permissions) in KINDS.iter().take(2).enumerate() {
                let found = allocator.alloc(handle, &request(1, *permissions)).unwrap();
                runs.entry((cpu, kind))
                    .or_default()
                    .push(found.range.lo().get());
            }
        }
    }
    for (owner, run) in runs {
        assert_eq!(run[0] % BLOCK, 0, "{owner:?}");
        let expected: Vec<u64> = (run[0]..run[0] + BLOCK).collect();
        assert_eq!(run, expected, "{owner:?}");
    }
    assert_eq!(allocator.blocks(), 4);
}

#[test]
fn the_blocks_of_a_ring_are_used_again() {
    let allocator = allocator(FreeBlocks::HALF_OF_32_BITS);
    let mut cpu = allocator.per_cpu();
    let mut ring = std::collections::VecDeque::new();
    for turn in 0..10_000 {
        if ring.len() == 256 {
            assert!(allocator.free(&mut cpu, flushed(ring.pop_front().unwrap())));
        }
        let found = allocator.alloc(&mut cpu, &request(1, KINDS[0])).unwrap();
        assert_eq!(found.range.lo().get() % BLOCK, turn % BLOCK);
        ring.push_back(found.range);
    }
    // 256 live pages lie in five blocks at most, one of them open.
    assert!(allocator.blocks() <= 6, "{}", allocator.blocks());
}

/// One mapping that lives for long keeps its block, and no other page of the block is allocated.
/// Above the bound on blocks, and for large ranges, the allocator below serves requests.
#[test]
fn blocks_are_bounded_and_others_take_their_place() {
    let allocator = allocator(2);
    let mut cpu = allocator.per_cpu();
    let mut all = Vec::new();
    for _ in 0..3 * BLOCK {
        let found = allocator.alloc(&mut cpu, &request(1, KINDS[1])).unwrap();
        all.push(found.range.lo().get());
    }
    assert_eq!(allocator.blocks(), 2);
    // All pages but one of each block are free.
    for page in &all {
        if page % BLOCK != 17 {
            assert!(allocator.free(&mut cpu, flushed(pages(*page, *page))));
        }
    }
    let blocks: BTreeSet<u64> = all
        .iter()
        .take(2 * BLOCK as usize)
        .map(|p| p / BLOCK)
        .collect();
    for _ in 0..BLOCK {
        let found = allocator.alloc(&mut cpu, &request(1, KINDS[1])).unwrap();
        let block = found.range.lo().get() / BLOCK;
        assert!(!blocks.contains(&block), "{block:#x} has a live page");
    }
    for count in [33, 64, 65, 1000] {
        let found = allocator
            .alloc(&mut cpu, &request(count, KINDS[1]))
            .unwrap();
        assert!(allocator.free(&mut cpu, flushed(found.range)));
    }
    assert_eq!(allocator.blocks(), 2);
}

#[test]
fn a_limit_below_a_block_goes_to_the_allocator_below() {
    let allocator = allocator(8);
    let mut cpu = allocator.per_cpu();
    let wide = allocator.alloc(&mut cpu, &request(1, KINDS[0])).unwrap();
    for limit in [40, 63, 64, 127, 128, 4000] {
        let narrow = AllocRequest {
            limit: Pfn::new(limit),
            ..request(1, KINDS[0])
        };
        let found = allocator.alloc(&mut cpu, &narrow).unwrap();
        assert!(found.range.hi().get() <= limit, "{limit}: {}", found.range);
        assert_ne!(found.range, wide.range);
    }
}

#[test]
fn a_drained_handle_returns_its_blocks() {
    let allocator = allocator(1);
    for _ in 0..5 {
        let mut cpu = allocator.per_cpu();
        let found = allocator.alloc(&mut cpu, &request(3, KINDS[0])).unwrap();
        assert_eq!(found.range.lo().get() % BLOCK, 0, "the only block");
        assert!(allocator.free(&mut cpu, flushed(found.range)));
        allocator.drain(&mut cpu);
    }
    // Drained first, freed last, through another handle.
    let (mut cpu, mut other) = (allocator.per_cpu(), allocator.per_cpu());
    let found = allocator.alloc(&mut cpu, &request(1, KINDS[0])).unwrap();
    allocator.drain(&mut cpu);
    assert!(allocator.free(&mut other, flushed(found.range)));
    let again = allocator.alloc(&mut other, &request(1, KINDS[1])).unwrap();
    assert_eq!(again.range, found.range);
    assert_eq!(allocator.blocks(), 1);
}

/// Every live page belongs to one range. A page of a block is allocated again only after all pages
/// of the block are free. Pages of one run ascend.
#[test]
fn random_operations_agree_with_a_model_of_every_page() {
    for (seed, most) in (0..24).zip([1, 3, 500].into_iter().cycle()) {
        let mut random = Random::new(seed);
        let allocator = allocator(most);
        let mut cpus = [allocator.per_cpu(), allocator.per_cpu()];
        let mut live: Vec<PfnRange> = Vec::new();
        let mut held: BTreeSet<u64> = BTreeSet::new();
        // By block: the page after the last allocated one. Above the bound on blocks, the allocator
        // below serves requests in any order.
        let mut next: BTreeMap<u64, u64> = BTreeMap::new();
        for step in 0..3000 {
            let cpu = &mut cpus[random.below(2) as usize];
            let why = format!("seed {seed}, step {step}");
            match random.below(20) {
                0..10 => {
                    let large = most < 500 && random.below(8) == 0;
                    let count = if large {
                        1 + random.below(200)
                    } else {
                        [1, 1, 1, 2, 5, 17, 32][random.below(7) as usize]
                    };
                    let request = AllocRequest {
                        align_order: [0, 0, 0, 2, 5][random.below(5) as usize],
                        ..request(count, KINDS[random.below(3) as usize])
                    };
                    let found = allocator.alloc(cpu, &request).unwrap();
                    let (lo, hi) = (found.range.lo().get(), found.range.hi().get());
                    assert_eq!(found.range.pages(), count, "{why}");
                    assert_eq!(lo & ((1 << request.align_order) - 1), 0, "{why}");
                    for page in lo..=hi {
                        assert!(held.insert(page), "{page:#x} twice, {why}");
                    }
                    if most == 500 {
                        let block = lo / BLOCK;
                        assert_eq!(block, hi / BLOCK, "{why}");
                        let next = next.entry(block).or_default();
                        let of_block = held.range(block * BLOCK..(block + 1) * BLOCK);
                        let only_own = of_block.count() as u64 == count;
                        assert!(*next <= lo || only_own, "{lo:#x} was used, {why}");
                        *next = hi + 1;
                    }
                    live.push(found.range);
                }
                10..19 if !live.is_empty() => {
                    let range = live.swap_remove(random.below(live.len() as u64) as usize);
                    assert!(allocator.free(cpu, flushed(range)), "{why}");
                    if cfg!(debug_assertions) {
                        assert!(!allocator.free(cpu, flushed(range)), "freed twice, {why}");
                    }
                    for page in range.lo().get()..=range.hi().get() {
                        held.remove(&page);
                    }
                }
                _ => allocator.drain(cpu),
            }
            assert!(allocator.blocks() <= most, "{why}");
        }
        for range in live {
            assert!(allocator.free(&mut cpus[0], flushed(range)));
        }
        for cpu in &mut cpus {
            allocator.drain(cpu);
        }
        // All blocks are free: as many new runs fit into them.
        let blocks = allocator.blocks();
        let mut cpu = allocator.per_cpu();
        for _ in 0..blocks as u64 * BLOCK {
            let _ = allocator.alloc(&mut cpu, &request(1, KINDS[2])).unwrap();
        }
        assert_eq!(allocator.blocks(), blocks, "seed {seed}");
    }
}

/// Ranges are freed by another thread than the one that allocated them. No page has two owners.
#[test]
fn pages_freed_by_other_threads_have_one_owner() {
    let space = pages(1, 0xf_ffff);
    let below = Magazines::new(space, MagazineLimits::DEFAULT, Mutex::new).unwrap();
    let allocator = Contiguous::new(below, 64, Mutex::new).unwrap();
    let owned: Vec<AtomicU8> = (0..=0xf_ffff).map(|_| AtomicU8::new(0)).collect();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..3).map(|_| mpsc::sync_channel::<PfnRange>(300)).unzip();
    std::thread::scope(|scope| {
        for (thread, receiver) in receivers.into_iter().enumerate() {
            let to = senders[(thread + 1) % 3].clone();
            let (allocator, owned) = (&allocator, &owned);
            scope.spawn(move || {
                let mut random = Random::new(thread as u64);
                let mut cpu = allocator.per_cpu();
                let release = |cpu: &mut _, range: PfnRange| {
                    for page in range.lo().get()..=range.hi().get() {
                        assert_eq!(owned[page as usize].swap(0, Ordering::Relaxed), 1);
                    }
                    assert!(allocator.free(cpu, flushed(range)));
                };
                for _ in 0..6_000 {
                    let asked = request(1 + random.below(3), KINDS[random.below(3) as usize]);
                    let found = allocator.alloc(&mut cpu, &asked).unwrap();
                    for page in found.range.lo().get()..=found.range.hi().get() {
                        let before = owned[page as usize].swap(1, Ordering::Relaxed);
                        assert_eq!(before, 0, "{page:#x} has two owners");
                    }
                    // The other thread may be behind: then this one frees its own range.
                    if let Err(back) = to.try_send(found.range) {
                        let (mpsc::TrySendError::Full(range)
                        | mpsc::TrySendError::Disconnected(range)) = back;
                        release(&mut cpu, range);
                    }
                    while let Ok(range) = receiver.try_recv() {
                        release(&mut cpu, range);
                    }
                }
                drop(to);
                while let Ok(range) = receiver.try_recv() {
                    release(&mut cpu, range);
                }
                allocator.drain(&mut cpu);
            });
        }
        drop(senders);
    });
}
