//! The copies of a sync, for one piece of a mapping.

use ringfence_types::PhysMemory;

use super::page::{BufferPart, Extent, Page};
use super::pool::ShadowPool;

impl<L> ShadowPool<L> {
    /// Copies `wanted` of a piece, and all bytes between it and the part that the CPU has received
    /// before, to the buffer. `page` holds the piece's record, and has the index `index`.
    pub(super) fn give_to_cpu(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        page: &Page,
        piece: &BufferPart,
        wanted: Extent,
    ) {
        if wanted.is_empty() {
            return;
        }
        let old = page.synced();
        let new = old.hull(wanted);
        for part in new.without(old) {
            self.copy_out(memory, index, piece.start, part);
        }
        page.set_synced(new);
    }

    /// Returns `wanted` of a piece, and all later bytes that the CPU has received, to the device.
    /// If `copies` is true, copies the bytes of `wanted` to the shadow.
    pub(super) fn give_to_device(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        page: &Page,
        piece: &BufferPart,
        wanted: Extent,
        copies: bool,
    ) {
        if wanted.is_empty() {
            return;
        }
        if copies {
            // The map has checked that the buffer lies in memory.
            let _ = self.copy_in(memory, index, piece.start, wanted);
        }
        let Extent { lo, hi } = page.synced();
        page.set_synced(if wanted.lo <= lo {
            Extent {
                lo: lo.max(wanted.hi),
                hi,
            }
        } else {
            Extent {
                lo,
                hi: hi.min(wanted.lo),
            }
        });
    }
}
