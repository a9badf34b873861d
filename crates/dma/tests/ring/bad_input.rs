//! Errors of drivers and devices: the ring rejects them with a reason, and nothing changes.

use std::cell::RefCell;

use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::ring::{
    OwnedRing, Ring, RingError, RingMapping, RingRefusal, RingSetup, RingTables, SlotChoice,
    lay_out,
};
use ringfence_dma::space::Rings;
use ringfence_dma::{
    AttachError, Attachment, Cpu, Dma, DmaSegment, FlushPolicy, MapReason, Mapping, Outcome,
    Released, SgLimits, SgRequest, UnmapReason, Withheld,
};
use ringfence_pgtable::{Coherency, RingFormatError};
use ringfence_types::{
    Direction, DomainId, Invalidation, Iova, IovaRange, PhysAddr, PhysRange, RequesterId, RingId,
};

use crate::rig::*;

type Space = Rings<Ring, RefCell<Ring>>;

struct Rig<F: FlushPolicy<Space, u64>> {
    board: Board,
    dma: Dma<Space, F, u64>,
    cpu: Cpu<Space, F, u64>,
    at: Attachment,
}

const TO: Direction = Direction::ToDevice;

impl<F: FlushPolicy<Space, u64>> Rig<F> {
    fn new(flush: F, slots: &[u32], mask: Iova) -> Self {
        let board = Board::new(Coherency::Coherent);
        let mut dma = Dma::new(flush);
        let at = dma
            .attach(DEVICE, mask, |domain| {
                let rings = board.rings(SlotChoice::Tail, slots);
                Ok::<_, ()>(Rings::new(domain, DEVICE, rings, RefCell::new))
            })
            .unwrap();
        let cpu = dma.cpu();
        Self {
            board,
            dma,
            cpu,
            at,
        }
    }

    fn map(&mut self, at: &Attachment, memory: PhysRange) -> Result<Mapping<u64>, MapReason> {
        let Self {
            board, dma, cpu, ..
        } = self;
        dma.map_single(cpu, board, at, 7, memory, TO)
            .map(|(mapping, _)| mapping)
            .map_err(|(back, error)| {
                assert_eq!(back, 7);
                error.reason
            })
    }

    fn unmap(&mut self, at: &Attachment, mapping: Mapping<u64>) -> Result<(), UnmapReason<u64>> {
        let Self {
            board, dma, cpu, ..
        } = self;
        match dma.unmap_single(cpu, board, at, mapping) {
            Ok(outcome) => {
                let _ = outcome.into_buffer();
                Ok(())
            }
            Err(error) => Err(error.reason),
        }
    }
}

const ANY: Iova = Iova::new(u64::MAX);

#[test]
fn sizes_that_no_ring_has() {
    let make = |slots: &[u32]| RingTables::new(TABLES, slots).map(|tables| tables.memory().bytes());
    for slots in [0, 1 << 18, u32::MAX] {
        let expected = RingError::Format(RingFormatError::Slots { slots });
        assert_eq!(make(&[slots]), Err(expected));
        assert_eq!(make(&[8, slots]), Err(expected));
    }
    assert_eq!(make(&[1]), Ok(64 + 16));
    assert_eq!(make(&[(1 << 18) - 1]), Ok(64 + 16 * ((1 << 18) - 1)));
    assert_eq!(make(&[]), Err(RingError::Count { rings: 0 }));
    let many = vec![1; 1 << 16];
    assert_eq!(make(&many), Err(RingError::Count { rings: 1 << 16 }));
    assert!(make(&many[1..]).is_ok());
}

#[test]
fn places_where_no_table_can_be() {
    let tables_at = |at| RingTables::new(PhysAddr::new(at), &[8]);
    assert_eq!(tables_at(0x1010), Err(RingError::Memory));
    assert_eq!(tables_at(!0xfff).map(|t| t.memory().bytes()), Ok(64 + 128));
    assert!(RingTables::new(PhysAddr::new(!0xfff), &[256]).is_err());
    let board = Board::new(Coherency::Coherent);
    let setup = RingSetup {
        choice: SlotChoice::Tail,
        coherency: Coherency::Coherent,
    };
    let outside = lay_out(&*board.memory, &tables_at(1 << 40).unwrap(), setup);
    assert_eq!(outside.err(), Some(RingError::Memory));
    drop(board.rings(SlotChoice::Tail, &[8]));
    let again = lay_out(&*board.memory, &tables_at(TABLES.get()).unwrap(), setup);
    assert_eq!(again.err(), Some(RingError::NotEmpty));
}

