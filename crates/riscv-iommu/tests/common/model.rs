//! The registers and the queues.

use std::cell::RefCell;

use ringfence_memory::Arena;
use ringfence_types::{PhysAddr, PhysMemory, Registers};
use std::sync::atomic::Ordering;

use super::cache::Caches;

const ON: u32 = 1 << 16;
const BUSY: u32 = 1 << 17;
const MEMORY_FAULT: u32 = 1 << 8;
const OVERFLOW: u32 = 1 << 9;
const CMD_TO: u32 = 1 << 9;
const CMD_ILL: u32 = 1 << 10;
const FENCE_W_IP: u32 = 1 << 11;
const PPN: u64 = 0x003f_ffff_ffff_fc00;

/// Errors of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    Normal,
    /// All registers read as all ones.
    Absent,
    /// Commands are not executed.
    Stuck,
    /// The register at the offset stays busy.
    Busy(u64),
    /// The queue whose register is at the offset does not turn on.
    Off(u64),
    /// The queue whose register is at the offset does not turn off. Commands are not executed.
    StaysOn(u64),
    /// The base register of the queue with this number keeps its value.
    KeepsBase(usize),
    /// Writes do not clear the bits of lost records.
    KeepsLosses,
    /// The unit cannot read commands.
    CannotRead,
    /// Invalidations of device TLBs time out.
    DeviceTimesOut,
}

#[derive(Debug)]
pub struct State {
    pub capabilities: u64,
    pub fctl: u32,
    pub fctl_writable: u32,
    pub ddtp: u64,
    /// Bit per mode of `ddtp` that the unit takes.
    pub modes: u8,
    pub csr: [u32; 3],
    pub base: [u64; 3],
    pub head: [u32; 3],
    pub tail: [u32; 3],
    pub ipsr: u32,
    pub behaviour: Behaviour,
    /// Commands in the order of their execution.
    pub log: Vec<[u64; 2]>,
    /// Writes of `cqt` while the queue is on.
    pub doorbells: u32,
    /// Writes that the specification leaves undefined.
    pub misuse: Vec<String>,
    pub caches: Caches,
    timed_out: bool,
}

pub struct Model<'a> {
    pub memory: &'a Arena,
    /// The uncached view of CPUs, if they do not share `memory`.
    pub mirror: Option<&'a Arena>,
    pub state: RefCell<State>,
}

/// Queue numbers: commands, faults, page requests.
pub const CQ: usize = 0;
pub const FQ: usize = 1;
pub const PQ: usize = 2;

impl<'a> Model<'a> {
    pub fn new(memory: &'a Arena, capabilities: u64) -> Self {
        Self {
            memory,
            mirror: None,
            state: RefCell::new(State {
                capabilities,
                fctl: 0,
                fctl_writable: 0,
                ddtp: 1,
                modes: 0b11111,
                csr: [0; 3],
                base: [0; 3],
                head: [0; 3],
                tail: [0; 3],
                ipsr: 0,
                behaviour: Behaviour::Normal,
                log: Vec::new(),
                doorbells: 0,
                misuse: Vec::new(),
                caches: Caches::default(),
                timed_out: false,
            }),
        }
    }

    pub fn behave(&self, behaviour: Behaviour) {
        self.state.borrow_mut().behaviour = behaviour;
    }

    /// Removes and returns the log.
    pub fn take_log(&self) -> Vec<[u64; 2]> {
        std::mem::take(&mut self.state.borrow_mut().log)
    }

    pub fn doorbells(&self) -> u32 {
        std::mem::take(&mut self.state.borrow_mut().doorbells)
    }

    pub fn load(&self, at: u64) -> u64 {
        let word = self.memory.word(PhysAddr::new(at)).unwrap();
        word.load(Ordering::SeqCst)
    }

    fn store(&self, at: u64, value: u64) {
        for memory in [Some(self.memory), self.mirror].into_iter().flatten() {
            let word = memory.word(PhysAddr::new(at)).unwrap();
            word.store(value, Ordering::SeqCst);
        }
    }

