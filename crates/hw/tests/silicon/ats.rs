//! Translation requests, translated requests, invalidate requests and page requests, against the
//! states of the specification.

use ringfence_hw::{
    AtsUnit, CompletionError, DeviceTlbQueueConfig, FaultRecord, GroupPosition, InvalidationTag,
    PageGroupResponse, PageRequest, PrgIndex, ResponseCode, RootTable, TranslatedCheck,
    TranslationCompletion, TranslationService,
};
use ringfence_pgtable::{Context, Levels, PageRequests, TranslationType};
use ringfence_types::{
    Access, CachedLevels, DomainId, FaultReason, Invalidation, InvalidationError, Invalidator,
    Iova, PageSize, Permissions, Pfn, PhysAddr, RequesterId,
};

use crate::rig::{A, B, DISK, GPU, NIC, READ, RW, Rig, WRITE, arena, pages_at, roomy, seen};

const TABLE: TranslationType = TranslationType::Table {
    root: PhysAddr::ZERO,
    levels: Levels::Four,
};

fn device_tlb(root: PhysAddr, page_requests: PageRequests) -> TranslationType {
    TranslationType::DeviceTlb {
        root,
        levels: Levels::Four,
        page_requests,
    }
}

/// Attaches `device` to the table at `root` with ATS and PRI.
fn attach(rig: &mut Rig<'_>, device: RequesterId, domain: DomainId, root: PhysAddr) {
    let translation = device_tlb(root, PageRequests::Allowed);
    rig.attach_context(
        device,
        &Context {
            domain,
            translation,
        },
    );
}

fn ats(rig: &Rig<'_>, queue: DeviceTlbQueueConfig, page_requests: usize) -> AtsUnit<RootTable> {
    AtsUnit::new(
        rig.unit.clone(),
        TranslatedCheck::DeviceOnly,
        queue,
        page_requests,
    )
}

fn request(device: RequesterId, page: u64, group: u16, position: GroupPosition) -> PageRequest {
    PageRequest {
        device,
        page: Pfn::new(page),
        permissions: Permissions::READ,
        group: PrgIndex::new(group).unwrap(),
        position,
    }
}

fn pages(domain: DomainId, iova: u64, pages: u64) -> Invalidation {
    Invalidation::Pages {
        domain,
        range: pages_at(iova, pages),
        levels: CachedLevels::Leaves,
    }
}

/// The context entry alone decides which requests a device may make.
#[test]
fn the_context_entry_permits_request_types() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    let root = table.root();
    let with_root = |translation| match translation {
        TranslationType::Table { levels, .. } => TranslationType::Table { root, levels },
        other => other,
    };
    // (context, translation and translated requests, page requests)
    let blocked = FaultReason::RequestTypeBlocked;
    for (translation, requests, page_requests) in [
        (None, Err(FaultReason::RootNotPresent), false),
        (Some(TABLE), Err(blocked), false),
        (
            Some(TranslationType::PassThrough {
                levels: Levels::Four,
            }),
            Err(blocked),
            false,
        ),
        (Some(device_tlb(root, PageRequests::Blocked)), Ok(()), false),
        (Some(device_tlb(root, PageRequests::Allowed)), Ok(()), true),
    ] {
        if let Some(translation) = translation.map(with_root) {
            rig.attach_context(
                NIC,
                &Context {
                    domain: A,
                    translation,
                },
            );
        }
        let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
        let completion = unit.translation_request(&mem, NIC, Iova::new(0x1234));
        let page = TranslationCompletion::Page {
            base: PhysAddr::new(0x7000),
            size: PageSize::Size4K,
            permissions: RW,
        };
        match (requests, completion) {
            (Ok(()), found) => assert_eq!(found, page, "{translation:?}"),
            (Err(reason), TranslationCompletion::UnsupportedRequest(fault)) => {
                assert_eq!((fault.device, fault.reason), (NIC, reason));
            }
            (_, found) => panic!("{translation:?}: {found:?}"),
        }
        let at = PhysAddr::new(0x9_9000);
        let spoofed = unit
            .translated_request(&mem, NIC, at, 8, WRITE)
            .map(|ranges| ranges.to_vec());
        let expected = match requests {
            Ok(()) => Ok(vec![(0x9_9000, 8)]),
            Err(reason) => Err((0x9_9000, reason)),
        };
        assert_eq!(seen(spoofed), expected, "{translation:?}");
        let asked = unit.page_request(&mem, &request(NIC, 1, 5, GroupPosition::Last));
        let invalid = PageGroupResponse {
            device: NIC,
            group: PrgIndex::new(5).unwrap(),
            code: ResponseCode::InvalidRequest,
        };
        assert_eq!(asked, (!page_requests).then_some(invalid));
        assert_eq!(unit.page_requests().len(), usize::from(page_requests));
        // Every blocked request left a record with the code of the specification.
        let records: Vec<FaultRecord> = unit.unit().faults().iter().copied().collect();
        let faults = 2 * usize::from(requests.is_err()) + usize::from(!page_requests);
        assert_eq!(records.len(), faults, "{translation:?}");
        if translation == Some(TABLE) {
            assert!(records.iter().all(|record| record.reason == 0xd));
        }
        // Untranslated requests need no permission.
        if translation.is_some() {
            assert!(
                unit.unit()
                    .translate(&mem, NIC, Iova::new(0x1000), 8, READ)
                    .is_ok()
            );
        }
    }
}

