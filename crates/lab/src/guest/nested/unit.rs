//! The VT-d unit in scalable mode, with the host's second stage and the PASID table entries.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_devices::{Bus, DmaRequest, Observer};
use ringfence_hw::{FaultLog, IommuStats, NestedInvalidation, NestedUnit, NestedUnitConfig};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Levels, MapRequest, NestedEntry, SecondStage, Table, TableError};
use ringfence_types::{
    DomainId, Fault, FrameSource, GuestPhysAddr, Iova, PageSize, Pasid, Permissions, PhysAddr,
    PhysMemory, PhysRange, RequesterId,
};

use super::WRITE_ONLY_OFFSET;
use crate::Profile;
use crate::error::LabError;
use crate::hardware::{FaultCounts, Hardware};
use crate::layer::ContextTarget;
use crate::replay_platform::MEMORY_BYTES;

/// The PASID of requests without a PASID, as Linux chooses it.
pub(super) const RID_PASID: Pasid = Pasid::NO_PASID;

/// Domain of the second stage's own table. Entries of devices have the domains of the layer.
const SECOND_STAGE_DOMAIN: DomainId = DomainId::new(0);

/// The unit. Guest-physical addresses equal physical ones, and the host's tables share the memory
/// of the replay: the second stage maps them, too.
#[derive(Debug)]
pub struct NestedVtd {
    unit: NestedUnit,
    second: Table<SecondStage>,
    /// PASID table entry of each device.
    entries: BTreeMap<RequesterId, PhysAddr>,
    /// False if all accesses pass through.
    enabled: bool,
    passed_through: u64,
}

impl Hardware for NestedVtd {
    type Host = ();
    type Invalidator = NestedUnit;

