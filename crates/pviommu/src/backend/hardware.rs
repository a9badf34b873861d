//! I/O page tables of assigned devices: GIOVA to host memory, in the format that the hardware walks.

use alloc::vec::Vec;

use ringfence_pgtable::{
    Coherency, Context, MapError, MapRequest, SecondStage, Table, TableError, Translation,
};
use ringfence_types::{
    Batch, CachedLevels, Direction, DomainId, FrameSource, Invalidation, Invalidator, Iova,
    Pending, Pfn, PfnRange, PhysAddr, PhysMemory, Unmapped,
};

use super::{IoError, IoTables, Slot};

/// Runs of pages that are invalidated one by one. More at a time cost more than what else the domain has cached.
const RUNS: usize = 8;

/// A VT-d second-stage table for each device, with a domain of its own.
///
/// Table pages stay linked until the tables are gone, as Linux's do: a driver that spreads its mappings over a wide window uses its host's frames up, and
/// is answered `NO_ROOM`. The source of frames is the limit.
#[derive(Debug)]
pub struct HardwareTables<M, S, I> {
    memory: M,
    frames: S,
    invalidator: I,
    tables: Vec<OfDevice>,
}

#[derive(Debug)]
struct OfDevice {
    table: Table<SecondStage>,
    /// Cleared and not yet invalidated.
    cleared: Cleared,
}

/// Runs of one domain.
#[derive(Debug, Default)]
struct Cleared(Vec<Unmapped>);

impl Batch for Cleared {
    fn covered_by(&self, request: &Invalidation) -> bool {
        self.0.iter().all(|run| run.covered_by(request))
    }
}

impl Cleared {
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
    /// An empty table of `format` for each of `domains`, one a device in the order of [`Slot`]s.
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
            let table = Table::new(format, *domain, coherency, &memory, &frames)?;
            Ok(OfDevice {
                table,
                cleared: Cleared::default(),
            })
        };
        let tables = domains.iter().map(table).collect::<Result<_, TableError>>();
        Ok(Self {
            tables: tables?,
            memory,
            frames,
            invalidator,
        })
    }

    /// What the context entry of a device holds once its driver has set DRIVER_OK; before, it holds nothing.
    pub fn context(&self, device: Slot) -> Option<Context> {
        let table = &self.tables.get(device.index())?.table;
        Some(Context {
            domain: table.domain(),
            translation: Translation::Table {
                root: table.root(),
                levels: table.format().levels(),
            },
        })
    }

    /// Bytes that all tables take.
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
        device: Slot,
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
        // The hardware caches nothing that is absent: there is nothing to invalidate.
        // A walk, and no cache of leaf tables: a guest's addresses lie too far apart for one.
        of.table
            .map(&self.memory, &self.frames, request)
            .map_err(|error| match error {
                MapError::OutOfFrames => IoError::NoRoom,
                _ => IoError::Failed,
            })
    }

    #[inline]
    fn unmap(&mut self, device: Slot, giova: Iova) -> Result<(), IoError> {
        let of = self.tables.get_mut(device.index()).ok_or(IoError::Failed)?;
        let page = PfnRange::new(Pfn::containing(giova), 1).ok_or(IoError::Failed)?;
        let (cleared, _) = of
            .table
            .unmap(&self.memory, page)
            .map_err(|_| IoError::Failed)?;
        of.cleared.add(cleared);
        Ok(())
    }

    #[inline]
    fn settle(&mut self, device: Slot) -> Result<(), IoError> {
        let of = self.tables.get_mut(device.index()).ok_or(IoError::Failed)?;
        let domain = of.table.domain();
        let runs = of.cleared.0.len();
        if runs == 0 {
            return Ok(());
        }
        if runs > RUNS {
            let batch = core::mem::take(&mut of.cleared);
            let request = Invalidation::Domain(domain);
            return match invalidate(&mut self.invalidator, request, batch) {
                Ok(()) => Ok(()),
                Err(batch) => {
                    of.cleared = batch;
                    Err(IoError::Failed)
                }
            };
        }
        while let Some(run) = of.cleared.0.pop() {
            let request = Invalidation::Pages {
                domain,
                range: run.range(),
                // Table pages stay linked.
                levels: CachedLevels::Leaves,
            };
            if let Err(run) = invalidate(&mut self.invalidator, request, run) {
                of.cleared.0.push(run);
                return Err(IoError::Failed);
            }
        }
        Ok(())
    }
}

/// Submits and waits. The batch comes back if that fails: it is still to be invalidated.
#[inline]
fn invalidate<I: Invalidator, B: Batch>(
    invalidator: &mut I,
    request: Invalidation,
    batch: B,
) -> Result<(), B> {
    let pending = Pending::submit(invalidator, request, batch).map_err(|(batch, _)| batch)?;
    match pending.wait(invalidator) {
        // The addresses are the guest's: nothing is given back here.
        Ok(flushed) => {
            drop(flushed.into_batch());
            Ok(())
        }
        Err((pending, _)) => Err(pending.abandon()),
    }
}