#[test]
fn a_disabled_unit_blocks_translation_and_translated_requests() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    attach(&mut rig, NIC, A, table.root());
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    unit.unit().disable();
    let found = unit.translation_request(&mem, NIC, Iova::new(0x1000));
    assert!(matches!(
        found,
        TranslationCompletion::UnsupportedRequest(fault)
            if fault.reason == FaultReason::RequestTypeBlocked
    ));
    let at = PhysAddr::new(0x1000);
    assert!(unit.translated_request(&mem, NIC, at, 1, READ).is_err());
}

/// A completion carries the permissions and the size of the page. A page that is not mapped is no
/// fault: R = W = 0.
#[test]
fn completions_describe_the_page() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let format = crate::rig::format(Levels::Four, PageSize::Size2M);
    let table = rig.domain_of(format, A, &[]);
    attach(&mut rig, NIC, A, table.root());
    rig.map(&table, 0x1000, 0x7000, 1, Permissions::READ);
    rig.map(&table, 0x2000, 0x8000, 1, Permissions::WRITE);
    rig.map(&table, 0x20_0000, 0x40_0000, 512, RW);
    rig.map(&table, 0x5000, 0xb000, 1, RW);
    rig.poke(&table, 1, 0x5000, |raw| raw | 1 << 62);
    let page = |base, size, permissions| TranslationCompletion::Page {
        base: PhysAddr::new(base),
        size,
        permissions,
    };
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    for (iova, expected) in [
        (0x1fff, page(0x7000, PageSize::Size4K, Permissions::READ)),
        (0x2000, page(0x8000, PageSize::Size4K, Permissions::WRITE)),
        (0x3f_ffff, page(0x40_0000, PageSize::Size2M, RW)),
        (0x9000, TranslationCompletion::NotMapped),
        (0x7fff_f000, TranslationCompletion::NotMapped),
    ] {
        // The second answer comes from the IOTLB.
        for _ in 0..2 {
            let found = unit.translation_request(&mem, NIC, Iova::new(iova));
            assert_eq!(found, expected, "{iova:#x}");
        }
    }
    assert!(unit.unit().faults().is_empty());
    let aborted = unit.translation_request(&mem, NIC, Iova::new(0x5000));
    assert!(matches!(
        aborted,
        TranslationCompletion::CompleterAbort(fault) if fault.reason == FaultReason::ReservedBit
    ));
    let beyond = unit.translation_request(&mem, NIC, Iova::new(1 << 48));
    assert!(matches!(
        beyond,
        TranslationCompletion::UnsupportedRequest(fault)
            if fault.reason == FaultReason::AddressBeyondWidth
    ));
    assert_eq!(unit.unit().faults().len(), 2);
}

