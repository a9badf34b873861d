//! One function per attack class; it returns the number of accesses that wrongly succeeded.

use ringfence_types::{Access, Direction, Iova};

use crate::bench::*;

/// Expected outcome of an attack on a mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// No access succeeds.
    Resists,
    /// Some accesses succeed.
    Vulnerable,
}

use Expected::{Resists as R, Vulnerable as V};

/// Representative modes of each kind.
const NONE: &[&str] = &["none", "hwpt", "swpt", "kvm-baseline"];
const STRICT: &[&str] = &[
    "strict",
    "strict+",
    "strict-bitmap",
    "freebsd-paper",
    "freebsd",
    "freebsd-14",
    "linux-strict",
    "linux-maple",
    "fence",
    "fence-burst",
    "emulated-strict",
    "virtio-strict",
    "pviommu",
    "shared",
    "calgary",
    "xen",
    "xen-multicall",
    "xen-grant",
];
const DEFERRED: &[&str] = &[
    "defer",
    "defer+",
    "linux-lazy",
    "bitmap",
    "emulated-lazy",
    "virtio-lazy",
    "pviommu+rtc",
    "pviommu+rtc+hopt",
    "pviommu+rtc-adaptive",
    "optimistic",
    "map-cache",
    "never-free",
    "pviommu+map-cache",
    "calgary-lazy",
    "xen-lazy",
];

type Attack = fn(&mut dyn Bench) -> usize;

/// Class, attack, and expected outcome for: no protection, strict, deferred.
const CLASSES: &[(&str, Attack, Expected, Expected, Expected)] = &[
    ("A01 never mapped", never_mapped, V, R, R),
    ("A02 stale, warm", stale_warm, V, R, V),
    ("A03 stale, cold", stale_cold, V, R, R),
    ("A04 recycled address", recycled_address, R, R, R),
    ("A05 recycled page", recycled_page, V, R, V),
    ("A06 wrong direction", wrong_direction, V, R, R),
    ("A07 read beside the buffer", beside_read, V, V, V),
    ("A08 overwrite beside the buffer", beside_write, V, V, V),
    ("A09 page-mate still mapped", page_mate, V, V, V),
    ("A10 alias still mapped", alias, V, V, V),
    ("A11 another device's address", foreign, V, R, R),
    ("A19 over the end of the page", straddle, V, R, R),
    ("A20 freed table page", freed_table, V, R, R),
    ("A35 released in a batch", batch, V, R, V),
];

/// Modes that differ from others of their kind. In `virtio-lazy`, the guest has not yet sent the
/// unmap to the host, so the table still translates the address. The guest sends it before the next
/// map, so no old address leads to a new buffer.
const ODD: &[(&str, &str, Expected)] = &[
    // The shadow translates the address until the flush.
    ("A03 stale, cold", "emulated-lazy", V),
    ("A03 stale, cold", "virtio-lazy", V),
    ("A05 recycled page", "virtio-lazy", R),
    // Mappings kept by a cache stay in the table.
    ("A03 stale, cold", "optimistic", V),
    ("A03 stale, cold", "map-cache", V),
    ("A03 stale, cold", "never-free", V),
    ("A03 stale, cold", "pviommu+map-cache", V),
    ("A03 stale, cold", "pviommu+rtc", V),
    ("A03 stale, cold", "pviommu+rtc+hopt", V),
    ("A03 stale, cold", "pviommu+rtc-adaptive", V),
];