#[test]
fn buffers_that_no_entry_can_encode() {
    let mut rig = Rig::new(Strict, &[4], ANY);
    let at = rig.at;
    assert_eq!(
        PhysRange::new(PhysAddr::new(0x1000), 0),
        None,
        "no empty buffer"
    );
    let before = words(&rig.board);
    for bytes in [1 << 30, (1 << 30) + 1, 1 << 40] {
        let refused = rig.map(&at, buffer(0x1234, bytes)).unwrap_err();
        let expected = RingRefusal::Format(RingFormatError::BufferTooLong { bytes });
        assert_eq!(refused, MapReason::Ring(expected));
        assert_eq!(words(&rig.board), before);
    }
    let longest = rig.map(&at, buffer(0x1235, (1 << 30) - 1)).unwrap();
    assert_eq!(longest.range().bytes(), (1 << 30) - 1);
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let before = words(board);
    let too_long = RingRefusal::Format(RingFormatError::BufferTooLong { bytes: 1 << 30 });
    let too_many = RingRefusal::ListTooLong { slots: 4 };
    for (pieces, expected) in [
        (vec![], MapReason::Empty),
        (
            vec![buffer(0, 1), buffer(9, 1 << 30)],
            MapReason::Ring(too_long),
        ),
        (vec![buffer(0, 1); 5], MapReason::Ring(too_many)),
    ] {
        let segment = DmaSegment {
            range: longest.range(),
        };
        let request = SgRequest {
            buffer: 7,
            pieces: &pieces,
            direction: TO,
            limits: SgLimits::default(),
            out: &mut vec![segment; pieces.len()],
        };
        let (back, error) = dma.map_sg(cpu, board, &at, request).unwrap_err();
        assert_eq!((back, error.reason), (7, expected));
        assert_eq!(words(board), before);
    }
    drop(longest);
}