/// Attacks A13 and A14: with the check, a host address works only while the permission table of
/// the device's own domain permits it.
#[test]
fn the_permission_table_bounds_translated_requests() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let tables = [A, B].map(|domain| rig.domain(domain, &[]));
    let permitted = [A, B].map(|domain| rig.domain(domain, &[]));
    attach(&mut rig, NIC, A, tables[0].root());
    attach(&mut rig, DISK, B, tables[1].root());
    rig.map(&permitted[0], 0x7000, 0x7000, 2, RW);
    rig.map(&permitted[1], 0xa000, 0xa000, 1, Permissions::READ);
    let mut check = TranslatedCheck::host_address();
    check.set_table(A, Some(permitted[0].root()));
    check.set_table(B, Some(permitted[1].root()));
    let queue = DeviceTlbQueueConfig::default();
    let mut unit = AtsUnit::new(rig.unit.clone(), check, queue, 4);
    let denied = FaultReason::HostAddressDenied;
    let mut access = |device, at, bytes, access: Access| {
        let at = PhysAddr::new(at);
        let result = unit
            .translated_request(&mem, device, at, bytes, access)
            .map(|ranges| ranges.to_vec());
        seen(result)
    };
    for (device, at, bytes, kind, expected) in [
        (NIC, 0x7ff0, 0x20, WRITE, Ok(vec![(0x7ff0, 0x20)])),
        (NIC, 0x8ff0, 0x20, WRITE, Err((0x9000, denied))),
        (NIC, 0xa000, 1, READ, Err((0xa000, denied))),
        (DISK, 0xa000, 1, READ, Ok(vec![(0xa000, 1)])),
        (DISK, 0xa000, 1, WRITE, Err((0xa000, denied))),
        (DISK, 0x7000, 1, READ, Err((0x7000, denied))),
        (NIC, 0x7000, 0, READ, Err((0x7000, FaultReason::BadLength))),
        (
            NIC,
            u64::MAX,
            2,
            READ,
            Err((u64::MAX, FaultReason::BadLength)),
        ),
        (
            NIC,
            0x7000,
            u64::MAX >> 1,
            READ,
            Err((0x7000, FaultReason::BadLength)),
        ),
        (
            GPU,
            0x7000,
            1,
            READ,
            Err((0x7000, FaultReason::ContextNotPresent)),
        ),
    ] {
        assert_eq!(access(device, at, bytes, kind), expected, "{at:#x}");
    }
    // A cleared entry takes effect at once, even if the device keeps the translation.
    rig.unmap(&permitted[0], 0x7000, 1);
    assert_eq!(access(NIC, 0x7000, 1, READ), Err((0x7000, denied)));
    unit.translated_check().set_table(A, None);
    let at = PhysAddr::new(0x8000);
    assert!(unit.translated_request(&mem, NIC, at, 1, READ).is_err());
}

/// An invalidation completes only after all device TLBs of its domain have completed theirs.
#[test]
fn an_invalidation_waits_for_the_device_tlbs_of_its_scope() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let tables = [A, B].map(|domain| rig.domain(domain, &[]));
    for (device, domain, table) in [(NIC, A, 0), (GPU, A, 0), (DISK, B, 1)] {
        attach(&mut rig, device, domain, tables[table].root());
    }
    let all = (0, u64::MAX);
    for (scope, expected, range) in [
        (pages(A, 0x2000, 2), vec![NIC, GPU], (0x2000, 0x3fff)),
        (pages(B, 0x1000, 1), vec![DISK], (0x1000, 0x1fff)),
        (Invalidation::Domain(B), vec![DISK], all),
        (Invalidation::Global, vec![NIC, GPU, DISK], all),
        (Invalidation::Context(GPU), vec![GPU], all),
    ] {
        let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
        unit.add_device_tlb(NIC, A);
        unit.add_device_tlb(GPU, A);
        unit.add_device_tlb(DISK, B);
        let ticket = unit.submit(scope).unwrap();
        let mut requests = Vec::new();
        while let Some(next) = unit.take_invalidate_request() {
            requests.push(next);
        }
        let devices: Vec<_> = requests.iter().map(|request| request.device).collect();
        assert_eq!(devices, expected, "{scope:?}");
        for request in requests {
            let addresses = (request.range.start().get(), request.range.last().get());
            assert_eq!(addresses, range, "{scope:?}");
            assert_eq!(unit.poll(ticket), Ok(false), "{scope:?}");
            unit.complete(request.device, request.tag).unwrap();
        }
        assert_eq!(unit.poll(ticket), Ok(true), "{scope:?}");
    }
    // A removed device TLB takes no part.
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    unit.add_device_tlb(NIC, A);
    unit.remove_device_tlb(NIC);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.take_invalidate_request(), None);
    assert_eq!(unit.poll(ticket), Ok(true));
}

