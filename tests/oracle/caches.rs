//! Caches of mappings: keys that must not be confused (A28, A29), and the time that a released
//! mapping stays reachable.

use ringfence_types::{Access, Direction, Iova};

use crate::bench::*;

const READ: Access = Access::Read;
const WRITE: Access = Access::Write;
const TO: Direction = Direction::ToDevice;
const FROM: Direction = Direction::FromDevice;

/// A28: the device has written a page that is then mapped for reading, and a page is then mapped as
/// the first of four. Returns the number of accesses that succeed against the new mapping's
/// direction, and the number of permitted accesses that are stopped.
fn direction_and_range(bench: &mut dyn Bench) -> (u64, u64) {
    let page = memory(0x10_0000, 4096);
    let written = bench.map(0, 0, &[page], FROM);
    bench.unmap(written, 0);
    let read = bench.map(0, 0, &[page], TO);
    let iova = bench.range(read).start();
    let _ = bench.access(device(0), iova, 64, WRITE);
    let _ = bench.access(device(0), iova, 64, READ);
    let alone = bench.map(0, 0, &[memory(0x20_0000, 4096)], TO);
    bench.unmap(alone, 0);
    let four = bench.map(0, 0, &[memory(0x20_0000, 4 * 4096)], TO);
    let first = bench.range(four).start();
    for page in 0..4 {
        let _ = bench.access(device(0), first.wrapping_add(page * 4096), 64, READ);
    }
    (bench.tally().direction, bench.tally().false_faults)
}

/// A29: one of two buffers in the same page is released, and cycles end. Returns the number of
/// stopped accesses to the other buffer.
fn two_users(bench: &mut dyn Bench) -> u64 {
    let first = bench.map(0, 0, &[memory(0x10_0000, 64)], FROM);
    let second = bench.map(0, 0, &[memory(0x10_0800, 64)], FROM);
    bench.unmap(first, 0);
    for _ in 0..5 {
        bench.tick(0, 10_000_000);
    }
    let iova = bench.range(second).start();
    let _ = bench.access(device(0), iova, 64, WRITE);
    bench.tally().false_faults
}

/// A page that one device has read is then mapped for another one. Returns the number of stopped
/// accesses of the second device.
fn another_device(bench: &mut dyn Bench) -> u64 {
    let page = [memory(0x10_0000, 4096)];
    let first = bench.map(0, 0, &page, TO);
    bench.unmap(first, 0);
    let second = bench.map(1, 0, &page, TO);
    let iova = bench.range(second).start();
    let _ = bench.access(device(1), iova, 64, READ);
    bench.tally().false_faults
}

/// The as-published cache is vulnerable to A28 and A29 (errata 16); the others are not.
#[test]
fn only_the_published_cache_confuses_keys() {
    let quiet = |name: &str| {
        let mut bench = named(name);
        bench.attackers(false);
        bench
    };
    let as_published = "rtc-paper";
    assert_eq!(direction_and_range(&mut *quiet(as_published)), (1, 1 + 3));
    assert_eq!(two_users(&mut *quiet(as_published)), 1);
    for name in [
        "pviommu",
        "pviommu+rtc",
        "pviommu+rtc+hopt",
        "pviommu+rtc-adaptive",
        "shared",
        "optimistic",
        "map-cache",
        "never-free",
        "persistent",
        "pviommu+map-cache",
    ] {
        assert_eq!(direction_and_range(&mut *quiet(name)), (0, 0), "{name}");
        assert_eq!(two_users(&mut *quiet(name)), 0, "{name}");
        assert_eq!(another_device(&mut *quiet(name)), 0, "{name}");
    }
}

