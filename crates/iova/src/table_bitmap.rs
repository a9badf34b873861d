//! The flat translation table as the bitmap: the allocator keeps its state in the entries
//! that the hardware reads.
//!
//! Source: Fujita and Moriai, section 2.3, footnote on the Alpha: 8 bytes per page instead of one
//! bit, but no second structure.
//!
//! An entry that is not present is not necessarily free. Between alloc and map, and between clear
//! and free, an entry is not present but in use. After free it is not present but may not be reused
//! before a flush. The hardware ignores all other bits of an entry whose two permission bits are
//! zero. The allocator therefore marks *its own* entries there; an all-zero entry belongs to the
//! mapping layer:
//!
//! | entry | meaning |
//! |---|---|
//! | permissions set | mapped |
//! | all zero | owned by the mapping layer: not yet mapped, or cleared and not yet freed |
//! | `FREE`, lap <= flushed | free |
//! | `FREE`, lap > flushed | freed, and some translation cache may still hold it |
//!
//! Entries have the hardware's format: big-endian, like Calgary's, with the permissions in the two
//! low bits.
//!
//! A flush then stores one lap number and needs no pass over the table. The policy is that of
//! [`Bitmap`](crate::Bitmap): next fit upwards, one flush per wrap. See
//! docs/decisions/0003-bitmap-reuse.md.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    Flushed, Lock, MemoryError, Pfn, PfnRange, PhysAddr, PhysMemory, Unmapped, WholeDomain,
};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// The two low bits: the permissions of the device.
const PERMISSIONS: u64 = 3;
/// The allocator owns the entry.
const FREE: u64 = 1 << 2;
/// First bit of the lap in which the entry was freed.
const LAP_SHIFT: u32 = 12;
const LAST_LAP: u64 = u64::MAX >> LAP_SHIFT;
const ENTRY_BYTES: u64 = 8;

/// The state that CPUs share besides the table; the embedder wraps it in a lock.
#[derive(Debug)]
pub struct TableCursor {
    /// Start of the next search, as an offset from the start of the space.
    next: u64,
    /// The current lap. `free` writes it into entries.
    lap: u64,
    /// Entries freed in this lap or an earlier one have been flushed.
    flushed: u64,
    /// Number of pages freed in the current lap.
    freed: u64,
    /// Number of pages freed in earlier laps that have not been flushed.
    unflushed: u64,
    wrapping: bool,
}

/// An allocator that keeps its state in a flat translation table.
#[derive(Debug)]
pub struct TableBitmap<M, L> {
    memory: M,
    /// Address of the entry of the space's first page.
    first_entry: PhysAddr,
    space: PfnRange,
    cursor: L,
}

/// The handle of one CPU. It records the last lap that this CPU was asked to flush.
#[derive(Debug, Default)]
pub struct TableBitmapCpu {
    flush_lap: u64,
}

impl<M: PhysMemory, L: Lock<TableCursor>> TableBitmap<M, L> {
    /// Creates the allocator on the flat table whose entry for page 0 is at `table`, and marks the
    /// entries of all pages of `space` free. No device may use the table yet, and no entry may be
    /// mapped.
    ///
    /// # Errors
    /// Returns an error if a part of the table lies outside memory.
    pub fn new(
        memory: M,
        table: PhysAddr,
        space: PfnRange,
        lock: impl FnOnce(TableCursor) -> L,
    ) -> Result<Self, MemoryError> {
        let outside = MemoryError::Outside {
            at: table,
            words: space.pages(),
        };
        let first_entry = space
            .lo()
            .get()
            .checked_mul(ENTRY_BYTES)
            .and_then(|offset| table.checked_add(offset))
            .ok_or(outside)?;
        let this = Self {
            memory,
            first_entry,
            space,
            cursor: lock(TableCursor {
                next: 0,
                lap: 1,
                flushed: 0,
                freed: 0,
                unflushed: 0,
                wrapping: false,
            }),
        };
        for entry in this.entries()? {
            write(entry, FREE);
        }
        Ok(this)
    }

    #[inline]
    fn entries(&self) -> Result<&[AtomicU64], MemoryError> {
        let count = usize::try_from(self.space.pages()).unwrap_or(usize::MAX);
        self.memory.words(self.first_entry, count)
    }

    /// Returns the entries of `range`. `None` if it is not in the space.
    fn entries_of(&self, range: PfnRange) -> Option<&[AtomicU64]> {
        if !self.space.contains(&range) {
            return None;
        }
        let from = (range.lo().get() - self.space.lo().get()) as usize;
        let entries = self.entries().ok()?;
        entries.get(from..from.checked_add(range.pages() as usize)?)
    }

    /// Finds the first fit among the entries `[from, end)`.
    fn first_fit(
        &self,
        entries: &[AtomicU64],
        flushed: u64,
        (from, end): (u64, u64),
        request: &AllocRequest,
        inspected: &mut u32,
    ) -> Option<u64> {
        let base = self.space.lo().get();
        let top = base.saturating_add(end);
        let mut lo = request.lowest_in(base.saturating_add(from), top)? - base;
        let mut at = lo;
        loop {
            let entry = read(entries.get(at as usize)?);
            *inspected = inspected.saturating_add(1);
            at += 1;
            if !is_free(entry, flushed) {
                lo = request.lowest_in(base.saturating_add(at), top)? - base;
                at = lo;
            } else if at - lo == request.pages {
                return Some(lo);
            }
        }
    }

