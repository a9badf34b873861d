//! The memory that a device sees if its accesses do not snoop the CPU caches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringfence_types::{PhysAddr, PhysMemory};

use crate::Arena;
use crate::line::LINE;

const LINE_WORDS: usize = (LINE / 8) as usize;

/// A second memory of an [`Arena`], for models of devices that do not snoop. A line moves to it in
/// two steps: [`write_back`](PhysMemory::write_back) copies the line, and
/// [`drain`](PhysMemory::drain) publishes the copies. Without them the device sees the old bytes.
#[derive(Debug)]
pub struct DeviceView {
    memory: Arena,
    staged: Mutex<BTreeMap<u64, [u64; LINE_WORDS]>>,
    /// True if write-backs have no effect.
    is_faulty: AtomicBool,
}

impl DeviceView {
    pub(crate) const fn new(memory: Arena) -> Self {
        Self {
            memory,
            staged: Mutex::new(BTreeMap::new()),
            is_faulty: AtomicBool::new(false),
        }
    }

    /// Returns the memory that the device sees.
    pub fn memory(&self) -> &Arena {
        &self.memory
    }

    /// Makes all later write-backs fail silently: fault injection for attack A21.
    pub fn lose_write_backs(&self) {
        self.is_faulty.store(true, Ordering::Relaxed);
    }

    fn staged(&self) -> MutexGuard<'_, BTreeMap<u64, [u64; LINE_WORDS]>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the present words of the line at `line`.
    pub(crate) fn stage(&self, line: u64, words: &[AtomicU64]) {
        if self.is_faulty.load(Ordering::Relaxed) {
            return;
        }
        let mut copy = [0; LINE_WORDS];
        for (to, from) in copy.iter_mut().zip(words) {
            *to = from.load(Ordering::Acquire);
        }
        self.staged().insert(line, copy);
    }

    /// Publishes the copied lines.
    pub(crate) fn publish(&self) {
        for (line, words) in std::mem::take(&mut *self.staged()) {
            let Ok(cells) = self.memory.words(PhysAddr::new(line), LINE_WORDS) else {
                continue;
            };
            for (cell, word) in cells.iter().zip(words) {
                cell.store(word, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_needs_a_write_back_and_a_drain() {
        let arena = Arena::with_device_view(1 << 20).unwrap();
        let view = arena.device_view().unwrap();
        let at = PhysAddr::new(0x1048);
        let seen = || view.memory().word(at).unwrap().load(Ordering::Relaxed);
        let store = |word| arena.word(at).unwrap().store(word, Ordering::Relaxed);
        store(7);
        arena.drain();
        assert_eq!(seen(), 0, "not written back");
        arena.write_back(at, 8);
        assert_eq!(seen(), 0, "not drained");
        store(8);
        arena.drain();
        assert_eq!(seen(), 7, "the line as it was written back");
        view.lose_write_backs();
        arena.write_back(at, 8);
        arena.drain();
        assert_eq!(seen(), 7, "lost");
    }

    #[test]
    fn an_arena_has_no_device_view_by_default() {
        assert!(Arena::new(4096).unwrap().device_view().is_none());
    }
}
