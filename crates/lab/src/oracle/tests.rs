use super::*;
use ringfence_types::{PhysAddr, PhysRange};

fn pa(at: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(at), bytes).unwrap()
}

fn iova(at: u64, bytes: u64) -> IovaRange {
    IovaRange::new(Iova::new(at), bytes).unwrap()
}

const RX: Direction = Direction::FromDevice;
const TX: Direction = Direction::ToDevice;
use Access::{Read, Write};

#[test]
fn verdicts_on_a_page_granular_space() {
    let mut oracle = Oracle::new(Ownership::Page);
    // Device 0 has 0x100 bytes at 0x5100 and a list of two segments at 0x8f00; device 1 has a page
    // at 0x7000.
    oracle.grant(0, iova(0x5100, 0x100), &[pa(0x20100, 0x100)], RX);
    oracle.grant(
        0,
        iova(0x8f00, 0x200),
        &[pa(0x30f00, 0x100), pa(0x40000, 0x100)],
        TX,
    );
    oracle.grant(1, iova(0x7000, 0x1000), &[pa(0x50000, 0x1000)], RX);
    let cases = [
        (0, 0x5100, 1, Write, 0x20100, Verdict::Granted),
        (0, 0x51ff, 1, Write, 0x201ff, Verdict::Granted),
        (0, 0x5100, 1, Read, 0x20100, Verdict::Direction),
        (0, 0x50ff, 1, Write, 0x200ff, Verdict::Colocated),
        (0, 0x5200, 1, Write, 0x20200, Verdict::Colocated),
        // A live grant owns the page, but the access reaches other memory.
        (0, 0x5100, 1, Write, 0x90100, Verdict::Stale),
        (0, 0x5200, 1, Write, 0x90200, Verdict::Stale),
        // The access crosses the end of the buffer.
        (0, 0x51ff, 2, Write, 0x201ff, Verdict::Colocated),
        (0, 0x8fff, 1, Read, 0x30fff, Verdict::Granted),
        (0, 0x9000, 1, Read, 0x40000, Verdict::Granted),
        (0, 0x9100, 1, Read, 0x40100, Verdict::Colocated),
        (0, 0x9000, 1, Write, 0x40000, Verdict::Direction),
        (0, 0x6000, 1, Read, 0x20000, Verdict::Never),
        (0, 0x7000, 1, Write, 0x50000, Verdict::Foreign),
        (2, 0x7000, 1, Write, 0x50000, Verdict::Foreign),
        (2, 0xa000, 1, Write, 0x50000, Verdict::Never),
    ];
    for (device, at, bytes, access, reached, expected) in cases {
        let got = oracle.allowed(device, Iova::new(at), bytes, access, PhysAddr::new(reached));
        assert_eq!(got, expected, "device {device} {access} {bytes} at {at:#x}");
    }
    assert_eq!(oracle.tally.violations(), 8);
    assert_eq!(oracle.tally.colocated, 4);
    let against = (oracle.tally.direction, oracle.tally.direction_reads);
    assert_eq!(against, (2, 1));
}

#[test]
fn released_mapping_is_stale_until_its_page_is_reused() {
    let mut oracle = Oracle::new(Ownership::Page);
    let old = oracle.grant(0, iova(0x5000, 0x100), &[pa(0x20000, 0x100)], RX);
    oracle.withhold(old);
    let touch = |oracle: &mut Oracle, reached| {
        oracle.allowed(0, Iova::new(0x5000), 1, Write, PhysAddr::new(reached))
    };
    // The layer still withholds the buffer, so the access does no harm, and a fault is not false.
    assert_eq!(touch(&mut oracle, 0x20000), Verdict::Granted);
    assert_eq!(
        oracle.faulted(0, Iova::new(0x5000), 1, Write),
        Verdict::Stopped
    );
    oracle.release(old);
    assert_eq!(touch(&mut oracle, 0x20000), Verdict::Stale);
    oracle.grant(0, iova(0x5000, 0x100), &[pa(0x60000, 0x100)], RX);
    assert_eq!(touch(&mut oracle, 0x60000), Verdict::Granted);
    assert_eq!(touch(&mut oracle, 0x20000), Verdict::Stale);
}

