//! Quiescent-state-based reclamation (QSBR) between the readers of one endpoint and writers that
//! remove mappings. While no reader is online, the `Qsbr` goes idle and waiters need no fence.
//!
//! Steps R1 to R6, W1 to W5, P1 to P5 and V1 to V4 refer to decision 0015, which contains the
//! proof. Every ordering here is the weakest that the proof needs. Each of
//! `tests/mutations/softiommu-*` weakens one and names the test that fails.

use crate::sync::{
    AtomicU64, AtomicUsize, IDLE_AFTER, Ordering, fence, has_heavy_fence, heavy_fence, light_fence,
    pause,
};

/// Slot value while the reader is offline. No epoch is zero.
const OFFLINE: u64 = 0;

/// State: active. A full fence of the reader and one of the waiter decide which sees the other.
const ACTIVE: usize = 0;
/// State: a reader goes online while idle and has not completed its heavy fence.
const WAKING: usize = 1;
/// State: idle. No reader is online, and none goes online without a heavy fence: waiters need no
/// fence.
const IDLE: usize = 2;

/// Prevents false sharing between threads. Two cache lines, because the CPU prefetches lines in
/// pairs.
#[repr(align(128))]
struct Padded<T>(T);

/// Fields that all readers read and that rarely change.
struct Shared {
    /// Incremented whenever a waiter starts to wait for readers.
    epoch: AtomicU64,
    /// `ACTIVE`, `WAKING` or `IDLE`.
    state: AtomicUsize,
}

/// QSBR state of the readers of one endpoint.
pub(crate) struct Qsbr {
    shared: Padded<Shared>,
    /// One slot per reader: the epoch of its last quiescent state while it is online, otherwise
    /// [`OFFLINE`].
    slots: Box<[Padded<AtomicU64>]>,
    /// Slots from this index on were never assigned to a reader.
    used: AtomicUsize,
    /// Number of consecutive waits that found no reader online.
    empty_waits: Padded<AtomicUsize>,
    /// True if heavy fences are available.
    can_idle: bool,
}

impl Qsbr {
    /// Creates the state for at most `capacity` readers.
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

    /// Assigns slot `slot` to a reader, which is offline.
    pub(crate) fn register(&self, slot: usize) {
        // Relaxed: a waiter that misses this update treats the slot as offline. R2 with W2 or P4
        // makes that correct.
        self.used
            .fetch_max(slot.saturating_add(1), Ordering::Relaxed);
    }

    /// Marks the reader of `slot` online: waiters may wait for what it reads from now on. Returns
    /// its epoch.
    #[inline]
    pub(crate) fn online(&self, slot: usize) -> u64 {
        // R1. A stale epoch only makes waiters wait until the next checkpoint.
        let epoch = self.shared.0.epoch.load(Ordering::Relaxed);
        if let Some(slot) = self.slots.get(slot) {
            // Release, because a waiter may read this store instead of the earlier OFFLINE.
            slot.0.store(epoch, Ordering::Release);
        }
        // R2. If the waiter's fence (W2, or P4 when it goes idle) comes first, this reader sees the
        // waiter's earlier stores. Otherwise the waiter sees the slot.
        fence(Ordering::SeqCst);
        // V1. Acquire: if another reader's heavy fence made this one unnecessary, order this reader
        // after that fence.
        if self.shared.0.state.load(Ordering::Acquire) != ACTIVE {
            self.wake();
        }
        epoch
    }

    /// Makes waiters check slots again. Afterwards, this reader sees the stores of all waiters that
    /// did not check slots.
    #[cold]
    fn wake(&self) {
        let state = &self.shared.0.state;
        // V2. Relaxed: V3 orders it. On failure, another reader has done it.
        let _ = state.compare_exchange(IDLE, WAKING, Ordering::Relaxed, Ordering::Relaxed);
        // V3. If the waiter's light fence (P1) comes first, this reader sees the waiter's earlier
        // stores. Otherwise the waiter sees that the state is not idle. Until this fence completes,
        // other readers need their own.
        heavy_fence();
        // V4. Release: see V1.
        let _ = state.compare_exchange(WAKING, ACTIVE, Ordering::Release, Ordering::Relaxed);
    }

