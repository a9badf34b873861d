//! A frame source that fails on demand and keeps accounts.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringfence_types::{FrameSource, OutOfFrames, PhysAddr};

/// Wraps a frame source: fails the allocations it is told to, and knows which frames are out.
#[derive(Debug)]
pub struct FaultyFrames<S> {
    inner: S,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    out: HashSet<PhysAddr>,
    asked: u64,
    fail_from: Option<u64>,
    wrong_frees: u64,
}

impl<S: FrameSource> FaultyFrames<S> {
    /// Never fails of itself.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            state: Mutex::default(),
        }
    }

    /// Lets `count` more allocations pass and fails all that follow.
    pub fn fail_after(&self, count: u64) {
        let mut state = self.lock();
        state.fail_from = Some(state.asked + count);
    }

    /// Fails no more.
    pub fn recover(&self) {
        self.lock().fail_from = None;
    }

    /// Allocations asked for, those that failed included.
    pub fn asked(&self) -> u64 {
        self.lock().asked
    }

    /// Frames handed out and not taken back.
    pub fn outstanding(&self) -> usize {
        self.lock().out.len()
    }

    /// Frames given back that were not out: double frees, or somebody else's.
    pub fn wrong_frees(&self) -> u64 {
        self.lock().wrong_frees
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: FrameSource> FrameSource for FaultyFrames<S> {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut state = self.lock();
        let turn = state.asked;
        state.asked += 1;
        if state.fail_from.is_some_and(|from| turn >= from) {
            return Err(OutOfFrames);
        }
        let frame = self.inner.alloc_zeroed()?;
        state.out.insert(frame);
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        let mut state = self.lock();
        if state.out.remove(&frame) {
            self.inner.free(frame);
        } else {
            state.wrong_frees += 1;
        }
    }
}
