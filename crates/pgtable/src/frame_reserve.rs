//! Page frames for new tables: zeroed frames, and a reserve that makes a map all-or-nothing.

use core::sync::atomic::Ordering;

use ringfence_types::{FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory};

use crate::{Coherency, TableError};

/// Allocates a zeroed frame and starts its write-back. The caller must [`drain`](Coherency::drain)
/// before it stores an entry that points to the frame.
pub(crate) fn fresh_frame<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
    coherency: Coherency,
    mem: &M,
    frames: &S,
) -> Result<PhysAddr, TableError> {
    let frame = frames.alloc_zeroed()?;
    if mem.table(frame).is_err() {
        frames.free(frame);
        return Err(TableError::Memory);
    }
    coherency.write_back(mem, frame, PageSize::Size4K.bytes());
    Ok(frame)
}

/// Frames allocated before the table is modified, so that running out of frames needs no undo.
///
/// The free frames form a list through their first words, so the reserve needs no other memory.
/// Drop returns unused frames to the source.
pub(crate) struct FrameReserve<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> {
    mem: &'a M,
    frames: &'a S,
    head: Option<PhysAddr>,
}

impl<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> FrameReserve<'a, M, S> {
    /// Allocates `count` frames.
    pub(crate) fn new(mem: &'a M, frames: &'a S, count: u64) -> Result<Self, OutOfFrames> {
        let mut reserve = Self {
            mem,
            frames,
            head: None,
        };
        for _ in 0..count {
            let frame = frames.alloc_zeroed()?;
            if mem.table(frame).is_err() {
                // The frame lies outside memory. Return it and report that no usable frame is left.
                frames.free(frame);
                return Err(OutOfFrames);
            }
            reserve.put(frame);
        }
        Ok(reserve)
    }

    /// Takes a zeroed frame whose zeroes have reached memory. An entry may point to it at once.
    pub(crate) fn take(&mut self, coherency: Coherency) -> Option<PhysAddr> {
        let frame = self.pop()?;
        coherency.write_back(self.mem, frame, PageSize::Size4K.bytes());
        // A walker that does not snoop must see the zeroes before it sees the entry that points
        // here. The CPU may evict the line with that entry at any time, so waiting at the end of
        // the operation would be too late.
        coherency.drain(self.mem);
        Some(frame)
    }

    /// Returns an unused frame to the reserve.
    pub(crate) fn put(&mut self, frame: PhysAddr) {
        if let Ok(link) = self.mem.word(frame) {
            // Frames are page-aligned: bit 0 marks a link, and so distinguishes a frame at address
            // zero from the end of the list.
            link.store(
                self.head.map_or(0, |next| next.get() | 1),
                Ordering::Relaxed,
            );
            self.head = Some(frame);
        }
    }

    fn pop(&mut self) -> Option<PhysAddr> {
        let frame = self.head?;
        let link = self.mem.word(frame).ok()?;
        let next = link.swap(0, Ordering::Relaxed);
        self.head = (next & 1 != 0).then(|| PhysAddr::new(next & !1));
        Some(frame)
    }
}

impl<M: PhysMemory + ?Sized, S: FrameSource + ?Sized> Drop for FrameReserve<'_, M, S> {
    fn drop(&mut self) {
        while let Some(frame) = self.pop() {
            self.frames.free(frame);
        }
    }
}
