//! The end of a mapping: the check of its range, and the copy of what the device wrote.

use ringfence_types::{Access, IovaRange, PhysAddr, PhysMemory};

use super::page::{BufferPart, Extent, Page, SlotKind};
use super::pool::{ShadowPool, Slot};
use crate::error::UnmapRefusal;
use crate::space::GRANULE;

impl<L> ShadowPool<L> {
    /// Returns the kind of `slot`, whose mapping has exactly this range, and the first piece. The
    /// range begins in the slot.
    ///
    /// # Errors
    /// The range is not that of one whole mapping.
    #[inline]
    pub(super) fn check_whole(
        &self,
        slot: Slot<'_>,
        range: IovaRange,
    ) -> Result<(SlotKind, BufferPart), UnmapRefusal> {
        let refused = UnmapRefusal::NotAllocated;
        let (kind, first) = slot.page.mapping().ok_or(refused)?;
        let bytes = if first.more {
            self.bytes_of_list(slot.index).ok_or(refused)?
        } else {
            first.bytes
        };
        let starts = first.offset() == range.start().offset_in(GRANULE.bytes());
        if starts && bytes == range.bytes() {
            Ok((kind, first))
        } else {
            Err(refused)
        }
    }

    /// Returns the bytes from the start of a mapping's first piece to the end of its last one.
    #[inline(never)]
    fn bytes_of_list(&self, slot: u32) -> Option<u64> {
        let first = self.page(slot)?.piece()?;
        let (mut index, mut piece) = (slot, first);
        while piece.more {
            (index, piece) = self.next_piece(index, piece)?;
        }
        let pages = u64::from(index.saturating_sub(slot));
        let end = (pages << GRANULE.shift())
            .wrapping_add(piece.offset())
            .wrapping_add(piece.bytes);
        end.checked_sub(first.offset())
    }

    /// Returns the piece after `piece`, and the index of the page of its first byte.
    fn next_piece(&self, index: u32, piece: BufferPart) -> Option<(u32, BufferPart)> {
        let next = index.saturating_add(piece.pages());
        Some((next, self.page(next)?.piece()?))
    }

    /// Calls `each` with the pieces of the mapping in the slot at page `slot`, in order: the index
    /// of the page of its first byte, that page, and the piece.
    #[inline]
    pub(super) fn each_piece(&self, slot: u32, mut each: impl FnMut(u32, &Page, BufferPart)) {
        let mut index = slot;
        while let Some((page, piece)) = self.page(index).and_then(|p| Some((p, p.piece()?))) {
            each(index, page, piece);
            if !piece.more {
                break;
            }
            index = index.saturating_add(piece.pages());
        }
    }

    /// Copies the bytes that the device wrote to the buffer, each byte once, and removes the
    /// records of the mapping, whose first piece is `first`. Bytes that a sync has copied before
    /// are not copied again.
    #[inline]
    pub(super) fn finish(
        &self,
        memory: &impl PhysMemory,
        slot: Slot<'_>,
        kind: SlotKind,
        first: BufferPart,
    ) {
        let received = if kind.permissions.allows(Access::Write) {
            slot.page.received()
        } else {
            0
        };
        if received != 0 {
            self.receive(memory, slot.index, slot.page, &first, received);
        }
        if first.more {
            self.finish_list(memory, slot.index, received);
        }
        slot.page.clear();
    }

    /// Finishes the pieces after the first one, as [`finish`](Self::finish) does. `received` bytes
    /// of the whole mapping are copied.
    #[inline(never)]
    fn finish_list(&self, memory: &impl PhysMemory, slot: u32, received: u64) {
        let Some(first) = self.page(slot).and_then(Page::piece) else {
            return;
        };
        let mut left = received.saturating_sub(first.bytes);
        let (mut index, mut piece) = (slot, first);
        while piece.more {
            let Some(next) = self.next_piece(index, piece) else {
                return;
            };
            (index, piece) = next;
            if let Some(page) = self.page(index) {
                self.receive(memory, index, page, &piece, left);
                page.clear();
            }
            left = left.saturating_sub(piece.bytes);
        }
    }

    /// Copies at most `received` bytes of a piece to the buffer, except those that a sync has
    /// copied.
    #[inline]
    fn receive(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        page: &Page,
        piece: &BufferPart,
        received: u64,
    ) {
        let whole = Extent::first(piece.bytes.min(received));
        for part in whole.without(page.synced()) {
            self.copy_out(memory, index, piece.start, part);
        }
    }

    /// Copies a part of the piece that begins at `start` of the buffer, and on page `index` of the
    /// pool, from the shadow to the buffer.
    #[inline(never)]
    pub(super) fn copy_out(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        start: PhysAddr,
        part: Extent,
    ) {
        if !part.is_empty() {
            let (at, bytes) = (u64::from(part.lo), u64::from(part.bytes()));
            let offset = start.offset_in(GRANULE.bytes());
            let shadow = self.address(index).wrapping_add(offset);
            // The map has checked that the buffer lies in memory.
            let _ = memory.copy_bytes(shadow.wrapping_add(at), start.wrapping_add(at), bytes);
        }
    }
}
