//! I/O page tables of assigned devices: GIOVA to host memory, in the hardware's format.

use alloc::vec::Vec;

use ringfence_pgtable::{
    Coherency, Context, Cursor, Level, MapError, MapRequest, ReclaimingTable, SecondStage,
    TableError, TranslationType, UnlinkedTables, walk,
};
use ringfence_types::{
    Batch, CachedLevels, Direction, DomainId, FrameSource, Invalidation, Invalidator, Iova, Pfn,
    PfnRange, PhysAddr, PhysMemory, Unmapped,
};

use super::invalidate::invalidate;
use super::{DeviceSlot, IoError, IoTables, TablesHandle};
use crate::wire::PAGE_BYTES;

/// Maximum number of page runs that are invalidated one by one. Beyond it, page invalidations cost
/// more than flushing the domain.
const RUNS: usize = 8;

/// Number of table pages that a device keeps even if they are empty: 16 MiB, which map 8 GiB of
/// adjacent addresses.
pub const KEPT_TABLES: u64 = 4096;

/// A VT-d second-stage table and a domain for each device.
///
/// Linux frees a table page only when one unmap covers its whole range, so unmaps of 4 KiB never
/// free one. A guest that maps one page in each of many regions then holds host frames for the
/// lifetime of its device.
///
/// Here an unmap frees an empty table page once the device has more than [`KEPT_TABLES`]. It keeps
/// table pages below that number. Otherwise a driver that maps and unmaps one page would allocate
/// and free a table each time.
///
/// A device therefore holds at most the kept pages and the pages in use. Those are one per level
/// below the root for each of the [`leaves`](super::BackendLimits::leaves) that the backend allows.
#[derive(Debug)]
pub struct HardwareTables<M, S, I> {
    memory: M,
    frames: S,
    invalidator: I,
    tables: Vec<PerDeviceTable>,
    /// Size of a device's tables in bytes above which empty pages are freed.
    kept_bytes: u64,
}

#[derive(Debug)]
struct PerDeviceTable {
    table: ReclaimingTable<SecondStage>,
    /// Cleared ranges that are not yet invalidated.
    cleared: ClearedRuns,
    /// Unlinked table pages whose invalidation failed.
    not_invalidated: Option<UnlinkedTables>,
}

impl PerDeviceTable {
    /// Invalidates the paging-structure caches and frees the unlinked table pages.
    ///
    /// # Errors
    /// The table pages stay. New mappings in their ranges may be invisible to the device.
    fn free_unlinked<S: FrameSource, I: Invalidator>(
        &mut self,
        frames: &S,
        invalidator: &mut I,
    ) -> Result<(), IoError> {
        let Some(retired) = self.not_invalidated.take() else {
            return Ok(());
        };
        match invalidate(
            invalidator,
            Invalidation::Domain(self.table.domain()),
            retired,
        ) {
            Ok(flushed) => {
                UnlinkedTables::release(flushed, frames);
                Ok(())
            }
            Err(retired) => {
                self.not_invalidated = Some(retired);
                Err(IoError::Failed)
            }
        }
    }

    /// Returns true if the leaf table of `giova` is linked.
    #[cold]
    fn leads_to<M: PhysMemory>(&self, memory: &M, giova: Iova) -> bool {
        let format = self.table.format();
        let root = Cursor::root(format, self.table.root());
        let mut linked = false;
        let _ = walk(format, memory, root, giova, |cursor| {
            linked |= cursor.level() == Level::LEAF;
        });
        linked
    }

    /// Unlinks empty tables in `ranges`, which no device can access any more.
    #[cold]
    fn unlink_empty<M: PhysMemory, S: FrameSource, I: Invalidator>(
        &mut self,
        memory: &M,
        frames: &S,
        invalidator: &mut I,
        ranges: &[PfnRange],
    ) {
        // While unlinked pages wait for an invalidation, do not unlink more.
        if self.free_unlinked(frames, invalidator).is_err() {
            return;
        }
        for range in ranges {
            self.table.unlink(memory, *range);
        }
        let retired = self.table.take_unlinked();
        if !retired.is_empty() {
            self.not_invalidated = Some(retired);
            // If this fails, the next map that needs a table, or the next unlink, retries it.
            let _ = self.free_unlinked(frames, invalidator);
        }
    }
}

/// Cleared page runs of one domain.
#[derive(Debug, Default)]
struct ClearedRuns(Vec<Unmapped>);

impl Batch for ClearedRuns {
    fn covered_by(&self, request: &Invalidation) -> bool {
        self.0.iter().all(|run| run.covered_by(request))
    }
}

impl ClearedRuns {
    #[inline]
    fn add(&mut self, page: Unmapped) {
        let rest = match self.0.last_mut() {
            Some(last) => last.append(page),
            None => Err(page),
        };
        if let Err(page) = rest {
            self.0.push(page);
        }
    }
}

impl<M: PhysMemory, S: FrameSource, I: Invalidator> HardwareTables<M, S, I> {
    /// Creates an empty table of `format` for each of `domains`, which are in the order of
    /// [`DeviceSlot`]s.
    ///
    /// # Errors
    /// No frame is left, or a frame is outside `memory`.
    pub fn new(
        memory: M,
        frames: S,
        invalidator: I,
        format: SecondStage,
        coherency: Coherency,
        domains: &[DomainId],
    ) -> Result<Self, TableError> {
        let table = |domain: &DomainId| {
            let table = ReclaimingTable::new(format, *domain, coherency, &memory, &frames)?;
            Ok(PerDeviceTable {
                table,
                cleared: ClearedRuns::default(),
                not_invalidated: None,
            })
        };
        let tables = domains.iter().map(table).collect::<Result<_, TableError>>();
        Ok(Self {
            tables: tables?,
            memory,
            frames,
            invalidator,
            kept_bytes: KEPT_TABLES * PAGE_BYTES,
        })
    }