/// The IOTLB is invalid before the device TLB: a refill cannot be stale.
#[test]
fn a_refill_during_an_invalidation_sees_the_new_table() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    attach(&mut rig, NIC, A, table.root());
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    unit.add_device_tlb(NIC, A);
    let iova = Iova::new(0x1000);
    let _ = unit.translation_request(&mem, NIC, iova);
    rig.unmap(&table, 0x1000, 1);
    let ticket = unit.submit(pages(A, 0x1000, 1)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(false));
    assert_eq!(
        unit.translation_request(&mem, NIC, iova),
        TranslationCompletion::NotMapped
    );
}

#[test]
fn wrong_completions_complete_nothing() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    attach(&mut rig, NIC, A, table.root());
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    unit.add_device_tlb(NIC, A);
    let ticket = unit.submit(Invalidation::Domain(A)).unwrap();
    let tag = |raw| InvalidationTag::new(raw).unwrap();
    // A completion before the request was sent.
    let early = unit.complete(NIC, tag(0));
    assert_eq!(early, Err(CompletionError::UnknownTag(tag(0))));
    let sent = unit.take_invalidate_request().unwrap();
    for (device, other, error) in [
        (GPU, sent.tag, CompletionError::OtherDevice(NIC)),
        (NIC, tag(31), CompletionError::UnknownTag(tag(31))),
    ] {
        assert_eq!(unit.complete(device, other), Err(error));
        assert_eq!(unit.poll(ticket), Ok(false));
    }
    assert_eq!(unit.complete(NIC, sent.tag), Ok(()));
    assert_eq!(unit.poll(ticket), Ok(true));
    let twice = unit.complete(NIC, sent.tag);
    assert_eq!(twice, Err(CompletionError::UnknownTag(sent.tag)));
    assert_eq!(unit.completion_errors(), 4);
}

/// A device that does not complete cannot make the queue grow, and its time-out is no completion.
#[test]
fn a_silent_device_is_bounded_and_times_out() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    attach(&mut rig, NIC, A, table.root());
    attach(&mut rig, GPU, A, table.root());
    let queue = DeviceTlbQueueConfig {
        waiting: 4,
        per_device: 1,
    };
    let mut unit = ats(&rig, queue, 4);
    unit.add_device_tlb(NIC, A);
    unit.add_device_tlb(GPU, A);
    let before = unit.submit(Invalidation::Domain(B)).unwrap();
    let first = unit.submit(pages(A, 0x1000, 1)).unwrap();
    let sent: Vec<_> = std::iter::from_fn(|| unit.take_invalidate_request()).collect();
    assert_eq!(sent.len(), 2);
    let second = unit.submit(pages(A, 0x2000, 1)).unwrap();
    let third = unit.submit(pages(A, 0x3000, 1)).unwrap();
    // One request per device is outstanding, so the others wait.
    assert_eq!(unit.take_invalidate_request(), None);
    assert_eq!(
        unit.submit(pages(A, 0x4000, 1)),
        Err(InvalidationError::QueueFull)
    );
    unit.complete(GPU, sent[1].tag).unwrap();
    // The device that completes gets its next request; the silent one does not stop it.
    let next = unit.take_invalidate_request().unwrap();
    assert_eq!(next.device, GPU);
    unit.complete(GPU, next.tag).unwrap();
    assert_eq!(unit.take_invalidate_request().unwrap().device, GPU);
    assert_eq!(unit.time_out(), [NIC, GPU]);
    for ticket in [first, second, third] {
        assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    }
    assert_eq!(unit.poll(before), Ok(true));
    // The queue works again.
    let retry = unit.submit(pages(A, 0x1000, 1)).unwrap();
    for _ in 0..2 {
        let request = unit.take_invalidate_request().unwrap();
        unit.complete(request.device, request.tag).unwrap();
    }
    assert_eq!(unit.poll(retry), Ok(true));
}