#[test]
fn rings_and_slots_that_are_not_there() {
    let mut rig = Rig::new(Strict, &[4, 2], ANY);
    let at = rig.at;
    assert!(rig.dma.on_ring(&at, RingId::new(1)).is_some());
    for ring in [2, 3, u16::MAX] {
        assert_eq!(rig.dma.on_ring(&at, RingId::new(ring)), None);
    }
    let live = rig.map(&at, buffer(0x77, 10)).unwrap();
    let before = words(&rig.board);
    for (ring, slot) in [(0, 4), (0, (1 << 18) - 1), (1, 0), (2, 0), (u16::MAX, 0)] {
        let start = Iova::new(u64::from(ring) << 48 | slot << 30);
        let range = IovaRange::new(start, 10).unwrap();
        for on in 0..2 {
            let on = rig.dma.on_ring(&at, RingId::new(on)).unwrap();
            let claim = Mapping::claim(&on, range, TO, 7);
            match rig.unmap(&on, claim).unwrap_err() {
                UnmapReason::NotAllocated(b) if *b.buffer() == 7 => {
                    assert_eq!(on.ring().get(), ring);
                }
                UnmapReason::OtherRing(of, b) if *b.buffer() == 7 => {
                    assert_eq!(of.get(), ring);
                    assert_ne!(of, on.ring());
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(words(&rig.board), before);
    rig.unmap(&at, live).unwrap();
}

#[test]
fn unmapped_twice_out_of_order_and_during_anothers_burst() {
    let mut rig = Rig::new(Burst::default(), &[3, 3], ANY);
    let at = rig.at;
    let mut other_cpu = rig.dma.cpu();
    let made: Vec<_> = (0..3)
        .map(|n| rig.map(&at, buffer(0x100 * n, 0x80)).unwrap())
        .collect();
    let ranges: Vec<_> = made.iter().map(Mapping::range).collect();
    let [a, b, c] = made.try_into().unwrap();
    // Out of order, and each on another CPU.
    {
        let Rig { board, dma, .. } = &mut rig;
        let Withheld = dma.unmap_single(&mut other_cpu, board, &at, c).unwrap();
    }
    rig.unmap(&at, b).unwrap();
    for range in &ranges[1..] {
        let twice = Mapping::claim(&at, *range, TO, 7);
        let reason = rig.unmap(&at, twice).unwrap_err();
        assert!(
            matches!(&reason, UnmapReason::NotAllocated(b) if *b.buffer() == 7),
            "{reason:?}"
        );
    }
    // First the tail's slot is live. Then it waits for this CPU's burst. When this CPU ends its
    // burst, the other CPU's slot stays withheld.
    assert!(is_full(rig.map(&at, buffer(0, 1)).unwrap_err()));
    rig.unmap(&at, a).unwrap();
    assert!(is_full(rig.map(&at, buffer(0, 1)).unwrap_err()));
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let mut back = 0;
    dma.end_burst(cpu, board, &at, TO, |_| back += 1).unwrap();
    assert_eq!(back, 2);
    let first = rig.map(&at, buffer(0, 1)).unwrap();
    let second = rig.map(&at, buffer(0, 2)).unwrap();
    assert_eq!(
        [first.range().start(), second.range().start()],
        [ranges[0].start(), ranges[1].start()]
    );
    assert!(
        is_full(rig.map(&at, buffer(0, 1)).unwrap_err()),
        "the other's burst is open"
    );
    let Rig { board, dma, .. } = &mut rig;
    dma.end_burst(&mut other_cpu, board, &at, TO, |_| back += 1)
        .unwrap();
    assert_eq!(back, 3);
    drop(rig.map(&at, buffer(0, 1)).unwrap());
    drop((first, second));
    let ring = rig.dma.space(&at).unwrap().ring(RingId::new(0)).unwrap();
    let stalls = ring.borrow().stalls();
    assert_eq!((stalls.unmap, stalls.burst_end), (1, 2));
}

#[test]
fn another_device_or_a_narrow_mask_has_no_use_for_a_ring() {
    let mut rig = Rig::new(Strict, &[4], ANY);
    let at = rig.at;
    let other = rig.dma.attach_to(RequesterId::new(0x20), ANY, &at);
    assert_eq!(other, Err(AttachError::OtherDevice));
    assert!(rig.dma.attach_to(DEVICE, ANY, &at).is_ok());
    // Ring 0 with four slots ends at 2^32; ring 1 begins at 2^48.
    for (mask, ring, fits) in [
        (u64::from(u32::MAX), 0, true),
        (u64::from(u32::MAX) >> 1, 0, false),
        ((1 << 48) - 1, 1, false),
        (u64::MAX, 1, true),
    ] {
        let mut rig = Rig::new(Strict, &[4, 4], Iova::new(mask));
        let at = rig.dma.on_ring(&rig.at, RingId::new(ring)).unwrap();
        match rig.map(&at, buffer(0, 1)) {
            Ok(mapping) => {
                assert!(fits);
                rig.unmap(&at, mapping).unwrap();
            }
            Err(reason) => {
                let expected = RingRefusal::BeyondMask(RingId::new(ring));
                assert_eq!(reason, MapReason::Ring(expected));
                assert!(!fits);
            }
        }
    }
}

/// A static ring holds long-lived mappings: coherent memory is one buffer of it, and never affects
/// the other ring.
#[test]
fn static_and_dynamic_rings_coexist() {
    let mut rig = Rig::new(Strict, &[1, 4], ANY);
    let (fixed, targets) = (rig.at, rig.dma.on_ring(&rig.at, RingId::new(1)).unwrap());
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let descriptors = dma.alloc_coherent(cpu, board, &fixed, 4).unwrap();
    assert_eq!(descriptors.range().bytes(), 4 * 4096);
    assert_eq!(board.entry((0, 0)).start(), descriptors.frames()[0]);
    for n in 0..9 {
        let mapping = rig.map(&targets, buffer(n, 1)).unwrap();
        let Rig {
            board, dma, cpu, ..
        } = &mut rig;
        let Released(7) = dma.unmap_single(cpu, board, &targets, mapping).unwrap() else {
            panic!();
        };
    }
    assert!(rig.board.entry((0, 0)).is_valid());
    let Rig {
        board, dma, cpu, ..
    } = &mut rig;
    let invalidated = board.port.log.len();
    dma.free_coherent(cpu, board, &fixed, descriptors).unwrap();
    assert!(!board.entry((0, 0)).is_valid());
    let ring = |ring| Invalidation::Ring {
        domain: fixed.domain(),
        device: DEVICE,
        ring: RingId::new(ring),
    };
    assert_eq!(board.port.log[..invalidated], [ring(1); 9]);
    assert_eq!(board.port.log[invalidated..], [ring(0)]);
}

/// Owned rings: another ring of the device rejects a mapping. So does the same ring of another
/// device in a domain of the same number, and the same ring of the device in another domain. The
/// mapping's own ring accepts it once.
#[test]
fn an_owned_ring_unmaps_nothing_of_others() {
    let board = Board::new(Coherency::Coherent);
    let memory = board.memory.clone();
    let owned = |ring: usize, device, domain| {
        let arena = Board::new(Coherency::Coherent);
        let memory: &'static Memory = Box::leak(Box::new(arena.memory.clone()));
        let ring = arena.rings(SlotChoice::Tail, &[4, 4]).remove(ring);
        OwnedRing::<u64>::new(ring, &**memory, domain, device).unwrap()
    };
    let mut own = owned(0, DEVICE, DOMAIN);
    let others = [
        owned(1, DEVICE, DOMAIN),
        owned(0, RequesterId::new(0x20), DOMAIN),
        owned(0, DEVICE, DomainId::new(2)),
    ];
    let mut mapping = own.map(&*memory, 7, &buffer(9, 9), TO).unwrap();
    let range = mapping.range().unwrap();
    for mut other in others {
        // A mapping with the same address and length is live there.
        let theirs = other.map(&*memory, 8, &buffer(9, 9), TO).unwrap();
        mapping = other.unmap(&*memory, mapping).unwrap_err().0;
        assert_eq!((other.live(), other.withheld()), (1, 0));
        let Withheld = other.unmap(&*memory, theirs).unwrap();
    }
    assert_eq!((mapping.range(), own.live()), (Some(range), 1));
    let Withheld = own.unmap(&*memory, mapping).unwrap();
    let twice = RingMapping::claim(&own, range, 7).unwrap();
    assert_eq!(
        own.unmap(&*memory, twice).unwrap_err().0.range(),
        Some(range)
    );
    assert_eq!(own.withheld(), 1);
}
