//! The protocol between the readers of one endpoint and whoever takes mappings away from it:
//! quiescent states, at a gate that is parked while nobody comes.
//!
//! Steps R1 to R6, W1 to W5, P1 to P5 and V1 to V4 are those of decision 0015, which argues from
//! them. Every ordering here is the weakest that the argument needs; `tests/mutations/softiommu-*`
//! weaken each and name the test that fails.

use crate::sync::{
    AtomicU64, AtomicUsize, IDLE_AFTER, Ordering, fence, has_heavy_fence, heavy_fence, light_fence,
    pause,
};

/// What a slot holds while its reader is offline. No epoch is zero.
const OFFLINE: u64 = 0;

/// State of a gate: a full fence of a reader's and one of a waiter's decide who sees whom.
const ACTIVE: usize = 0;
/// A reader goes online at a gate that was parked, and has not had its heavy fence yet.
const WAKING: usize = 1;
/// No reader is online, and none goes online without a heavy fence: waiters need none of their own.
const IDLE: usize = 2;

/// Keeps what one thread writes out of the cache lines of another; two lines, because they are
/// fetched in pairs.
#[repr(align(128))]
struct Padded<T>(T);

/// What everybody reads and hardly anybody writes.
struct Shared {
    /// Grows by one whenever somebody starts to wait for readers.
    epoch: AtomicU64,
    /// `ACTIVE`, `WAKING` or `IDLE`.
    state: AtomicUsize,
}

/// The readers of one endpoint.
pub(crate) struct Qsbr {
    shared: Padded<Shared>,
    /// A reader's slot: the epoch of its last quiescent state while it is online.
    slots: Box<[Padded<AtomicU64>]>,
    /// Slots from here on were never given to a reader.
    used: AtomicUsize,
    /// How often in a row a waiter found nobody online.
    empty_waits: Padded<AtomicUsize>,
    /// Whether there are heavy fences.
    can_idle: bool,
}

impl Qsbr {
    /// A gate for at most `capacity` readers.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            shared: Padded(Shared {
                epoch: AtomicU64::new(OFFLINE + 1),
                state: AtomicUsize::new(ACTIVE),
            }),
            slots: (0..capacity)
                .map(|_| Padded(AtomicU64::new(OFFLINE)))
                .collect(),
            used: AtomicUsize::new(0),
            empty_waits: Padded(AtomicUsize::new(0)),
            can_idle: has_heavy_fence(),
        }
    }

    /// Slot `slot` now belongs to a reader, which is offline.
    pub(crate) fn register(&self, slot: usize) {
        // Relaxed: a waiter that misses it reads the slot as offline in effect, and R2 with W2 or
        // P4 makes that right.
        self.used
            .fetch_max(slot.saturating_add(1), Ordering::Relaxed);
    }

    /// The reader of `slot` goes online: what it reads from here on may be waited for. Returns its
    /// epoch.
    #[inline]
    pub(crate) fn online(&self, slot: usize) -> u64 {
        // R1. An old epoch only makes waiters wait longer than they had to, until the next
        // checkpoint.
        let epoch = self.shared.0.epoch.load(Ordering::Relaxed);
        if let Some(slot) = self.slots.get(slot) {
            // Release, because a waiter may meet this store instead of the OFFLINE before it.
            slot.0.store(epoch, Ordering::Release);
        }
        // R2. Either the waiter's fence (W2, or P4 where it parks) comes first, and what it did
        // before is seen from here on; or this one does, and the waiter sees the slot.
        fence(Ordering::SeqCst);
        // V1. Acquire: a reader that another one has saved the heavy fence comes after that fence.
        if self.shared.0.state.load(Ordering::Acquire) != ACTIVE {
            self.wake();
        }
        epoch
    }

    /// Waiters look at slots again, and what those took away that did not look is not seen from
    /// here on.
    #[cold]
    fn wake(&self) {
        let state = &self.shared.0.state;
        // V2. Relaxed: V3 orders it. Where it fails, another reader has done it.
        let _ = state.compare_exchange(IDLE, WAKING, Ordering::Relaxed, Ordering::Relaxed);
        // V3. Either the waiter's light fence (P1) comes first, and what it took away is not seen
        // from here on; or this one does, and the waiter sees that the gate is not parked. Until it
        // is over, other readers have to have their own.
        heavy_fence();
        // V4. Release: see V1.
        let _ = state.compare_exchange(WAKING, ACTIVE, Ordering::Release, Ordering::Relaxed);
    }

    /// The epoch now. If it is not the reader's own, [`quiescent`](Self::quiescent) is due.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // R4. Acquire: who reads a waiter's epoch sees what the waiter took away.
        self.shared.0.epoch.load(Ordering::Acquire)
    }

    /// The reader of `slot`, online, holds nothing that it read before it read `epoch`.
    #[inline]
    pub(crate) fn quiescent(&self, slot: usize, epoch: u64) {
        if let Some(slot) = self.slots.get(slot) {
            // R5. Release: its accesses so far happen before the waiter goes on.
            slot.0.store(epoch, Ordering::Release);
        }
    }

    /// The reader of `slot` goes offline and holds nothing.
    #[inline]
    pub(crate) fn offline(&self, slot: usize) {
        // R6. As R5.
        self.quiescent(slot, OFFLINE);
    }
}

