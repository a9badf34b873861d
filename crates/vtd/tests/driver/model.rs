//! A model of the registers of a unit. It executes the invalidation queue and logs what it sees.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_memory::{Arena, Frames};
use ringfence_types::{PhysAddr, PhysMemory, PhysRange, Registers};
use ringfence_vtd::{Interface, Mode, Options, Unit, UnitError};

/// CAP_REG of a unit with 2^16 domains, tables of three and four levels, page-selective
/// invalidation up to 2^9 pages, four fault records at 0x400, and write buffer flush and caching
/// mode as below.
pub(crate) const CAP: u64 = 0x0009_0380_4026_0606;
pub(crate) const RWBF: u64 = 1 << 4;
pub(crate) const CM: u64 = 1 << 7;
pub(crate) const PSI: u64 = 1 << 39;
/// ECAP_REG: coherent, queue, pass-through, IOTLB registers at 0x100.
pub(crate) const ECAP: u64 = 0x1043;
/// Scalable mode with both stages, PASIDs of 16 bits.
pub(crate) const ECAP_SCALABLE: u64 = ECAP | 1 << 43 | 1 << 46 | 1 << 47 | 1 << 40 | 15 << 35;

pub(crate) const GCMD: u64 = 0x18;
const GSTS: u64 = 0x1c;
pub(crate) const RTADDR: u64 = 0x20;
pub(crate) const CCMD: u64 = 0x28;
pub(crate) const FSTS: u64 = 0x34;
const IQH: u64 = 0x80;
pub(crate) const IQT: u64 = 0x88;
pub(crate) const IQA: u64 = 0x90;
pub(crate) const IVA: u64 = 0x100;
pub(crate) const IOTLB: u64 = 0x108;
const FRCD: u64 = 0x400;
const RECORDS: u64 = 4;

const QIE: u32 = 1 << 26;
const IQE: u32 = 1 << 4;
const ONE_SHOT: u32 = 1 << 27 | 1 << 29;

/// An event at the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Write(u64, u64),
    Descriptor([u64; 2]),
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) memory: Rc<Arena>,
    cap: u64,
    ecap: u64,
    pub(crate) gsts: Cell<u32>,
    pub(crate) fsts: Cell<u32>,
    pub(crate) records: RefCell<[[u64; 2]; RECORDS as usize]>,
    iqa: Cell<u64>,
    iqh: Cell<u64>,
    iqt: Cell<u64>,
    pub(crate) context_command: Cell<u64>,
    pub(crate) iotlb_command: Cell<u64>,
    /// Reads of IOTLB_REG until the command under way is done.
    pub(crate) iotlb_busy_reads: Cell<u32>,
    pub(crate) events: RefCell<Vec<Event>>,
    /// Bits of GCMD that GSTS does not show yet.
    pub(crate) late: Cell<u32>,
    /// Writes do not clear FSTS.
    pub(crate) keeps_status: Cell<bool>,
    /// The unit executes nothing.
    pub(crate) is_stalled: Cell<bool>,
    /// No unit answers: all registers read as ones.
    pub(crate) is_absent: Cell<bool>,
    /// The unit stops with an error at this descriptor word.
    pub(crate) bad: Cell<Option<u64>>,
}

impl Model {
    pub(crate) fn new(cap: u64, ecap: u64) -> Rc<Self> {
        Rc::new(Self {
            memory: Rc::new(Arena::new(1 << 24).unwrap()),
            cap,
            ecap,
            gsts: Cell::default(),
            fsts: Cell::default(),
            records: RefCell::default(),
            iqa: Cell::default(),
            iqh: Cell::default(),
            iqt: Cell::default(),
            context_command: Cell::default(),
            iotlb_command: Cell::default(),
            iotlb_busy_reads: Cell::default(),
            events: RefCell::default(),
            late: Cell::default(),
            keeps_status: Cell::default(),
            is_stalled: Cell::default(),
            is_absent: Cell::default(),
            bad: Cell::default(),
        })
    }

    /// Returns the events since the last call.
    pub(crate) fn take(&self) -> Vec<Event> {
        self.events.take()
    }

    /// Returns the descriptors since the last call, without the last one, which must be a wait.
    pub(crate) fn take_commands(&self) -> Vec<[u64; 2]> {
        let events = self.take().into_iter();
        let mut found: Vec<_> = events
            .filter_map(|event| match event {
                Event::Descriptor(words) => Some(words),
                Event::Write(..) => None,
            })
            .collect();
        let last = found.pop().map(|[low, _]| low & 0xffff_ffff);
        assert!(last.is_none_or(|low| low == 0x25), "{found:x?}");
        found
    }

    fn descriptor_bytes(&self) -> u64 {
        if self.iqa.get() & 1 << 11 == 0 {
            16
        } else {
            32
        }
    }