#[test]
fn faults_inside_a_live_grant_are_false() {
    let mut oracle = Oracle::new(Ownership::Page);
    oracle.grant(0, iova(0x5100, 0x100), &[pa(0x20100, 0x100)], RX);
    let cases = [
        (0x5100, Write, Verdict::FalseFault),
        (0x5100, Read, Verdict::Stopped),
        (0x5000, Write, Verdict::Stopped),
        (0x6000, Write, Verdict::Stopped),
    ];
    for (at, access, expected) in cases {
        assert_eq!(
            oracle.faulted(0, Iova::new(at), 1, access),
            expected,
            "{at:#x}"
        );
    }
    assert_eq!(oracle.tally.false_faults, 1);
}

#[test]
fn identity_spaces_judge_by_the_byte() {
    let mut oracle = Oracle::new(Ownership::Byte);
    let a = oracle.grant(0, iova(0x5000, 0x800), &[pa(0x5000, 0x800)], RX);
    let b = oracle.grant(0, iova(0x5800, 0x700), &[pa(0x5800, 0x700)], RX);
    let touch =
        |oracle: &mut Oracle, at| oracle.allowed(0, Iova::new(at), 1, Write, PhysAddr::new(at));
    assert_eq!(touch(&mut oracle, 0x5000), Verdict::Granted);
    assert_eq!(touch(&mut oracle, 0x5f00), Verdict::Colocated);
    oracle.release(a);
    assert_eq!(
        touch(&mut oracle, 0x5000),
        Verdict::Stale,
        "b does not excuse a"
    );
    assert_eq!(touch(&mut oracle, 0x5800), Verdict::Granted);
    oracle.grant(0, iova(0x5000, 0x800), &[pa(0x5000, 0x800)], RX);
    assert_eq!(touch(&mut oracle, 0x5000), Verdict::Granted);
    oracle.release(b);
    assert_eq!(touch(&mut oracle, 0x5800), Verdict::Stale);
    assert_eq!(touch(&mut oracle, 0x9000), Verdict::Never);
}

#[test]
fn dropped_grants_free_their_memory() {
    for ownership in [Ownership::Page, Ownership::Byte] {
        let mut oracle = Oracle::new(ownership);
        for round in 0..10_000_u64 {
            let at = 0x5000 + (round % 4) * 0x1000;
            let id = oracle.grant(0, iova(at, 0x1000), &[pa(at, 0x1000)], RX);
            oracle.release(id);
        }
        assert!(
            oracle.grants.len() <= 8,
            "{ownership:?}: {}",
            oracle.grants.len()
        );
    }
}

#[test]
fn windows_close_only_when_covered() {
    use ringfence_types::{CachedLevels, DomainId, Invalidation, Nanos, Pfn, PfnRange};
    let domain = DomainId::new(1);
    let range = |lo, pages| PfnRange::new(Pfn::new(lo), pages).unwrap();
    let mut windows = Windows::default();
    windows.open(domain, range(5, 2), 0x1800, Nanos(100));
    let pages = |domain, range| Invalidation::Pages {
        domain,
        range,
        levels: CachedLevels::Leaves,
    };
    windows.close(&pages(domain, range(5, 1)), Nanos(200));
    windows.close(&pages(DomainId::new(2), range(5, 2)), Nanos(300));
    assert_eq!(windows.longest_ns, 0);
    windows.close(&pages(domain, range(4, 4)), Nanos(400));
    assert_eq!((windows.longest_ns, windows.byte_ns), (300, 300 * 0x1800));
    let bytes = windows.timeline.until(Nanos(900));
    let area = bytes.mean_bytes.iter().sum::<f64>() * bytes.bin_ns as f64;
    assert_eq!(area, (300 * 0x1800) as f64);
    windows.finish(Nanos(900));
    assert_eq!((windows.longest_ns, windows.byte_ns), (300, 300 * 0x1800));
}

#[test]
fn open_windows_last_until_the_end_in_constant_memory() {
    use ringfence_types::{DomainId, Invalidation, Nanos, Pfn, PfnRange};
    let mut listed = Windows::default();
    let mut added_up = Windows::default();
    for window in 0..50 {
        let (bytes, since) = (100 + window, Nanos(1000 + 7 * window));
        let range = PfnRange::new(Pfn::new(window), 1).unwrap();
        listed.open(DomainId::new(1), range, bytes, since);
        added_up.open_for_good(bytes, since);
    }
    added_up.close(&Invalidation::Global, Nanos(5000));
    assert_eq!(added_up.longest_ns, 0);
    let sums = |windows: &mut Windows| {
        windows.finish(Nanos(9000));
        (windows.longest_ns, windows.byte_ns, windows.count)
    };
    assert_eq!(sums(&mut added_up), sums(&mut listed));
    assert_eq!(added_up.longest_ns, 8000);
    // A second `finish` adds nothing.
    let before = added_up.byte_ns;
    added_up.finish(Nanos(99_000));
    assert_eq!(added_up.byte_ns, before);
}

