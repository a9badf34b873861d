//! A lock that threads take in the order in which they ask for it.
//!
//! A `std` mutex may be taken again by the thread that has just released it, however long another
//! one has waited. With this lock, a thread waits for at most one turn of each other thread: a
//! device that accesses memory without a pause cannot delay the guest's invalidations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A lock that threads get in the order in which they asked.
#[derive(Debug)]
pub(super) struct FairLock<T> {
    /// Number of turns asked for.
    asked: AtomicU64,
    /// Number of turns that have ended. Turn n may begin when n have ended.
    ended: AtomicU64,
    /// Threads that wait for their turns.
    waiting: Mutex<()>,
    turn_ended: Condvar,
    /// Only the thread whose turn it is locks it, so it never waits here.
    value: Mutex<T>,
}

/// The thread's turn.
#[derive(Debug)]
pub(super) struct FairGuard<'l, T> {
    // Released before the turn ends, because fields are dropped in this order.
    value: MutexGuard<'l, T>,
    _turn: Turn<'l, T>,
}

#[derive(Debug)]
struct Turn<'l, T>(&'l FairLock<T>);

impl<T> FairLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            asked: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            waiting: Mutex::new(()),
            turn_ended: Condvar::new(),
            value: Mutex::new(value),
        }
    }

    /// Waits for the turns that were asked for before. A panic during a turn ends it.
    pub(super) fn lock(&self) -> FairGuard<'_, T> {
        let number = self.asked.fetch_add(1, Ordering::SeqCst);
        if self.ended.load(Ordering::SeqCst) != number {
            self.wait_for(number);
        }
        let turn = Turn(self);
        FairGuard {
            value: self.value.lock().unwrap_or_else(PoisonError::into_inner),
            _turn: turn,
        }
    }

    #[cold]
    fn wait_for(&self, number: u64) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while self.ended.load(Ordering::SeqCst) != number {
            let woken = self.turn_ended.wait(waiting);
            waiting = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the number of turns that have been asked for and have not ended.
    #[cfg(test)]
    fn queued(&self) -> u64 {
        self.asked.load(Ordering::SeqCst) - self.ended.load(Ordering::SeqCst)
    }
}

/// Ends the turn and wakes the threads that wait.
///
/// A waiting thread asks before it looks at `ended`, and this one stores `ended` before it looks at
/// `asked`. Both orders are sequentially consistent: the waiting thread sees that the turn has
/// ended, or is seen here. In the second case it holds `waiting` until it sleeps.
impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let Self(lock) = self;
        let ended = lock.ended.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if lock.asked.load(Ordering::SeqCst) != ended {
            drop(lock.waiting.lock());
            lock.turn_ended.notify_all();
        }
    }
}

impl<T> std::ops::Deref for FairGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> std::ops::DerefMut for FairGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::*;

    /// A thread that releases the lock and takes it again does not pass one that waits.
    #[test]
    fn a_waiting_thread_is_next() {
        let lock = FairLock::new(Vec::new());
        for round in 0..200 {
            thread::scope(|scope| {
                let turn = lock.lock();
                scope.spawn(|| lock.lock().push(("register", round)));
                while lock.queued() < 2 {
                    thread::yield_now();
                }
                drop(turn);
                lock.lock().push(("device", round));
            });
            let turns = std::mem::take(&mut *lock.lock());
            assert_eq!(turns, [("register", round), ("device", round)]);
        }
    }

    #[test]
    fn every_turn_comes_and_none_overlaps() {
        let lock = FairLock::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let mut count = lock.lock();
                        let seen = *count;
                        thread::yield_now();
                        *count = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 8000);
        assert_eq!(lock.queued(), 0);
    }

    #[test]
    fn a_panic_ends_the_turn() {
        let lock = FairLock::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _turn = lock.lock();
            panic!("during a turn");
        }));
        assert!(panicked.is_err());
        assert_eq!(*lock.lock(), 1);
    }
}
