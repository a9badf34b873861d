//! What stands behind a device that was handed over: its place, what its accesses go through, and
//! the process that works for it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_types::RequesterId;

use super::sandboxed_disk::{SandboxArgs, start_sandboxed_disk};
use super::{BLK, IOMMU_SLOT, LocalConfig, NET, RNG, complaints};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::guest::{IOMMU, PVIOMMU, PciSlot};
use crate::handover::{DeviceState, DiskKind, StateError};
use crate::iommu::{EndpointMemory, GuestIommu};
use crate::sandbox::DiskProxy;
use crate::virtio::blk::Blk;

pub(super) fn slot_and_name(own: &DeviceState) -> (PciSlot, &'static str) {
    match own {
        DeviceState::Blk { .. } => BLK,
        DeviceState::Rng => RNG,
        DeviceState::Net(_) => NET,
        DeviceState::Iommu { .. } => (IOMMU_SLOT, IOMMU),
        DeviceState::PvIommu(_) => (IOMMU_SLOT, PVIOMMU),
    }
}

pub(super) fn device_id(own: &DeviceState) -> RequesterId {
    RequesterId::new(slot_and_name(own).0.address())
}

/// Whether the model of the hardware translates its accesses.
pub(super) fn is_assigned(own: &DeviceState) -> bool {
    is_disk(own, DiskKind::Assigned)
}

/// Whether it is a process of its own.
pub(super) fn is_sandboxed(own: &DeviceState) -> bool {
    is_disk(own, DiskKind::Sandboxed)
}

fn is_disk(own: &DeviceState, wanted: DiskKind) -> bool {
    let DeviceState::Blk { kind, .. } = own else {
        return false;
    };
    *kind == wanted
}

/// What a device's accesses go through.
pub(super) enum DmaPath {
    /// Nothing: there is no IOMMU.
    Direct,
    Translated(Box<EndpointMemory>),
    Assigned(AssignedDma),
    /// The hardware, behind which the host has mapped all of the guest.
    AssignedIdentity(AssignedDma),
}

impl DmaPath {
    /// Of a device of this kind, which has none yet.
    pub(super) fn new(
        own: &DeviceState,
        iommu: Option<&GuestIommu>,
        counters: &Arc<DeviceCounters>,
    ) -> Result<Self, StateError> {
        let id = device_id(own);
        let counters = Arc::clone(counters);
        Ok(match (iommu, is_assigned(own)) {
            (None, false) => Self::Direct,
            (None, true) => Self::AssignedIdentity(AssignedDma::identity_mapped(id, counters)?),
            (Some(iommu), true) => Self::Assigned(iommu.assign(id, counters)?),
            (Some(iommu), false) => {
                let added = iommu.add_endpoint(id);
                Self::Translated(Box::new(added.map_err(io::Error::other)?))
            }
        })
    }
}

/// A disk, within what this process allows.
pub(super) fn disk(
    file: OwnedFd,
    read_only: bool,
    sectors: u64,
    counters: Arc<DeviceCounters>,
    here: LocalConfig<'_>,
) -> Result<Blk, StateError> {
    let mut disk = Blk::restore(File::from(file), read_only, sectors, counters)?;
    disk.set_limits(here.limits, complaints(BLK.1, here.log));
    Ok(disk)
}

/// The process of a disk that is one: a new one, which is granted nothing yet.
pub(super) fn start_sandbox(
    own: &DeviceState,
    iommu: Option<&GuestIommu>,
    counters: &Arc<DeviceCounters>,
    here: LocalConfig<'_>,
) -> Result<Option<DiskProxy>, StateError> {
    let DeviceState::Blk {
        file,
        read_only,
        sectors,
        kind: DiskKind::Sandboxed,
    } = own
    else {
        return Ok(None);
    };
    let (Some(program), Some(iommu)) = (here.sandbox, iommu) else {
        return Err(StateError::Register {
            what: "process without an IOMMU",
        });
    };
    let known = Arc::clone(counters);
    let disk = disk(file.try_clone()?, *read_only, *sectors, known, here)?;
    let told = SandboxArgs {
        read_only: *read_only,
        caps: here.limits,
        injected: &[],
    };
    let front = start_sandboxed_disk(program, disk, &told, iommu, counters, here.log);
    Ok(Some(front?))
}
