//! The hardware of a rig: a memory that walkers may see late, and frames and invalidations that
//! fail on demand.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_devices::{ByteMemory, Unreachable};
use ringfence_hw::{Translate, Translation};
use ringfence_memory::{Arena, Frames, fake::NonCoherent};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Access, Fault, FrameSource, Invalidation, InvalidationError, Invalidator, Iova, MemoryError,
    OutOfFrames, PhysAddr, PhysMemory, PhysRange, RequesterId, TABLE_WORDS, Ticket,
};

use super::rig::TABLES;

const ARENA: u64 = TABLES + (512 << 20);
/// Bytes of memory in which walkers see garbage until the first write-back.
const GARBAGE: u64 = 2 << 20;

/// Memory as CPUs see it. Devices transfer the same bytes. Walkers that do not snoop see only what
/// was written back.
#[derive(Debug)]
pub(crate) struct Memory(NonCoherent<Rc<Arena>>);

impl Memory {
    /// Creates zeroed memory. Walkers that do not snoop see garbage.
    pub(crate) fn new(coherency: Coherency) -> Self {
        let arena = || Rc::new(Arena::new(ARENA).unwrap());
        let (processors, walkers) = (arena(), arena());
        let garbage = match coherency {
            Coherency::Coherent => TABLES..TABLES,
            Coherency::NonCoherent => TABLES..TABLES + GARBAGE,
        };
        for at in garbage.step_by(8) {
            // As an address, it points to buffer memory. As an entry's second word, it is a valid
            // entry of 2^20 bytes for both directions.
            let garbage = 3 << 30 | 1 << 32 | 1 << 20;
            let word = walkers.word(PhysAddr::new(at)).unwrap();
            word.store(garbage, Ordering::Relaxed);
        }
        Self(NonCoherent::new(processors, walkers))
    }

    fn seen(&self, coherency: Coherency) -> &Rc<Arena> {
        match coherency {
            Coherency::Coherent => self.0.processor_view(),
            Coherency::NonCoherent => self.0.device_view(),
        }
    }
}

impl PhysMemory for Memory {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.0.word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.0.table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.0.words(at, count)
    }
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.0.write_back(at, bytes);
    }
    fn drain(&self) {
        self.0.drain();
    }
}

impl ByteMemory for Memory {
    fn read(&self, at: PhysAddr, into: &mut [u8]) -> Result<(), Unreachable> {
        ByteMemory::read(&**self.0.processor_view(), at, into)
    }
    fn write(&self, at: PhysAddr, from: &[u8]) -> Result<(), Unreachable> {
        ByteMemory::write(&**self.0.processor_view(), at, from)
    }
}

/// A failure injector that fails at chosen calls.
#[derive(Debug, Default)]
pub(crate) struct FailureInjector {
    turns: Cell<u64>,
    strikes: Cell<(u64, u64)>,
}

impl FailureInjector {
    /// Lets the next `count` calls succeed, and the `times` calls after them fail.
    pub(crate) fn after(&self, count: u64, times: u64) {
        let first = self.turns.get() + count;
        self.strikes.set((first, first + times));
    }

    pub(crate) fn over(&self) {
        self.strikes.set((0, 0));
    }

    /// Returns the number of calls so far.
    pub(crate) fn turns(&self) -> u64 {
        self.turns.get()
    }

    pub(crate) fn strikes(&self) -> bool {
        let turn = self.turns.get();
        self.turns.set(turn + 1);
        let (first, end) = self.strikes.get();
        (first..end).contains(&turn)
    }
}

/// Frames for tables and rings. Reuses freed frames lowest first, so that a ring's coherent memory
/// is contiguous.
pub(crate) struct Pool {
    pub(crate) frames: Frames<Rc<Memory>>,
    freed: RefCell<BTreeSet<PhysAddr>>,
    memory: Rc<Memory>,
    pub(crate) trouble: FailureInjector,
}

impl Pool {
    pub(crate) fn new(memory: &Rc<Memory>) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
        Self {
            frames: Frames::new(Rc::clone(memory), region),
            freed: RefCell::default(),
            memory: Rc::clone(memory),
            trouble: FailureInjector::default(),
        }
    }
}

impl Pool {
    /// Returns the number of allocated frames.
    pub(crate) fn in_use(&self) -> u64 {
        self.frames.in_use() - self.freed.borrow().len() as u64
    }
}

impl FrameSource for Pool {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        if self.trouble.strikes() {
            return Err(OutOfFrames);
        }
        let Some(frame) = self.freed.borrow_mut().pop_first() else {
            return self.frames.alloc_zeroed();
        };
        for word in self.memory.table(frame).unwrap() {
            word.store(0, Ordering::Relaxed);
        }
        Ok(frame)
    }
    fn free(&self, frame: PhysAddr) {
        assert!(
            self.freed.borrow_mut().insert(frame),
            "{frame} is freed twice"
        );
    }
}

/// A unit whose walker may not snoop, and whose invalidations may fail.
pub(crate) struct Walker<U> {
    pub(crate) unit: U,
    memory: Rc<Memory>,
    coherency: Coherency,
    pub(crate) trouble: FailureInjector,
}

impl<U> Walker<U> {
    pub(crate) fn new(unit: U, memory: &Rc<Memory>, coherency: Coherency) -> Self {
        Self {
            unit,
            memory: Rc::clone(memory),
            coherency,
            trouble: FailureInjector::default(),
        }
    }
}

impl<U: Translate> Translate for Walker<U> {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        _: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let memory = self.memory.seen(self.coherency);
        self.unit.translate(&**memory, device, iova, bytes, access)
    }
}

impl<U: Invalidator> Invalidator for Walker<U> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if self.trouble.strikes() {
            return Err(InvalidationError::Failed);
        }
        self.unit.submit(request)
    }
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.unit.poll(ticket)
    }
}
