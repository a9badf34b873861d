//! The port to the allocator of table frames.

use core::fmt;

use crate::{PageSize, PhysAddr};

/// Allocates frames for tables, all of one size. The embedder bounds the supply, so every caller
/// handles [`OutOfFrames`].
pub trait FrameSource {
    /// Returns the size and alignment of every frame: 4 KiB, unless the granule of the tables is
    /// larger.
    #[inline]
    fn frame_size(&self) -> PageSize {
        PageSize::Size4K
    }

    /// Allocates a frame for the caller's exclusive use; all its words read zero.
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames>;

    /// Frees a frame. The caller guarantees that no page-table walker can reach it any more.
    fn free(&self, frame: PhysAddr);
}

impl<S: FrameSource + ?Sized> FrameSource for &S {
    #[inline]
    fn frame_size(&self) -> PageSize {
        (**self).frame_size()
    }

    #[inline]
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        (**self).alloc_zeroed()
    }

    #[inline]
    fn free(&self, frame: PhysAddr) {
        (**self).free(frame);
    }
}

/// The source has out of frames for tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OutOfFrames;

impl fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of frames for tables")
    }
}

impl core::error::Error for OutOfFrames {}
