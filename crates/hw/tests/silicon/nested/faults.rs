//! Faults of both stages, and hostile tables of the guest.

use ringfence_hw::{NestedFault, NestedInvalidation, Stage};
use ringfence_pgtable::Levels;
use ringfence_types::{FaultReason, GuestPhysAddr, Permissions, PhysMemory};

use super::{CACHED, GuestMemory, Nested, TABLES, UNCACHED, host_of};
use crate::rig::{GPU, NIC, READ, RW, WRITE, arena};

/// A fault names the stage whose owner must handle it.
#[test]
fn faults_name_their_stage() {
    let mem = arena();
    for config in [UNCACHED, CACHED] {
        let mut nested = Nested::new(&mem, &config, Levels::Four);
        let first = nested.first(Levels::Four);
        nested.attach(NIC, 1, &first, Levels::Four);
        nested.map_first(&first, 0x1000, 0x3000, RW);
        nested.map_first(&first, 0x2000, 0x4000, RW);
        nested.map_first(&first, 0x5000, 0x6000, Permissions::READ);
        nested.map_first(&first, 0x8000, 0x9000, RW);
        nested.map_second(0x3000, RW);
        nested.map_second(0x6000, RW);
        nested.map_second(0x9000, Permissions::READ);
        let guest = GuestPhysAddr::new;
        let check = |nested: &mut Nested<'_>, iova, access, reason, stage| {
            let found = nested.dma(NIC, iova, 1, access);
            assert_eq!(found, Err((iova, reason)), "{iova:#x}");
            let NestedFault {
                fault,
                stage: named,
            } = nested.unit.last_fault().unwrap();
            assert_eq!((fault.device, named), (NIC, stage), "{iova:#x}");
        };
        let not_present = FaultReason::NotPresent;
        let denied = FaultReason::WriteDenied;
        // Twice, because the first access may fill a cache.
        for _ in 0..2 {
            let stages = &mut nested;
            check(stages, 0xa000, READ, not_present, Stage::First);
            assert!(stages.dma(NIC, 0x5000, 1, READ).is_ok());
            check(stages, 0x5000, WRITE, denied, Stage::First);
            let page = Stage::SecondForPage {
                guest: guest(0x4000),
            };
            check(stages, 0x2000, READ, not_present, page);
            assert!(stages.dma(NIC, 0x8000, 1, READ).is_ok());
            let page = Stage::SecondForPage {
                guest: guest(0x9000),
            };
            check(stages, 0x8000, WRITE, denied, page);
            let beyond = FaultReason::AddressBeyondWidth;
            check(stages, 1 << 48, READ, beyond, Stage::First);
        }
        // The host takes the page of the guest's root table away.
        let root = first.root().get();
        nested.unmap_second(root);
        nested.unit.invalidate_nested(&NestedInvalidation::Global);
        let table = Stage::SecondForTable { guest: guest(root) };
        check(&mut nested, 0x1000, READ, not_present, table);
        assert_eq!(
            nested.dma(GPU, 0x1000, 1, READ),
            Err((0x1000, FaultReason::Blocked))
        );
        assert_eq!(nested.unit.last_fault().unwrap().stage, Stage::Context);
        assert_eq!(nested.unit.faults().len(), 12);
    }
}

/// A guest cannot reach host memory that its second stage lacks, whatever its first stage holds.
#[test]
fn a_hostile_first_stage_stays_in_the_guest() {
    let mem = arena();
    let mut nested = Nested::new(&mem, &CACHED, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    // A leaf to the host's own tables, and a root that points to itself.
    nested.map_first(&first, 0x1000, TABLES, RW);
    assert_eq!(
        nested.dma(NIC, 0x1000, 1, READ),
        Err((0x1000, FaultReason::NotPresent))
    );
    let root = first.root();
    let word = GuestMemory(&mem);
    let itself = root.get() | 0x27;
    word.word(root)
        .unwrap()
        .store(itself, std::sync::atomic::Ordering::Relaxed);
    // The root is then also the page: the second stage maps it for reads only.
    assert_eq!(
        nested.dma(NIC, 0, 8, READ),
        Ok(vec![(host_of(root.get()), 8)])
    );
    assert_eq!(
        nested.dma(NIC, 0, 8, WRITE),
        Err((0, FaultReason::WriteDenied))
    );
}
