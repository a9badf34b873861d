//! The protocol between the readers of one endpoint and whoever takes mappings away from it: quiescent states.
//!
//! Steps R1 to R6 and W1 to W5 are those of decision 0015, which argues from them. Every ordering here is the weakest that
//! the argument needs; `tests/mutations/softiommu-*` weaken each and name the test that fails.

use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence, pause};

/// What a slot holds while its reader is offline. No epoch is zero.
const OFFLINE: u64 = 0;

/// Keeps what one thread writes out of the cache lines of another; two lines, because they are fetched in pairs.
#[repr(align(128))]
struct Padded<T>(T);

/// The readers of one endpoint.
pub(crate) struct Gate {
    /// Grows by one whenever somebody starts to wait for readers.
    epoch: Padded<AtomicU64>,
    /// A reader's slot: the epoch of its last quiescent state while it is online.
    slots: Box<[Padded<AtomicU64>]>,
    /// Slots from here on were never given to a reader.
    used: AtomicUsize,
}

impl Gate {
    /// A gate for at most `capacity` readers.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            epoch: Padded(AtomicU64::new(OFFLINE + 1)),
            slots: (0..capacity)
                .map(|_| Padded(AtomicU64::new(OFFLINE)))
                .collect(),
            used: AtomicUsize::new(0),
        }
    }

    /// Slot `slot` now belongs to a reader, which is offline.
    pub(crate) fn register(&self, slot: usize) {
        // Relaxed: a waiter that misses it reads the slot as offline in effect, and R2 and W2 make that right.
        self.used
            .fetch_max(slot.saturating_add(1), Ordering::Relaxed);
    }

    /// The reader of `slot` goes online: what it reads from here on may be waited for. Returns its epoch.
    #[inline]
    pub(crate) fn enter(&self, slot: usize) -> u64 {
        // R1. An old epoch only makes waiters wait longer than they had to, until the next checkpoint.
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        if let Some(slot) = self.slots.get(slot) {
            // Release, because a waiter may meet this store instead of the OFFLINE before it.
            slot.0.store(epoch, Ordering::Release);
        }
        // R2. Either the waiter's fence (W2) comes first, and what it took away is not seen from here on; or this one does, and
        // the waiter sees the slot.
        fence(Ordering::SeqCst);
        epoch
    }

    /// The epoch now. If it is not the reader's own, [`pass`](Self::pass) is due.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // R4. Acquire: who reads a waiter's epoch sees what the waiter took away.
        self.epoch.0.load(Ordering::Acquire)
    }

    /// The reader of `slot`, online, holds nothing that it read before it read `epoch`.
    #[inline]
    pub(crate) fn pass(&self, slot: usize, epoch: u64) {
        if let Some(slot) = self.slots.get(slot) {
            // R5. Release: its accesses so far happen before the waiter goes on.
            slot.0.store(epoch, Ordering::Release);
        }
    }

    /// The reader of `slot` goes offline and holds nothing.
    #[inline]
    pub(crate) fn leave(&self, slot: usize) {
        // R6. As R5.
        self.pass(slot, OFFLINE);
    }
}

/// Returns when no reader at `gates` holds anything that the caller took away before the call (W1), and every reader that looks
/// from now on finds it gone.
#[inline]
pub(crate) fn settle<'a>(gates: impl Iterator<Item = &'a Gate>) {
    // W2. See R2.
    fence(Ordering::SeqCst);
    for gate in gates {
        if gate.online().next().is_some() {
            gate.wait();
        }
    }
}

impl Gate {
    /// The slots of readers that are online.
    #[inline]
    fn online(&self) -> impl Iterator<Item = &AtomicU64> {
        let used = self.used.load(Ordering::Relaxed);
        self.slots
            .iter()
            .take(used)
            .map(|slot| &slot.0)
            // W3. Acquire: the accesses of a reader that is found offline are over.
            .filter(|slot| slot.load(Ordering::Acquire) != OFFLINE)
    }

    #[cold]
    fn wait(&self) {
        // W4. Relaxed: the fence W2 before it makes it a release.
        let wanted = self.epoch.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        for slot in self.online() {
            let mut looks = 0;
            loop {
                // W5. Acquire: as W3.
                let seen = slot.load(Ordering::Acquire);
                if seen == OFFLINE || seen >= wanted {
                    break;
                }
                pause(looks);
                looks = looks.saturating_add(1);
            }
        }
    }
}