    /// Adds a record to the fault or page-request queue, as the unit does.
    pub fn record(&self, queue: usize, words: &[u64]) {
        let mut state = self.state.borrow_mut();
        let mask = mask(state.base[queue]);
        let (head, tail) = (state.head[queue], state.tail[queue]);
        if state.csr[queue] & ON == 0 || state.csr[queue] & (OVERFLOW | MEMORY_FAULT) != 0 {
            return;
        }
        if (tail + 1) & mask == head {
            state.csr[queue] |= OVERFLOW;
            return;
        }
        let base = (state.base[queue] & PPN) << 2;
        for (index, word) in (0..).zip(words) {
            let at = base + u64::from(tail) * words.len() as u64 * 8 + index * 8;
            self.store(at, *word);
        }
        state.tail[queue] = (tail + 1) & mask;
    }

    /// Executes commands until the queue is empty or stops.
    pub fn run(&self) {
        loop {
            let mut state = self.state.borrow_mut();
            let errors = MEMORY_FAULT | CMD_TO | CMD_ILL;
            let is_on = state.csr[CQ] & ON != 0 && state.csr[CQ] & errors == 0;
            let is_stuck = matches!(state.behaviour, Behaviour::Stuck | Behaviour::StaysOn(_));
            if !is_on || is_stuck || state.head[CQ] == state.tail[CQ] {
                return;
            }
            if state.behaviour == Behaviour::CannotRead {
                state.csr[CQ] |= MEMORY_FAULT;
                return;
            }
            let at = ((state.base[CQ] & PPN) << 2) + u64::from(state.head[CQ]) * 16;
            let command = [self.load(at), self.load(at + 8)];
            if !self.execute(&mut state, command) {
                return;
            }
            state.log.push(command);
            state.head[CQ] = (state.head[CQ] + 1) & mask(state.base[CQ]);
        }
    }

    fn execute(&self, state: &mut State, [low, high]: [u64; 2]) -> bool {
        let legal = match low & 0x3ff {
            // IOFENCE.C
            2 => {
                if state.timed_out {
                    state.timed_out = false;
                    state.csr[CQ] |= CMD_TO;
                    return false;
                }
                if low >> 10 & 1 != 0 {
                    let at = high << 2;
                    let old = self.load(at & !7);
                    let shift = (at & 4) * 8;
                    let data = (low >> 32) << shift;
                    self.store(at & !7, old & !(0xffff_ffff << shift) | data);
                }
                if low >> 11 & 1 != 0 {
                    state.csr[CQ] |= FENCE_W_IP;
                    state.ipsr |= 1;
                }
                low >> 11 & 1 == 0 || state.fctl & 2 != 0
            }
            4 | 0x84 => {
                // ATS.PRGR: the device that receives the message is that of the command.
                if low & 0x3ff == 0x84 && high >> 48 != low >> 40 & 0xffff {
                    let (to, rid) = (high >> 48, low >> 40 & 0xffff);
                    state
                        .misuse
                        .push(format!("page response of {rid:#x} to {to:#x}"));
                }
                state.timed_out |= low & 0x3ff == 4 && state.behaviour == Behaviour::DeviceTimesOut;
                state.capabilities >> 25 & 1 != 0
            }
            _ => state.caches.execute(state.capabilities, [low, high]),
        };
        if !legal {
            state.csr[CQ] |= CMD_ILL;
        }
        legal
    }

    fn write_csr(&self, queue: usize, value: u32) {
        let mut state = self.state.borrow_mut();
        let offset = 72 + 4 * queue as u64;
        if state.csr[queue] & BUSY != 0 {
            state
                .misuse
                .push(format!("write of busy register {offset}"));
        }
        let sticky = [
            MEMORY_FAULT | CMD_TO | CMD_ILL | FENCE_W_IP,
            MEMORY_FAULT | OVERFLOW,
            MEMORY_FAULT | OVERFLOW,
        ][queue];
        let was_on = state.csr[queue] & 1 != 0;
        let cleared = match state.behaviour {
            Behaviour::KeepsLosses => 0,
            _ => value,
        };
        let mut csr = state.csr[queue] & sticky & !cleared | value & 3;
        if value & 1 != 0 && state.behaviour != Behaviour::Off(offset) {
            csr |= ON;
        }
        if state.behaviour == Behaviour::StaysOn(offset) {
            csr |= state.csr[queue] & ON;
        }
        if value & 1 != 0 && !was_on {
            csr &= !sticky;
            match queue {
                CQ => state.head[queue] = 0,
                _ => state.tail[queue] = 0,
            }
        }
        state.csr[queue] = csr;
    }

