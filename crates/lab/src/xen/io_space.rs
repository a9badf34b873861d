//! The I/O space of one host bridge: its flat table, and the entries that the TCE cache may still
//! hold.

use ringfence_memory::Arena;
use ringfence_pgtable::{CalgaryTce, DirtyLines, MapError, MapRequest, Table};
use ringfence_types::{DomainId, PageSize, Permissions, Pfn, PfnRange, PhysAddr};

use super::{Domid, XenError};

/// Entries of a space: 4 GiB in pages.
pub(super) const SLOTS: u64 = 1 << 20;

/// One bit for each entry.
#[derive(Debug)]
struct SlotBits(Box<[u64]>);

impl SlotBits {
    fn new() -> Self {
        Self(vec![0; (SLOTS / 64) as usize].into_boxed_slice())
    }

    #[inline]
    fn has(&self, slot: u64) -> bool {
        let word = self.0.get((slot / 64) as usize);
        word.is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    #[inline]
    fn set(&mut self, slot: u64, on: bool) {
        if let Some(word) = self.0.get_mut((slot / 64) as usize) {
            let bit = 1 << (slot % 64);
            *word = if on { *word | bit } else { *word & !bit };
        }
    }
}

/// An I/O space.
#[derive(Debug)]
pub(super) struct IoSpace {
    pub(super) owner: Domid,
    pub(super) table: Table<CalgaryTce>,
    /// True if DMA addresses equal guest pseudo-physical ones.
    pub(super) whole_guest: bool,
    /// Unmapped and not flushed: entry and frame. At most one for each entry.
    unflushed: Vec<(u64, u64)>,
    is_unflushed: SlotBits,
    /// Entries that a grant holds.
    granted: SlotBits,
    mapped: u64,
}

impl IoSpace {
    pub(super) fn new(owner: Domid, table: Table<CalgaryTce>) -> Self {
        Self {
            owner,
            table,
            whole_guest: false,
            unflushed: Vec::new(),
            is_unflushed: SlotBits::new(),
            granted: SlotBits::new(),
            mapped: 0,
        }
    }

    pub(super) fn domain(&self) -> DomainId {
        self.table.domain()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.mapped == 0
    }

    /// Returns true if the TCE cache may still hold the old entry of a slot.
    #[inline]
    pub(super) fn must_flush_before(&self, page: Pfn) -> bool {
        self.is_unflushed.has(page.get())
    }

    pub(super) fn set_granted(&mut self, page: Pfn, on: bool) {
        self.granted.set(page.get(), on);
    }

    pub(super) fn is_granted(&self, page: Pfn) -> bool {
        self.granted.has(page.get())
    }

    /// Stores an entry.
    #[inline]
    pub(super) fn map(
        &mut self,
        memory: &Arena,
        frames: &ringfence_memory::Frames<std::rc::Rc<Arena>>,
        page: Pfn,
        frame: u64,
        permissions: Permissions,
    ) -> Result<(), XenError> {
        if page.get() >= SLOTS {
            return Err(XenError::BeyondSpace);
        }
        let request = MapRequest {
            iova: page.iova(),
            pa: PhysAddr::new(frame << 12),
            pages: 1,
            permissions,
        };
        match self.table.map(memory, frames, request) {
            Ok(()) => {
                self.mapped += 1;
                Ok(())
            }
            Err(MapError::AlreadyMapped { .. }) => Err(XenError::Occupied),
            Err(_) => Err(XenError::NoMemory),
        }
    }

    /// Returns the frame of an entry.
    pub(super) fn frame(&self, memory: &Arena, page: Pfn) -> Option<u64> {
        if page.get() >= SLOTS {
            return None;
        }
        let leaf = self.table.lookup(memory, page.iova())?;
        Some(leaf.base.get() / PageSize::Size4K.bytes())
    }

    /// Clears an entry. Its frame stays referenced until the flush.
    #[inline]
    pub(super) fn unmap(
        &mut self,
        memory: &Arena,
        dirty: &mut DirtyLines,
        page: Pfn,
    ) -> Result<(), XenError> {
        let frame = self.frame(memory, page).ok_or(XenError::NotMapped)?;
        let range = PfnRange::new(page, 1).ok_or(XenError::BeyondSpace)?;
        // The guest's allocator owns the address. The hypervisor withholds only the frame.
        let (_range, _levels) = self
            .table
            .unmap_nosync(memory, range, dirty)
            .map_err(|_| XenError::NotMapped)?;
        self.mapped = self.mapped.saturating_sub(1);
        self.granted.set(page.get(), false);
        self.unflushed.push((page.get(), frame));
        self.is_unflushed.set(page.get(), true);
        Ok(())
    }

    /// Calls `put` with each frame that no cached translation refers to any more. The TCE cache was
    /// just flushed.
    #[inline]
    pub(super) fn flushed(&mut self, mut put: impl FnMut(u64)) {
        for (slot, frame) in self.unflushed.drain(..) {
            self.is_unflushed.set(slot, false);
            put(frame);
        }
    }

    /// Returns the pages of all entries.
    pub(super) fn mapped_pages(&self, memory: &Arena) -> Vec<Pfn> {
        let present = |page: &Pfn| self.frame(memory, *page).is_some();
        (0..SLOTS).map(Pfn::new).filter(present).collect()
    }
}