/// A page has at most the given number of live owners, from the first one on.
#[test]
fn live_owners_of_a_page_are_bounded() {
    for ownership in [Ownership::Byte, Ownership::Shared] {
        for most in 0..4 {
            let mut oracle = Oracle::new(ownership);
            oracle.set_max_sharers(most);
            for count in 1..=4 {
                let at = 0x5000 + 64 * count as u64;
                oracle.grant(0, iova(at, 8), &[pa(at, 8)], RX);
                let found = (
                    oracle.owners[0].owners_of(5).count(),
                    oracle.crowded().is_some(),
                );
                let expected = (count.min(most), count > most);
                assert_eq!(found, expected, "{ownership:?}: {count} of at most {most}");
            }
        }
    }
}

/// Two buffers share one page. The bytes of a released buffer are colocated while the other buffer
/// lives, and stale after that.
#[test]
fn live_owners_share_a_page() {
    let mut oracle = Oracle::new(Ownership::Shared);
    let first = oracle.grant_per_segment(0, &[iova(0x5000, 0x100)], &[pa(0x20000, 0x100)], RX);
    let second = oracle.grant_per_segment(0, &[iova(0x5800, 0x100)], &[pa(0x20800, 0x100)], RX);
    let at = |oracle: &mut Oracle, at: u64| {
        let reached = PhysAddr::new(0x20000 + at - 0x5000);
        oracle.allowed(0, Iova::new(at), 1, Write, reached)
    };
    for granted in [0x5000, 0x5800] {
        assert_eq!(at(&mut oracle, granted), Verdict::Granted);
    }
    oracle.release(first);
    assert!(oracle.is_live(0, &iova(0x5000, 0x100)));
    assert_eq!(at(&mut oracle, 0x5000), Verdict::Colocated);
    assert_eq!(at(&mut oracle, 0x5800), Verdict::Granted);
    oracle.release(second);
    assert!(!oracle.is_live(0, &iova(0x5000, 0x100)));
    for stale in [0x5000, 0x5800, 0x5400] {
        assert_eq!(at(&mut oracle, stale), Verdict::Stale);
    }
    // A new grant uses the page again.
    oracle.grant_per_segment(0, &[iova(0x5000, 0x100)], &[pa(0x20000, 0x100)], RX);
    assert_eq!(at(&mut oracle, 0x5000), Verdict::Granted);
    assert_eq!(at(&mut oracle, 0x5800), Verdict::Colocated);
    assert_eq!(oracle.grants.len(), 1, "the dead are forgotten");
}