    /// Executes the queue.
    pub(crate) fn run(&self) {
        let bytes = self.descriptor_bytes();
        while self.iqh.get() != self.iqt.get() {
            let stopped = self.fsts.get() & IQE != 0 || self.gsts.get() & QIE == 0;
            if stopped || self.is_stalled.get() {
                return;
            }
            let at = PhysAddr::new(self.iqa.get() & !0xfff).wrapping_add(self.iqh.get());
            let words = self.memory.words(at, (bytes / 8) as usize).unwrap();
            let words: Vec<_> = words.iter().map(|w| w.load(Ordering::SeqCst)).collect();
            assert!(words[2..].iter().all(|word| *word == 0), "reserved");
            if self.bad.get() == Some(words[0]) {
                self.fsts.set(self.fsts.get() | IQE);
                return;
            }
            self.execute([words[0], words[1]]);
            self.iqh.set((self.iqh.get() + bytes) % 4096);
        }
    }

    fn execute(&self, words: [u64; 2]) {
        self.events.borrow_mut().push(Event::Descriptor(words));
        // A wait with status write.
        if words[0] & 0x2f == 0x25 {
            let status = self.memory.word(PhysAddr::new(words[1] & !3)).unwrap();
            status.store(words[0] >> 32, Ordering::SeqCst);
        }
    }

    fn read(&self, offset: u64) -> u64 {
        if self.is_absent.get() {
            return u64::MAX;
        }
        let record = offset.wrapping_sub(FRCD);
        match offset {
            0x08 => self.cap,
            0x10 => self.ecap,
            GSTS => self.gsts.get().into(),
            FSTS => self.fault_status().into(),
            CCMD => self.context_command.get(),
            IOTLB => self.read_iotlb(),
            IQH => self.iqh.get(),
            IQT => self.iqt.get(),
            _ if record < RECORDS * 16 => {
                self.records.borrow()[(record / 16) as usize][(record / 8 % 2) as usize]
            }
            _ => panic!("read of {offset:x}"),
        }
    }

    fn read_iotlb(&self) -> u64 {
        if let Some(left) = self.iotlb_busy_reads.get().checked_sub(1) {
            self.iotlb_busy_reads.set(left);
            if left == 0 {
                // IVT is clear, and the unit performed a global invalidation.
                self.iotlb_command.set(1 << 57);
            }
        }
        self.iotlb_command.get()
    }

    /// PPF is set while a record is valid.
    fn fault_status(&self) -> u32 {
        let records = self.records.borrow();
        let pending = records.iter().any(|[_, high]| high >> 63 != 0);
        self.fsts.get() & !2 | u32::from(pending) << 1
    }

    fn write(&self, offset: u64, value: u64) {
        if self.is_absent.get() {
            return;
        }
        self.events.borrow_mut().push(Event::Write(offset, value));
        let record = offset.wrapping_sub(FRCD);
        match offset {
            GCMD if self.is_stalled.get() => {}
            GCMD => self.command(value as u32),
            RTADDR | IVA => {}
            FSTS if self.keeps_status.get() => {}
            FSTS => {
                self.fsts.set(self.fsts.get() & !(value as u32));
                self.run();
            }
            // The unit performs what was asked: the actual granularity.
            CCMD => self
                .context_command
                .set(value & !(1 << 63) | (value >> 61 & 3) << 59),
            IOTLB => self
                .iotlb_command
                .set(value & !(1 << 63) | (value >> 60 & 3) << 57),
            IQT => {
                assert_eq!(value % self.descriptor_bytes(), 0);
                self.iqt.set(value);
                self.run();
            }
            IQA => {
                self.iqa.set(value);
                self.iqh.set(0);
            }
            _ if record < RECORDS * 16 && record % 16 == 8 => {
                let record = &mut self.records.borrow_mut()[(record / 16) as usize];
                record[1] &= !(value & 1 << 63);
            }
            _ => panic!("write of {offset:x}"),
        }
    }

    fn command(&self, value: u32) {
        if self.gsts.get() & QIE == 0 && value & QIE != 0 {
            self.iqh.set(0);
        }
        // RTPS stays set once the unit has taken a root table over.
        let taken = self.gsts.get() & 1 << 30;
        self.gsts.set(value & !ONE_SHOT & !self.late.get() | taken);
    }
}

impl Registers for Model {
    fn read32(&self, offset: u64) -> u32 {
        self.read(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.read(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, value.into());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, value);
    }
}

pub(crate) type ModelFrames = Frames<Rc<Arena>>;
pub(crate) type ModelUnit<'f> = Unit<Rc<Model>, Rc<Arena>, &'f ModelFrames>;

pub(crate) fn frames(model: &Model) -> ModelFrames {
    let region = PhysRange::new(PhysAddr::new(0x10_0000), 1 << 20).unwrap();
    Frames::new(model.memory.clone(), region)
}

pub(crate) const fn options(mode: Mode, interface: Interface) -> Options {
    Options {
        mode,
        interface,
        poll_limit: 100,
    }
}

pub(crate) fn start<'f>(
    model: &Rc<Model>,
    frames: &'f ModelFrames,
    mode: Mode,
) -> Result<ModelUnit<'f>, UnitError> {
    let options = options(mode, Interface::Queue);
    Unit::new(model.clone(), model.memory.clone(), frames, &options)
}

/// Returns the words of memory from `at`.
pub(crate) fn words<const N: usize>(model: &Model, at: u64) -> [u64; N] {
    let words = model.memory.words(PhysAddr::new(at), N).unwrap();
    std::array::from_fn(|index| words[index].load(Ordering::SeqCst))
}