/// Returns when no reader at `gates` holds anything that the caller took away before the call (W1),
/// and every reader that looks from now on finds it gone. Callers of one gate come one after the
/// other.
#[inline]
pub(crate) fn synchronize<'a>(gates: impl Iterator<Item = &'a Qsbr> + Clone) {
    // P1. See V3. It costs no instruction.
    light_fence();
    if !gates.clone().all(Qsbr::is_idle) {
        synchronize_active(gates);
    }
}

/// [`synchronize`] where readers may be online.
#[inline(never)]
fn synchronize_active<'a>(gates: impl Iterator<Item = &'a Qsbr>) {
    // W2. See R2.
    fence(Ordering::SeqCst);
    for gate in gates.filter(|gate| !gate.is_idle()) {
        if gate.online_slots().next().is_some() {
            gate.wait();
        } else {
            gate.count_empty_wait();
        }
    }
}

/// As [`synchronize`], without the wait: a reader at `gates` holds what the caller took away (W1)
/// until its next checkpoint, which is due, and every reader that goes online from now on finds it
/// gone. For a caller that may not wait.
#[cold]
pub(crate) fn start_grace_period<'a>(gates: impl Iterator<Item = &'a Qsbr> + Clone) {
    // P1.
    light_fence();
    if gates.clone().all(Qsbr::is_idle) {
        // Nobody is online, and whoever comes has a heavy fence first: see V3.
        return;
    }
    // W2.
    fence(Ordering::SeqCst);
    for gate in gates.filter(|gate| !gate.is_idle()) {
        gate.advance();
    }
}

impl Qsbr {
    /// Makes the checkpoint of every reader due. Returns the epoch that a reader passes on to
    /// there.
    fn advance(&self) -> u64 {
        // W4. Relaxed: the fence W2 before it makes it a release.
        let before = self.shared.0.epoch.fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1)
    }

    #[inline]
    fn is_idle(&self) -> bool {
        // P2. Relaxed: the caller parked it, or another one before it did, and has seen then that
        // nobody was online.
        self.shared.0.state.load(Ordering::Relaxed) == IDLE
    }

    /// The slots of readers that are online.
    #[inline]
    fn online_slots(&self) -> impl Iterator<Item = &AtomicU64> {
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
        self.empty_waits.0.store(0, Ordering::Relaxed);
        let wanted = self.advance();
        for slot in self.online_slots() {
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

    /// Parks the gate if that has been so for long.
    #[inline]
    fn count_empty_wait(&self) {
        // Relaxed: callers come one after the other, and it is a guess.
        let idle = self.empty_waits.0.load(Ordering::Relaxed).saturating_add(1);
        self.empty_waits.0.store(idle, Ordering::Relaxed);
        if idle >= IDLE_AFTER && self.can_idle {
            self.go_idle();
        }
    }

    #[cold]
    fn go_idle(&self) {
        self.empty_waits.0.store(0, Ordering::Relaxed);
        let state = &self.shared.0.state;
        // P3. Not where a reader is just waking it.
        if state
            .compare_exchange(ACTIVE, IDLE, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        // P4. Either a reader's fence (R2) comes first, and its slot is seen; or this one does, and
        // the reader sees PARKED.
        fence(Ordering::SeqCst);
        // P5. As W3.
        if self.online_slots().next().is_some() {
            let _ = state.compare_exchange(IDLE, ACTIVE, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}
