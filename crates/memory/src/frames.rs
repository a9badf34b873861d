//! Table frames from a region of memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use core::sync::atomic::Ordering;

use ringfence_types::{
    FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory, PhysRange, TABLE_WORDS,
};

const FRAME: u64 = PageSize::Size4K.bytes();

/// Allocates the frames of a region: freed ones first, then unused ones. Threads share it behind
/// one lock, because tables rarely need a frame.
#[derive(Debug)]
pub struct Frames<M> {
    mem: M,
    region: PhysRange,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// First unused byte of the region; `None` if the region is used up.
    fresh: Option<PhysAddr>,
    free: Vec<PhysAddr>,
    in_use: u64,
    peak: u64,
}

impl<M: PhysMemory> Frames<M> {
    /// Creates a source of the whole frames inside `region`, which must lie in `mem`.
    pub fn new(mem: M, region: PhysRange) -> Self {
        let fresh = region
            .start()
            .checked_add(FRAME - 1)
            .map(|up| up.align_down(FRAME));
        Self {
            mem,
            region,
            state: Mutex::new(State {
                fresh,
                free: Vec::new(),
                in_use: 0,
                peak: 0,
            }),
        }
    }

    /// Allocates `count` consecutive zeroed frames, aligned to their size rounded up to a power of
    /// two: the root of a flat table. They cannot be freed.
    ///
    /// # Errors
    /// The unused rest of the region is too small.
    pub fn alloc_contiguous(&self, count: u64) -> Result<PhysAddr, OutOfFrames> {
        let bytes = count.checked_mul(FRAME).ok_or(OutOfFrames)?;
        let align = bytes
            .checked_next_power_of_two()
            .ok_or(OutOfFrames)?
            .max(FRAME);
        let mut state = self.lock();
        let fresh = state.fresh.ok_or(OutOfFrames)?;
        let at = fresh
            .checked_add(align - 1)
            .ok_or(OutOfFrames)?
            .align_down(align);
        let range = PhysRange::new(at, bytes).ok_or(OutOfFrames)?;
        if !self.region.contains(&range) {
            return Err(OutOfFrames);
        }
        for frame in 0..count {
            self.zero(at.wrapping_add(frame * FRAME))?;
        }
        // The frames that the alignment skips stay available.
        let mut skipped = fresh;
        while skipped < at {
            state.free.push(skipped);
            skipped = skipped.wrapping_add(FRAME);
        }
        state.fresh = at.checked_add(bytes);
        state.take(count);
        Ok(at)
    }

    /// Returns the number of allocated frames.
    pub fn in_use(&self) -> u64 {
        self.lock().in_use
    }

    /// Returns the peak number of allocated frames.
    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    fn zero(&self, frame: PhysAddr) -> Result<(), OutOfFrames> {
        let words = self.mem.table(frame).map_err(|_| OutOfFrames)?;
        for word in words {
            // Storing zeros over zeros would populate a sparse arena.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state consistent, so another thread's panic does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take(&mut self, count: u64) {
        self.in_use += count;
        self.peak = self.peak.max(self.in_use);
    }
}

impl<M: PhysMemory> FrameSource for Frames<M> {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut state = self.lock();
        if let Some(frame) = state.free.last().copied() {
            self.zero(frame)?;
            state.free.pop();
            state.take(1);
            return Ok(frame);
        }
        let frame = state.fresh.ok_or(OutOfFrames)?;
        let range = PhysRange::new(frame, FRAME).ok_or(OutOfFrames)?;
        if !self.region.contains(&range) {
            return Err(OutOfFrames);
        }
        self.zero(frame)?;
        state.fresh = frame.checked_add(FRAME);
        state.take(1);
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        debug_assert_eq!(TABLE_WORDS as u64 * 8, FRAME);
        let mut state = self.lock();
        debug_assert!(
            self.region.contains_address(frame) && frame.is_aligned(FRAME),
            "{frame} does not belong to this source"
        );
        debug_assert!(!state.free.contains(&frame), "{frame} is freed twice");
        state.in_use = state.in_use.saturating_sub(1);
        state.free.push(frame);
    }
}
