//! A frame source that fails on request, and detects leaks and wrong frees.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringfence_types::{FrameSource, OutOfFrames, PageSize, PhysAddr};

/// A frame source that fails after a number of allocations. It records the allocated frames and
/// counts wrong frees, so a test can check that a failed operation leaks nothing.
#[derive(Debug)]
pub struct FaultyFrames<S> {
    inner: S,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    allocated: HashSet<PhysAddr>,
    requests: u64,
    /// Number of the first request that fails, from 0.
    fail_from: Option<u64>,
    wrong_frees: u64,
}

impl<S: FrameSource> FaultyFrames<S> {
    /// Creates a source that fails only when `inner` does.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            state: Mutex::default(),
        }
    }

    /// Passes the next `count` allocations to the inner source, and fails all later ones.
    pub fn fail_after(&self, count: u64) {
        let mut state = self.lock();
        state.fail_from = Some(state.requests + count);
    }

    /// Ends the failures that [`fail_after`](Self::fail_after) requested.
    pub fn recover(&self) {
        self.lock().fail_from = None;
    }

    /// Returns the number of requested allocations, including failed ones.
    pub fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// Returns the number of allocated frames.
    pub fn outstanding(&self) -> usize {
        self.lock().allocated.len()
    }

    /// Returns the number of frees of unallocated frames: double frees, or frames of another
    /// source.
    pub fn wrong_frees(&self) -> u64 {
        self.lock().wrong_frees
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: FrameSource> FrameSource for FaultyFrames<S> {
    fn frame_size(&self) -> PageSize {
        self.inner.frame_size()
    }

    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut state = self.lock();
        let request = state.requests;
        state.requests += 1;
        if state.fail_from.is_some_and(|from| request >= from) {
            return Err(OutOfFrames);
        }
        let frame = self.inner.alloc_zeroed()?;
        state.allocated.insert(frame);
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        let mut state = self.lock();
        if state.allocated.remove(&frame) {
            self.inner.free(frame);
        } else {
            state.wrong_frees += 1;
        }
    }
}
