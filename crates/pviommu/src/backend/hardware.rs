//! I/O page tables of assigned devices: GIOVA to host memory, in the format that the hardware
//! walks.

use alloc::vec::Vec;

use ringfence_pgtable::{
    Coherency, Context, Cursor, Level, MapError, MapRequest, Reclaim, ReclaimingTable, SecondStage,
    TableError, TranslationType, UnlinkedTables, walk,
};
use ringfence_types::{
    Batch, CachedLevels, Direction, DomainId, FrameSource, Invalidation, Invalidator, Iova, Pfn,
    PfnRange, PhysAddr, PhysMemory, Unmapped,
};

use super::invalidate::invalidate;
use super::{DeviceSlot, IoError, IoTables};
use crate::wire::PAGE_BYTES;

/// Runs of pages that are invalidated one by one. More at a time cost more than what else the
/// domain has cached.
const RUNS: usize = 8;

/// Table pages that a device keeps although they are empty: 16 MiB, which lead to 8 GiB of
/// addresses that are near each other.
pub const KEPT_TABLES: u64 = 4096;

/// A VT-d second-stage table for each device, with a domain of its own.
///
/// Linux frees a table page only when one unmap covers all that it leads to, so pages of 4 KiB
/// never do, and a guest that maps one page in each of many regions has its host's frames for as
/// long as its device is there. Here a table page that an unmap leaves empty goes back as soon as
/// the device has more than [`KEPT_TABLES`]; up to these they stay, for a driver that maps and
/// unmaps one page would otherwise build and free a table each time. So a device holds at most the
/// kept ones and those that lead to what is mapped, one a level below the root for each of the
/// [`leaves`](super::BackendLimits::leaves) that the backend allows.
#[derive(Debug)]
pub struct HardwareTables<M, S, I> {
    memory: M,
    frames: S,
    invalidator: I,
    tables: Vec<PerDeviceTable>,
    /// Bytes of a device's tables beyond which empty ones go.
    kept: u64,
}

#[derive(Debug)]
struct PerDeviceTable {
    table: ReclaimingTable<SecondStage>,
    /// Cleared and not yet invalidated.
    cleared: ClearedRuns,
    /// Table pages that nothing leads to, if the walk caches could not be told.
    not_invalidated: Option<UnlinkedTables>,
}

impl PerDeviceTable {
    /// Waits until no walk cache leads to a table page that was unlinked, and frees those.
    ///
    /// # Errors
    /// They stay, and what is mapped where they were may not be seen.
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

    /// Whether the last table on the way to `giova` is linked.
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

    /// Unlinks what is empty on the way to `ranges`, which no device reaches any more.
    #[cold]
    fn unlink_empty<M: PhysMemory, S: FrameSource, I: Invalidator>(
        &mut self,
        memory: &M,
        frames: &S,
        invalidator: &mut I,
        ranges: &[PfnRange],
    ) {
        // While some wait for the walk caches, no others join them.
        if self.free_unlinked(frames, invalidator).is_err() {
            return;
        }
        for range in ranges {
            self.table.unlink(memory, *range);
        }
        let retired = self.table.take_unlinked();
        if !retired.is_empty() {
            self.not_invalidated = Some(retired);
            // Tried again when a map needs a table, and when others are to go.
            let _ = self.free_unlinked(frames, invalidator);
        }
    }
}

/// Runs of one domain.
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
    /// An empty table of `format` for each of `domains`, one a device in the order of
    /// [`DeviceSlot`]s.
    ///
    /// # Errors
    /// No frame, or none in `memory`.
    pub fn new(
        memory: M,
        frames: S,
        invalidator: I,
        format: SecondStage,
        coherency: Coherency,
        domains: &[DomainId],
    ) -> Result<Self, TableError> {
        let table = |domain: &DomainId| {
            let reclaim = Reclaim::FlushTouched;
            let table =
                ReclaimingTable::new(format, *domain, coherency, reclaim, &memory, &frames)?;
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
            kept: KEPT_TABLES * PAGE_BYTES,
        })
    }

    /// Each device keeps this many table pages, the root among them, before empty ones go back:
    /// [`KEPT_TABLES`] unless this is called.
    pub const fn set_kept_tables(&mut self, tables: u64) {
        self.kept = tables.saturating_mul(PAGE_BYTES);
    }

    /// What the context entry of a device holds once its driver has set DRIVER_OK; before, it holds
    /// nothing.
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

    /// Bytes that all linked tables take.
    pub fn table_bytes(&self) -> u64 {
        self.tables.iter().map(|one| one.table.table_bytes()).sum()
    }

    /// The invalidation port.
    pub const fn invalidator(&mut self) -> &mut I {
        &mut self.invalidator
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
        // A walk cache that leads to a page unlinked before would hide what is mapped below a new
        // one.
        if of.not_invalidated.is_some() && !of.leads_to(&self.memory, giova) {
            of.free_unlinked(&self.frames, &mut self.invalidator)?;
        }
        // The hardware caches nothing that is absent: there is nothing to invalidate.
        // A walk, and no cache of leaf tables: a guest's addresses lie too far apart for one.
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
        // Tables stay linked until the entries are known to be gone: what is put back needs no
        // frame.
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
        let sheds = of.table.table_bytes() > self.kept;
        let ranges: Vec<PfnRange> = match sheds {
            true => of.cleared.0.iter().map(Unmapped::range).collect(),
            false => Vec::new(),
        };
        if runs > RUNS {
            let batch = core::mem::take(&mut of.cleared);
            let request = Invalidation::Domain(domain);
            // The addresses are the guest's: nothing is given back here.
            if let Err(batch) = invalidate(&mut self.invalidator, request, batch) {
                of.cleared = batch;
                return Err(IoError::Failed);
            }
        }
        while let Some(run) = of.cleared.0.pop() {
            let request = Invalidation::Pages {
                domain,
                range: run.range(),
                // Table pages are linked.
                levels: CachedLevels::Leaves,
            };
            if let Err(run) = invalidate(&mut self.invalidator, request, run) {
                of.cleared.0.push(run);
                return Err(IoError::Failed);
            }
        }
        if sheds {
            of.unlink_empty(&self.memory, &self.frames, &mut self.invalidator, &ranges);
        }
        Ok(())
    }
}
