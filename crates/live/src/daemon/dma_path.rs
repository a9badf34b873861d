//! The parts around a handed-over device: its PCI slot, its memory view, and its sandboxed process.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_types::RequesterId;

use super::sandboxed_disk::{SandboxArgs, start_sandboxed_disk};
use super::{BLK, IOMMU_SLOT, LocalConfig, NET, RNG, bounded_log};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::handover::{DeviceState, DiskKind, StateError};
use crate::iommu::{EndpointDma, GuestIommu};
use crate::qemu::{IOMMU, PVIOMMU, PciSlot, RIOMMU};
use crate::sandbox::DiskProxy;
use crate::virtio::blk::Blk;

pub(super) fn slot_and_name(state: &DeviceState) -> (PciSlot, &'static str) {
    match state {
        DeviceState::Blk { .. } => BLK,
        DeviceState::Rng => RNG,
        DeviceState::Net(_) => NET,
        DeviceState::Iommu { .. } => (IOMMU_SLOT, IOMMU),
        DeviceState::PvIommu(_) => (IOMMU_SLOT, PVIOMMU),
        DeviceState::Ring(_) => (IOMMU_SLOT, RIOMMU),
    }
}

pub(super) fn device_id(state: &DeviceState) -> RequesterId {
    RequesterId::new(slot_and_name(state).0.address())
}

/// Returns true if the hardware model translates the device's accesses.
pub(super) fn is_assigned(state: &DeviceState) -> bool {
    is_disk(state, DiskKind::Assigned)
}

/// Returns true if the device is sandboxed.
pub(super) fn is_sandboxed(state: &DeviceState) -> bool {
    is_disk(state, DiskKind::Sandboxed)
}

fn is_disk(state: &DeviceState, wanted: DiskKind) -> bool {
    let DeviceState::Blk { kind, .. } = state else {
        return false;
    };
    *kind == wanted
}

/// Memory view of a device.
pub(super) enum DmaPath {
    /// Direct access, without an IOMMU.
    Direct,
    Translated(EndpointDma),
    Assigned(AssignedDma),
    /// The hardware model, with all guest memory identity-mapped by the host.
    AssignedIdentity(AssignedDma),
}

impl DmaPath {
    /// Creates the memory view of a restored device.
    pub(super) fn new(
        state: &DeviceState,
        iommu: Option<&GuestIommu>,
        counters: &Arc<DeviceCounters>,
    ) -> Result<Self, StateError> {
        let id = device_id(state);
        let counters = Arc::clone(counters);
        Ok(match (iommu, is_assigned(state)) {
            (None, false) => Self::Direct,
            (None, true) => Self::AssignedIdentity(AssignedDma::identity_mapped(id, counters)?),
            (Some(iommu), true) => Self::Assigned(iommu.assign(id, counters)?),
            (Some(iommu), false) => {
                let added = iommu.add_endpoint(id, &counters);
                Self::Translated(added.map_err(io::Error::other)?)
            }
        })
    }
}

/// Restores a disk, with the limits of this process.
pub(super) fn disk(
    file: OwnedFd,
    read_only: bool,
    sectors: u64,
    counters: Arc<DeviceCounters>,
    config: LocalConfig<'_>,
) -> Result<Blk, StateError> {
    let mut disk = Blk::restore(File::from(file), read_only, sectors, counters)?;
    disk.set_limits(config.limits, bounded_log(BLK.1, config.log));
    Ok(disk)
}

/// Starts the process of a sandboxed disk, without any grants. `None` if the disk is not sandboxed.
pub(super) fn start_sandbox(
    state: &DeviceState,
    iommu: Option<&GuestIommu>,
    counters: &Arc<DeviceCounters>,
    config: LocalConfig<'_>,
) -> Result<Option<DiskProxy>, StateError> {
    let DeviceState::Blk {
        file,
        read_only,
        sectors,
        kind: DiskKind::Sandboxed,
    } = state
    else {
        return Ok(None);
    };
    let (Some(program), Some(iommu)) = (config.sandbox, iommu) else {
        return Err(StateError::Register {
            what: "sandboxed disk without an IOMMU",
        });
    };
    let known = Arc::clone(counters);
    let disk = disk(file.try_clone()?, *read_only, *sectors, known, config)?;
    let args = SandboxArgs {
        read_only: *read_only,
        limits: config.limits,
        injected: &[],
    };
    let proxy = start_sandboxed_disk(program, disk, &args, iommu, counters, config.log);
    Ok(Some(proxy?))
}
