//! Memory for a device that does not snoop the CPU caches.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};

use crate::line::LINE;

const LINE_WORDS: usize = (LINE / 8) as usize;

/// Two memories: one that CPUs see and one that devices see. A line moves from the first to the
/// second in two steps, as in a CPU. [`write_back`](PhysMemory::write_back) copies the current
/// line; [`drain`](PhysMemory::drain) publishes the copies. If code skips a step, the device reads
/// the old bytes.
#[derive(Debug)]
pub struct NonCoherent<M> {
    processors: M,
    devices: M,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    staged: HashMap<u64, [u64; LINE_WORDS]>,
    write_backs: u64,
    drains: u64,
}

impl<M: PhysMemory> NonCoherent<M> {
    /// Creates the pair. `processors` and `devices` must have the same size. `devices` may start
    /// with arbitrary contents, like real memory.
    pub fn new(processors: M, devices: M) -> Self {
        Self {
            processors,
            devices,
            state: Mutex::default(),
        }
    }

    /// Returns the memory that devices see, for a hardware model.
    pub fn device_view(&self) -> &M {
        &self.devices
    }

    /// Returns the memory that CPUs see.
    pub fn processor_view(&self) -> &M {
        &self.processors
    }

    /// Returns the number of lines written back.
    pub fn write_backs(&self) -> u64 {
        self.lock().write_backs
    }

    /// Returns the number of drains.
    pub fn drains(&self) -> u64 {
        self.lock().drains
    }

    /// Publishes the current contents of the line that holds `at`: a cache may write back a
    /// modified line at any time.
    pub fn evict(&self, at: PhysAddr) {
        let line = at.align_down(LINE);
        if let Some(words) = self.copy(line) {
            self.publish(line, &words);
        }
    }

    fn copy(&self, line: PhysAddr) -> Option<[u64; LINE_WORDS]> {
        let words = self.processors.words(line, LINE_WORDS).ok()?;
        let mut copy = [0; LINE_WORDS];
        for (to, from) in copy.iter_mut().zip(words) {
            *to = from.load(Ordering::Acquire);
        }
        Some(copy)
    }

    fn publish(&self, line: PhysAddr, words: &[u64; LINE_WORDS]) {
        if let Ok(to) = self.devices.words(line, LINE_WORDS) {
            for (to, from) in to.iter().zip(words) {
                to.store(*from, Ordering::Release);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: PhysMemory> PhysMemory for NonCoherent<M> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.processors.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.processors.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.processors.words(at, count)
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let last = at.get().saturating_add(bytes - 1);
        let mut line = at.align_down(LINE);
        while line.get() <= last {
            let mut state = self.lock();
            state.write_backs += 1;
            if let Some(words) = self.copy(line) {
                state.staged.insert(line.get(), words);
            }
            drop(state);
            let Some(next) = line.checked_add(LINE) else {
                return;
            };
            line = next;
        }
    }

    fn drain(&self) {
        let mut state = self.lock();
        state.drains += 1;
        for (line, words) in std::mem::take(&mut state.staged) {
            self.publish(PhysAddr::new(line), &words);
        }
    }
}