    /// Returns the current epoch. If it differs from the reader's epoch, the reader must call
    /// [`quiescent`](Self::quiescent).
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // R4. Acquire: a reader that sees a waiter's epoch also sees the waiter's removals.
        self.shared.0.epoch.load(Ordering::Acquire)
    }

    /// Records that the online reader of `slot` holds nothing that it read before it read `epoch`.
    #[inline]
    pub(crate) fn quiescent(&self, slot: usize, epoch: u64) {
        if let Some(slot) = self.slots.get(slot) {
            // R5. Release: the reader's accesses so far happen before the waiter continues.
            slot.0.store(epoch, Ordering::Release);
        }
    }

    /// Marks the reader of `slot` offline. It must hold no translation.
    #[inline]
    pub(crate) fn offline(&self, slot: usize) {
        // R6. As R5.
        self.quiescent(slot, OFFLINE);
    }
}

/// Waits until no reader at `gates` holds anything that the caller removed before the call (W1).
/// Every later lookup by a reader sees the removal. Calls for the same `Qsbr` must be serialised.
#[inline]
pub(crate) fn synchronize<'a>(gates: impl Iterator<Item = &'a Qsbr> + Clone) {
    // P1. See V3. Costs no instruction.
    light_fence();
    if !gates.clone().all(Qsbr::is_idle) {
        synchronize_active(gates);
    }
}

/// Slow path of [`synchronize`]: readers may be online.
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

/// Starts a grace period as [`synchronize`] does, but does not wait. A reader at `gates` keeps what
/// the caller removed (W1) until its next checkpoint, which is now due. Every reader that goes
/// online from now on sees the removal. For callers that must not wait.
#[cold]
pub(crate) fn start_grace_period<'a>(gates: impl Iterator<Item = &'a Qsbr> + Clone) {
    // P1.
    light_fence();
    if gates.clone().all(Qsbr::is_idle) {
        // No reader is online, and the next one executes a heavy fence first: see V3.
        return;
    }
    // W2.
    fence(Ordering::SeqCst);
    for gate in gates.filter(|gate| !gate.is_idle()) {
        gate.advance();
    }
}

impl Qsbr {
    /// Makes a checkpoint of every reader due. Returns the new epoch.
    fn advance(&self) -> u64 {
        // W4. Relaxed: the fence W2 before it makes it a release.
        let before = self.shared.0.epoch.fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1)
    }

    #[inline]
    fn is_idle(&self) -> bool {
        // P2. Relaxed: the caller or an earlier caller set IDLE, and saw at that time that no
        // reader was online.
        self.shared.0.state.load(Ordering::Relaxed) == IDLE
    }

    /// Returns the slots of online readers.
    #[inline]
    fn online_slots(&self) -> impl Iterator<Item = &AtomicU64> {
        let used = self.used.load(Ordering::Relaxed);
        self.slots
            .iter()
            .take(used)
            .map(|slot| &slot.0)
            // W3. Acquire: the accesses of a reader found offline are complete.
            .filter(|slot| slot.load(Ordering::Acquire) != OFFLINE)
    }

    #[cold]
    fn wait(&self) {
        self.empty_waits.0.store(0, Ordering::Relaxed);
        let required = self.advance();
        for slot in self.online_slots() {
            let mut polls = 0;
            loop {
                // W5. Acquire: as W3.
                let seen = slot.load(Ordering::Acquire);
                if seen == OFFLINE || seen >= required {
                    break;
                }
                pause(polls);
                polls = polls.saturating_add(1);
            }
        }
    }

    /// Counts a wait without online readers. Goes idle after [`IDLE_AFTER`] in a row.
    #[inline]
    fn count_empty_wait(&self) {
        // Relaxed: callers are serialised, and the counter is only a heuristic.
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
        // P3. Fails while a reader is waking the state.
        if state
            .compare_exchange(ACTIVE, IDLE, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        // P4. If a reader's fence (R2) comes first, its slot is visible here. Otherwise the reader
        // sees IDLE.
        fence(Ordering::SeqCst);
        // P5. As W3.
        if self.online_slots().next().is_some() {
            let _ = state.compare_exchange(IDLE, ACTIVE, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}