/// At most 32 requests are outstanding, each with its own tag.
#[test]
fn tags_are_unique_among_outstanding_requests() {
    let mem = arena();
    let rig = Rig::new(&mem, &roomy());
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 4);
    unit.add_device_tlb(NIC, A);
    for page in 0..40 {
        unit.submit(pages(A, page << 12, 1)).unwrap();
    }
    let sent: Vec<_> = std::iter::from_fn(|| unit.take_invalidate_request()).collect();
    let mut tags: Vec<_> = sent.iter().map(|request| request.tag).collect();
    tags.sort_unstable();
    tags.dedup();
    assert_eq!((sent.len(), tags.len()), (32, 32));
    unit.complete(NIC, sent[7].tag).unwrap();
    let next = unit.take_invalidate_request().unwrap();
    assert_eq!(next.tag, sent[7].tag);
    assert_eq!(next.range.start(), Iova::new(32 << 12));
}

/// Attack A38: a storm fills the queue, sets PRO, and never grows it.
#[test]
fn a_full_page_request_queue_overflows_until_cleared() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[]);
    attach(&mut rig, NIC, A, table.root());
    attach(&mut rig, DISK, B, table.root());
    let mut unit = ats(&rig, DeviceTlbQueueConfig::default(), 3);
    let (more, last) = (GroupPosition::More, GroupPosition::Last);
    let success = |device, group| PageGroupResponse {
        device,
        group: PrgIndex::new(group).unwrap(),
        code: ResponseCode::Success,
    };
    for (device, group, position, response) in [
        (NIC, 0, more, None),
        (NIC, 0, last, None),
        (NIC, 1, last, None),
        // Lost: only the last request of a group has a response.
        (NIC, 2, more, None),
        (NIC, 2, last, Some(success(NIC, 2))),
        // The storm of one device loses the requests of another.
        (DISK, 2, last, Some(success(DISK, 2))),
    ] {
        let found = unit.page_request(&mem, &request(device, 1, group, position));
        assert_eq!(found, response, "{device} {group}");
    }
    let queue = unit.page_requests();
    assert_eq!((queue.len(), queue.overflowed()), (3, true));
    assert_eq!((queue.stats().queued, queue.stats().lost), (3, 3));
    // Free space alone does not resume queuing.
    assert_eq!(queue.take(), Some(request(NIC, 1, 0, more)));
    let lost = unit.page_request(&mem, &request(DISK, 1, 3, last));
    assert_eq!(lost, Some(success(DISK, 3)));
    unit.page_requests().clear_overflow();
    assert_eq!(unit.page_request(&mem, &request(DISK, 1, 4, last)), None);
    // Software ends the storm: without permission the requests no longer enter the queue.
    let translation = device_tlb(table.root(), PageRequests::Blocked);
    rig.attach_context(
        NIC,
        &Context {
            domain: A,
            translation,
        },
    );
    unit.unit().invalidate(&Invalidation::Context(NIC));
    let before = unit.page_requests().len();
    let answer = unit.page_request(&mem, &request(NIC, 1, 5, last)).unwrap();
    assert_eq!(answer.code, ResponseCode::InvalidRequest);
    assert_eq!(unit.page_requests().len(), before);
    assert_eq!(unit.page_requests().stats().blocked, 1);
}