    /// Sets the number of table pages, including the root, that each device keeps before empty ones
    /// are freed. The default is [`KEPT_TABLES`].
    pub const fn set_kept_tables(&mut self, tables: u64) {
        self.kept_bytes = tables.saturating_mul(PAGE_BYTES);
    }

    /// Returns the context entry of a device, to install when its driver has set DRIVER_OK. Before
    /// that, the entry must be empty.
    pub fn context(&self, device: DeviceSlot) -> Option<Context> {
        let table = &self.tables.get(device.index())?.table;
        Some(Context {
            domain: table.domain(),
            translation: TranslationType::Table {
                root: table.root(),
                levels: table.format().levels(),
            },
        })
    }

    /// Returns the size of all linked tables in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.tables.iter().map(|one| one.table.table_bytes()).sum()
    }
}

/// Exclusive access to the [`HardwareTables`] of a backend:
/// [`Backend::tables`](super::Backend::tables).
#[derive(Debug)]
pub struct HardwareTablesMut<'t, M, S, I> {
    tables: &'t mut HardwareTables<M, S, I>,
}

impl<'t, M: PhysMemory, S: FrameSource, I: Invalidator> HardwareTablesMut<'t, M, S, I> {
    /// Sets the number of kept table pages as [`HardwareTables::set_kept_tables`] does.
    pub const fn set_kept_tables(&mut self, tables: u64) {
        self.tables.set_kept_tables(tables);
    }

    /// Returns the context entry of a device as [`HardwareTables::context`] does.
    pub fn context(&self, device: DeviceSlot) -> Option<Context> {
        self.tables.context(device)
    }

    /// Returns the size of all linked tables in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.tables.table_bytes()
    }

    /// The invalidation interface, a type of the embedder. It must keep invalidating the caches of
    /// these tables.
    pub fn invalidator(self) -> &'t mut I {
        &mut self.tables.invalidator
    }
}

impl<M: PhysMemory, S: FrameSource, I: Invalidator> TablesHandle for HardwareTables<M, S, I> {
    type Handle<'t>
        = HardwareTablesMut<'t, M, S, I>
    where
        Self: 't;

    fn handle(&mut self) -> HardwareTablesMut<'_, M, S, I> {
        HardwareTablesMut { tables: self }
    }
}

impl<M: PhysMemory, S: FrameSource, I: Invalidator> IoTables for HardwareTables<M, S, I> {
    #[inline]
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        let of = self.tables.get_mut(device.index()).ok_or(IoError::Failed)?;
        let request = MapRequest {
            iova: giova,
            pa: frame,
            pages: 1,
            permissions: direction.permissions(),
        };
        // A paging-structure cache may still point to an unlinked page. It would hide a mapping in
        // the new table.
        if of.not_invalidated.is_some() && !of.leads_to(&self.memory, giova) {
            of.free_unlinked(&self.frames, &mut self.invalidator)?;
        }
        // The hardware caches no absent entries, so a map needs no invalidation. Walk from the
        // root: a guest's addresses are too far apart for a cache of leaf tables.
        let mapped = of.table.map(&self.memory, &self.frames, request);
        mapped.map_err(|error| match error {
            MapError::OutOfFrames => IoError::NoRoom,
            _ => IoError::Failed,
        })
    }

    #[inline]
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        let of = self.tables.get_mut(device.index()).ok_or(IoError::Failed)?;
        let page = PfnRange::new(Pfn::containing(giova), 1).ok_or(IoError::Failed)?;
        // Keep the tables linked until the entries are invalidated, so that restoring an entry
        // needs no frame.
        let cleared = of.table.clear(&self.memory, page);
        of.cleared.add(cleared.map_err(|_| IoError::Failed)?);
        Ok(())
    }

    #[inline]
    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        let of = self.tables.get_mut(device.index()).ok_or(IoError::Failed)?;
        let domain = of.table.domain();
        let runs = of.cleared.0.len();
        if runs == 0 {
            return Ok(());
        }
        let over_limit = of.table.table_bytes() > self.kept_bytes;
        let ranges: Vec<PfnRange> = match over_limit {
            true => of.cleared.0.iter().map(Unmapped::range).collect(),
            false => Vec::new(),
        };
        if runs > RUNS {
            let batch = core::mem::take(&mut of.cleared);
            let request = Invalidation::Domain(domain);
            // The guest manages the addresses, so there is none to release here.
            if let Err(batch) = invalidate(&mut self.invalidator, request, batch) {
                of.cleared = batch;
                return Err(IoError::Failed);
            }
        }
        while let Some(run) = of.cleared.0.pop() {
            let request = Invalidation::Pages {
                domain,
                range: run.range(),
                // The table pages stay linked.
                levels: CachedLevels::Leaves,
            };
            if let Err(run) = invalidate(&mut self.invalidator, request, run) {
                of.cleared.0.push(run);
                return Err(IoError::Failed);
            }
        }
        if over_limit {
            of.unlink_empty(&self.memory, &self.frames, &mut self.invalidator, &ranges);
        }
        Ok(())
    }
}
