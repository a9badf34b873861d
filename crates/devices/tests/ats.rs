//! Functions with a device TLB and page requests over a real unit and memory.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};
use ringfence_devices::Bus;
use ringfence_devices::ats::{
    AtsControl, AtsError, AtsFunction, OnInvalidate, PageFaultHandler, PageRequestError,
    UnexpectedResponse,
};
use ringfence_hw::{
    AtsUnit, DeviceTlbQueueConfig, FaultLog, Geometry, GroupPosition, InvalidationGranularity,
    PageGroupResponse, PageRequest, PrgIndex, Replacement, ResponseCode, RootTable,
    TranslatedCheck, UnitConfig, VtdUnit,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, PageRequests, SecondStage, Table,
    TranslationType,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, FaultReason, Invalidation, InvalidationError, Invalidator,
    Iova, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange, RequesterId, Ticket,
};

const NIC: RequesterId = RequesterId::new(0x0100);
const DOMAIN: DomainId = DomainId::new(7);
const ARENA: u64 = 64 << 20;
const TABLES: u64 = 32 << 20;
const RW: Permissions = Permissions::READ_WRITE;

/// Permissions that a context entry grants to the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grant {
    Untranslated,
    Ats,
    AtsAndPri,
}

struct Rig<'m> {
    mem: &'m Arena,
    frames: Frames<&'m Arena>,
    table: Table<SecondStage>,
    permitted: Table<SecondStage>,
    unit: AtsUnit<RootTable>,
    nic: AtsFunction,
}

impl<'m> Rig<'m> {
    fn new(mem: &'m Arena, grant: Grant, on_invalidate: OnInvalidate) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), ARENA - TABLES).unwrap();
        let frames = Frames::new(mem, region);
        let mut contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
        let format = SecondStage::new(Levels::Four);
        let table = || Table::new(format, DOMAIN, Coherency::Coherent, mem, &frames).unwrap();
        let (table, permitted) = (table(), table());
        let (root, levels) = (table.root(), Levels::Four);
        let device_tlb = |page_requests| TranslationType::DeviceTlb {
            root,
            levels,
            page_requests,
        };
        let context = Context {
            domain: DOMAIN,
            translation: match grant {
                Grant::Untranslated => TranslationType::Table { root, levels },
                Grant::Ats => device_tlb(PageRequests::Blocked),
                Grant::AtsAndPri => device_tlb(PageRequests::Allowed),
            },
        };
        contexts.attach(mem, &frames, NIC, &context).unwrap();
        let small = Geometry::new(16, 4).unwrap();
        let mut unit = VtdUnit::vtd(&UnitConfig {
            iotlb: small,
            walk_caches: [small; 3],
            contexts: small,
            replacement: Replacement::Lru,
            fault_log: FaultLog::MAX_CAPACITY,
            granularity: InvalidationGranularity::Selective,
        });
        unit.set_root_table(contexts.root());
        unit.enable();
        let mut unit = AtsUnit::new(
            unit,
            TranslatedCheck::DeviceOnly,
            DeviceTlbQueueConfig::default(),
            8,
        );
        let mut nic = AtsFunction::new(NIC, 8, on_invalidate);
        if grant != Grant::Untranslated {
            unit.add_device_tlb(NIC, DOMAIN);
            nic.set_control(AtsControl::Enabled);
        }
        if grant == Grant::AtsAndPri {
            nic.page_requests.enable(4);
        }
        Self {
            mem,
            frames,
            table,
            permitted,
            unit,
            nic,
        }
    }

    fn map(&self, iova: u64, pa: u64, permissions: Permissions) {
        let request = |iova, pa| MapRequest {
            iova: Iova::new(iova),
            pa: PhysAddr::new(pa),
            pages: 1,
            permissions,
        };
        self.table
            .map(self.mem, &self.frames, request(iova, pa))
            .unwrap();
        self.permitted
            .map(self.mem, &self.frames, request(pa, pa))
            .unwrap();
    }

