//! What stands behind a device that was handed over: its place, what its accesses go through, and the process that works for it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_types::DeviceId;

use super::apart::{Told, front};
use super::{BLK, Here, IOMMU_SLOT, NET, RNG, complaints};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::guest::{IOMMU, PVIOMMU, Slot};
use crate::handover::{DiskKind, Own, StateError};
use crate::iommu::{Behind, Translated};
use crate::isolate::Front;
use crate::virtio::blk::Blk;

pub(super) fn place(own: &Own) -> (Slot, &'static str) {
    match own {
        Own::Blk { .. } => BLK,
        Own::Rng => RNG,
        Own::Net(_) => NET,
        Own::Iommu { .. } => (IOMMU_SLOT, IOMMU),
        Own::PvIommu(_) => (IOMMU_SLOT, PVIOMMU),
    }
}

pub(super) fn device_id(own: &Own) -> DeviceId {
    DeviceId::new(place(own).0.address())
}

/// Whether the model of the hardware translates its accesses.
pub(super) fn is_assigned(own: &Own) -> bool {
    is_disk(own, DiskKind::Assigned)
}

/// Whether it is a process of its own.
pub(super) fn is_apart(own: &Own) -> bool {
    is_disk(own, DiskKind::Apart)
}

fn is_disk(own: &Own, wanted: DiskKind) -> bool {
    let Own::Blk { kind, .. } = own else {
        return false;
    };
    *kind == wanted
}

/// What a device's accesses go through.
pub(super) enum Way {
    /// Nothing: there is no IOMMU.
    Direct,
    Translated(Box<Translated>),
    Assigned(AssignedDma),
    /// The hardware, behind which the host has mapped all of the guest.
    Whole(AssignedDma),
}

impl Way {
    /// Of a device of this kind, which has none yet.
    pub(super) fn of(
        own: &Own,
        iommu: Option<&Behind>,
        counters: &Arc<DeviceCounters>,
    ) -> Result<Self, StateError> {
        let id = device_id(own);
        let counters = Arc::clone(counters);
        Ok(match (iommu, is_assigned(own)) {
            (None, false) => Self::Direct,
            (None, true) => Self::Whole(AssignedDma::whole(id, counters)?),
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
    here: Here<'_>,
) -> Result<Blk, StateError> {
    let mut disk = Blk::restore(File::from(file), read_only, sectors, counters)?;
    disk.keep_within(here.caps, complaints(BLK.1, here.log));
    Ok(disk)
}

/// The process of a disk that is one: a new one, which is granted nothing yet.
pub(super) fn process(
    own: &Own,
    iommu: Option<&Behind>,
    counters: &Arc<DeviceCounters>,
    here: Here<'_>,
) -> Result<Option<Front>, StateError> {
    let Own::Blk {
        file,
        read_only,
        sectors,
        kind: DiskKind::Apart,
    } = own
    else {
        return Ok(None);
    };
    let (Some(program), Some(iommu)) = (here.isolate, iommu) else {
        return Err(StateError::Register {
            what: "process without an IOMMU",
        });
    };
    let known = Arc::clone(counters);
    let disk = disk(file.try_clone()?, *read_only, *sectors, known, here)?;
    let told = Told {
        read_only: *read_only,
        caps: here.caps,
        errant: &[],
    };
    let front = front(program, disk, &told, iommu, counters, here.log);
    Ok(Some(front?))
}
