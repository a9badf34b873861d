//! A model of a unit: registers, caches and the command processor, written from specification 48882
//! and not from the driver. It stops at a command with a reserved bit, as section 2.4 demands.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_memory::Arena;
use ringfence_types::{Access, PhysAddr, PhysMemory, Registers, RequesterId};

pub(crate) const DEVICE_TABLE_BASE: u64 = 0x0;
pub(crate) const COMMAND_BUFFER_BASE: u64 = 0x8;
pub(crate) const EVENT_LOG_BASE: u64 = 0x10;
pub(crate) const CONTROL: u64 = 0x18;
pub(crate) const FEATURE: u64 = 0x30;
pub(crate) const COMMAND_HEAD: u64 = 0x2000;
pub(crate) const COMMAND_TAIL: u64 = 0x2008;
pub(crate) const EVENT_HEAD: u64 = 0x2010;
pub(crate) const EVENT_TAIL: u64 = 0x2018;
pub(crate) const STATUS: u64 = 0x2020;

pub(crate) const IOMMU_EN: u64 = 1;
pub(crate) const EVENT_LOG_EN: u64 = 1 << 2;
pub(crate) const COMMAND_BUFFER_EN: u64 = 1 << 12;
pub(crate) const OVERFLOW: u64 = 1;
const EVENT_INT: u64 = 1 << 1;
pub(crate) const EVENT_RUN: u64 = 1 << 3;
pub(crate) const COMMAND_RUN: u64 = 1 << 4;

pub(crate) const POINTER: u64 = 0x000f_ffff_ffff_f000;
/// Tag of a cached translation: domain, guest table, page number.
type Tag = (u16, bool, u64);

/// The command processor's treatment of new commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processor {
    /// Executes them at once.
    Prompt,
    /// Executes them when [`Model::execute`] is called.
    Manual,
    /// Does nothing, though it reports to run.
    Hung,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) registers: BTreeMap<u64, u64>,
    pub(crate) processor: Processor,
    /// The status bits that never change to what control demands.
    pub(crate) stuck: u64,
    /// The unit caches pages that are not present.
    pub(crate) np_cache: bool,
    /// The commands that were executed.
    pub(crate) executed: Vec<[u64; 2]>,
    /// Writes of the tail register of the command buffer.
    pub(crate) doorbells: u32,
    /// Reads and writes of any register.
    pub(crate) accesses: u32,
    entries: BTreeMap<u16, [u64; 4]>,
    pages: BTreeMap<Tag, Option<u64>>,
    directories: BTreeMap<Tag, u64>,
}

#[derive(Debug)]
pub(crate) struct Model {
    memory: Rc<Arena>,
    state: RefCell<State>,
}

impl Model {
    pub(crate) fn new(memory: Rc<Arena>, feature: u64, np_cache: bool) -> Rc<Self> {
        let state = State {
            registers: BTreeMap::from([(FEATURE, feature)]),
            processor: Processor::Prompt,
            stuck: 0,
            np_cache,
            executed: Vec::new(),
            doorbells: 0,
            accesses: 0,
            entries: BTreeMap::new(),
            pages: BTreeMap::new(),
            directories: BTreeMap::new(),
        };
        Rc::new(Self {
            memory,
            state: RefCell::new(state),
        })
    }

