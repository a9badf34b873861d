//! Where table pages come from.

use core::fmt;

use crate::PhysAddr;

/// Hands out 4 KiB frames for tables. Bounded by the embedder: a table can always be refused.
pub trait FrameSource {
    /// A frame whose 512 words read zero, for the caller alone.
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames>;

    /// Takes a frame back. The caller has made sure that no walker can reach it any more.
    fn free(&self, frame: PhysAddr);
}

impl<S: FrameSource + ?Sized> FrameSource for &S {
    #[inline]
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        (**self).alloc_zeroed()
    }

    #[inline]
    fn free(&self, frame: PhysAddr) {
        (**self).free(frame);
    }
}

/// No frame is left for a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OutOfFrames;

impl fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no frame left for a table")
    }
}

impl core::error::Error for OutOfFrames {}
