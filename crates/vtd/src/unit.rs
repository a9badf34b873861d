//! A unit: its start, its devices, and its end.

use alloc::vec::Vec;

use ringfence_pgtable::{Coherency, ContextTables, TableError};
use ringfence_types::{FrameSource, PhysMemory, Registers, RequesterId};

use crate::attachment::Attachment;
use crate::capabilities::Capabilities;
use crate::command::Commands;
use crate::error::{Feature, UnitError};
use crate::fault::{FaultRecord, Faults};
use crate::queue::{Queue, Width};
use crate::register_invalidation::RegisterInvalidation;
use crate::registers::{self, CAP, ECAP, GSTS, RTADDR, SRTP, TE, TTM_SCALABLE};
use crate::scalable::{ScalableTables, Unlinked};

/// The format of root and context tables (RTADDR.TTM).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One table per device, second stage only.
    Legacy,
    /// One table per device and PASID, first or second stage.
    Scalable,
}

/// The interface through which the driver invalidates caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interface {
    /// The queue: several commands with one doorbell.
    Queue,
    /// The registers: one command at a time, in legacy mode only.
    Registers,
}

/// Options of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Format of the tables.
    pub mode: Mode,
    /// Interface of invalidations.
    pub interface: Interface,
    /// Polls after which a wait for the unit fails.
    pub poll_limit: u32,
}

#[derive(Debug)]
pub(crate) enum Tables {
    Legacy(ContextTables),
    Scalable(ScalableTables),
}

#[derive(Debug)]
pub(crate) enum Invalidations {
    Queue(Queue),
    Registers(RegisterInvalidation),
}

/// The driver of one unit. All devices are blocked until they are attached.
///
/// It is the unit's only driver: nothing else writes its registers or tables. The embedder
/// serialises its calls.
#[derive(Debug)]
pub struct Unit<R, M, S> {
    pub(crate) registers: R,
    pub(crate) memory: M,
    pub(crate) frames: S,
    pub(crate) capabilities: Capabilities,
    pub(crate) tables: Tables,
    pub(crate) invalidations: Invalidations,
    pub(crate) attachments: Vec<Attachment>,
    pub(crate) poll_limit: u32,
    faults: Faults,
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Reads the capabilities, allocates empty tables and the queue, and enables translation: all
    /// DMA through the unit is blocked.
    ///
    /// # Errors
    /// The unit is absent, in use, lacks a feature or does not answer; or no frame is left. All
    /// frames were freed, unless the unit may still use them because it stopped answering.
    pub fn new(registers: R, memory: M, frames: S, options: &Options) -> Result<Self, UnitError> {
        let (cap, ecap) = (registers.read64(CAP), registers.read64(ECAP));
        if cap == u64::MAX && ecap == u64::MAX {
            return Err(UnitError::Absent);
        }
        let capabilities = Capabilities::decode(cap, ecap);
        check(&capabilities, options)?;
        if registers.read32(GSTS) & TE != 0 {
            return Err(UnitError::AlreadyEnabled);
        }
        let tables = Tables::new(&capabilities, options.mode, &memory, &frames)?;
        let invalidations =
            Invalidations::new(&registers, &memory, &frames, &capabilities, options);
        let invalidations = match invalidations {
            Ok(invalidations) => invalidations,
            Err(error) => {
                tables.destroy(&memory, &frames);
                return Err(error);
            }
        };
        let mut unit = Self {
            registers,
            memory,
            frames,
            capabilities,
            tables,
            invalidations,
            attachments: Vec::new(),
            poll_limit: options.poll_limit,
            faults: Faults::default(),
        };
        if let Err(error) = unit.prepare() {
            // The first error is the one to report.
            let _ = unit.disable();
            return Err(error);
        }
        unit.enable()?;
        Ok(unit)
    }

    /// Enables translation. After an error the unit may still do so, and use the tables: they stay
    /// allocated, although TES reads as clear.
    fn enable(&self) -> Result<(), UnitError> {
        registers::set(&self.registers, TE, self.poll_limit).inspect_err(|_| {
            let _ = registers::clear(&self.registers, TE, self.poll_limit);
        })
    }

    /// Gives the root table to the unit and invalidates all caches (VT-d
    /// specification, "Set Root Table Pointer Operation").
    fn prepare(&mut self) -> Result<(), UnitError> {
        let root = match &self.tables {
            Tables::Legacy(tables) => tables.root().get(),
            Tables::Scalable(tables) => tables.root().get() | TTM_SCALABLE,
        };
        self.flush_write_buffer()?;
        self.registers.write64(RTADDR, root);
        registers::set(&self.registers, SRTP, self.poll_limit)?;
        self.execute(Commands::everything(self.is_scalable()))
    }

