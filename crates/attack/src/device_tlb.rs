//! A unit with ATS and PRI that walks the tables of a bench's mode.

use std::rc::Rc;

use ringfence_devices::ats::AtsFunction;
use ringfence_hw::{
    AtsUnit, DeviceTlbQueueConfig, RootTable, TranslatedCheck, TranslationService, UnitConfig,
    VtdUnit,
};
use ringfence_lab::LabError;
use ringfence_lab::testbed::Machine;
use ringfence_memory::Arena;
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, PageRequests, SecondStage, Table,
    TranslationType,
};
use ringfence_types::{
    Access, CachedLevels, FrameSource, Invalidation, Invalidator, Iova, OutOfFrames, PageSize,
    Permissions, Pfn, PfnRange, PhysAddr, PhysRange,
};

use crate::bench::{Bench, DEVICES};

/// Frames of the mode's machine. A bench ends before they run out.
pub(crate) struct MachineFrames<'a>(pub(crate) &'a dyn Machine);

impl FrameSource for MachineFrames<'_> {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.0.alloc_frame().map_err(|_| OutOfFrames)
    }

    fn free(&self, _: PhysAddr) {}
}

/// A unit with ATS and PRI beside the mode's own unit. Both walk the same tables. Each device has a
/// permission table, for the check of translated requests by host address.
pub(crate) struct DeviceTlbUnit {
    pub(crate) memory: Rc<Arena>,
    pub(crate) unit: AtsUnit<RootTable>,
    contexts: ContextTables,
    permitted: Vec<Table<SecondStage>>,
}

impl DeviceTlbUnit {
    /// Creates the unit with a page request queue of `queue` entries. `requests` decides for each
    /// device if it may make page requests. `None` if the mode's unit serves no device TLB.
    pub(crate) fn new(
        bench: &mut Bench,
        requests: [PageRequests; DEVICES as usize],
        queue: usize,
    ) -> Result<Option<Self>, LabError> {
        for device in 0..DEVICES {
            if !bench.permit_ats(device)? {
                return Ok(None);
            }
        }
        let memory = bench.machine().memory();
        let (levels, coherency) = (Levels::Four, Coherency::Coherent);
        let mut check = TranslatedCheck::host_address();
        let mut permitted = Vec::new();
        let mut device_tlbs = Vec::new();
        let frames = MachineFrames(bench.machine());
        let mut contexts = ContextTables::new(coherency, &*memory, &frames)?;
        for (device, page_requests) in (0..DEVICES).zip(requests) {
            let requester = bench.requester(device)?;
            let Some((domain, root)) = bench.table(device) else {
                return Ok(None);
            };
            let context = Context {
                domain,
                translation: TranslationType::DeviceTlb {
                    root,
                    levels,
                    page_requests,
                },
            };
            let frames = MachineFrames(bench.machine());
            contexts.attach(&*memory, &frames, requester, &context)?;
            let format = SecondStage::new(levels);
            let table = Table::new(format, domain, coherency, &*memory, &frames)?;
            check.set_table(domain, Some(table.root()));
            permitted.push(table);
            device_tlbs.push((requester, domain));
        }
        let mut unit = VtdUnit::vtd(&UnitConfig::UNCACHED);
        unit.set_root_table(contexts.root());
        unit.enable();
        let mut unit = AtsUnit::new(unit, check, DeviceTlbQueueConfig::default(), queue);
        for (requester, domain) in device_tlbs {
            unit.add_device_tlb(requester, domain);
        }
        Ok(Some(Self {
            memory,
            unit,
            contexts,
            permitted,
        }))
    }

    /// Directs the accesses of `device` to a new, empty table, whose pages a handler of page
    /// requests maps.
    pub(crate) fn demand_table(
        &mut self,
        bench: &mut Bench,
        device: u16,
    ) -> Result<Table<SecondStage>, LabError> {
        let (requester, domain) = (bench.requester(device)?, self.table(device)?.domain());
        let frames = MachineFrames(bench.machine());
        let (levels, coherency) = (Levels::Four, Coherency::Coherent);
        let format = SecondStage::new(levels);
        let table = Table::new(format, domain, coherency, &*self.memory, &frames)?;
        let context = Context {
            domain,
            translation: TranslationType::DeviceTlb {
                root: table.root(),
                levels,
                page_requests: PageRequests::Allowed,
            },
        };
        let contexts = &mut self.contexts;
        contexts.attach(&*self.memory, &frames, requester, &context)?;
        Ok(table)
    }

    /// Stores permissions for the pages of `host`, which the operating system does at a map.
    pub(crate) fn permit(
        &self,
        bench: &mut Bench,
        device: u16,
        host: PhysRange,
        permissions: Permissions,
    ) -> Result<(), LabError> {
        let page = PageSize::Size4K.bytes();
        let start = host.start().align_down(page);
        let request = MapRequest {
            iova: Iova::new(start.get()),
            pa: start,
            pages: (host.last().get() - start.get()) / page + 1,
            permissions,
        };
        let frames = MachineFrames(bench.machine());
        self.table(device)?.map(&*self.memory, &frames, request)?;
        Ok(())
    }

    /// Clears the permissions of the page of `host`, which the operating system does at an unmap.
    pub(crate) fn revoke(&self, device: u16, host: PhysAddr) -> Result<(), LabError> {
        let page = PfnRange::new(Pfn::containing(Iova::new(host.get())), 1);
        let page = page.ok_or(LabError::Internal("a page"))?;
        let cleared = self.table(device)?.unmap(&*self.memory, page);
        let cleared = cleared.map_err(|_| LabError::Internal("a page without a permission"))?;
        let _ = cleared;
        Ok(())
    }

    /// Invalidates the page of `iova`, which the operating system does after an unmap. `function`
    /// is the device, and completes the requests of the unit.
    pub(crate) fn invalidate(
        &mut self,
        device: u16,
        iova: Iova,
        function: &mut AtsFunction,
    ) -> Result<(), LabError> {
        let domain = self.table(device)?.domain();
        let range = PfnRange::new(Pfn::containing(iova), 1);
        let request = Invalidation::Pages {
            domain,
            range: range.ok_or(LabError::Internal("a page"))?,
            levels: CachedLevels::Leaves,
        };
        let failed = |_| LabError::Internal("an invalidation of a device TLB");
        let ticket = self.unit.submit(request).map_err(failed)?;
        while let Some(request) = self.unit.take_invalidate_request() {
            if let Some(tag) = function.invalidate(&request) {
                let completed = self.unit.complete(function.id(), tag);
                completed.map_err(|_| LabError::Internal("a completion without a request"))?;
            }
        }
        match self.unit.poll(ticket) {
            Ok(true) => Ok(()),
            _ => Err(LabError::Internal("an invalidation without a completion")),
        }
    }

    fn table(&self, device: u16) -> Result<&Table<SecondStage>, LabError> {
        let table = self.permitted.get(usize::from(device));
        table.ok_or(LabError::Internal("an unknown device"))
    }

    /// Makes a translated request. Returns true if the unit permits it.
    pub(crate) fn translated_request(
        &mut self,
        bench: &Bench,
        device: u16,
        host: PhysRange,
        access: Access,
    ) -> Result<bool, LabError> {
        let device = bench.requester(device)?;
        let (at, bytes) = (host.start(), host.bytes());
        let found = self
            .unit
            .translated_request(&*self.memory, device, at, bytes, access);
        Ok(found.is_ok())
    }
}
