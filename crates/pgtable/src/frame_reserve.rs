//! Page frames of tables: zeroed frames, a reserve that makes a map all-or-nothing, and the frames
//! of a table that is destroyed.

use core::sync::atomic::Ordering;

use ringfence_types::{FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory};

use crate::{Coherency, TableError};

/// Allocates a zeroed frame and starts its write-back. The caller must [`drain`](Coherency::drain)
/// before it stores an entry that points to the frame.
pub(crate) fn fresh_frame<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
    size: PageSize,
    coherency: Coherency,
    mem: &M,
    frames: &S,
) -> Result<PhysAddr, TableError> {
    if frames.frame_size() != size {
        return Err(TableError::FrameSize);
    }
    let frame = frames.alloc_zeroed()?;
    if !is_usable(mem, frame, size) {
        frames.free(frame);
        return Err(TableError::Memory);
    }
    coherency.write_back(mem, frame, size.bytes());
    Ok(frame)
}

/// Returns true if the frame of `size` at `frame` lies in memory and is aligned.
fn is_usable<M: PhysMemory + ?Sized>(mem: &M, frame: PhysAddr, size: PageSize) -> bool {
    frame.is_aligned(size.bytes()) && mem.words(frame, (size.bytes() / 8) as usize).is_ok()
}

/// Bit of the first word of a frame in a [`FrameReserve`]. An entry with this bit alone is absent.
const LISTED: u64 = 1 << 2;
/// Another frame follows, at the address in the word. Tells a frame at address zero from the end.
const FOLLOWED: u64 = 1 << 3;
/// Bits of the word that hold no address: frames are page-aligned.
const FLAGS: u64 = PageSize::Size4K.bytes() - 1;

/// Frames allocated before the table is modified, so that running out of frames needs no undo.
///
/// The free frames form a list through their first words, so the reserve needs no other memory.
/// Drop returns unused frames to the source.
pub(crate) struct FrameReserve<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> {
    mem: &'a M,
    frames: &'a S,
    size: PageSize,
    head: Option<PhysAddr>,
}

impl<'a, M: PhysMemory + ?Sized, S: FrameSource + ?Sized> FrameReserve<'a, M, S> {
    /// Creates an empty reserve of frames of `size`.
    pub(crate) fn new(size: PageSize, mem: &'a M, frames: &'a S) -> Self {
        Self {
            mem,
            frames,
            size,
            head: None,
        }
    }

    /// Allocates one frame more.
    pub(crate) fn grow(&mut self) -> Result<(), OutOfFrames> {
        if self.frames.frame_size() != self.size {
            return Err(OutOfFrames);
        }
        let frame = self.frames.alloc_zeroed()?;
        if !is_usable(self.mem, frame, self.size) {
            // The frame lies outside memory. Return it and report that no usable frame is left.
            self.frames.free(frame);
            return Err(OutOfFrames);
        }
        self.put(frame);
        Ok(())
    }

    /// Takes a zeroed frame whose zeroes have reached memory. An entry may point to it at once.
    pub(crate) fn take(&mut self, coherency: Coherency) -> Option<PhysAddr> {
        let frame = self.pop()?;
        coherency.write_back(self.mem, frame, self.size.bytes());
        // A walker that does not snoop must see the zeroes before it sees the entry that points
        // here. The CPU may evict the line with that entry at any time, so waiting at the end of
        // the operation would be too late.
        coherency.drain(self.mem);
        Some(frame)
    }

    /// Puts a frame into the reserve. Ignores a frame outside memory.
    pub(crate) fn put(&mut self, frame: PhysAddr) {
        if let Ok(link) = self.mem.word(frame) {
            let next = self.head.map_or(0, |next| next.get() | FOLLOWED);
            link.store(next | LISTED, Ordering::Relaxed);
            self.head = Some(frame);
        }
    }

    /// Returns true if `frame` is in the reserve, or outside memory. A hostile hand can also write
    /// the word that a frame in the reserve has; no table of ours contains that word.
    pub(crate) fn holds(&self, frame: PhysAddr) -> bool {
        let link = self.mem.word(frame);
        link.map_or(true, |link| {
            link.load(Ordering::Relaxed) & FLAGS & !FOLLOWED == LISTED
        })
    }

    fn pop(&mut self) -> Option<PhysAddr> {
        let frame = self.head?;
        let link = self.mem.word(frame).ok()?;
        let next = link.swap(0, Ordering::Relaxed);
        self.head = (next & FOLLOWED != 0).then(|| PhysAddr::new(next & !FLAGS));
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