    /// Returns the unit's capabilities.
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(crate) const fn is_scalable(&self) -> bool {
        matches!(self.tables, Tables::Scalable(_))
    }

    /// Returns the coherency of the unit's walk of page tables, which a
    /// [`Table`](ringfence_pgtable::Table) needs.
    pub const fn coherency(&self) -> Coherency {
        match self.tables {
            Tables::Legacy(_) => self.capabilities.coherency,
            Tables::Scalable(_) => self.capabilities.scalable_coherency,
        }
    }

    /// Returns true if a map owes an invalidation of its range too: in caching mode the unit may
    /// cache entries that are not present (VT-d specification, "Caching Mode").
    pub const fn invalidates_after_map(&self) -> bool {
        self.capabilities.caching_mode
    }

    /// Makes earlier stores to tables visible to a unit with a write buffer (RWBF; VT-d
    /// specification, "Write Buffer Flushing").
    /// A map owes it unless it owes an invalidation, which flushes the buffer too. Does nothing on
    /// other units.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`].
    pub fn flush_write_buffer(&self) -> Result<(), UnitError> {
        if !self.capabilities.write_buffer_flush {
            return Ok(());
        }
        registers::flush_write_buffer(&self.registers, self.poll_limit)
    }

    /// Returns the oldest fault record and removes it.
    ///
    /// A device can cause faults as fast as they are read: bound the number of calls.
    pub fn next_fault(&mut self) -> Option<FaultRecord> {
        self.faults.next(&self.registers, &self.capabilities)
    }

    /// Disables translation, after which the devices reach all memory, and frees all tables and the
    /// queue.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`]. The frames stay allocated, because the unit may still use them.
    pub fn disable(self) -> Result<(), UnitError> {
        registers::clear(&self.registers, TE, self.poll_limit)?;
        if let Invalidations::Queue(queue) = self.invalidations {
            queue.stop(&self.registers)?;
            queue.free(&self.frames);
        }
        self.tables.destroy(&self.memory, &self.frames);
        Ok(())
    }
}

/// Checks the options against the capabilities.
fn check(capabilities: &Capabilities, options: &Options) -> Result<(), UnitError> {
    let is_scalable = options.mode == Mode::Scalable;
    let missing = if is_scalable && !capabilities.scalable_mode {
        Feature::ScalableMode
    } else if options.interface == Interface::Queue && !capabilities.queue {
        Feature::Queue
    } else if options.interface == Interface::Registers && is_scalable {
        Feature::RegisterInvalidation
    } else {
        return Ok(());
    };
    Err(UnitError::Unsupported(missing))
}

impl Tables {
    fn new(
        capabilities: &Capabilities,
        mode: Mode,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
    ) -> Result<Self, UnitError> {
        let coherency = capabilities.coherency;
        Ok(match mode {
            Mode::Legacy => Self::Legacy(ContextTables::new(coherency, memory, frames)?),
            Mode::Scalable => {
                let pasids = capabilities.pasid_bits.is_some();
                Self::Scalable(ScalableTables::new(coherency, pasids, memory, frames)?)
            }
        })
    }

    fn destroy(self, memory: &impl PhysMemory, frames: &impl FrameSource) {
        match self {
            Self::Legacy(tables) => tables.destroy(memory, frames),
            Self::Scalable(tables) => tables.destroy(memory, frames),
        }
    }

    /// Clears the entry of a device, which blocks all its requests.
    pub(crate) fn unlink(
        &mut self,
        memory: &impl PhysMemory,
        device: RequesterId,
    ) -> Result<Option<Unlinked>, UnitError> {
        match self {
            Self::Legacy(tables) => {
                let detached = tables.detach(memory, device);
                detached.map_err(|_| TableError::Memory)?;
                Ok(None)
            }
            Self::Scalable(tables) => Ok(tables.unlink(memory, device)?),
        }
    }
}

impl Invalidations {
    fn new(
        registers: &impl Registers,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
        capabilities: &Capabilities,
        options: &Options,
    ) -> Result<Self, UnitError> {
        let limit = options.poll_limit;
        let width = match options.mode {
            Mode::Legacy => Width::Narrow,
            Mode::Scalable => Width::Wide,
        };
        Ok(match options.interface {
            Interface::Queue => {
                Self::Queue(Queue::enable(registers, memory, frames, width, limit)?)
            }
            Interface::Registers => Self::Registers(RegisterInvalidation::enable(
                registers,
                capabilities.iotlb_registers_at,
                limit,
            )?),
        })
    }
}
