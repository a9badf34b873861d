//! Frames on demand, the pool, the last-table pointer, and reclaim by the host.

use ringfence_memory::fake::FaultyFrames;
use ringfence_papers::LastTableAsPublished;
use ringfence_pviommu::backend::{
    BackendLimits, FixedLastTable, GuestBacking, NoLastTable, POOL_PAGES, PagePool, REFILL_BELOW,
    ReclaimError,
};
use ringfence_pviommu::wire::{Gpa, Status};
use ringfence_types::{Access, Direction, FrameSource, PhysAddr, PhysMemory};
use std::sync::atomic::Ordering;

use crate::rig::{MEMORY, NIC, PAGE, Rig, WINDOW, config, memory};

#[test]
fn frames_come_with_the_first_map_only() {
    let mut rig = Rig::new();
    let outstanding = rig.frames.0.outstanding();
    assert_eq!(outstanding, POOL_PAGES);
    let pages = [(WINDOW, MEMORY), (WINDOW + PAGE, MEMORY + PAGE)];
    assert_eq!(rig.map(NIC, Direction::ToDevice, &pages), Status::Ok);
    let again = [
        (WINDOW + 2 * PAGE, MEMORY),
        (WINDOW + 3 * PAGE, MEMORY + PAGE),
    ];
    assert_eq!(rig.map(NIC, Direction::ToDevice, &again), Status::Ok);
    assert_eq!(rig.backend.backing().stats().allocated, 2);
    assert_eq!(rig.frames.0.outstanding(), POOL_PAGES);
    assert_eq!(rig.backend.backing().pool().available(), POOL_PAGES - 2);
}

/// A frame that a device can access is not reclaimed.
#[test]
fn a_frame_that_a_device_reaches_is_not_reclaimed() {
    let mut rig = Rig::new();
    let page = Gpa::new(MEMORY);
    let two = [(WINDOW, MEMORY), (WINDOW + PAGE, MEMORY)];
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two), Status::Ok);
    let frame = rig.frame(MEMORY);
    let reclaim = |rig: &mut Rig| rig.backend.backing().reclaim(page, &mut rig.processors);
    assert_eq!(reclaim(&mut rig), Err(ReclaimError::Mapped { mappings: 2 }));
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
    assert_eq!(reclaim(&mut rig), Err(ReclaimError::Mapped { mappings: 1 }));
    assert!(rig.reach(NIC, WINDOW + PAGE, Access::Read).is_ok());
    assert_eq!(rig.unmap(NIC, &[WINDOW + PAGE]), Status::Ok);
    assert_eq!(reclaim(&mut rig), Ok(frame));
    assert_eq!(reclaim(&mut rig), Err(ReclaimError::NotPresent));
    rig.frames.free(frame);
    // The guest continues with another frame, without the old frame's content.
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two), Status::Ok);
    assert_ne!(rig.frame(MEMORY), frame);
}

/// This holds even if no frame is left for a table: the tables of the page stay until it is
/// reclaimed.
#[test]
fn a_frame_is_not_reclaimed_while_processors_may_use_it() {
    let mut rig = Rig::new();
    let page = Gpa::new(MEMORY);
    let frame = rig.frame(MEMORY);
    let tables = rig.tables.0.outstanding();
    rig.fails.set(true);
    rig.tables.0.fail_after(0);
    // Use any address in the page.
    for page in [page, page, Gpa::new(MEMORY + 17)] {
        let taken = rig.backend.backing().reclaim(page, &mut rig.processors);
        assert_eq!(taken, Err(ReclaimError::NotInvalidated));
        assert_eq!(rig.frame(MEMORY), frame);
    }
    assert_eq!(rig.tables.0.outstanding(), tables);
    rig.fails.set(false);
    // The frame is reclaimed while paging-structure caches still point to the tables.
    rig.keeps_tables.set(true);
    let taken = rig.backend.backing().reclaim(page, &mut rig.processors);
    assert_eq!(taken, Ok(frame));
    assert_eq!(rig.tables.0.outstanding(), tables);
    rig.tables.0.recover();
    rig.keeps_tables.set(false);
    for (outside, error) in [
        (8 << 20, ReclaimError::NotMemory),
        (MEMORY + PAGE, ReclaimError::NotPresent),
    ] {
        let taken = rig
            .backend
            .backing()
            .reclaim(Gpa::new(outside), &mut rig.processors);
        assert_eq!(taken, Err(error));
    }
    // All tables below the root are freed, because the last invalidation succeeded.
    assert_eq!(rig.tables.0.outstanding(), tables - 3);
    assert_eq!(rig.tables.0.wrong_frees(), 0);
}