/// Lists of segments in any order, also with overlaps, are judged as a search of all segments
/// would.
#[test]
fn the_segment_of_an_access_is_found_in_any_list() {
    let lists: [&[(u64, u64)]; 6] = [
        &[(0x1000, 0x100), (0x3000, 0x1000), (0x9f00, 0x80)],
        &[(0x9f00, 0x80), (0x1000, 0x100), (0x3000, 0x1000)],
        &[
            (0x1000, 0x8000),
            (0x2000, 0x10),
            (0x3000, 0x10),
            (0x8f00, 0x200),
        ],
        &[
            (0x3000, 0x10),
            (0x3000, 0x20),
            (0x3000, 0x8),
            (0x2ff0, 0x18),
        ],
        &[
            (0x5000, 0x800),
            (0x5800, 0x800),
            (0x4000, 0x1000),
            (0x5100, 0x10),
        ],
        &[(0x1800, 0x10), (0x1000, 0x10), (0x1400, 0x10)],
    ];
    for list in lists {
        let pieces: Vec<_> = list.iter().map(|(at, bytes)| pa(*at, *bytes)).collect();
        let mut oracle = Oracle::new(Ownership::Byte);
        let id = oracle.grant(0, iova(list[0].0, list[0].1), &pieces, TX);
        let grant = oracle.get(id).unwrap().clone();
        for at in (0xf00_u64..0xa100).step_by(4) {
            for bytes in [1, 4, 0x18, 0x100] {
                let within = list
                    .iter()
                    .any(|(from, size)| *from <= at && at + bytes <= from + size);
                let found = grant.translate(Iova::new(at), bytes);
                assert_eq!(
                    found,
                    within.then_some(PhysAddr::new(at)),
                    "{list:x?} {at:x}"
                );
                let shares = list
                    .iter()
                    .any(|(from, size)| *from < at + bytes && at < from + size);
                assert_eq!(grant.overlaps(&pa(at, bytes)), shares, "{list:x?} {at:x}");
            }
            let beside = list
                .iter()
                .any(|(from, size)| from & !4095 <= at && at <= (from + size - 1) | 4095);
            let inside = grant.translate(Iova::new(at), 1).is_some();
            let verdict = grant.judge(Iova::new(at), 1, Read, PhysAddr::new(at));
            let expected = match (inside, beside) {
                (true, _) => Verdict::Granted,
                (_, true) => Verdict::Colocated,
                _ => Verdict::Stale,
            };
            assert_eq!(verdict, expected, "{list:x?} {at:x}");
        }
    }
}

/// An access takes time logarithmic in the segments of the list: a search of each segment would
/// take minutes here.
#[test]
fn accesses_to_long_lists_are_fast() {
    const SEGMENTS: u64 = 1 << 16;
    let ascending: Vec<_> = (0..SEGMENTS).map(|n| pa(n << 13, 0x100)).collect();
    let mut shuffled = ascending.clone();
    shuffled.reverse();
    for pieces in [ascending, shuffled] {
        let mut oracle = Oracle::new(Ownership::Byte);
        let id = oracle.grant(0, iova(0, 0x100), &pieces, TX);
        let grant = oracle.get(id).unwrap();
        for n in 0..SEGMENTS {
            let (at, beside) = (n << 13, (n << 13) + 0x200);
            assert!(grant.translate(Iova::new(at), 0x100).is_some());
            let verdict = grant.judge(Iova::new(beside), 1, Read, PhysAddr::new(beside));
            assert_eq!(verdict, Verdict::Colocated);
            assert!(!grant.overlaps(&pa(beside, 0x1000)));
        }
    }
}

#[test]
fn a_pool_belongs_to_its_own_device() {
    let mut oracle = Oracle::new(Ownership::Page);
    oracle.set_pool(0, pa(0x80_0000, 0x2000));
    let id = oracle.grant(0, iova(0x5010, 0x20), &[pa(0x80_0010, 0x20)], TX);
    let mut judge = |device, iova, access, reached| {
        oracle.allowed(device, Iova::new(iova), 8, access, PhysAddr::new(reached))
    };
    assert_eq!(judge(0, 0x5010, Read, 0x80_0010), Verdict::Granted);
    // Beside the copy, on another page of the pool, at an address that never had a mapping.
    assert_eq!(judge(0, 0x5008, Read, 0x80_0008), Verdict::Shadow);
    assert_eq!(judge(0, 0x6000, Read, 0x80_1000), Verdict::Shadow);
    // Against the direction, beyond the pool, and of another device.
    assert_eq!(judge(0, 0x5010, Write, 0x80_0010), Verdict::Direction);
    assert_eq!(judge(0, 0x7000, Read, 0x80_2000), Verdict::Never);
    assert_eq!(judge(0, 0x6ffc, Read, 0x80_1ffc), Verdict::Never);
    assert_eq!(judge(1, 0x5010, Read, 0x80_0010), Verdict::Foreign);
    assert_eq!(judge(1, 0x6000, Read, 0x80_1000), Verdict::Never);
    oracle.release(id);
    let stale = oracle.allowed(0, Iova::new(0x5010), 8, Read, PhysAddr::new(0x80_0010));
    assert_eq!(stale, Verdict::Shadow);
    assert_eq!(oracle.tally.shadow, 3);
    assert_eq!(oracle.tally.violations(), 5);
}