    fn write_ddtp(&self, value: u64) {
        let mut state = self.state.borrow_mut();
        let (old, new) = (state.ddtp & 0xf, value & 0xf);
        if old > 1 && new > 1 {
            state.misuse.push(format!("mode {old} to {new}"));
        }
        // WARL: another mode stands for one that the unit does not support.
        let mode = match state.modes >> new & 1 {
            0 => u64::from(state.modes.ilog2()),
            _ => new,
        };
        state.ddtp = value & PPN | mode;
    }

    fn index(offset: u64) -> (usize, bool) {
        let number = (offset - 24) / 16;
        (number as usize, (offset - 24) % 16 == 8)
    }
}

fn mask(base: u64) -> u32 {
    (2 << (base & 0x1f)) - 1
}

impl Registers for Model<'_> {
    fn read32(&self, offset: u64) -> u32 {
        let state = self.state.borrow();
        if state.behaviour == Behaviour::Absent {
            return u32::MAX;
        }
        let busy = match state.behaviour == Behaviour::Busy(offset) {
            true => BUSY,
            false => 0,
        };
        match offset {
            8 => state.fctl,
            32 | 48 | 64 => state.head[Self::index(offset).0],
            36 | 52 | 68 => state.tail[((offset - 36) / 16) as usize],
            72 | 76 | 80 => state.csr[((offset - 72) / 4) as usize] | busy,
            84 => state.ipsr,
            _ => panic!("read of {offset}"),
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        let state = self.state.borrow();
        if state.behaviour == Behaviour::Absent {
            return u64::MAX;
        }
        match offset {
            0 => state.capabilities,
            16 if state.behaviour == Behaviour::Busy(16) => state.ddtp | 1 << 4,
            16 => state.ddtp,
            24 | 40 | 56 => state.base[Self::index(offset).0],
            _ => panic!("read of {offset}"),
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        match offset {
            8 => {
                let mut state = self.state.borrow_mut();
                if state.ddtp & 0xf != 0 || state.csr.iter().any(|csr| csr & 1 != 0) {
                    state.misuse.push("fctl while on".into());
                }
                let writable = state.fctl_writable;
                state.fctl = state.fctl & !writable | value & writable;
            }
            36 => {
                let mut state = self.state.borrow_mut();
                if state.csr[CQ] & ON != 0 {
                    state.doorbells += 1;
                }
                state.tail[CQ] = value & mask(state.base[CQ]);
                drop(state);
                self.run();
            }
            48 | 64 => {
                let queue = Self::index(offset).0;
                let mut state = self.state.borrow_mut();
                state.head[queue] = value & mask(state.base[queue]);
            }
            72 | 76 | 80 => {
                self.write_csr(((offset - 72) / 4) as usize, value);
                self.run();
            }
            84 => self.state.borrow_mut().ipsr &= !value,
            _ => panic!("write of {offset}"),
        }
    }

    fn write64(&self, offset: u64, value: u64) {
        match offset {
            16 => self.write_ddtp(value),
            24 | 40 | 56 => {
                let queue = Self::index(offset).0;
                let mut state = self.state.borrow_mut();
                if state.csr[queue] & (ON | BUSY) != 0 {
                    state.misuse.push(format!("base {queue} while on"));
                }
                if state.behaviour != Behaviour::KeepsBase(queue) {
                    state.base[queue] = value;
                }
            }
            _ => panic!("write of {offset}"),
        }
    }
}
