//! Tables of a ring IOMMU: bit patterns from rIOMMU Fig. 9, rejected values, store order, hostile
//! memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{
    MAX_RING_BUFFER, RingDevice, RingFormatError, RingPte, RingTable, RingWalkError, RingWords,
};
use ringfence_types::{Access, Permissions, PhysAddr, PhysRange, RingId, RingSlot};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;
const RW: Permissions = Permissions::READ_WRITE;

fn pa(raw: u64) -> PhysAddr {
    PhysAddr::new(raw)
}

fn slot(raw: u32) -> RingSlot {
    RingSlot::new(raw).expect("18 bits")
}

fn buffer(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(pa(start), bytes).expect("a range")
}

fn pte(start: u64, bytes: u64, permissions: Permissions) -> RingPte {
    RingPte::new(&buffer(start, bytes), permissions).expect("short enough")
}

fn words([first, second]: [u64; 2]) -> RingWords {
    [AtomicU64::new(first), AtomicU64::new(second)]
}

fn raw([first, second]: &RingWords) -> [u64; 2] {
    [
        first.load(Ordering::Relaxed),
        second.load(Ordering::Relaxed),
    ]
}

#[test]
fn entries() {
    // Fig. 9c: phys_addr in the first word. Second word: size in 0..=29, dir in 30..=31, valid in
    // 32.
    let cases = [
        (0x0, 1, R, [0x0, 0x1_4000_0001]),
        (
            0x1234_5678_9abc_def1,
            1500,
            W,
            [0x1234_5678_9abc_def1, 0x1_8000_05dc],
        ),
        (0xffff_ffff_ffff_ffff, 1, RW, [u64::MAX, 0x1_c000_0001]),
        (0x1000, (1 << 30) - 1, RW, [0x1000, 0x1_ffff_ffff]),
    ];
    for (start, bytes, permissions, expected) in cases {
        let made = pte(start, bytes, permissions);
        assert_eq!(made.words(), expected);
        let [first, second] = expected;
        for unused in [0, 1 << 33, 1 << 63, !0 << 33] {
            let read = RingPte::from_words([first, second | unused]);
            assert!(read.is_valid());
            assert_eq!((read.start(), read.bytes()), (pa(start), bytes));
            assert_eq!(read.permissions(), Some(permissions));
            for access in [Access::Read, Access::Write] {
                assert_eq!(read.allows(access), permissions.allows(access));
            }
            assert!(!RingPte::from_words([first, (second | unused) & !(1 << 32)]).is_valid());
        }
    }
    let none = RingPte::from_words([0x1000, 0x1_0000_0010]);
    assert_eq!(none.permissions(), None);
    assert!(!none.allows(Access::Read) && !none.allows(Access::Write));
    assert!(!RingPte::ABSENT.is_valid());
}

#[test]
fn rings_and_devices() {
    let ring = RingTable::new(pa(0x12_3450), 0x2_0001).expect("fits");
    assert_eq!(ring.encode(), [0x12_3450, 0x2_0001]);
    // Fig. 9b puts software fields above the size. The hardware reads only 18 bits.
    assert_eq!(RingTable::decode([0x12_3450, !0x1_fffe]), Ok(ring));
    assert_eq!(ring.entry(slot(0x2_0000)), Some(pa(0x12_3450 + 0x20_0000)));
    assert_eq!(ring.entry(slot(0x2_0001)), None);
    let device = RingDevice::new(pa(0x7fff_fff0), 0x102).expect("fits");
    assert_eq!(device.encode(), [0x7fff_fff0, 0x102]);
    assert_eq!(RingDevice::decode([0x7fff_fff0, 0xab_0102]), Ok(device));
    assert_eq!(device.ring(RingId::new(0x101)), Some(pa(0x8000_1000)));
    assert_eq!(device.ring(RingId::new(0x102)), None);
    let none = RingDevice::new(pa(0), 0).expect("a device without rings");
    assert_eq!(none.ring(RingId::new(0)), None);
}

#[test]
fn oversized_entries_are_rejected() {
    for slots in [0, 1 << 18, u32::MAX] {
        assert_eq!(
            RingTable::new(pa(0x1000), slots),
            Err(RingFormatError::Slots { slots })
        );
    }
    assert!(RingTable::new(pa(0x1000), (1 << 18) - 1).is_ok());
    for low in 1..16 {
        let at = pa(0x1000 + low);
        assert_eq!(
            RingTable::new(at, 1),
            Err(RingFormatError::Misaligned { at })
        );
        assert_eq!(
            RingDevice::new(at, 1),
            Err(RingFormatError::Misaligned { at })
        );
        assert!(RingTable::decode([at.get(), 1]).is_err());
        assert!(RingDevice::decode([at.get(), 1]).is_err());
    }
    let at = pa(0xffff_ffff_ffff_fff0);
    assert!(RingTable::new(at, 1).is_ok());
    assert_eq!(RingTable::new(at, 2), Err(RingFormatError::TooHigh { at }));
    assert_eq!(RingDevice::new(at, 2), Err(RingFormatError::TooHigh { at }));
    for bytes in [MAX_RING_BUFFER + 1, 1 << 32, u64::MAX] {
        assert_eq!(
            RingPte::new(&buffer(0, bytes), R),
            Err(RingFormatError::BufferTooLong { bytes })
        );
    }
}