#[test]
fn a_released_buffer_in_a_lent_pool_is_mutable_but_no_violation() {
    for lends in [false, true] {
        let mut oracle = Oracle::new(Ownership::Page);
        oracle.set_lends(lends);
        oracle.set_pool(0, pa(0x80_0000, 0x3000));
        let id = oracle.grant(0, iova(0x5000, 0x800), &[pa(0x80_0000, 0x800)], RX);
        let judge = |oracle: &mut Oracle, device, iova, access, reached| {
            oracle.allowed(device, Iova::new(iova), 8, access, PhysAddr::new(reached))
        };
        assert_eq!(
            judge(&mut oracle, 0, 0x5000, Write, 0x80_0000),
            Verdict::Granted
        );
        // Beside the live buffer, and where no buffer was.
        assert_eq!(
            judge(&mut oracle, 0, 0x5800, Write, 0x80_0800),
            Verdict::Shadow
        );
        assert_eq!(
            judge(&mut oracle, 0, 0x6000, Write, 0x80_1000),
            Verdict::Shadow
        );
        oracle.release(id);
        let released = if lends {
            Verdict::Mutable
        } else {
            Verdict::Shadow
        };
        assert_eq!(judge(&mut oracle, 0, 0x5000, Write, 0x80_0000), released);
        assert_eq!(
            judge(&mut oracle, 0, 0x5000, Read, 0x80_0000),
            Verdict::Shadow
        );
        assert_eq!(oracle.tally.mutable, u64::from(lends));
        assert_eq!(oracle.tally.violations(), 0);
        // Outside the pool, and in another device's.
        assert_eq!(
            judge(&mut oracle, 0, 0x5000, Write, 0x90_0000),
            Verdict::Stale
        );
        assert_eq!(
            judge(&mut oracle, 1, 0x6000, Write, 0x80_0000),
            Verdict::Never
        );
        assert_eq!(oracle.tally.violations(), 2);
    }
}

/// A pool keeps a page until somebody else maps it, also if the old mapping stays.
#[test]
fn a_recycled_page_belongs_to_its_pool_until_somebody_else_maps_it() {
    for recycles in [false, true] {
        let mut oracle = Oracle::new(Ownership::Shared);
        if recycles {
            oracle.set_recycles();
        }
        let mutable = match recycles {
            true => Verdict::Mutable,
            false => Verdict::Stale,
        };
        let judge = |oracle: &mut Oracle, iova, access| {
            oracle.allowed(0, Iova::new(iova), 8, access, PhysAddr::new(0x80_0000))
        };
        let id = oracle.grant(0, iova(0x5000, 0x800), &[pa(0x80_0000, 0x800)], RX);
        assert_eq!(judge(&mut oracle, 0x5000, Write), Verdict::Granted);
        oracle.release(id);
        // The mapping was not kept: the access reached what the layer should have unmapped.
        assert_eq!(judge(&mut oracle, 0x5000, Write), Verdict::Stale);
        oracle.keep(0, id);
        assert_eq!(judge(&mut oracle, 0x5000, Write), mutable);
        // The pool's pages allow no reads.
        assert_eq!(judge(&mut oracle, 0x5000, Read), Verdict::Stale);
        // The next buffer on the page is of the same pool.
        let next = oracle.grant(0, iova(0x7000, 0x800), &[pa(0x80_0000, 0x800)], RX);
        assert_eq!(judge(&mut oracle, 0x5000, Write), mutable);
        oracle.release(next);
        oracle.keep(0, next);
        // The same device in another direction, and another device, are somebody else.
        for (device, direction) in [(0, TX), (1, RX)] {
            let range = iova(0x9000 + device as u64 * 0x1000, 0x800);
            let other = oracle.grant(device, range, &[pa(0x80_0000, 0x800)], direction);
            assert_eq!(judge(&mut oracle, 0x5000, Write), Verdict::Stale);
            oracle.release(other);
            oracle.keep(device, other);
            assert_eq!(judge(&mut oracle, 0x5000, Write), Verdict::Stale);
            let own = oracle.grant(0, iova(0x5000, 0x800), &[pa(0x80_0000, 0x800)], RX);
            oracle.release(own);
            oracle.keep(0, own);
            assert_eq!(judge(&mut oracle, 0x5000, Write), mutable);
        }
        let counts = oracle.tally;
        let (stale, mutable) = if recycles { (6, 4) } else { (10, 0) };
        assert_eq!(
            (counts.stale, counts.mutable, counts.violations()),
            (stale, mutable, stale)
        );
    }
}
