//! Registers with any value.

use proptest::prelude::*;
use ringfence_memory::fake::AnyRegisters;
use ringfence_smmu_v3::{Unit, UnitError};
use ringfence_types::{
    Invalidation, InvalidationError, Invalidator, PhysAddr, PhysMemory, RequesterId,
};

use crate::model::{CMDQ_CONS, EVENTQ_PROD, GERROR};
use crate::rig::{DEVICE, DOMAIN, IOVA, Rig, STREAM_TABLE, one, pages};

#[test]
fn an_absent_unit_is_an_error() {
    let rig = Rig::new();
    let unit = Unit::new(
        AnyRegisters::absent(),
        rig.memory.clone(),
        &rig.frames,
        &rig.options,
    );
    assert_eq!(unit.map(drop), Err(UnitError::Absent));
    assert_eq!(rig.frames.in_use(), 0);
}

/// The unit disappears while it runs, as a hot-unplugged one does.
#[test]
fn a_unit_that_disappears_is_an_error() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let ticket = unit.submit(Invalidation::Global).unwrap();
    rig.model.change().stuck = vec![0x20, 0x44, 0x50];
    for value in rig.model.change().registers.values_mut() {
        *value = u64::MAX;
    }
    assert_eq!(unit.next_fault(), None);
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    assert!(matches!(unit.recover(), Err(UnitError::TimedOut { .. })));
    let Err((_, UnitError::TimedOut { .. })) = unit.disable() else {
        panic!("an absent unit stopped");
    };
}

proptest! {
    /// No value of a register makes the driver panic or loop for ever.
    #[test]
    fn any_register_values_end(
        values in proptest::collection::vec(any::<u64>(), 1..40),
        words in any::<[u64; 4]>(),
        flood in any::<u32>(),
    ) {
        let mut rig = Rig::new();
        rig.options.poll_limit = 8;
        let registers = AnyRegisters::new(values);
        let unit = Unit::new(registers, rig.memory.clone(), &rig.frames, &rig.options);
        if let Ok(mut unit) = unit {
            let _ = unit.next_fault();
        }
        // A unit that started on the model, whose registers and memory then turn hostile.
        let mut unit = rig.unit();
        let table = rig.stage1(DOMAIN);
        let _ = unit.attach(DEVICE, DOMAIN, &one(&table));
        let [consumed, produced, errors, word] = words;
        rig.model.set(CMDQ_CONS, consumed);
        rig.model.set(EVENTQ_PROD, produced);
        rig.model.set(GERROR, errors);
        // A first-level descriptor of the stream table, within memory.
        let target = rig.memory.word(PhysAddr::new(STREAM_TABLE + 8)).unwrap();
        target.store(word, std::sync::atomic::Ordering::Release);
        for _ in 0..300 {
            let _ = unit.next_fault();
            let next = rig.model.register(EVENTQ_PROD).wrapping_add(flood.into());
            rig.model.set(EVENTQ_PROD, next);
        }
        if let Ok(ticket) = unit.submit(pages(DOMAIN, IOVA, 5)) {
            for _ in 0..20 {
                let _ = unit.poll(ticket);
            }
        }
        let _ = unit.command_error();
        let _ = unit.pass_through(RequesterId::new(0x41));
        let _ = unit.detach(DEVICE);
        let _ = unit.recover();
    }
}