/// Section 4.6 and Fig. 10: allocation from the head, refill below 64, the host's allocator when
/// the ring is empty.
#[test]
fn the_pool_is_a_ring_of_256_refilled_below_64() {
    let rig = Rig::new();
    let counted = FaultyFrames::new(rig.frames.clone());
    let mut pool = PagePool::new(&counted);
    let first: Vec<PhysAddr> = (0..192).map(|_| pool.alloc().unwrap()).collect();
    assert!(first.is_sorted(), "the order in which the host gave them");
    assert_eq!(pool.available(), REFILL_BELOW);
    pool.refill();
    assert_eq!((pool.available(), pool.stats().refills), (REFILL_BELOW, 1));
    pool.alloc().unwrap();
    pool.refill();
    assert_eq!((pool.available(), pool.stats().refills), (POOL_PAGES, 2));
    // The rest of the first filling comes before the second.
    assert_eq!(pool.alloc().unwrap().get(), first[191].get() + 2 * PAGE);
    counted.fail_after(0);
    while pool.available() > 0 {
        pool.alloc().unwrap();
    }
    assert!(pool.alloc().is_err());
    pool.refill();
    assert_eq!(pool.available(), 0);
    counted.recover();
    pool.alloc().unwrap();
    assert_eq!(pool.stats().from_host, 1);
    pool.refill();
    drop(pool);
    // All pages that were not allocated went back to the host.
    assert_eq!(counted.outstanding(), 192 + 1 + 256 + 1);
    assert_eq!(counted.wrong_frees(), 0);
}

/// Without the pool, each page is allocated from the host on demand.
#[test]
fn without_the_pool_each_page_requests_a_frame() {
    let rig = Rig::new();
    let counted = FaultyFrames::new(rig.frames.clone());
    let mut pool = PagePool::new(&counted);
    pool.alloc().unwrap();
    pool.close();
    assert_eq!(counted.outstanding(), 1, "the ring's pages went back");
    pool.refill();
    pool.alloc().unwrap();
    assert_eq!((pool.available(), counted.outstanding()), (0, 2));
    let stats = pool.stats();
    assert_eq!((stats.from_ring, stats.from_host, stats.refills), (1, 1, 1));
    assert_eq!(counted.wrong_frees(), 0);
}

/// The pointer can be disabled at run time.
#[test]
fn a_pointer_that_is_not_there_finds_nothing() {
    let limits = BackendLimits::default();
    for (last, hits) in [(None, 0), (Some(FixedLastTable::default()), 2)] {
        let mut rig = Rig::with(config(), limits, &memory(), last);
        for page in [MEMORY, MEMORY + PAGE, MEMORY] {
            rig.frame(page);
        }
        assert_eq!(rig.backend.backing().stats().last_table_hits, hits);
    }
}

/// Errata 13: the pointer confuses a page with the one 1 MiB below in the same table. A device that
/// may read the upper page reads the lower one.
#[test]
fn pointer_as_published_confuses_halves_of_a_table() {
    let upper = MEMORY + (1 << 20);
    let limits = BackendLimits::default();
    let mut as_published = Rig::with(config(), limits, &memory(), LastTableAsPublished::default());
    // Walk to a page of each half, so that the pointer has the upper prefix.
    let low = as_published.frame(MEMORY);
    as_published.frame(upper + PAGE);
    assert_eq!(
        as_published.frame(upper),
        low,
        "two pages of the guest in one frame"
    );

    let mut fixed = Rig::new();
    let low = fixed.frame(MEMORY);
    fixed.frame(upper + PAGE);
    assert_ne!(fixed.frame(upper), low);
}

