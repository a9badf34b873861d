//! The IOMMUs of AMD-Vi, SMMUv3 and RISC-V: a walking unit with an entry for each device, and the
//! invalidation commands of its family.

use std::rc::Rc;

use ringfence_devices::{Bus, DmaRequest, Observer};
use ringfence_hw::{
    ContextEntry, DeviceTable, DeviceTlbPermission, Iommu, IommuStats, RangeCommands, TableRoot,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Format as _;
use ringfence_types::{
    DomainId, Fault, Invalidation, InvalidationError, Invalidator, IovaRange, PageSize, PfnRange,
    RequesterId, Ticket,
};

use super::{FaultCounts, Hardware, config};
use crate::components::FamilyFormat;
use crate::error::LabError;
use crate::layer::ContextTarget;
use crate::{IotlbPrefetch, Profile};

/// The unit of a family beside VT-d.
#[derive(Debug)]
pub struct FamilyIommu {
    unit: Iommu<DeviceTable<FamilyFormat>>,
    /// A unit that supports the leaves of every page size.
    format: FamilyFormat,
    commands: RangeCommands,
    /// Number of requests, each of which ends with a wait for its commands: `COMPLETION_WAIT`,
    /// `CMD_SYNC` or `IOFENCE.C`.
    requests: u64,
    hinted: bool,
}

impl Hardware for FamilyIommu {
    type Host = ();
    type Invalidator = Self;

    fn new(
        profile: &Profile,
        _memory: &Rc<Arena>,
        _frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let family = profile.iommu;
        let parts = FamilyFormat::new(family, PageSize::Size2M).zip(family.range_commands());
        let (format, commands) = parts.ok_or(LabError::Internal("a family with VT-d's unit"))?;
        let mut unit = Iommu::new(&config(profile)?, DeviceTable::new());
        unit.set_adjacent_prefetch(profile.iotlb_prefetch.adjacent());
        unit.enable();
        Ok(Self {
            unit,
            format,
            commands,
            requests: 0,
            hinted: profile.iotlb_prefetch == IotlbPrefetch::HintAtMap,
        })
    }

    fn disable(&mut self) {
        self.unit.disable();
    }

    fn mapped(&mut self, memory: &Arena, device: RequesterId, range: &IovaRange) {
        if self.hinted {
            self.unit
                .prefetch(memory, device, &PfnRange::covering(range));
        }
    }

    fn attach(
        &mut self,
        _memory: &Arena,
        _frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let entry = match to {
            ContextTarget::Table(root) => ContextEntry::Translated(TableRoot {
                domain,
                format: self.format,
                root,
                device_tlb: DeviceTlbPermission::Blocked,
            }),
            ContextTarget::PassThrough => ContextEntry::PassThrough {
                domain,
                width: self.format.width(),
            },
            ContextTarget::DeviceTlb(_) => return Err(LabError::NoDeviceTlb),
        };
        self.unit.set_device(device, entry);
        Ok(())
    }

    fn detach(&mut self, _memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        self.unit.invalidate(&Invalidation::Context(device));
        self.unit.clear_device(device);
        Ok(())
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        Bus::new(&mut self.unit, memory, observer).probe(request)
    }

    #[inline]
    fn invalidator(&mut self) -> &mut Self {
        self
    }

    /// `invalidations` counts commands.
    fn stats(&self) -> IommuStats {
        *self.unit.stats()
    }

    fn fault_counts(&mut self) -> FaultCounts {
        FaultCounts::of(self.unit.faults())
    }
}

impl Invalidator for FamilyIommu {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if matches!(request, Invalidation::Ring { .. }) {
            return Err(InvalidationError::Unsupported);
        }
        let unit = &mut self.unit;
        self.commands
            .split(&request, |command| unit.invalidate(&command));
        self.requests += 1;
        Ok(Ticket::new(self.requests))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        match ticket.get() <= self.requests {
            true => Ok(true),
            false => Err(InvalidationError::Failed),
        }
    }
}
