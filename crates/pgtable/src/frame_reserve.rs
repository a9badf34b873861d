//! Frames on their way into a table: fresh ones, and the reserve that makes mapping all-or-nothing.

use core::sync::atomic::Ordering;

use ringfence_types::{FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory};

use crate::{Coherency, TableError};

/// A zeroed frame whose zeroes are on their way to memory; [`Coherency::drain`] before anything
/// leads to it.
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

/// Frames allocated before the table is touched, so that running out of them leaves nothing to
/// undo.
///
/// They are chained through their own first words and need no other memory. What is not taken goes
/// back on drop.
pub(crate) struct FrameReserve<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> {
    mem: &'a M,
    frames: &'a S,
    head: Option<PhysAddr>,
}

impl<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> FrameReserve<'a, M, S> {
    /// `count` frames.
    pub(crate) fn new(mem: &'a M, frames: &'a S, count: u64) -> Result<Self, OutOfFrames> {
        let mut reserve = Self {
            mem,
            frames,
            head: None,
        };
        for _ in 0..count {
            let frame = frames.alloc_zeroed()?;
            if mem.table(frame).is_err() {
                // Not usable, hence as good as none; it goes back to where it came from.
                frames.free(frame);
                return Err(OutOfFrames);
            }
            reserve.put(frame);
        }
        Ok(reserve)
    }

    /// A frame of the reserve, all zero, its zeroes in memory: ready to be led to.
    pub(crate) fn take(&mut self, coherency: Coherency) -> Option<PhysAddr> {
        let frame = self.pop()?;
        coherency.write_back(self.mem, frame, PageSize::Size4K.bytes());
        // A walker that does not snoop must find zeroes here before it finds the entry that leads
        // here, and a line can be evicted to memory at any time: waiting until the end of the
        // operation would be too late.
        coherency.drain(self.mem);
        Some(frame)
    }

    /// Takes a frame back that was taken and not used.
    pub(crate) fn put(&mut self, frame: PhysAddr) {
        if let Ok(link) = self.mem.word(frame) {
            // Frames are page-aligned: bit 0 tells a link to the frame at zero from the end of the
            // chain.
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