    pub(crate) fn state(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.borrow_mut());
    }

    pub(crate) fn register(&self, offset: u64) -> u64 {
        self.state().registers.get(&offset).copied().unwrap_or(0)
    }

    pub(crate) fn set(&self, offset: u64, value: u64) {
        self.change(|state| {
            state.registers.insert(offset, value);
        });
    }

    /// Executes `most` commands, or all up to the tail.
    pub(crate) fn execute(&self, most: usize) {
        for _ in 0..most {
            let head = self.register(COMMAND_HEAD);
            let running = self.register(STATUS) & COMMAND_RUN != 0;
            if !running || head == self.register(COMMAND_TAIL) {
                return;
            }
            let base = self.register(COMMAND_BUFFER_BASE);
            let bytes = 16 << (base >> 56 & 0xf);
            let command = [head, head + 8].map(|at| self.load((base & POINTER) + at));
            if !self.command(command) {
                // The head stays at the illegal command.
                self.set(STATUS, self.register(STATUS) & !COMMAND_RUN);
                self.log([5 << 60, (base & POINTER) + head]);
                return;
            }
            self.change(|state| state.executed.push(command));
            self.set(COMMAND_HEAD, (head + 16) % bytes);
        }
    }

    fn command(&self, [first, second]: [u64; 2]) -> bool {
        let mut state = self.state.borrow_mut();
        match first >> 60 {
            1 if first & 0x0ff0_0000_0000_0000 == 0 => {
                if first & 1 != 0 {
                    self.store(first & 0x000f_ffff_ffff_fff8, second);
                }
            }
            2 if first & 0x0fff_ffff_ffff_0000 == 0 && second == 0 => {
                state.entries.remove(&(first as u16));
            }
            3 if first & 0x0fff_0000_fff0_0000 == 0 && second & 0xff8 == 0 => {
                let (domain, guest) = ((first >> 32) as u16, second & 4 != 0);
                let (lo, hi) = invalidated(second);
                let covers = |&(of, kind, page): &Tag| {
                    of == domain && kind == guest && (lo..=hi).contains(&page)
                };
                state.pages.retain(|tag, _| !covers(tag));
                if second & 2 != 0 {
                    // Directories cover 512 pages.
                    state.directories.retain(|&(of, kind, index), _| {
                        !(of == domain && kind == guest && (lo >> 9..=hi >> 9).contains(&index))
                    });
                }
            }
            8 if first << 4 == 0 && second == 0 => {
                state.entries.clear();
                state.pages.clear();
                state.directories.clear();
            }
            _ => return false,
        }
        true
    }

    /// Adds a record to the event log, or sets EventOverflow.
    pub(crate) fn log(&self, record: [u64; 2]) {
        let status = self.register(STATUS);
        if status & EVENT_RUN == 0 {
            return;
        }
        let base = self.register(EVENT_LOG_BASE);
        let bytes = 16 << (base >> 56 & 0xf);
        let tail = self.register(EVENT_TAIL);
        let next = (tail + 16) % bytes;
        if next == self.register(EVENT_HEAD) {
            self.set(STATUS, status & !EVENT_RUN | OVERFLOW);
            return;
        }
        self.store((base & POINTER) + tail, record[0]);
        self.store((base & POINTER) + tail + 8, record[1]);
        self.set(EVENT_TAIL, next);
        self.set(STATUS, status | EVENT_INT);
    }

    /// An access of a device: the physical address, or `None` if it is stopped.
    pub(crate) fn access(
        &self,
        device: RequesterId,
        iova: u64,
        access: Access,
    ) -> Option<PhysAddr> {
        if self.register(CONTROL) & IOMMU_EN == 0 {
            return Some(PhysAddr::new(iova));
        }
        let entry = self.entry(device)?;
        let fault = |present: u64| {
            let write = u64::from(access == Access::Write) << 53;
            let domain = (entry[1] & 0xffff) << 32;
            let id = u64::from(device.get());
            self.log([2 << 60 | write | present << 52 | domain | id, iova]);
        };
        assert_eq!(entry[0] & 3, 3, "an entry without V and TV");
        let guest = entry[0] >> 55 & 1 != 0;
        if entry[0] >> 9 & 7 == 0 && !guest {
            return match entry[0] >> 61 & 3 {
                3 => Some(PhysAddr::new(iova)),
                _ => {
                    fault(0);
                    None
                }
            };
        }
        let allowed = match (self.page(&entry, guest, iova), access) {
            (None, _) => {
                fault(0);
                return None;
            }
            (Some(page), Access::Read) => (page, page >> 61 & 1),
            (Some(page), Access::Write) => (page, page >> 62 & 1),
        };
        if allowed.1 == 0 {
            fault(1);
            return None;
        }
        Some(PhysAddr::new(allowed.0 & POINTER | iova & 0xfff))
    }

    /// The entry of a device, from the cache or from memory. An id beyond the table is stopped.
    fn entry(&self, device: RequesterId) -> Option<[u64; 4]> {
        if let Some(entry) = self.state().entries.get(&device.get()) {
            return Some(*entry);
        }
        let base = self.register(DEVICE_TABLE_BASE);
        let offset = u64::from(device.get()) * 32;
        if offset >= ((base & 0x1ff) + 1) << 12 {
            self.log([1 << 60 | u64::from(device.get()), 0]);
            return None;
        }
        let at = (base & POINTER) + offset;
        let entry = [0, 8, 16, 24].map(|word| self.load(at + word));
        self.change(|state| {
            state.entries.insert(device.get(), entry);
        });
        Some(entry)
    }

    /// The page of 4 KiB at `iova`: its entry with the address of this page, and the bits IR and
    /// IW.
    fn page(&self, entry: &[u64; 4], guest: bool, iova: u64) -> Option<u64> {
        let domain = entry[1] as u16;
        let tag = (domain, guest, iova >> 12);
        if let Some(page) = self.state().pages.get(&tag) {
            return *page;
        }
        let page = match guest {
            false => self.host_walk(entry, domain, iova),
            true => self.guest_walk(entry, domain, iova),
        };
        let cached = page.is_some() || self.state().np_cache;
        if cached {
            self.change(|state| {
                state.pages.insert(tag, page);
            });
        }
        page
    }

    fn host_walk(&self, entry: &[u64; 4], domain: u16, iova: u64) -> Option<u64> {
        let mode = entry[0] >> 9 & 7;
        if mode < 6 && iova >> (12 + 9 * mode) != 0 {
            return None;
        }
        let directory = (domain, false, iova >> 21);
        let known = self.state().directories.get(&directory).copied();
        let (mut level, mut table) = known.map_or((mode, entry[0] & POINTER), |table| (1, table));
        loop {
            let index = iova >> (3 + 9 * level) & 0x1ff;
            let raw = self.load(table + index * 8);
            let next = raw >> 9 & 7;
            match (raw & 1, next) {
                (0, _) => return None,
                (_, 0) => {
                    let below = (1 << (3 + 9 * level)) - 1;
                    return Some(raw & !POINTER | (raw | iova & below) & POINTER);
                }
                (_, 7) => {
                    let below = (1_u64 << (13 + (raw >> 12).trailing_ones())) - 1;
                    return Some(raw & !POINTER | (raw & !below | iova & below) & POINTER);
                }
                _ => (level, table) = (next, raw & POINTER),
            }
            if level == 1 {
                self.change(|state| {
                    state.directories.insert(directory, table);
                });
            }
        }
    }

    fn guest_walk(&self, entry: &[u64; 4], domain: u16, iova: u64) -> Option<u64> {
        assert_eq!(entry[0] >> 54 & 1, 1, "requests without a PASID need GIOV");
        let gcr3 =
            (entry[0] >> 58 & 7) << 12 | (entry[1] >> 16 & 0xffff) << 15 | (entry[1] >> 43) << 31;
        let root = self.load(gcr3);
        assert_eq!(root & 1, 1, "PASID 0 is not valid");
        let five = entry[2] >> 54 & 3 == 1;
        let directory = (domain, true, iova >> 21);
        let mut table = root & POINTER;
        for level in (1..=if five { 5 } else { 4 }).rev() {
            let raw = self.load(table + (iova >> (3 + 9 * level) & 0x1ff) * 8);
            if raw & 1 == 0 {
                return None;
            }
            if level == 1 {
                self.change(|state| {
                    state.directories.insert(directory, table);
                });
                return Some(raw & POINTER | 1 << 61 | (raw >> 1 & 1) << 62);
            }
            table = raw & POINTER;
        }
        None
    }

    fn load(&self, at: u64) -> u64 {
        let word = self.memory.word(PhysAddr::new(at)).expect("memory");
        word.load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, at: u64, value: u64) {
        let word = self.memory.word(PhysAddr::new(at)).expect("memory");
        word.store(value, Ordering::Release);
    }

    fn read(&self, offset: u64) -> u64 {
        self.change(|state| state.accesses += 1);
        self.register(offset)
    }

    fn write(&self, offset: u64, value: u64) {
        self.change(|state| state.accesses += 1);
        let running = self.register(STATUS);
        match offset {
            STATUS => self.set(STATUS, running & !(value & (OVERFLOW | EVENT_INT))),
            CONTROL => {
                let before = self.register(CONTROL);
                self.set(CONTROL, value);
                self.control(before, value);
            }
            COMMAND_BUFFER_BASE | EVENT_LOG_BASE | DEVICE_TABLE_BASE => {
                let run = match offset {
                    COMMAND_BUFFER_BASE => running & COMMAND_RUN,
                    EVENT_LOG_BASE => running & EVENT_RUN,
                    _ => self.register(CONTROL) & IOMMU_EN,
                };
                assert_eq!(run, 0, "the base {offset:#x} changes while it is in use");
                self.set(offset, value);
            }
            COMMAND_TAIL => {
                self.set(offset, value);
                self.change(|state| state.doorbells += 1);
                if self.state().processor == Processor::Prompt {
                    self.execute(usize::MAX);
                }
            }
            _ => self.set(offset, value),
        }
    }

    /// Starts and stops the command buffer and the event log.
    fn control(&self, before: u64, value: u64) {
        let mut status = self.register(STATUS);
        for (enable, run) in [(EVENT_LOG_EN, EVENT_RUN), (COMMAND_BUFFER_EN, COMMAND_RUN)] {
            let on = value & enable != 0 && value & IOMMU_EN != 0;
            let rises = on && (before & enable == 0 || before & IOMMU_EN == 0);
            let full = run == EVENT_RUN && status & OVERFLOW != 0;
            if self.state().stuck & run != 0 {
                continue;
            }
            if !on {
                status &= !run;
            } else if rises && !full {
                status |= run;
            }
        }
        self.set(STATUS, status);
    }
}

/// The pages that the second word of INVALIDATE_IOMMU_PAGES names.
pub(crate) fn invalidated(word: u64) -> (u64, u64) {
    let page = word >> 12;
    if word & 1 == 0 {
        return (page, page);
    }
    // The lowest zero of the address, from bit 12 up, is the highest bit below the size.
    let pages = 2_u64 << page.trailing_ones();
    if page.trailing_ones() >= 51 {
        return (0, u64::MAX >> 12);
    }
    (page & !(pages - 1), page | (pages - 1))
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
