//! Registers with any value.

use proptest::prelude::*;
use ringfence_amd_vi::{Stage, Unit, UnitError};
use ringfence_memory::fake::AnyRegisters;
use ringfence_pgtable::Level;
use ringfence_types::{Invalidation, InvalidationError, Invalidator, PhysAddr};

use crate::rig::{DEVICE, DOMAIN, FEATURE, IOVA, Rig, pages};

#[test]
fn an_absent_unit_is_an_error() {
    let mut rig = Rig::new(FEATURE);
    let unit = Unit::new(
        AnyRegisters::absent(),
        rig.memory.clone(),
        &rig.frames,
        &rig.options,
    );
    assert_eq!(unit.map(drop), Err(UnitError::Absent));
    rig.options.capability_header = u32::MAX;
    assert_eq!(rig.start().map(drop), Err(UnitError::Absent));
    assert_eq!(rig.frames.in_use(), 0);
}

/// Values of the status register that let the driver go on, among others.
fn values() -> impl Strategy<Value = Vec<u64>> {
    let value = prop_oneof![
        Just(0),
        Just(0x18),
        Just(0x19),
        Just(u64::MAX),
        any::<u64>()
    ];
    proptest::collection::vec(value, 1..40)
}

proptest! {
    /// No value of a register makes the driver panic or loop for ever.
    #[test]
    fn any_register_values_end(values in values(), words in any::<[u64; 4]>()) {
        let mut rig = Rig::new(FEATURE);
        rig.options.poll_limit = 8;
        let registers = AnyRegisters::new(values);
        let unit = Unit::new(registers, rig.memory.clone(), &rig.frames, &rig.options);
        if let Ok(mut unit) = unit {
            // Without completions, only a model would come here.
            let _ = unit.next_fault();
        }
        // A unit that started on the model, whose registers and memory then turn hostile.
        let mut unit = rig.unit();
        let [status, tail, word, entry] = words;
        // The GCR3 pointer of an entry is the driver's own record of a frame, as page tables are.
        let entry = entry & !(1 << 55);
        rig.model.set(crate::model::STATUS, status);
        rig.model.set(crate::model::EVENT_TAIL, tail);
        rig.model.store(crate::rig::DEVICE_TABLE + 32 * u64::from(DEVICE.get()), entry);
        rig.model.store(crate::rig::DEVICE_TABLE + 32 * u64::from(DEVICE.get()) + 8, word);
        for _ in 0..300 {
            let _ = unit.next_fault();
        }
        let levels = Level::new(3).unwrap();
        let stage = Stage::Host { root: PhysAddr::new(0x30_0000), levels };
        let _ = unit.submit(Invalidation::Context(DEVICE));
        let _ = unit.submit(pages(DOMAIN, IOVA, 5));
        let _ = unit.attach(DEVICE, DOMAIN, stage);
        let _ = unit.recover();
    }
}

/// The unit disappears while it runs, as a hot-unplugged one does.
#[test]
fn a_unit_that_disappears_is_an_error() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    rig.model.change(|state| {
        state.processor = crate::model::Processor::Hung;
        state.stuck = u64::MAX;
        for value in state.registers.values_mut() {
            *value = u64::MAX;
        }
    });
    assert_eq!(unit.next_fault(), None);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    let mut polls = (0..10_000).map(|_| unit.poll(ticket));
    let error = polls.find(|poll| *poll != Ok(false));
    assert_eq!(error, Some(Err(InvalidationError::TimedOut)));
    rig.model.set(crate::model::CONTROL, u64::MAX);
    assert_eq!(unit.recover(), Err(UnitError::Absent));
}