#[test]
fn filling_and_clearing() {
    let (old, new) = (pte(0xa000, 64, RW), pte(0xc001, 100, R));
    let at = words([0, 0]);
    old.store(&at);
    assert_eq!(
        (raw(&at), RingPte::load(&at), RingPte::is_set(&at)),
        (old.words(), old, true)
    );
    // The entry does not match other lengths, including those with bits above `size`.
    for (bytes, is) in [
        (64, true),
        (65, false),
        (64 | 1 << 30, false),
        (64 | 3 << 30, false),
        (64 | 1 << 32, false),
        (0, false),
    ] {
        assert_eq!(RingPte::is_set_to(&at, bytes), is, "{bytes:#x}");
    }
    RingPte::clear(&at);
    assert_eq!(
        (RingPte::load(&at).is_valid(), RingPte::is_set(&at)),
        (false, false)
    );
    assert!(!RingPte::is_set_to(&at, 64) && !RingPte::is_set_to(&at, 0));
    new.store(&at);
    assert_eq!(RingPte::load(&at), new);
}

#[test]
fn a_reader_never_sees_a_mixture() {
    // Entries with the same second word are the hard case: only the clear of `valid` in between
    // shows that the first word has changed.
    let tagged = |tag: u64| pte(tag << 20, 64 + tag % 3, RW);
    // The two words lie on different cache lines, unlike any entry in real memory. On one line, the
    // CPU would publish both stores at once and the test could not observe their order.
    #[repr(align(64))]
    struct Lines([AtomicU64; 16]);
    let lines = Lines([const { AtomicU64::new(0) }; 16]);
    let at: &RingWords = lines.0[7..].first_chunk().expect("two words");
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let seen = RingPte::load(at);
                if seen.is_valid() {
                    assert_eq!(seen, tagged(seen.start().get() >> 20), "of two entries");
                }
                reads.fetch_add(1, Ordering::Release);
            }
        });
        for turn in 0..20_000 {
            RingPte::clear(at);
            tagged(turn % 7).store(at);
            // Wait as for an invalidation: no read may span two refills of an entry.
            let read = reads.load(Ordering::Relaxed);
            while reads.load(Ordering::Acquire) == read && !reader.is_finished() {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(reader.join().is_ok(), "a mixture was seen");
    });
}

#[test]
fn every_way_to_find_nothing() {
    let mut mem = SparseMemory::new();
    mem.add(pa(0x1000));
    mem.set(pa(0x1000), 0x1010);
    mem.set(pa(0x1008), 3);
    for (ring, [base, size]) in [[0x1080, 2], [0x1081, 2], [0x9000, 2]]
        .into_iter()
        .enumerate()
    {
        mem.set(pa(0x1010 + 16 * ring as u64), base);
        mem.set(pa(0x1018 + 16 * ring as u64), size);
    }
    let [first, second] = pte(0x5005, 7, W).words();
    mem.set(pa(0x1080), first);
    mem.set(pa(0x1088), second);
    let walk = |ring, index| {
        let device = RingDevice::read(&mem, pa(0x1000))?;
        let table = RingTable::read(&mem, &device, RingId::new(ring))?;
        let read = RingPte::read(&mem, &table, slot(index));
        let found = read.and_then(|pte| match pte.is_valid() {
            true => Ok(pte),
            false => Err(RingWalkError::NotPresent),
        });
        assert_eq!(RingPte::find(&mem, &table, slot(index)), found);
        read
    };
    let cases = [
        (0, 0, Ok(pte(0x5005, 7, W))),
        (0, 1, Ok(RingPte::ABSENT)),
        (0, 2, Err(RingWalkError::SlotBeyondRing)),
        (0, 0x3_ffff, Err(RingWalkError::SlotBeyondRing)),
        (1, 0, Err(RingWalkError::Misaligned)),
        (2, 0, Err(RingWalkError::TableAccess)),
        (3, 0, Err(RingWalkError::RingBeyondDevice)),
        (0xffff, 0, Err(RingWalkError::RingBeyondDevice)),
    ];
    for (ring, index, expected) in cases {
        assert_eq!(walk(ring, index), expected, "{ring} {index}");
    }
    for at in [0x9000, 0x1ff8, 1, u64::MAX, !0xf] {
        assert_eq!(
            RingDevice::read(&mem, pa(at)),
            Err(RingWalkError::TableAccess)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0x9c),
        ..ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn entries_round_trip(start: u64, bytes in 1..=MAX_RING_BUFFER, dir in 1_u64..4) {
        let permissions = Permissions::from_bits(dir).unwrap();
        if let Some(range) = PhysRange::new(pa(start), bytes) {
            let made = RingPte::new(&range, permissions).unwrap();
            let at = words([0, 0]);
            made.store(&at);
            let read = RingPte::load(&at);
            prop_assert_eq!(
                (read.start(), read.bytes(), read.permissions()),
                (pa(start), bytes, Some(permissions))
            );
        }
    }

    #[test]
    fn any_words_are_read(
        device: [u64; 2],
        table: [u64; 2],
        entry: [u64; 2],
        ring: u16,
        index in 0_u32..1 << 18,
    ) {
        let _ = RingDevice::decode(device).map(|d| d.ring(RingId::new(ring)));
        let _ = RingTable::decode(table).map(|t| t.entry(slot(index)));
        let read = RingPte::from_words(entry);
        prop_assert!(read.bytes() <= MAX_RING_BUFFER);
        prop_assert_eq!(read.words(), entry);
    }
}
