//! Invalidation of each stage.

use ringfence_hw::NestedInvalidation;
use ringfence_pgtable::Levels;
use ringfence_types::{CachedLevels, Invalidation, InvalidationError, Invalidator, RingId};

use super::{CACHED, Nested, pasid};
use crate::rig::{A, B, DISK, NIC, READ, RW, WRITE, arena, pages_at};

/// Each stage's invalidation removes what it must and no other first stage's entries.
#[test]
fn each_stage_invalidates_its_own() {
    let mem = arena();
    // Entries: two devices with first stages of their own, one page each.
    for (name, invalidation, remaining, second_stage_stale) in [
        (
            "one page of one first stage",
            NestedInvalidation::FirstStagePages {
                domain: A,
                pasid: pasid(1),
                range: pages_at(0x1000, 1),
            },
            1,
            true,
        ),
        (
            "another page",
            NestedInvalidation::FirstStagePages {
                domain: A,
                pasid: pasid(1),
                range: pages_at(0x2000, 1),
            },
            2,
            true,
        ),
        (
            "one first stage",
            NestedInvalidation::FirstStage {
                domain: A,
                pasid: pasid(2),
            },
            1,
            true,
        ),
        (
            "a page of the second stage",
            NestedInvalidation::SecondStagePages {
                domain: A,
                range: pages_at(0x3000, 1),
            },
            0,
            false,
        ),
        (
            "another page of the second stage",
            NestedInvalidation::SecondStagePages {
                domain: A,
                range: pages_at(0x4000, 1),
            },
            0,
            true,
        ),
        ("the domain", NestedInvalidation::Domain(A), 0, false),
        ("another domain", NestedInvalidation::Domain(B), 2, true),
        ("everything", NestedInvalidation::Global, 0, false),
        ("the context", NestedInvalidation::Context(NIC), 0, false),
    ] {
        let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
        let stages = [nested.first(Levels::Four), nested.first(Levels::Four)];
        nested.map_second(0x3000, RW);
        for (tag, device, first) in [(1, NIC, &stages[0]), (2, DISK, &stages[1])] {
            nested.attach(device, tag, first, Levels::Four);
            nested.map_first(first, 0x1000, 0x3000, RW);
            assert!(nested.dma(device, 0x1000, 1, WRITE).is_ok());
        }
        assert_eq!(nested.unit.iotlb_live(), 2);
        nested.unmap_second(0x3000);
        nested.unit.invalidate_nested(&invalidation);
        assert_eq!(nested.unit.iotlb_live(), remaining, "{name}");
        // A new walk for another IOVA of the same page uses the cache of the second stage.
        nested.map_first(&stages[0], 0x9000, 0x3000, RW);
        let reached = nested.dma(NIC, 0x9000, 1, READ).is_ok();
        assert_eq!(reached, second_stage_stale, "{name}");
    }
}

#[test]
fn a_guests_invalidator_covers_all_first_stages_of_its_domain() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.map_second(0x3000, RW);
    for (tag, device) in [(1, NIC), (2, DISK)] {
        nested.attach(device, tag, &first, Levels::Four);
    }
    nested.map_first(&first, 0x1000, 0x3000, RW);
    for device in [NIC, DISK] {
        assert!(nested.dma(device, 0x1000, 1, READ).is_ok());
    }
    let ticket = nested
        .unit
        .submit(Invalidation::Pages {
            domain: A,
            range: pages_at(0x1000, 1),
            levels: CachedLevels::Leaves,
        })
        .unwrap();
    assert_eq!(nested.unit.poll(ticket), Ok(true));
    assert_eq!(nested.unit.iotlb_live(), 0);
    let ring = Invalidation::Ring {
        domain: A,
        device: NIC,
        ring: RingId::new(0),
    };
    assert_eq!(
        nested.unit.submit(ring),
        Err(InvalidationError::Unsupported)
    );
}

/// A device keeps its PASID with its cached entry. Otherwise the IOTLB would hold translations of
/// the old first stage under the new PASID, which no invalidation of the old one removes.
#[test]
fn a_new_pasid_applies_after_the_invalidation_of_the_context() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let [old, new] = [(), ()].map(|()| nested.first(Levels::Four));
    for (first, guest) in [(&old, 0x3000), (&new, 0x4000)] {
        nested.map_first(first, 0x1000, guest, RW);
        nested.map_second(guest, RW);
    }
    let host = |guest: u64| Ok(vec![(super::host_of(guest), 8)]);
    nested.attach(NIC, 1, &old, Levels::Four);
    assert_eq!(nested.dma(NIC, 0x1000, 8, READ), host(0x3000));
    nested.attach(NIC, 2, &new, Levels::Four);
    let invalidate = |nested: &mut Nested<'_>, request| nested.unit.invalidate_nested(&request);
    let first_stage = |tag| NestedInvalidation::FirstStage {
        domain: A,
        pasid: pasid(tag),
    };
    invalidate(&mut nested, first_stage(1));
    assert_eq!(nested.dma(NIC, 0x1000, 8, READ), host(0x3000), "as cached");
    invalidate(&mut nested, first_stage(1));
    assert_eq!(
        nested.unit.iotlb_live(),
        0,
        "it was tagged with the old PASID"
    );
    invalidate(&mut nested, NestedInvalidation::Context(NIC));
    assert_eq!(nested.dma(NIC, 0x1000, 8, READ), host(0x4000));
}
