//! I/O page tables of simulated devices: GIOVA to addresses in the simulator's own address space
//! (section 4.2).
//!
//! A simulator reaches what it was granted and nothing else of the guest. Its table lies where it
//! reads it; a walk is its software IOMMU.

use alloc::vec::Vec;
use core::fmt;

use ringfence_pgtable::{
    Coherency, MapError, MapRequest, SecondStage, Table, TableError, WalkErrorKind,
};
use ringfence_types::{
    Access, Address, Direction, DomainId, FrameSource, Iova, Pfn, PfnRange, PhysAddr, PhysMemory,
};

use super::{DeviceSlot, IoError, IoTables};
use crate::wire::EventReason;

/// Marks addresses in a simulator's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostVirtual {}

/// Host-virtual address: where a simulator finds a page. 52 bits at most.
pub type Hva = Address<HostVirtual>;

/// Gives a simulator pages, one at a time, and takes them back.
pub trait Grants {
    /// From now on the simulator of `device` reaches the page at `frame`, in `direction`, at the
    /// address returned, a multiple of 4096.
    ///
    /// # Errors
    /// Nothing has changed.
    fn grant(
        &mut self,
        device: DeviceSlot,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<Hva, GrantError>;

    /// Takes the page at `at` back; the next [`commit`](Self::commit) says when it is gone.
    ///
    /// # Errors
    /// Nothing has changed.
    fn revoke(&mut self, device: DeviceSlot, at: Hva) -> Result<(), GrantError>;

    /// Returns when the simulator of `device` reaches nothing that was revoked.
    ///
    /// # Errors
    /// It may. What was revoked stays due.
    fn commit(&mut self, device: DeviceSlot) -> Result<(), GrantError>;
}

/// Why a grant was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrantError {
    /// No room in the simulator's address space.
    NoRoom,
    /// Anything else.
    Failed,
}

impl fmt::Display for GrantError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "no room in the simulator's address space",
            Self::Failed => "the grant could not be changed",
        })
    }
}

impl core::error::Error for GrantError {}

impl From<GrantError> for IoError {
    fn from(error: GrantError) -> Self {
        match error {
            GrantError::NoRoom => Self::NoRoom,
            GrantError::Failed => Self::Failed,
        }
    }
}

/// A table for each simulated device.
#[derive(Debug)]
pub struct SimulatedTables<M, S, G> {
    memory: M,
    frames: S,
    grants: G,
    tables: Vec<Table<SecondStage>>,
}

impl<M: PhysMemory, S: FrameSource, G: Grants> SimulatedTables<M, S, G> {
    /// An empty table for each of `devices` devices. The bits are those of a second-stage table,
    /// and the simulator's addresses stand in them for host memory.
    ///
    /// # Errors
    /// No frame, or none in `memory`.
    pub fn new(
        memory: M,
        frames: S,
        grants: G,
        format: SecondStage,
        devices: u16,
    ) -> Result<Self, TableError> {
        let table = |number| {
            let domain = DomainId::new(number);
            Table::new(format, domain, Coherency::Coherent, &memory, &frames)
        };
        let tables = (0..devices).map(table).collect::<Result<_, TableError>>()?;
        Ok(Self {
            memory,
            frames,
            grants,
            tables,
        })
    }

    /// Where the table of a device begins, for the simulator's own walk.
    pub fn root(&self, device: DeviceSlot) -> Option<PhysAddr> {
        Some(self.tables.get(device.index())?.root())
    }

    /// The software IOMMU's answer: where the byte at `giova` is, if `access` is allowed there.
    ///
    /// # Errors
    /// Why the access is to be stopped.
    pub fn translate(
        &self,
        device: DeviceSlot,
        giova: Iova,
        access: Access,
    ) -> Result<Hva, EventReason> {
        let table = self
            .tables
            .get(device.index())
            .ok_or(EventReason::NotMapped)?;
        let leaf = table
            .walk(&self.memory, giova)
            .map_err(|error| match error.kind {
                WalkErrorKind::NoPermission => EventReason::Direction,
                _ => EventReason::NotMapped,
            })?;
        if !leaf.permissions.allows(access) {
            return Err(EventReason::Direction);
        }
        Ok(Hva::new(leaf.translate(giova).get()))
    }

    /// The port to the simulator.
    pub const fn grants(&mut self) -> &mut G {
        &mut self.grants
    }

    fn install(
        &self,
        device: DeviceSlot,
        giova: Iova,
        at: Hva,
        direction: Direction,
    ) -> Result<(), IoError> {
        let table = self.tables.get(device.index()).ok_or(IoError::Failed)?;
        let request = MapRequest {
            iova: giova,
            pa: PhysAddr::new(at.get()),
            pages: 1,
            permissions: direction.permissions(),
        };
        let installed = table.map(&self.memory, &self.frames, request);
        installed.map_err(|error| match error {
            MapError::OutOfFrames => IoError::NoRoom,
            _ => IoError::Failed,
        })
    }
}

impl<M: PhysMemory, S: FrameSource, G: Grants> IoTables for SimulatedTables<M, S, G> {
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        let at = self.grants.grant(device, frame, direction)?;
        let installed = self.install(device, giova, at, direction);
        if installed.is_err() && self.grants.revoke(device, at).is_err() {
            // Granted and unknown to the table. Nothing leads there, but the simulator, were it to
            // guess.
            return Err(IoError::Failed);
        }
        installed
    }

    /// First the entry, then the grant (section 4.2, "Tear down DMA mappings").
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        let table = self.tables.get(device.index()).ok_or(IoError::Failed)?;
        let leaf = table.lookup(&self.memory, giova).ok_or(IoError::Failed)?;
        let page = PfnRange::new(Pfn::containing(giova), 1).ok_or(IoError::Failed)?;
        let (_cleared, _) = table
            .unmap(&self.memory, page)
            .map_err(|_| IoError::Failed)?;
        let at = Hva::new(leaf.base.get());
        self.grants.revoke(device, at).map_err(|error| {
            // Back as it was: the grant is still there. The table has room, for it had it before.
            let request = MapRequest {
                iova: giova,
                pa: leaf.base,
                pages: 1,
                permissions: leaf.permissions,
            };
            let table = self.tables.get(device.index());
            match table.map(|table| table.map(&self.memory, &self.frames, request)) {
                Some(Ok(())) => error.into(),
                _ => IoError::Failed,
            }
        })
    }

    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        Ok(self.grants.commit(device)?)
    }
}
