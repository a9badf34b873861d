//! A model of a unit: registers, command queue and event queue, written from IHI 0070 and not from
//! the driver. It stops at a command with a reserved bit, as section 4.1.2 allows.
//!
//! A command takes effect at the next `CMD_SYNC` and not before. Commands between two `CMD_SYNC`s
//! take effect in reverse order, with accesses of devices between them: section 4.1.4 promises no
//! order.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_memory::Arena;
use ringfence_types::{PhysAddr, PhysMemory, Registers};

use crate::caches::Caches;

pub(crate) const IDR0: u64 = 0x0;
pub(crate) const IDR1: u64 = 0x4;
pub(crate) const IDR3: u64 = 0xc;
pub(crate) const IDR5: u64 = 0x14;
pub(crate) const CR0: u64 = 0x20;
pub(crate) const CR0ACK: u64 = 0x24;
pub(crate) const CR1: u64 = 0x28;
pub(crate) const CR2: u64 = 0x2c;
pub(crate) const GBPA: u64 = 0x44;
pub(crate) const IRQ_CTRL: u64 = 0x50;
pub(crate) const GERROR: u64 = 0x60;
pub(crate) const GERRORN: u64 = 0x64;
pub(crate) const STRTAB_BASE: u64 = 0x80;
pub(crate) const STRTAB_BASE_CFG: u64 = 0x88;
pub(crate) const CMDQ_BASE: u64 = 0x90;
pub(crate) const CMDQ_PROD: u64 = 0x98;
pub(crate) const CMDQ_CONS: u64 = 0x9c;
pub(crate) const EVENTQ_BASE: u64 = 0xa0;
pub(crate) const EVENTQ_PROD: u64 = 0x1_00a8;
pub(crate) const EVENTQ_CONS: u64 = 0x1_00ac;

pub(crate) const SMMUEN: u64 = 1;
pub(crate) const EVENTQEN: u64 = 1 << 2;
pub(crate) const CMDQEN: u64 = 1 << 3;
pub(crate) const ABORT: u64 = 1 << 20;
const UPDATE: u64 = 1 << 31;
const CMDQ_ERR: u64 = 1;
/// Bit of an overflow in `EVENTQ_PROD`.
const OVFLG: u64 = 1 << 31;

/// SCALE and NUM.
const RANGE: u64 = 0x1f1_f000;

/// The unit's treatment of new commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processor {
    /// Consumes them at once.
    Prompt,
    /// Consumes one at some reads of `CMDQ_CONS`.
    Slow,
    /// Consumes them when [`Model::execute`] is called.
    Manual,
}

/// A consumed command, and the contents of the stream table entry that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Executed {
    pub(crate) command: [u64; 2],
    pub(crate) entry: Option<[u64; 8]>,
    /// Contents of the context descriptor that `entry` names.
    pub(crate) context: Option<[u64; 8]>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) registers: BTreeMap<u64, u64>,
    pub(crate) processor: Processor,
    /// The registers that do not confirm what is written.
    pub(crate) stuck: Vec<u64>,
    pub(crate) executed: Vec<Executed>,
    /// Writes of `CMDQ_PROD` while the queue runs.
    pub(crate) doorbells: u32,
    /// Reads and writes of any register.
    pub(crate) accesses: u32,
    /// Accesses that devices make between any two commands: stream and address.
    pub(crate) traffic: Vec<(u32, u64)>,
    /// Commands that the unit consumes before it hangs.
    pub(crate) budget: usize,
    /// Consumed commands that have not taken effect.
    waiting: Vec<[u64; 2]>,
    pub(crate) caches: Caches,
}

#[derive(Debug)]
pub(crate) struct Model {
    memory: Rc<Arena>,
    state: RefCell<State>,
}

