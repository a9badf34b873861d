//! Table frames out of a region of memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use core::sync::atomic::Ordering;

use ringfence_types::{
    FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory, PhysRange, TABLE_WORDS,
};

const FRAME: u64 = PageSize::Size4K.bytes();

/// Hands out the frames of a region: freed ones first, then those never used. Shared by threads
/// behind one lock; tables need a frame rarely.
#[derive(Debug)]
pub struct Frames<M> {
    mem: M,
    region: PhysRange,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// First byte of the region never handed out; none when there is none left.
    fresh: Option<PhysAddr>,
    free: Vec<PhysAddr>,
    in_use: u64,
    peak: u64,
}

impl<M: PhysMemory> Frames<M> {
    /// The whole frames inside `region`, which lies in `mem`.
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

    /// `count` consecutive frames, zeroed, aligned to their size rounded up to a power of two: the
    /// root of a flat table. They are not taken back.
    ///
    /// # Errors
    /// The rest of the region that was never used is too small.
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
        // What the alignment skips is not lost.
        let mut skipped = fresh;
        while skipped < at {
            state.free.push(skipped);
            skipped = skipped.wrapping_add(FRAME);
        }
        for frame in 0..count {
            self.zero(at.wrapping_add(frame * FRAME))?;
        }
        state.fresh = at.checked_add(bytes);
        state.take(count);
        Ok(at)
    }

    /// Frames handed out and not taken back.
    pub fn in_use(&self) -> u64 {
        self.lock().in_use
    }

    /// The most frames that were ever handed out at a time.
    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    fn zero(&self, frame: PhysAddr) -> Result<(), OutOfFrames> {
        let words = self.mem.table(frame).map_err(|_| OutOfFrames)?;
        for word in words {
            // Storing zeroes over zeroes would make a sparse arena dense.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements, so another thread's panic means nothing
        // here.
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
            "{frame} is no frame of this source"
        );
        debug_assert!(!state.free.contains(&frame), "{frame} is freed twice");
        state.in_use = state.in_use.saturating_sub(1);
        state.free.push(frame);
    }
}