    fn take(
        &self,
        entries: &[AtomicU64],
        lo: u64,
        request: &AllocRequest,
        inspected: u32,
    ) -> Result<Allocation, AllocError> {
        let first = Pfn::new(self.space.lo().get().saturating_add(lo));
        let range = PfnRange::new(first, request.pages).ok_or_else(|| request.exhausted())?;
        for entry in entries
            .iter()
            .skip(lo as usize)
            .take(request.pages as usize)
        {
            // No write-back for a walker that does not snoop: both the old and the new value are
            // not present.
            write(entry, 0);
        }
        Ok(Allocation {
            range,
            steps: inspected.saturating_sub(1),
        })
    }

    fn alloc_under_lock(
        &self,
        cursor: &mut TableCursor,
        cpu: &mut TableBitmapCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        let entries = self.entries().map_err(|_| AllocError::OutOfMemory)?;
        let size = self.space.pages();
        let end = match request.limit.get().checked_sub(self.space.lo().get()) {
            Some(last) => last.saturating_add(1).min(size),
            None => return Err(request.exhausted()),
        };
        let mut inspected = 0;
        let above_cursor = (cursor.next, end);
        if let Some(lo) = self.first_fit(
            entries,
            cursor.flushed,
            above_cursor,
            request,
            &mut inspected,
        ) {
            cursor.next = lo.saturating_add(request.pages);
            return self.take(entries, lo, request, inspected);
        }
        let wraps = end == size;
        if wraps && cursor.withheld() > 0 {
            cursor.wrapping = true;
            return Err(cursor.needs_flush(cpu));
        }
        if let Some(lo) = self.first_fit(entries, cursor.flushed, (0, end), request, &mut inspected)
        {
            if wraps {
                cursor.next = lo.saturating_add(request.pages);
            }
            return self.take(entries, lo, request, inspected);
        }
        if cursor.withheld() > 0 {
            return Err(cursor.needs_flush(cpu));
        }
        Err(request.exhausted())
    }
}

#[inline]
fn read(entry: &AtomicU64) -> u64 {
    u64::from_be(entry.load(Ordering::Relaxed))
}

#[inline]
fn write(entry: &AtomicU64, value: u64) {
    entry.store(value.to_be(), Ordering::Relaxed);
}

#[inline]
fn is_free(entry: u64, flushed: u64) -> bool {
    entry & (PERMISSIONS | FREE) == FREE && entry >> LAP_SHIFT <= flushed
}

impl TableCursor {
    fn withheld(&self) -> u64 {
        self.freed.saturating_add(self.unflushed)
    }

    /// Ends the lap. The flush that the caller then submits releases the pages freed in this lap
    /// and in earlier ones, but no page freed later.
    fn needs_flush(&mut self, cpu: &mut TableBitmapCpu) -> AllocError {
        cpu.flush_lap = self.lap;
        // After 2^52 laps freed pages stay withheld forever, because they could be mistaken for
        // flushed ones.
        self.lap = self.lap.saturating_add(1).min(LAST_LAP);
        self.unflushed = self.withheld();
        self.freed = 0;
        AllocError::NeedsFlush
    }

    fn flushed(&mut self, cpu: &TableBitmapCpu) {
        if cpu.flush_lap <= self.flushed || cpu.flush_lap >= LAST_LAP {
            return;
        }
        self.flushed = cpu.flush_lap;
        if self.flushed.saturating_add(1) == self.lap {
            self.unflushed = 0;
        }
        if core::mem::take(&mut self.wrapping) {
            self.next = 0;
        }
    }
}

impl<M: PhysMemory, L: Lock<TableCursor>> IovaAllocator for TableBitmap<M, L> {
    type PerCpu = TableBitmapCpu;
    type FreeProof = Unmapped;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> TableBitmapCpu {
        TableBitmapCpu::default()
    }

    fn alloc(
        &self,
        cpu: &mut TableBitmapCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        request.validate()?;
        self.cursor
            .with(|cursor| self.alloc_under_lock(cursor, cpu, request))
    }

    /// Returns `None`: the table does not record where ranges begin and end.
    #[inline]
    fn find(&self, _: &mut TableBitmapCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    /// Frees a range. Rejects ranges with a mapped or free entry, in every build.
    fn free(&self, _: &mut TableBitmapCpu, range: Unmapped) -> bool {
        let Some(entries) = self.entries_of(range.range()) else {
            return false;
        };
        self.cursor.with(|cursor| {
            if entries
                .iter()
                .any(|entry| read(entry) & (PERMISSIONS | FREE) != 0)
            {
                return false;
            }
            for entry in entries {
                write(entry, cursor.lap << LAP_SHIFT | FREE);
            }
            cursor.freed = cursor.freed.saturating_add(range.range().pages());
            true
        })
    }

    fn flushed(&self, cpu: &mut TableBitmapCpu, _proof: Flushed<WholeDomain>) {
        self.cursor.with(|cursor| cursor.flushed(cpu));
    }

    /// Returns 0: the mapping layer needs the table anyway.
    fn footprint(&self) -> usize {
        0
    }
}