impl Model {
    pub(crate) fn new(memory: Rc<Arena>, identification: [u64; 4]) -> Rc<Self> {
        let registers = [IDR0, IDR1, IDR3, IDR5].into_iter().zip(identification);
        let state = State {
            registers: registers.collect(),
            processor: Processor::Prompt,
            stuck: Vec::new(),
            executed: Vec::new(),
            doorbells: 0,
            accesses: 0,
            traffic: Vec::new(),
            budget: usize::MAX,
            waiting: Vec::new(),
            caches: Caches::default(),
        };
        Rc::new(Self {
            memory,
            state: RefCell::new(state),
        })
    }

    pub(crate) fn state(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    pub(crate) fn change(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    pub(crate) fn register(&self, offset: u64) -> u64 {
        self.state().registers.get(&offset).copied().unwrap_or(0)
    }

    pub(crate) fn set(&self, offset: u64, value: u64) {
        self.change().registers.insert(offset, value);
    }

    /// A word of memory as the unit sees it.
    pub(crate) fn load(&self, at: u64) -> u64 {
        let memory = match self.memory.device_view() {
            Some(view) => view.memory(),
            None => &*self.memory,
        };
        let word = memory.word(PhysAddr::new(at)).unwrap();
        word.load(Ordering::Acquire)
    }

    pub(crate) fn words<const N: usize>(&self, at: u64) -> [u64; N] {
        std::array::from_fn(|index| self.load(at + 8 * index as u64))
    }

    fn is_enabled(&self, field: u64) -> bool {
        self.register(CR0ACK) & field != 0
    }

    pub(crate) fn has_failed(&self) -> bool {
        (self.register(GERROR) ^ self.register(GERRORN)) & CMDQ_ERR != 0
    }

    /// Raises an error, if it is not active.
    pub(crate) fn raise(&self, error: u64) {
        let active = (self.register(GERROR) ^ self.register(GERRORN)) & error;
        let old = self.register(GERROR);
        self.set(GERROR, old ^ (error & !active));
    }

    /// Consumes at most `most` commands.
    pub(crate) fn execute(&self, most: usize) {
        let log2 = self.register(CMDQ_BASE) & 0x1f;
        let base = self.register(CMDQ_BASE) & 0x00ff_ffff_ffff_ffe0;
        let wrap = (2 << log2) - 1;
        for _ in 0..most {
            let index = self.register(CMDQ_CONS) & wrap;
            if !self.is_enabled(CMDQEN) || self.has_failed() || self.state().budget == 0 {
                return;
            }
            if index == self.register(CMDQ_PROD) & wrap {
                return;
            }
            self.change().budget -= 1;
            let slot = index & ((1 << log2) - 1);
            let command = self.words(base + 16 * slot);
            if !self.consume(command) {
                // CERROR_ILL.
                self.set(CMDQ_CONS, index | 1 << 24);
                self.raise(CMDQ_ERR);
                return;
            }
            self.set(CMDQ_CONS, (index + 1) & wrap);
        }
    }

    /// Returns false if the command is illegal.
    fn consume(&self, command: [u64; 2]) -> bool {
        if !is_legal(command, self.register(IDR0), self.register(IDR3)) {
            return false;
        }
        let entry = (command[0] & 0xff == 3).then(|| self.entry_in_memory(command[0] >> 32));
        let entry = entry.flatten();
        let context = entry.filter(|entry| entry[0] >> 1 & 7 == 5);
        let context = context.map(|entry| self.words(entry[0] & 0x00ff_ffff_ffff_ffc0));
        self.change().executed.push(Executed {
            command,
            entry,
            context,
        });
        if command[0] & 0xff != 0x46 {
            self.change().waiting.push(command);
            return true;
        }
        let waiting = std::mem::take(&mut self.change().waiting);
        for command in waiting.into_iter().rev() {
            self.change().caches.invalidate(command);
            let traffic = self.state().traffic.clone();
            for (stream, iova) in traffic {
                let _ = self.translate(stream, iova, false);
            }
        }
        true
    }

    /// Appends a record, or sets the overflow flag.
    pub(crate) fn record(&self, record: [u64; 4]) {
        if !self.is_enabled(EVENTQEN) {
            return;
        }
        let base = self.register(EVENTQ_BASE);
        let (log2, at) = (base & 0x1f, base & 0x00ff_ffff_ffff_ffe0);
        let wrap = (2 << log2) - 1;
        let (producer, consumer) = (self.register(EVENTQ_PROD), self.register(EVENTQ_CONS));
        if (producer ^ consumer) & wrap == 1 << log2 {
            // An overflow that is not acknowledged stays one.
            if (producer ^ consumer) & OVFLG == 0 {
                self.set(EVENTQ_PROD, producer ^ OVFLG);
            }
            return;
        }
        let slot = producer & ((1 << log2) - 1);
        for (index, word) in record.into_iter().enumerate() {
            let at = PhysAddr::new(at + 32 * slot + 8 * index as u64);
            let word_at = self.memory.word(at).unwrap();
            word_at.store(word, Ordering::Release);
            if let Some(view) = self.memory.device_view() {
                let word_at = view.memory().word(at).unwrap();
                word_at.store(word, Ordering::Release);
            }
        }
        self.set(EVENTQ_PROD, producer & OVFLG | (producer + 1) & wrap);
    }

    fn written(&self, offset: u64, value: u64) {
        let is_stuck = self.state().stuck.contains(&offset);
        match offset {
            CR0 | IRQ_CTRL if !is_stuck => self.set(offset + 4, value),
            GBPA if !is_stuck => self.set(GBPA, value & !UPDATE),
            CMDQ_PROD if self.is_enabled(CMDQEN) => self.change().doorbells += 1,
            _ => {}
        }
        if self.state().processor == Processor::Prompt {
            self.execute(usize::MAX);
        }
    }
}

/// Checks the reserved bits of a command (chapter 4).
fn is_legal([first, second]: [u64; 2], idr0: u64, idr3: u64) -> bool {
    let (stage1, stage2, ranges) = (idr0 & 2 != 0, idr0 & 1 != 0, idr3 >> 10 & 1 != 0);
    let vmid = if stage2 { 0xffff << 32 } else { 0 };
    let (tg, scale_and_num) = (second >> 10 & 3, first & RANGE);
    let is_address_legal = second & 0x3fe == 0
        && match (tg, ranges) {
            (0, _) => scale_and_num == 0,
            (_, true) => scale_and_num != 0,
            (_, false) => false,
        };
    match first & 0xff {
        // CFGI_STE, CFGI_CD: SSec must be 0.
        3 => first & 0xffff_ff00 == 0 && second <= 1,
        5 => first & 0xffff_ff00 == 0 && second <= 1,
        // CFGI_STE_RANGE, CFGI_ALL.
        4 => first & 0xffff_ff00 == 0 && second <= 31,
        // NH_ALL, NH_ASID, NH_VA.
        0x10 => stage1 && first & !(0xff | vmid) == 0 && second == 0,
        0x11 => stage1 && first & !(0xff | vmid | 0xffff << 48) == 0 && second == 0,
        0x12 => stage1 && is_address_legal && first & !(0xff | vmid | 0xffff << 48 | RANGE) == 0,
        // S12_VMALL, S2_IPA.
        0x28 => stage2 && first & !(0xff | vmid) == 0 && second == 0,
        0x2a => {
            stage2 && is_address_legal && first & !(0xff | vmid | RANGE) == 0 && second >> 56 == 0
        }
        0x30 => first == 0x30 && second == 0,
        0x46 => first == 0x46 && second == 0,
        _ => false,
    }
}

impl Registers for Model {
    fn read32(&self, offset: u64) -> u32 {
        self.change().accesses += 1;
        let is_slow = self.state().processor == Processor::Slow;
        if is_slow && offset == CMDQ_CONS && self.state().accesses.is_multiple_of(4) {
            self.execute(1);
        }
        self.register(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.change().accesses += 1;
        self.register(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write64(offset, value.into());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.change().accesses += 1;
        self.set(offset, value);
        self.written(offset, value);
    }
}
