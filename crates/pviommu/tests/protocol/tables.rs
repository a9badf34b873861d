//! Device tables: empty ones are freed, but only when no paging-structure cache points to them.

use ringfence_pviommu::backend::{BackendLimits, FixedLastTable, KEPT_TABLES};
use ringfence_pviommu::wire::{Config, Status};
use ringfence_types::{Access, Direction, Iova, IovaRange};

use crate::rig::{MEMORY, NIC, PAGE, Rig, WINDOW, memory};

/// Bytes that a leaf table maps.
const STRETCH: u64 = 2 << 20;

/// Creates a host whose devices may map anywhere in 256 GiB.
fn wide() -> Rig {
    let window = IovaRange::new(Iova::new(WINDOW), 1 << 38).unwrap();
    let config = Config::new(window, 64, [0x10, 0x11]).unwrap();
    Rig::with(
        config,
        BackendLimits::default(),
        &memory(),
        FixedLastTable::default(),
    )
}

fn map(rig: &mut Rig, giova: u64) -> Status {
    rig.map(NIC, Direction::Bidirectional, &[(giova, MEMORY)])
}

/// A hostile guest maps one page in each of many regions, one after the other. Returns the highest
/// number of table pages that the host held.
fn held(kept: Option<u64>, regions: u64) -> usize {
    let mut rig = wide();
    if let Some(kept) = kept {
        rig.backend.tables().set_kept_tables(kept);
    }
    rig.frame(MEMORY);
    let before = rig.tables.0.outstanding();
    let mut most = 0;
    for region in 0..regions {
        let giova = WINDOW + region * STRETCH;
        assert_eq!(map(&mut rig, giova), Status::Ok);
        most = most.max(rig.tables.0.outstanding() - before);
        assert_eq!(rig.unmap(NIC, &[giova]), Status::Ok);
    }
    assert_eq!(rig.tables.0.wrong_frees(), 0);
    most
}

#[test]
fn tables_that_lead_nowhere_go_back() {
    let regions = 20_000;
    let (as_linux, ours, few) = (
        held(Some(u64::MAX), regions),
        held(None, regions),
        held(Some(16), regions),
    );
    println!(
        "a page in each of {regions} regions, one after the other: {as_linux} table pages if they \
        stay, {ours} with {KEPT_TABLES} kept, {few} with 16"
    );
    assert!(as_linux as u64 >= regions);
    // Also the tables of the mapped page.
    assert!(ours as u64 <= KEPT_TABLES + 3, "{ours}");
    assert!(few <= 16 + 3, "{few}");
}

/// A driver that uses few regions allocates its tables once.
#[test]
fn tables_that_are_used_again_stay() {
    let mut rig = wide();
    assert_eq!(map(&mut rig, WINDOW), Status::Ok);
    let linked = rig.tables.0.outstanding();
    let submitted = rig.backend.tables().invalidator().submitted;
    for _ in 0..10 {
        assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
        assert_eq!(rig.tables.0.outstanding(), linked);
        assert_eq!(map(&mut rig, WINDOW), Status::Ok);
    }
    let submitted = rig.backend.tables().invalidator().submitted - submitted;
    assert_eq!(submitted, 10, "one invalidation for each unmap");
}

/// An unmap completes when its entry is invalidated. The table stays, and a map that it would hide
/// is refused.
#[test]
fn a_table_that_walk_caches_lead_to_is_not_freed() {
    let mut rig = wide();
    rig.backend.tables().set_kept_tables(0);
    // Map another 2 MiB region, so that the upper tables stay.
    assert_eq!(map(&mut rig, WINDOW + STRETCH), Status::Ok);
    let linked = rig.tables.0.outstanding();
    assert_eq!(map(&mut rig, WINDOW), Status::Ok);
    assert!(rig.reach(NIC, WINDOW, Access::Read).is_ok());
    rig.keeps_tables.set(true);
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
    assert!(rig.reach(NIC, WINDOW, Access::Read).is_err());
    assert_eq!(rig.tables.0.outstanding(), linked + 1, "it waits");
    for _ in 0..3 {
        assert_eq!(map(&mut rig, WINDOW + PAGE), Status::Failed);
        assert_eq!(rig.tables.0.outstanding(), linked + 1, "none but that");
    }
    // A map below a linked table succeeds.
    assert_eq!(map(&mut rig, WINDOW + STRETCH + PAGE), Status::Ok);
    assert!(
        rig.reach(NIC, WINDOW + STRETCH + PAGE, Access::Read)
            .is_ok()
    );
    rig.keeps_tables.set(false);
    assert_eq!(map(&mut rig, WINDOW + PAGE), Status::Ok);
    assert!(rig.reach(NIC, WINDOW + PAGE, Access::Read).is_ok());
    assert_eq!(rig.tables.0.outstanding(), linked + 1);
    assert_eq!(rig.tables.0.wrong_frees(), 0);
}

/// The table pages of a failed unmap stay linked, so restoring the entry needs no frame.
#[test]
fn a_failed_unmap_needs_no_frame_to_be_put_back() {
    let mut rig = wide();
    rig.backend.tables().set_kept_tables(0);
    assert_eq!(map(&mut rig, WINDOW), Status::Ok);
    rig.tables.0.fail_after(0);
    rig.fails.set(true);
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Failed);
    assert!(rig.reach(NIC, WINDOW, Access::Read).is_ok());
    rig.fails.set(false);
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
    assert_eq!(map(&mut rig, WINDOW), Status::NoRoom, "they have gone");
}

/// Swapping the handles of two backends does not swap their tables: an UNMAP affects the device of
/// its own guest.
#[test]
fn tables_of_two_backends_stay_where_they_are() {
    let (mut a, mut b) = (Rig::new(), Rig::new());
    for rig in [&mut a, &mut b] {
        let mapped = rig.map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]);
        assert_eq!(mapped, Status::Ok);
    }
    let (mut of_a, mut of_b) = (a.backend.tables(), b.backend.tables());
    std::mem::swap(&mut of_a, &mut of_b);
    // These now refer to `b` and `a`.
    of_a.set_kept_tables(0);
    assert_eq!(of_a.table_bytes(), of_b.table_bytes());
    assert_eq!(a.unmap(NIC, &[WINDOW]), Status::Ok);
    assert!(a.reach(NIC, WINDOW, Access::Read).is_err());
    assert!(b.reach(NIC, WINDOW, Access::Read).is_ok());
    assert_eq!(b.unmap(NIC, &[WINDOW]), Status::Ok);
    let (a, b) = (
        a.backend.tables().table_bytes(),
        b.backend.tables().table_bytes(),
    );
    assert!(b < a, "only `b` keeps no empty tables");
}
