//! Registers with arbitrary values: errors, no panic, no endless loop, no frame freed twice.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;
use ringfence_memory::fake::FaultyFrames;
use ringfence_pgtable::Levels;
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, Invalidator, Pfn, PfnRange, PhysAddr, Registers,
    RequesterId,
};
use ringfence_vtd::{Interface, Mode, Options, Translation, Unit};

use crate::model::{self, CAP, ECAP_SCALABLE, Model};

/// Reads give random numbers, of which some look like a unit that works.
struct Hostile {
    state: Cell<u64>,
    cap: u64,
    ecap: u64,
}

impl Hostile {
    fn next(&self) -> u64 {
        let value = self.state.get().wrapping_mul(0x5851_f42d_4c95_7f2d);
        let value = value.wrapping_add(0x1405_7b7e_f767_814f);
        self.state.set(value);
        let mixed = value ^ value >> 29;
        match mixed >> 60 {
            0 => 0,
            1 => u64::MAX,
            2..6 => mixed & mixed << 7,
            6..10 => mixed | mixed << 9,
            _ => mixed,
        }
    }
}

impl Registers for Hostile {
    fn read32(&self, _offset: u64) -> u32 {
        self.next() as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        match offset {
            0x08 => self.cap,
            0x10 => self.ecap,
            _ => self.next(),
        }
    }

    fn write32(&self, _offset: u64, _value: u32) {}

    fn write64(&self, _offset: u64, _value: u64) {}
}

fn attempt(hostile: Hostile, mode: Mode, interface: Interface) {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = FaultyFrames::new(model::frames(&model));
    let options = Options {
        mode,
        interface,
        poll_limit: 40,
    };
    let memory = model.memory.clone();
    let Ok(mut unit) = Unit::new(Rc::new(hostile), memory, &frames, &options) else {
        return;
    };
    let device = RequesterId::new(0xffff);
    let root = PhysAddr::new(0x5000);
    let levels = Levels::Four;
    let range = PfnRange::new(Pfn::new(0x3_ffff), 77).unwrap();
    for round in 0..20_u16 {
        let domain = DomainId::new(round);
        let _ = unit.attach(device, domain, Translation::SecondStage { root, levels });
        let request = Invalidation::Pages {
            domain,
            range,
            levels: CachedLevels::All,
        };
        if let Ok(ticket) = unit.submit_all(&[request; 7]) {
            let _ = unit.poll(ticket);
        }
        let _ = unit.next_fault();
        let _ = unit.recover();
        let _ = unit.flush_write_buffer();
        let _ = unit.detach(device);
    }
    let _ = unit.disable();
    assert_eq!(frames.wrong_frees(), 0);
}

proptest! {
    #[test]
    fn arbitrary_registers_cause_errors_only(
        seed: u64,
        cap in prop_oneof![Just(CAP), any::<u64>()],
        ecap in prop_oneof![Just(ECAP_SCALABLE), any::<u64>()],
    ) {
        for mode in [Mode::Legacy, Mode::Scalable] {
            for interface in [Interface::Queue, Interface::Registers] {
                let state = Cell::new(seed);
                attempt(Hostile { state, cap, ecap }, mode, interface);
            }
        }
    }
}