    /// Clears the entries of a page and submits its invalidation.
    fn unmap(&mut self, iova: u64, pa: u64) -> Ticket {
        let page = |at| PfnRange::new(Pfn::containing(Iova::new(at)), 1).unwrap();
        let _ = self.table.unmap(self.mem, page(iova)).unwrap();
        let _ = self.permitted.unmap(self.mem, page(pa)).unwrap();
        let request = Invalidation::Pages {
            domain: DOMAIN,
            range: page(iova),
            levels: CachedLevels::Leaves,
        };
        self.unit.submit(request).unwrap()
    }

    /// Delivers invalidate requests and completions.
    fn deliver(&mut self) {
        while let Some(request) = self.unit.take_invalidate_request() {
            if let Some(tag) = self.nic.invalidate(&request) {
                self.unit.complete(NIC, tag).unwrap();
            }
        }
    }

    fn write(&mut self, iova: u64, bytes: &[u8]) -> Result<(), AtsError> {
        let mut bus = Bus::new(&mut self.unit, self.mem, ());
        self.nic.write(&mut bus, Iova::new(iova), bytes)
    }

    fn read(&mut self, iova: u64, bytes: usize) -> Result<Vec<u8>, AtsError> {
        let mut bus = Bus::new(&mut self.unit, self.mem, ());
        let mut into = vec![0; bytes];
        self.nic.read(&mut bus, Iova::new(iova), &mut into)?;
        Ok(into)
    }

    fn word(&self, at: u64) -> u64 {
        self.mem
            .word(PhysAddr::new(at))
            .unwrap()
            .load(std::sync::atomic::Ordering::Relaxed)
    }
}

fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