#[test]
fn every_class_has_the_expected_outcome() {
    for &(class, attack, none, strict, deferred) in CLASSES {
        for (modes, expected) in [(NONE, none), (STRICT, strict), (DEFERRED, deferred)] {
            for name in modes {
                let mut bench = named(name);
                bench.attackers(false);
                let odd = ODD.iter().find(|odd| (odd.0, odd.1) == (class, *name));
                let expected = odd.map_or(expected, |odd| odd.2);
                let through = attack(&mut *bench);
                let found = if through > 0 { V } else { R };
                assert_eq!(found, expected, "{class} on {name}: {through} came through");
                assert_eq!(bench.tally().false_faults, 0, "{class} on {name}");
            }
        }
    }
}

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
        "pviommu+map-cache",
    ] {
        assert_eq!(direction_and_range(&mut *quiet(name)), (0, 0), "{name}");
        assert_eq!(two_users(&mut *quiet(name)), 0, "{name}");
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

const READ: Access = Access::Read;
const WRITE: Access = Access::Write;
const TO: Direction = Direction::ToDevice;
const FROM: Direction = Direction::FromDevice;

fn never_mapped(bench: &mut dyn Bench) -> usize {
    let handle = bench.map(0, 0, &[memory(0x10_0000, 4096)], TO);
    let range = bench.range(handle);
    let mut tries: Vec<u64> = vec![0, 1, 0x12_3456, 0xffff_f000, 1 << 33, (1 << 36) - 1];
    tries.push(range.start().get().wrapping_sub(4096));
    tries.push(range.last().get().wrapping_add(4096));
    let mut through = 0;
    for iova in tries {
        for access in [READ, WRITE] {
            through += usize::from(violates(bench, 0, Iova::new(iova), 1, access));
        }
    }
    through
}

/// The unmap includes the device's own last use, so the entry is warm.
fn stale_warm(bench: &mut dyn Bench) -> usize {
    let mut through = 0;
    for access in [READ, WRITE] {
        let direction = if access == READ { TO } else { FROM };
        let handle = bench.map(0, 0, &[memory(0x10_0010, 5000)], direction);
        let range = bench.range(handle);
        bench.unmap(handle, 0);
        bench.end_burst(0, 0, direction);
        for iova in [range.start(), range.last()] {
            through += usize::from(violates(bench, 0, iova, 1, access));
        }
    }
    through
}

fn stale_cold(bench: &mut dyn Bench) -> usize {
    let handle = bench.map(0, 0, &[memory(0x10_0010, 5000)], TO);
    let range = bench.range(handle);
    bench.unmap(handle, 0);
    bench.end_burst(0, 0, TO);
    bench.invalidate_all();
    usize::from(violates(bench, 0, range.start(), 1, READ))
}

/// A new mapping at an old address must translate to the new page. Without translation, the address
/// is that of the page.
fn recycled_address(bench: &mut dyn Bench) -> usize {
    let mut through = 0;
    for round in 0..400_u64 {
        let handle = bench.map(0, 0, &[memory(0x10_0000 + round * 4096, 64)], TO);
        let range = bench.range(handle);
        // Warm the entry, and check that it is the new one.
        let reached = bench.access(device(0), range.start(), 64, READ);
        let expected = 0x10_0000 + round * 4096;
        let new = reached.is_ok_and(|r| r[0].start().get() == expected);
        through += usize::from(!new);
        bench.unmap(handle, 0);
        bench.end_burst(0, 0, TO);
    }
    through
}

/// The page of a released buffer now holds data of another device.
fn recycled_page(bench: &mut dyn Bench) -> usize {
    let page = memory(0x10_0000, 4096);
    let old = bench.map(0, 0, &[page], Direction::Bidirectional);
    let range = bench.range(old);
    bench.unmap(old, 0);
    bench.end_burst(0, 0, Direction::Bidirectional);
    let _secret = bench.map(1, 1, &[page], Direction::Bidirectional);
    [READ, WRITE]
        .into_iter()
        .filter(|access| violates(bench, 0, range.start(), 8, *access))
        .count()
}

fn wrong_direction(bench: &mut dyn Bench) -> usize {
    let (to, from) = (memory(0x10_0000, 64), memory(0x20_0000, 64));
    let (to, from) = (bench.map(0, 0, &[to], TO), bench.map(0, 0, &[from], FROM));
    // Make the permitted access first, so that the entry is cached with its permissions.
    let (to, from) = (bench.range(to).start(), bench.range(from).start());
    assert!(!violates(bench, 0, to, 64, READ) && !violates(bench, 0, from, 64, WRITE));
    usize::from(violates(bench, 0, to, 64, WRITE)) + usize::from(violates(bench, 0, from, 64, READ))
}

fn beside(bench: &mut dyn Bench, access: Access, direction: Direction) -> usize {
    let handle = bench.map(0, 0, &[memory(0x10_0800, 64)], direction);
    let range = bench.range(handle);
    let (before, behind) = (range.start().get() - 1, range.last().get() + 1);
    [before, behind]
        .into_iter()
        .filter(|iova| leaks(bench, 0, Iova::new(*iova), access))
        .count()
}

fn beside_read(bench: &mut dyn Bench) -> usize {
    beside(bench, READ, TO)
}

fn beside_write(bench: &mut dyn Bench) -> usize {
    beside(bench, WRITE, FROM)
}

fn page_mate(bench: &mut dyn Bench) -> usize {
    let (a, b) = (memory(0x10_0000, 64), memory(0x10_0800, 64));
    let (a, b) = (bench.map(0, 0, &[a], TO), bench.map(0, 0, &[b], TO));
    bench.unmap(a, 0);
    bench.end_burst(0, 0, TO);
    // The bytes of the first buffer, through the page of the second.
    let iova = Iova::new(bench.range(b).start().get() - 0x800);
    usize::from(leaks(bench, 0, iova, READ))
}

/// The driver maps one page twice, which no mode can detect. The second mapping still grants the
/// access, so it is not a violation.
fn alias(bench: &mut dyn Bench) -> usize {
    let page = memory(0x10_0000, 64);
    let (a, b) = (bench.map(0, 0, &[page], TO), bench.map(0, 0, &[page], TO));
    bench.unmap(a, 0);
    bench.end_burst(0, 0, TO);
    let iova = bench.range(b).start();
    usize::from(bench.access(device(0), iova, 64, READ).is_ok())
}

fn foreign(bench: &mut dyn Bench) -> usize {
    let handle = bench.map(0, 0, &[memory(0x10_0000, 64)], Direction::Bidirectional);
    let iova = bench.range(handle).start();
    // Warm the entry, so that a lookup without a domain tag would find it.
    assert!(!violates(bench, 0, iova, 64, WRITE));
    [READ, WRITE]
        .into_iter()
        .filter(|access| violates(bench, 1, iova, 8, *access))
        .count()
}

/// The start is inside the mapping, but the length is not: a check of the start alone would permit
/// it.
fn straddle(bench: &mut dyn Bench) -> usize {
    let handle = bench.map(0, 0, &[memory(0x10_0f00, 0x80)], Direction::Bidirectional);
    let range = bench.range(handle);
    assert!(!violates(bench, 0, range.start(), 0x80, WRITE));
    let mut through = 0;
    for bytes in [0x101, 0x1000, 0x2000, 1 << 20] {
        for access in [READ, WRITE] {
            through += usize::from(violates(bench, 0, range.start(), bytes, access));
        }
    }
    through
}

/// A table page freed by an unmap is reused for data that look like entries.
fn freed_table(bench: &mut dyn Bench) -> usize {
    let secret = 0x7777_7000_u64;
    let both = Direction::Bidirectional;
    let handle = bench.map(0, 0, &[memory(0x10_0000, 4096)], both);
    let iova = bench.range(handle).start();
    bench.unmap(handle, 0);
    bench.end_burst(0, 0, both);
    let Some(data) = bench.map_coherent(1, 1, 8) else {
        return 0;
    };
    for page in bench.lies_at(data) {
        for word in 0..512 {
            bench.poke(page.start().wrapping_add(word * 8), secret | 3);
        }
    }
    // Pages of the same table that are not in an IOTLB: only a walk cache can translate them. The
    // page itself may be in the IOTLB, which is A02.
    let base = iova.get() & !0x1f_ffff;
    (0..512)
        .filter(|page| base + page * 4096 != iova.get())
        .filter(|page| {
            let iova = Iova::new(base + page * 4096);
            let through = bench.access(device(0), iova, 8, READ);
            let foreign = bench.verdict().is_violation();
            through.is_ok_and(|r| r[0].start().get() == secret || foreign)
        })
        .count()
}

/// The driver must not get a buffer of a batch back while the device can reach it.
fn batch(bench: &mut dyn Bench) -> usize {
    let buffers: Vec<_> = (0..64)
        .map(|page| (memory(0x10_0000 + page * 4096, 4096), TO))
        .collect();
    let handles = bench.map_multi(0, 0, &buffers);
    bench.unmap_multi(&handles, 0);
    let mut through = 0;
    for handle in handles {
        if bench.is_back(handle) {
            let iova = bench.range(handle).start();
            through += usize::from(violates(bench, 0, iova, 8, READ));
        }
    }
    through
}