/// On one kind of pointer: a table is freed, its frame gets another owner, and the guest maps a
/// page with the same prefix. Returns the frame that the device reaches, the secret, and the page's
/// own.
pub(crate) fn stale_pointer<K: ringfence_pviommu::backend::LastTable>(
    last: K,
) -> (PhysAddr, PhysAddr, PhysAddr) {
    let mut rig = Rig::with(config(), BackendLimits::default(), &memory(), last);
    let page = Gpa::new(MEMORY);
    let before = rig.tables.0.outstanding();
    assert_eq!(
        rig.map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]),
        Status::Ok
    );
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
    let frame = rig.backend.backing().reclaim(page, &mut rig.processors);
    rig.frames.free(frame.unwrap());
    assert!(
        rig.tables.0.outstanding() > before,
        "the device's table stays"
    );
    // The host reuses the freed tables. Every word looks like an entry that points to a secret.
    let secret = PhysAddr::new(0x1234_5000);
    for _ in 0..3 {
        let reused = rig.tables.alloc_zeroed().unwrap();
        for word in rig.arena.table(reused).unwrap() {
            word.store(secret.get() | 3, Ordering::Relaxed);
        }
    }
    assert_eq!(
        rig.map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]),
        Status::Ok
    );
    let reached = rig.reach(NIC, WINDOW, Access::Read).unwrap();
    let own = rig.backend.backing().pool().stats().from_ring;
    (reached, secret, PhysAddr::new(own))
}

/// A freed table behind the last-table pointer, as published and fixed.
#[test]
fn a_freed_table_is_not_read_through_its_old_pointer() {
    let (reached, secret, _) = stale_pointer(LastTableAsPublished::default());
    assert_eq!(
        reached, secret,
        "the as-published pointer leads the device to the host's secret"
    );
    for (reached, secret, frames) in [
        stale_pointer(FixedLastTable::default()),
        stale_pointer(NoLastTable),
    ] {
        assert_ne!(reached, secret);
        assert_eq!(
            frames,
            PhysAddr::new(2),
            "a frame for each time it was mapped"
        );
    }
}

/// A walk of four levels reads four words, fewer if a table is absent, and the pointer reads one.
/// The pointer never causes additional reads.
#[test]
fn the_pointer_reads_one_word_in_place_of_four() {
    for last in [None, Some(FixedLastTable::default())] {
        let with = last.is_some();
        let mut rig = Rig::with(config(), BackendLimits::default(), &memory(), last);
        let mut seen = Vec::new();
        for page in [0, 1, 2, 1] {
            let before = *rig.backend.backing().stats();
            rig.frame(MEMORY + page * PAGE);
            let now = *rig.backend.backing().stats();
            seen.push((now.walks - before.walks, now.reads - before.reads));
        }
        // First the root is the only table, and the walk learns the leaf table. Then two absent
        // entries in it, then a present one.
        let rest = if with { (0, 1) } else { (1, 4) };
        assert_eq!(seen, [(2, 5), rest, rest, rest]);
        assert_eq!(rig.backend.backing().stats().allocated, 3);
    }
}

/// The pointer saves walks for nearby pages and changes nothing else.
#[test]
fn the_pointer_saves_walks() {
    let mut rig = Rig::new();
    let mut plain = Rig::with(config(), BackendLimits::default(), &memory(), NoLastTable);
    for round in 0..4 {
        for page in 0..512 {
            let gpa = Gpa::new(MEMORY + page * PAGE);
            let found = rig.backend.backing().pin(gpa).unwrap();
            assert_eq!(plain.backend.backing().pin(gpa), Ok(found), "{round} {gpa}");
        }
    }
    let stats = *rig.backend.backing().stats();
    assert_eq!(plain.backend.backing().stats().last_table_hits, 0);
    assert!(stats.last_table_hits >= 3 * 512, "{stats:?}");
    assert!(plain.backend.backing().stats().walks >= 4 * 512);
}
