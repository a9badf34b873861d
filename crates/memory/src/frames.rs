//! Table frames from a region of memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use core::sync::atomic::Ordering;

use ringfence_types::{
    FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory, PhysRange, is_zeroed,
};

/// Allocates the frames of a region: freed ones first, then unused ones. Threads share it behind
/// one lock, because tables rarely need a frame.
#[derive(Debug)]
pub struct Frames<M> {
    mem: M,
    region: PhysRange,
    size: PageSize,
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
    /// Creates a source of the whole frames of 4 KiB inside `region`, which must lie in `mem`.
    pub fn new(mem: M, region: PhysRange) -> Self {
        Self::of_size(PageSize::Size4K, mem, region)
    }

    /// Creates a source of the whole frames of `size` inside `region`, which must lie in `mem`.
    pub fn of_size(size: PageSize, mem: M, region: PhysRange) -> Self {
        let fresh = region
            .start()
            .checked_add(size.bytes() - 1)
            .map(|up| up.align_down(size.bytes()));
        Self {
            mem,
            region,
            size,
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
        let frame = self.size.bytes();
        let bytes = count.checked_mul(frame).ok_or(OutOfFrames)?;
        let align = bytes
            .checked_next_power_of_two()
            .ok_or(OutOfFrames)?
            .max(frame);
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
        for index in 0..count {
            self.zero(at.wrapping_add(index * frame))?;
        }
        // The frames that the alignment skips stay available.
        let mut skipped = fresh;
        while skipped < at {
            state.free.push(skipped);
            skipped = skipped.wrapping_add(frame);
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
        let words = (self.size.bytes() / 8) as usize;
        let words = self.mem.words(frame, words).map_err(|_| OutOfFrames)?;
        // Storing zeros over zeros would populate a sparse arena.
        if !is_zeroed(words) {
            for word in words {
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
    fn frame_size(&self) -> PageSize {
        self.size
    }

    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut state = self.lock();
        if let Some(frame) = state.free.last().copied() {
            self.zero(frame)?;
            state.free.pop();
            state.take(1);
            return Ok(frame);
        }
        let frame = state.fresh.ok_or(OutOfFrames)?;
        let range = PhysRange::new(frame, self.size.bytes()).ok_or(OutOfFrames)?;
        if !self.region.contains(&range) {
            return Err(OutOfFrames);
        }
        self.zero(frame)?;
        state.fresh = frame.checked_add(self.size.bytes());
        state.take(1);
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        let mut state = self.lock();
        debug_assert!(
            self.region.contains_address(frame) && frame.is_aligned(self.size.bytes()),
            "{frame} does not belong to this source"
        );
        debug_assert!(!state.free.contains(&frame), "{frame} is freed twice");
        state.in_use = state.in_use.saturating_sub(1);
        state.free.push(frame);
    }
}
