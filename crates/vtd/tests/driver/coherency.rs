//! Tables in memory that the unit does not snoop: it sees an entry only complete.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_memory::Arena;
use ringfence_memory::fake::NonCoherent;
use ringfence_pgtable::Levels;
use ringfence_types::{
    DomainId, MemoryError, Pasid, PhysAddr, PhysMemory, RequesterId, TABLE_WORDS,
};
use ringfence_vtd::{Interface, Mode, Translation, Unit};

use crate::model::{self, CAP, ECAP, ECAP_SCALABLE, Model};

/// Looks at the tables as the unit does, at each drain.
struct Watched {
    memory: NonCoherent<Rc<Arena>>,
    mode: Mode,
    seen: RefCell<Vec<Seen>>,
}

/// The end of the unit's walk for device 0x20.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Absent,
    Present { domain: u64, root: u64 },
}

const ROOT: u64 = 0x10_0000;
const POINTER: u64 = !0xfff;

impl Watched {
    fn load(&self, at: u64) -> u64 {
        let word = self.memory.device_view().word(PhysAddr::new(at)).unwrap();
        word.load(Ordering::SeqCst)
    }

    fn walk(&self) -> Seen {
        let mut at = ROOT;
        let offsets: &[u64] = match self.mode {
            Mode::Legacy => &[0x20 * 16],
            Mode::Scalable => &[0x20 * 32, 0, 0],
        };
        for offset in offsets {
            let entry = self.load(at);
            if entry & 1 == 0 {
                return Seen::Absent;
            }
            at = (entry & POINTER) + offset;
        }
        let (first, second, third) = (self.load(at), self.load(at + 8), self.load(at + 16));
        if first & 1 == 0 {
            return Seen::Absent;
        }
        match self.mode {
            Mode::Legacy => Seen::Present {
                domain: second >> 8,
                root: first & POINTER,
            },
            Mode::Scalable => Seen::Present {
                domain: second & 0xffff,
                root: third & POINTER,
            },
        }
    }
}

impl PhysMemory for Watched {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.memory.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.memory.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.memory.words(at, count)
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.memory.write_back(at, bytes);
    }

    fn drain(&self) {
        self.memory.drain();
        self.seen.borrow_mut().push(self.walk());
    }
}

#[test]
fn the_unit_sees_no_entry_or_a_complete_one() {
    for (mode, ecap) in [
        (Mode::Legacy, ECAP & !1),
        (Mode::Scalable, ECAP_SCALABLE & !1),
    ] {
        let model = Model::new(CAP, ecap);
        // The unit's memory begins with garbage, as real memory does.
        let devices = Rc::new(Arena::new(1 << 24).unwrap());
        for word in devices.words(PhysAddr::new(ROOT), 1 << 16).unwrap() {
            word.store(u64::MAX, Ordering::SeqCst);
        }
        let memory = Rc::new(Watched {
            memory: NonCoherent::new(model.memory.clone(), devices),
            mode,
            seen: RefCell::default(),
        });
        let frames = model::frames(&model);
        let options = model::options(mode, Interface::Queue);
        let mut unit = Unit::new(model.clone(), memory.clone(), &frames, &options).unwrap();
        assert_eq!(memory.walk(), Seen::Absent);
        let root = PhysAddr::new(0x5000);
        let levels = Levels::Four;
        let translation = match mode {
            Mode::Legacy => Translation::SecondStage { root, levels },
            Mode::Scalable => Translation::FirstStage { root, levels },
        };
        let device = RequesterId::new(0x20);
        if mode == Mode::Scalable {
            // The unit already walks to the table with the entry of PASID 0.
            let pasid = Pasid::new(1).unwrap();
            let other = DomainId::new(8);
            unit.attach_pasid(device, pasid, other, translation)
                .unwrap();
            assert_eq!(memory.walk(), Seen::Absent);
        }
        memory.seen.take();
        unit.attach(device, DomainId::new(7), translation).unwrap();
        let complete = Seen::Present {
            domain: 7,
            root: 0x5000,
        };
        let seen = memory.seen.take();
        assert_eq!(seen.last(), Some(&complete), "{mode:?}");
        for state in &seen {
            assert!(
                [Seen::Absent, complete].contains(state),
                "{mode:?}: {seen:?}"
            );
        }
        unit.detach(device).unwrap();
        assert_eq!(memory.walk(), Seen::Absent, "{mode:?}");
    }
}