/// Bytes arrive through the device TLB as they arrive without it, also across pages.
#[test]
fn translated_accesses_reach_the_mapped_bytes() {
    let mem = arena();
    for grant in [Grant::Untranslated, Grant::Ats] {
        let mut rig = Rig::new(&mem, grant, OnInvalidate::default());
        rig.map(0x1000, 0x7000, RW);
        rig.map(0x2000, 0x5000, RW);
        rig.write(0x1ffc, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        assert_eq!(rig.word(0x7ff8) >> 32, 0x0403_0201);
        assert_eq!(rig.word(0x5000) & 0xffff_ffff, 0x0807_0605);
        assert_eq!(rig.read(0x1ffe, 4), Ok(vec![3, 4, 5, 6]));
        let cached = if grant == Grant::Ats { 2 } else { 0 };
        assert_eq!(rig.nic.tlb.len(), cached);
        // The first page has no bytes of an access whose second page has no translation.
        let error = rig.write(0x2ffc, &[9; 8]).unwrap_err();
        assert_eq!(rig.word(0x5ff8) >> 32, 0, "{error}");
    }
}

/// A function that the context entry does not permit loses ATS and works with untranslated requests.
#[test]
fn an_unsupported_request_disables_ats() {
    let mem = arena();
    let mut rig = Rig::new(&mem, Grant::Untranslated, OnInvalidate::default());
    rig.map(0x1000, 0x7000, RW);
    rig.nic.set_control(AtsControl::Enabled);
    assert!(matches!(
        rig.write(0x1000, &[1]),
        Err(AtsError::UnsupportedRequest(fault))
            if fault.reason == FaultReason::RequestTypeBlocked
    ));
    assert_eq!(rig.nic.control(), AtsControl::Disabled);
    assert_eq!(rig.write(0x1000, &[1]), Ok(()));
}

/// Attack A13: the result depends on the context entry and on the check only.
#[test]
fn a_spoofed_translated_request_is_blocked_by_default() {
    let mem = arena();
    for (grant, checked, reason) in [
        (
            Grant::Untranslated,
            false,
            Some(FaultReason::RequestTypeBlocked),
        ),
        (Grant::Ats, false, None),
        (Grant::Ats, true, Some(FaultReason::HostAddressDenied)),
    ] {
        let mut rig = Rig::new(&mem, grant, OnInvalidate::default());
        if checked {
            let mut check = TranslatedCheck::host_address();
            check.set_table(DOMAIN, Some(rig.permitted.root()));
            *rig.unit.translated_check() = check;
        }
        let mut bus = Bus::new(&mut rig.unit, &mem, ());
        let secret = PhysAddr::new(0x9_9000);
        let found = bus.probe_translated(NIC, secret, 8, Access::Read);
        assert_eq!(found.err().map(|fault| fault.reason), reason);
    }
}

/// Attack A14: a device that completes an invalidation and keeps the entry still reaches the page.
/// Only the check of host addresses stops it. An honest device does not reach it.
#[test]
fn a_retained_translation_outlives_the_unmap_without_a_check() {
    let mem = arena();
    for (behaviour, checked, reached) in [
        (OnInvalidate::RemovesAndCompletes, false, false),
        (OnInvalidate::CompletesAndKeeps, false, true),
        (OnInvalidate::CompletesAndKeeps, true, false),
        (OnInvalidate::RemovesAndCompletes, true, false),
    ] {
        let mut rig = Rig::new(&mem, Grant::Ats, behaviour);
        if checked {
            let mut check = TranslatedCheck::host_address();
            check.set_table(DOMAIN, Some(rig.permitted.root()));
            *rig.unit.translated_check() = check;
        }
        rig.map(0x1000, 0x7000, RW);
        assert_eq!(rig.write(0x1000, &[1]), Ok(()), "{behaviour:?}");
        let ticket = rig.unmap(0x1000, 0x7000);
        // Until the completion, even an honest device may use the entry.
        assert_eq!(rig.unit.poll(ticket), Ok(false));
        assert_eq!(rig.write(0x1000, &[1]).is_ok(), !checked);
        rig.deliver();
        assert_eq!(rig.unit.poll(ticket), Ok(true));
        let after = rig.write(0x1000, &[2]);
        assert_eq!(after.is_ok(), reached, "{behaviour:?} {after:?}");
    }
}

/// A device that ignores invalidate requests makes the invalidation fail, never complete.
#[test]
fn a_silent_device_fails_the_invalidation() {
    let mem = arena();
    let mut rig = Rig::new(&mem, Grant::Ats, OnInvalidate::Ignores);
    rig.map(0x1000, 0x7000, RW);
    rig.write(0x1000, &[1]).unwrap();
    let ticket = rig.unmap(0x1000, 0x7000);
    rig.deliver();
    assert_eq!(rig.unit.poll(ticket), Ok(false));
    assert_eq!(rig.unit.time_out(), [NIC]);
    assert_eq!(rig.unit.poll(ticket), Err(InvalidationError::Failed));
}

/// The device faults, requests the page, the handler maps it, and the access succeeds.
#[test]
fn an_io_page_fault_is_served() {
    let mem = arena();
    let mut rig = Rig::new(&mem, Grant::AtsAndPri, OnInvalidate::default());
    let mut handler = PageFaultHandler::new(4);
    let authorised = Pfn::new(2);
    for (page, write, code) in [
        (2, Ok(()), ResponseCode::Success),
        (
            3,
            Err(AtsError::PageFault(Iova::new(0x3000), Access::Write)),
            ResponseCode::InvalidRequest,
        ),
    ] {
        let iova = page << 12;
        let fault = AtsError::PageFault(Iova::new(iova), Access::Write);
        assert_eq!(rig.write(iova, &[5]), Err(fault));
        let pages = [(Pfn::new(page), RW)];
        for request in rig.nic.page_requests.group(&pages).unwrap() {
            let mut bus = Bus::new(&mut rig.unit, &mem, ());
            assert_eq!(bus.page_request(&request), None);
        }
        let (table, frames) = (&rig.table, &rig.frames);
        let responses = handler.serve(rig.unit.page_requests(), 8, |request| {
            if request.page != authorised {
                return ResponseCode::InvalidRequest;
            }
            let map = MapRequest {
                iova: request.page.iova(),
                pa: PhysAddr::new(0x7000),
                pages: 1,
                permissions: request.permissions,
            };
            match table.map(&mem, frames, map) {
                Ok(_) => ResponseCode::Success,
                Err(_) => ResponseCode::ResponseFailure,
            }
        });
        let [response] = responses[..] else {
            panic!("{responses:?}")
        };
        assert_eq!(rig.nic.page_requests.respond(&response), Ok(code));
        assert_eq!(rig.write(iova, &[5]), write);
    }
    assert_eq!(rig.word(0x7000) & 0xff, 5);
    assert!(rig.unit.unit().faults().is_empty());
    assert_eq!(handler.stats().responses, [1, 1, 0]);
}

/// A page that is mapped for reads only needs a page request before a write.
#[test]
fn a_write_to_a_read_only_page_is_a_page_fault() {
    let mem = arena();
    let mut rig = Rig::new(&mem, Grant::Ats, OnInvalidate::default());
    rig.map(0x1000, 0x7000, Permissions::READ);
    assert!(rig.read(0x1000, 8).is_ok());
    let fault = AtsError::PageFault(Iova::new(0x1004), Access::Write);
    assert_eq!(rig.write(0x1004, &[1]), Err(fault));
    assert_eq!(rig.word(0x7000), 0);
}

#[test]
fn responses_must_name_an_outstanding_group() {
    let mut nic = AtsFunction::new(NIC, 1, OnInvalidate::default());
    let pages = [(Pfn::new(1), RW), (Pfn::new(2), RW)];
    let disabled = nic.page_requests.group(&pages);
    assert_eq!(disabled, Err(PageRequestError::Disabled(NIC)));
    nic.page_requests.enable(2);
    let first = nic.page_requests.group(&pages).unwrap();
    let second = nic.page_requests.group(&pages).unwrap();
    let positions: Vec<_> = first.iter().map(|request| request.position).collect();
    assert_eq!(positions, [GroupPosition::More, GroupPosition::Last]);
    assert_ne!(first[0].group, second[0].group);
    let full = nic.page_requests.group(&pages);
    assert_eq!(full, Err(PageRequestError::AllocationUsed(2, NIC)));
    let respond = |device, group: u16, code| PageGroupResponse {
        device,
        group: PrgIndex::new(group).unwrap(),
        code,
    };
    for wrong in [
        respond(RequesterId::new(1), 0, ResponseCode::Success),
        respond(NIC, 9, ResponseCode::Success),
    ] {
        let found = nic.page_requests.respond(&wrong);
        assert_eq!(found, Err(UnexpectedResponse(wrong)));
        assert!(nic.page_requests.status().unexpected_group);
    }
    let success = respond(NIC, first[0].group.get(), ResponseCode::Success);
    assert_eq!(
        nic.page_requests.respond(&success),
        Ok(ResponseCode::Success)
    );
    assert_eq!(
        nic.page_requests.respond(&success),
        Err(UnexpectedResponse(success))
    );
    // A failure disables page requests until the driver enables them.
    let failure = respond(NIC, second[0].group.get(), ResponseCode::ResponseFailure);
    nic.page_requests.respond(&failure).unwrap();
    assert!(nic.page_requests.status().response_failure);
    assert_eq!(
        nic.page_requests.group(&pages),
        Err(PageRequestError::Disabled(NIC))
    );
    assert_eq!(nic.page_requests.outstanding(), 0);
}

/// Attack A38: groups without a last request cannot make the handler grow, and a group's response
/// is the worst result of its requests.
#[test]
fn incomplete_groups_are_bounded() {
    let mem = arena();
    let mut rig = Rig::new(&mem, Grant::AtsAndPri, OnInvalidate::default());
    let mut handler = PageFaultHandler::new(2);
    let request = |group, position, page| PageRequest {
        device: NIC,
        page: Pfn::new(page),
        permissions: RW,
        group: PrgIndex::new(group).unwrap(),
        position,
    };
    let (more, last) = (GroupPosition::More, GroupPosition::Last);
    let code = |request: &PageRequest| match request.page.get() {
        0 => ResponseCode::Success,
        _ => ResponseCode::InvalidRequest,
    };
    let mut responses = Vec::new();
    for (group, position, page) in [
        (0, more, 1),
        (1, more, 0),
        (2, more, 1),
        (0, last, 0),
        (1, last, 0),
        (2, last, 0),
    ] {
        let mut bus = Bus::new(&mut rig.unit, &mem, ());
        assert_eq!(bus.page_request(&request(group, position, page)), None);
        responses.extend(handler.serve(rig.unit.page_requests(), 1, code));
    }
    let codes: Vec<_> = responses
        .iter()
        .map(|response| (response.group.get(), response.code))
        .collect();
    assert_eq!(
        codes,
        [
            (0, ResponseCode::InvalidRequest),
            (1, ResponseCode::Success),
            // Its first request was discarded unresolved; the device asks again.
            (2, ResponseCode::Success),
        ]
    );
    assert_eq!((handler.stats().served, handler.stats().discarded), (5, 1));
}

#[derive(Debug, Clone)]
enum Step {
    Map(u64, u64),
    Unmap(u64),
    Deliver,
    Write(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..12_u64, 0..64_u64).prop_map(|(page, frame)| Step::Map(page, frame)),
        (0..12_u64).prop_map(Step::Unmap),
        Just(Step::Deliver),
        (0..12_u64).prop_map(Step::Write),
        (0..12_u64).prop_map(Step::Write),
    ]
}

