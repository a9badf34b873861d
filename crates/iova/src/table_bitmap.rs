//! The flat translation table itself as the bitmap (AL13): no record besides the entries the
//! hardware reads.
//!
//! Source: Fujita et al., section 2.3, footnote on the Alpha: 8 bytes a page instead of one bit,
//! but no second structure.
//!
//! "Absent" is not "free": between alloc and install, and between clear and free, an entry is
//! absent and owned, and after free it is absent and may not be used before a flush. The hardware
//! ignores all other bits of an entry whose two permission bits are zero, so the allocator marks
//! what is *its own* there and leaves zero to the mapping layer:
//!
//! | entry | meaning |
//! |---|---|
//! | permissions set | mapped |
//! | all zero | owned by the mapping layer: handed out and not yet installed, or cleared and not yet freed |
//! | `FREE`, lap <= flushed | free |
//! | `FREE`, lap > flushed | freed, and some translation cache may still hold it |
//!
//! Entries are read and written as the hardware's: big-endian, as Calgary's are, with the
//! permissions in the two low bits.
//!
//! A flush then costs one store of a lap number, not a pass over the table. The policy is that of
//! [`Bitmap`](crate::Bitmap): next fit upwards, one flush per wrap. See
//! docs/decisions/0003-bitmap-reuse.md.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    Flushed, Lock, MemoryError, Pfn, PfnRange, PhysAddr, PhysMemory, Unmapped, WholeDomain,
};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// The two low bits: what a device may do.
const PERMISSIONS: u64 = 3;
/// The entry is the allocator's.
const FREE: u64 = 1 << 2;
/// Where the lap of the free begins.
const LAP_SHIFT: u32 = 12;
const LAST_LAP: u64 = u64::MAX >> LAP_SHIFT;
const ENTRY_BYTES: u64 = 8;

/// What all processors share besides the table, to be put behind a lock.
#[derive(Debug)]
pub struct TableCursor {
    /// Where the next search starts, counted from the start of the space.
    next: u64,
    /// Written into entries that are freed now.
    lap: u64,
    /// Entries freed in this lap or an earlier one were flushed.
    flushed: u64,
    /// Pages freed in this lap.
    freed: u64,
    /// Pages freed in laps that have ended without a flush.
    unflushed: u64,
    wrapping: bool,
}

/// The allocator.
#[derive(Debug)]
pub struct TableBitmap<M, L> {
    memory: M,
    /// Address of the entry of the space's first page.
    first_entry: PhysAddr,
    space: PfnRange,
    cursor: L,
}

/// Handle of one processor: the lap that it was told to flush.
#[derive(Debug, Default)]
pub struct TableBitmapCpu {
    flush_lap: u64,
}

impl<M: PhysMemory, L: Lock<TableCursor>> TableBitmap<M, L> {
    /// Marks the entries of all pages of `space` free in the flat table whose entry for page 0 lies
    /// at `table`. No device uses the table yet, and no entry is mapped.
    ///
    /// # Errors
    /// If a part of the table lies outside memory.
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

    /// The entries of `range`, if it lies in the space.
    fn entries_of(&self, range: PfnRange) -> Option<&[AtomicU64]> {
        if !self.space.contains(&range) {
            return None;
        }
        let from = (range.lo().get() - self.space.lo().get()) as usize;
        let entries = self.entries().ok()?;
        entries.get(from..from.checked_add(range.pages() as usize)?)
    }

    /// First fit among the entries `[from, end)`.
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
            // No write-back for a walker that does not snoop: free or owned, it reads absent.
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
        let ahead = (cursor.next, end);
        if let Some(lo) = self.first_fit(entries, cursor.flushed, ahead, request, &mut inspected) {
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

    /// Ends the lap: the flush that the caller now submits releases what was freed in it, and
    /// nothing freed later.
    fn needs_flush(&mut self, cpu: &mut TableBitmapCpu) -> AllocError {
        cpu.flush_lap = self.lap;
        // After 2^52 laps pages stay withheld for ever rather than be mistaken for flushed ones.
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

    /// The table does not know where ranges begin and end.
    #[inline]
    fn find(&self, _: &mut TableBitmapCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    /// Refuses ranges with an entry that is mapped or free, in every build.
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

    /// Nothing: the table is there anyway.
    fn footprint(&self) -> usize {
        0
    }
}