/// A cached mapping is unreachable after its bound, and not before.
#[test]
fn cached_mappings_leave_within_their_bound() {
    // C whole cycles, of C + 1, and the rest of the bound.
    let (ten_ms, one_ms) = ((29_999_999, 10_000_001), (2_999_999, 1_000_001));
    for (name, (whole, rest), stays) in [
        ("pviommu+rtc", ten_ms, true),
        ("pviommu+rtc+hopt", ten_ms, true),
        ("pviommu+rtc-adaptive", ten_ms, false),
        ("optimistic", one_ms, true),
    ] {
        let mut bench = named(name);
        bench.attackers(false);
        let handle = bench.map(0, 0, &[memory(0x10_0000, 4096)], TO);
        let iova = bench.range(handle).start();
        bench.unmap(handle, 0);
        assert!(violates(&mut *bench, 0, iova, 8, READ), "{name}");
        bench.tick(0, whole);
        assert_eq!(violates(&mut *bench, 0, iova, 8, READ), stays, "{name}");
        bench.tick(0, rest);
        assert!(!violates(&mut *bench, 0, iova, 8, READ), "{name}");
        assert_eq!(bench.tally().false_faults, 0, "{name}");
    }
}

/// Caches without a residency: a released mapping is reachable for any time, until the layer
/// flushes, and its next use costs no invalidation. The shared mapping ends with its last user.
#[test]
fn only_caches_without_a_residency_expose_for_any_time() {
    for (name, exposes) in [
        ("map-cache", true),
        ("never-free", true),
        ("persistent", true),
        ("pviommu+map-cache", true),
        ("shared", false),
        ("optimistic", false),
    ] {
        let mut bench = named(name);
        bench.attackers(false);
        let handle = bench.map(0, 0, &[memory(0x10_0000, 64)], FROM);
        let mate = bench.map(0, 0, &[memory(0x10_0800, 64)], FROM);
        let iova = bench.range(handle).start();
        assert_eq!(
            bench.range(mate).start(),
            iova.wrapping_add(0x800),
            "{name}"
        );
        bench.unmap(handle, 0);
        assert!(leaks(&mut *bench, 0, iova, WRITE), "{name}: page mate");
        bench.unmap(mate, 0);
        for _ in 0..1000 {
            bench.tick(0, 3_600_000_000_000);
        }
        assert_eq!(violates(&mut *bench, 0, iova, 8, WRITE), exposes, "{name}");
        let invalidations = bench.counts().1;
        assert_eq!(invalidations == 0, exposes, "{name}");
        bench.flush();
        assert!(!violates(&mut *bench, 0, iova, 8, WRITE), "{name}");
        assert_eq!(bench.tally().false_faults, 0, "{name}");
    }
}

/// A cache of 16,384 pages (`map-cache`) unmaps some for the next one. Without frees (`never-free`,
/// remedy CG13) all of them stay reachable, with no invalidation.
#[test]
fn mappings_that_are_never_freed_outnumber_a_cache() {
    const PAGES: u64 = (1 << 14) + 1;
    for (name, stay) in [("never-free", true), ("map-cache", false)] {
        let mut bench = named(name);
        bench.attackers(false);
        let mut mapped = Vec::new();
        for page in 0..PAGES {
            let handle = bench.map(0, 0, &[memory(0x10_0000 + (page << 12), 64)], FROM);
            mapped.push(bench.range(handle).start());
            bench.unmap(handle, 0);
        }
        bench.tick(0, 1_000_000);
        assert_eq!(bench.counts().1 == 0, stay, "{name}");
        let reached = mapped
            .iter()
            .all(|iova| violates(&mut *bench, 0, *iova, 8, WRITE));
        assert_eq!(reached, stay, "{name}");
    }
}

/// Returns true if the access succeeded without a grant.
fn violates(bench: &mut dyn Bench, dev: usize, iova: Iova, bytes: u64, access: Access) -> bool {
    let through = bench.access(device(dev), iova, bytes, access).is_ok();
    through && bench.verdict().is_violation()
}

/// Returns true if the access reached a byte without a grant, even on a page with a granted buffer.
fn leaks(bench: &mut dyn Bench, dev: usize, iova: Iova, access: Access) -> bool {
    use ringfence_lab::oracle::Verdict;
    let through = bench.access(device(dev), iova, 1, access).is_ok();
    through && bench.verdict() != Verdict::Granted
}