    /// Maps all memory in the second stage, by both addresses.
    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let largest = PageSize::Size1G;
        let format = SecondStage::new(Levels::Four).with_pages_up_to(largest);
        let (coherency, domain) = (profile.coherency(), SECOND_STAGE_DOMAIN);
        let second = Table::new(format, domain, coherency, &**memory, &**frames)?;
        for (start, permissions) in [
            (0, Permissions::READ_WRITE),
            (WRITE_ONLY_OFFSET, Permissions::WRITE),
        ] {
            let request = MapRequest {
                iova: Iova::new(start),
                pa: PhysAddr::new(0),
                pages: MEMORY_BYTES / PageSize::Size4K.bytes(),
                permissions,
            };
            let mapped = second.map(&**memory, &**frames, request);
            mapped.map_err(|_| LabError::Internal("a second stage"))?;
        }
        let unit = NestedUnit::new(&NestedUnitConfig {
            iotlb: profile.iotlb_sets as usize * profile.iotlb_ways as usize,
            second_stage: profile.walk_cache_entries.iter().sum::<u32>() as usize,
            largest,
            fault_log: FaultLog::MAX_CAPACITY,
        });
        Ok(Self {
            unit,
            second,
            entries: BTreeMap::new(),
            enabled: true,
            passed_through: 0,
        })
    }

    fn disable(&mut self) {
        self.enabled = false;
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let root = match to {
            ContextTarget::Table(root) => root,
            ContextTarget::DeviceTlb(_) => return Err(LabError::NoDeviceTlb),
            ContextTarget::PassThrough => {
                return Err(LabError::Internal("a nested unit without a first stage"));
            }
        };
        let entry = NestedEntry {
            domain,
            first_root: GuestPhysAddr::new(root.get()),
            first_levels: Levels::Four,
            second_root: self.second.root(),
            second_levels: Levels::Four,
        };
        let at = match self.entries.get(&device) {
            Some(at) => *at,
            None => frames.alloc_zeroed().map_err(|_| TableError::OutOfFrames)?,
        };
        let written = entry.write(memory, at);
        written.map_err(|_| LabError::Internal("a PASID table entry outside memory"))?;
        self.entries.insert(device, at);
        self.unit.set_context(device, RID_PASID, at);
        Ok(())
    }

    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        let Some(at) = self.entries.get(&device).copied() else {
            return Ok(());
        };
        let outside = |_| LabError::Internal("a PASID table entry outside memory");
        let first = memory.word(at).map_err(outside)?;
        first.store(0, Ordering::Release);
        memory.write_back(at, NestedEntry::BYTES);
        memory.drain();
        self.unit
            .invalidate_nested(&NestedInvalidation::Context(device));
        Ok(())
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        mut observer: O,
    ) -> Result<(), Fault> {
        if self.enabled {
            return Bus::new(&mut self.unit, memory, observer).probe(request);
        }
        self.passed_through += 1;
        let reached = PhysRange::new(PhysAddr::new(request.iova.get()), request.bytes);
        observer.allowed(request, reached.as_slice());
        Ok(())
    }

    #[inline]
    fn invalidator(&mut self) -> &mut NestedUnit {
        &mut self.unit
    }

    fn stats(&self) -> IommuStats {
        let nested = self.unit.stats();
        let mut stats = IommuStats::default();
        stats.iotlb_hits = nested.iotlb_hits;
        stats.iotlb_misses = nested.iotlb_misses;
        stats.walk_references = nested.walk_references;
        stats.passed_through = self.passed_through;
        stats.faults = nested.faults;
        stats
    }

    fn fault_counts(&mut self) -> FaultCounts {
        FaultCounts::of(self.unit.faults())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay_platform::DATA_BYTES;
    use ringfence_pgtable::FirstStage;
    use ringfence_types::Access;

    const DEVICE: RequesterId = RequesterId::new(0x18);

    #[derive(Default)]
    struct Reached(Vec<PhysRange>);

    impl Observer for &mut Reached {
        fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
            self.0.extend_from_slice(ranges);
        }

        fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
    }

    /// Whatever a guest writes to its first stage, a device reaches only the guest's memory, and
    /// only for writes by the second addresses.
    #[test]
    fn the_second_stage_bounds_every_first_stage() {
        let memory = Rc::new(Arena::new(MEMORY_BYTES).unwrap());
        let region = PhysRange::new(PhysAddr::new(DATA_BYTES), MEMORY_BYTES - DATA_BYTES);
        let frames = Rc::new(Frames::new(Rc::clone(&memory), region.unwrap()));
        let profile = Profile::r210_2015();
        let mut vtd = NestedVtd::new(&profile, &memory, &frames).unwrap();
        let (domain, coherency) = (DomainId::new(1), profile.coherency());
        let format = FirstStage::FOUR_LEVELS;
        let first = Table::new(format, domain, coherency, &*memory, &*frames).unwrap();
        let both = [Access::Read, Access::Write];
        let last = MEMORY_BYTES - 4096;
        let cases = [
            (0x5000, 0x5000, both.as_slice()),
            (last, last, &both),
            (WRITE_ONLY_OFFSET + 0x5000, 0x5000, &[Access::Write]),
            (WRITE_ONLY_OFFSET + last, last, &[Access::Write]),
            (MEMORY_BYTES, 0, &[]),
            (WRITE_ONLY_OFFSET + MEMORY_BYTES, 0, &[]),
            (WRITE_ONLY_OFFSET - 4096, 0, &[]),
        ];
        for (page, (guest, ..)) in (1..).zip(&cases) {
            let request = MapRequest {
                iova: Iova::new(page << 12),
                pa: PhysAddr::new(*guest),
                pages: 1,
                permissions: Permissions::READ_WRITE,
            };
            first.map(&*memory, &*frames, request).unwrap();
        }
        let root = ContextTarget::Table(first.root());
        vtd.attach(&memory, &frames, DEVICE, domain, root).unwrap();
        let probe = |vtd: &mut NestedVtd, page: u64, access| {
            let request = DmaRequest {
                device: DEVICE,
                iova: Iova::new(page << 12),
                bytes: 8,
                access,
            };
            let mut reached = Reached::default();
            let found = vtd.probe(&memory, &request, &mut reached);
            found.is_ok().then(|| reached.0[0].start().get())
        };
        for _ in 0..2 {
            for (page, (guest, host, allowed)) in (1..).zip(&cases) {
                for access in both {
                    let expected = allowed.contains(&access).then_some(*host);
                    let found = probe(&mut vtd, page, access);
                    assert_eq!(found, expected, "{guest:#x} {access:?}");
                }
            }
        }
        vtd.detach(&memory, DEVICE).unwrap();
        assert_eq!(probe(&mut vtd, 1, Access::Read), None);
        // A device that was never attached has nothing to detach.
        vtd.detach(&memory, RequesterId::new(0x20)).unwrap();
        for to in [
            ContextTarget::PassThrough,
            ContextTarget::DeviceTlb(first.root()),
        ] {
            assert!(vtd.attach(&memory, &frames, DEVICE, domain, to).is_err());
        }
        vtd.disable();
        assert_eq!(probe(&mut vtd, 1, Access::Read), Some(0x1000));
    }
}
