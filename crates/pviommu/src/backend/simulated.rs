//! I/O page tables of simulated devices: GIOVA to addresses in the simulator's address space
//! (PVIOMMU paper, section 4.2).
//!
//! A simulator can access only the guest pages granted to it. Its table is in memory that it can
//! read; walking the table is its software IOMMU.

use alloc::vec::Vec;
use core::fmt;

use ringfence_pgtable::{
    Coherency, MapError, MapRequest, SecondStage, Table, TableError, WalkErrorKind,
};
use ringfence_types::{
    Access, Address, Direction, DomainId, FrameSource, Iova, Pfn, PfnRange, PhysAddr, PhysMemory,
};

use super::{DeviceSlot, IoError, IoTables, TablesHandle};
use crate::wire::EventReason;

/// Address space of simulator addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostVirtual {}

/// Address of a page in the simulator's address space. At most 52 bits.
pub type Hva = Address<HostVirtual>;

/// Grants pages to a simulator, one at a time, and revokes them.
pub trait Grants {
    /// Grants the page at `frame` to the simulator of `device`, for `direction`. Returns its
    /// address in the simulator, a multiple of 4096.
    ///
    /// # Errors
    /// No page was granted.
    fn grant(
        &mut self,
        device: DeviceSlot,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<Hva, GrantError>;

    /// Revokes the page at `at`. It is inaccessible after the next [`commit`](Self::commit).
    ///
    /// # Errors
    /// The grant is unchanged.
    fn revoke(&mut self, device: DeviceSlot, at: Hva) -> Result<(), GrantError>;

    /// Returns when the simulator of `device` can no longer access any revoked page.
    ///
    /// # Errors
    /// The simulator may still access revoked pages. The next call waits for them as well.
    fn commit(&mut self, device: DeviceSlot) -> Result<(), GrantError>;
}

/// Reason why a grant operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrantError {
    /// The simulator's address space is full.
    NoRoom,
    /// Any other failure.
    Failed,
}

impl fmt::Display for GrantError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "the simulator's address space is full",
            Self::Failed => "the host failed to change the grant",
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

/// One table for each simulated device.
#[derive(Debug)]
pub struct SimulatedTables<M, S, G> {
    memory: M,
    frames: S,
    grants: G,
    tables: Vec<Table<SecondStage>>,
}

impl<M: PhysMemory, S: FrameSource, G: Grants> SimulatedTables<M, S, G> {
    /// Creates an empty table for each of `devices` devices. The format is that of a second-stage
    /// table, with simulator addresses in place of host-physical addresses.
    ///
    /// # Errors
    /// No frame is left, or a frame is outside `memory`.
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

    /// Returns the address of a device's root table, for the simulator's own walk.
    pub fn root(&self, device: DeviceSlot) -> Option<PhysAddr> {
        Some(self.tables.get(device.index())?.root())
    }

    /// Translates `giova` like the software IOMMU, if `access` is allowed.
    ///
    /// # Errors
    /// Returns the reason why the access must be blocked.
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

/// Exclusive access to the [`SimulatedTables`] of a backend:
/// [`Backend::tables`](super::Backend::tables).
#[derive(Debug)]
pub struct SimulatedTablesMut<'t, M, S, G> {
    tables: &'t mut SimulatedTables<M, S, G>,
}

impl<'t, M: PhysMemory, S: FrameSource, G: Grants> SimulatedTablesMut<'t, M, S, G> {
    /// Returns the address of a device's root table as [`SimulatedTables::root`] does.
    pub fn root(&self, device: DeviceSlot) -> Option<PhysAddr> {
        self.tables.root(device)
    }

    /// Translates `giova` as [`SimulatedTables::translate`] does.
    ///
    /// # Errors
    /// Returns the reason why the access must be blocked.
    pub fn translate(
        &self,
        device: DeviceSlot,
        giova: Iova,
        access: Access,
    ) -> Result<Hva, EventReason> {
        self.tables.translate(device, giova, access)
    }

    /// The interface to the simulator, a type of the embedder.
    pub fn grants(self) -> &'t mut G {
        &mut self.tables.grants
    }
}

impl<M: PhysMemory, S: FrameSource, G: Grants> TablesHandle for SimulatedTables<M, S, G> {
    type Handle<'t>
        = SimulatedTablesMut<'t, M, S, G>
    where
        Self: 't;

    fn handle(&mut self) -> SimulatedTablesMut<'_, M, S, G> {
        SimulatedTablesMut { tables: self }
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
            // The page is granted but not in the table. The simulator can access it only by
            // guessing its address.
            return Err(IoError::Failed);
        }
        installed
    }

    /// Clears the entry, then revokes the grant (section 4.2, "Tear down DMA mappings").
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        let table = self.tables.get(device.index()).ok_or(IoError::Failed)?;
        let leaf = table.lookup(&self.memory, giova).ok_or(IoError::Failed)?;
        let page = PfnRange::new(Pfn::containing(giova), 1).ok_or(IoError::Failed)?;
        let (_cleared, _) = table
            .unmap(&self.memory, page)
            .map_err(|_| IoError::Failed)?;
        let at = Hva::new(leaf.base.get());
        self.grants.revoke(device, at).map_err(|error| {
            // Restore the entry, because the grant is still valid. The table has room for it.
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