proptest! {
    #![proptest_config(Config {
        cases: 128,
        rng_seed: RngSeed::Fixed(0x617473),
        failure_persistence: None,
        ..Config::default()
    })]

    /// Against a map from pages to frames: a device that completes its invalidations reaches
    /// exactly the mapped frames, except through entries whose invalidation has not completed.
    #[test]
    fn an_honest_device_tlb_changes_nothing(steps in prop::collection::vec(step(), 1..120)) {
        let mem = arena();
        let mut rig = Rig::new(&mem, Grant::Ats, OnInvalidate::default());
        let mut mapped: BTreeMap<u64, u64> = BTreeMap::new();
        let mut withheld: BTreeMap<u64, (u64, Ticket)> = BTreeMap::new();
        let mut value = 0_u64;
        for step in steps {
            match step {
                // An address is reused only after its invalidation has completed.
                Step::Map(page, frame)
                    if !mapped.contains_key(&page)
                        && !withheld.contains_key(&page)
                        && !mapped.values().any(|used| *used == frame) =>
                {
                    rig.map(page << 12, frame << 12, RW);
                    mapped.insert(page, frame);
                }
                Step::Unmap(page) => {
                    if let Some(frame) = mapped.remove(&page) {
                        let ticket = rig.unmap(page << 12, frame << 12);
                        withheld.insert(page, (frame, ticket));
                    }
                }
                Step::Deliver => {
                    rig.deliver();
                    for (_, (_, ticket)) in std::mem::take(&mut withheld) {
                        prop_assert_eq!(rig.unit.poll(ticket), Ok(true));
                    }
                }
                Step::Write(page) => {
                    value += 1;
                    let written = rig.write(page << 12, &value.to_le_bytes());
                    match (mapped.get(&page), withheld.get(&page)) {
                        (Some(frame), _) => {
                            prop_assert_eq!(written, Ok(()));
                            prop_assert_eq!(rig.word(frame << 12), value);
                        }
                        (None, Some((frame, _))) if written.is_ok() => {
                            prop_assert_eq!(rig.word(frame << 12), value);
                        }
                        _ => prop_assert_eq!(
                            written,
                            Err(AtsError::PageFault(Iova::new(page << 12), Access::Write))
                        ),
                    }
                }
                Step::Map(..) => {}
            }
        }
    }
}
