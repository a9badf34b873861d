//! The vhost-user IOTLB against a front-end with worst-case timing, and against a hostile one.

mod model;
mod updates;

use ringfence_softiommu::iotlb::{
    Iotlb, IotlbError, IotlbLimits, Message, MissAction, MissOutcome, Region, RegionError, Regions,
};
use ringfence_types::{Access, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr};

use model::{Both, DISK, FRAMES, PAGE, PAGES, Random, USER, fault, range, regions, update, user};

#[test]
fn invalidated_ranges_stay_invalid() {
    let mut chances = 0;
    for seed in 1..200 {
        println!("seed {seed}");
        let mut both = Both::new(seed);
        for _ in 0..400 {
            both.step();
        }
        // After the guest stops changing mappings, exactly its granted translations are available.
        for _ in 0..1000 {
            both.front_end();
            both.back_end();
        }
        assert!(both.front_end.main.is_empty() && both.waiting.is_empty());
        for page in 0..PAGES {
            let mut replies = 0;
            while let Some(fault) = both.fault_at(page) {
                let Ok(MissAction::Send(miss, Message::Miss { iova, required })) =
                    both.iotlb.miss(&fault)
                else {
                    panic!("a miss");
                };
                let found = both.look_up(iova.get() / PAGE, required);
                if let Some(message) = found {
                    both.iotlb.receive(&message).unwrap();
                }
                let outcome = both.iotlb.replied(miss, found.is_some()).unwrap();
                assert_ne!(outcome, MissOutcome::Invalidated);
                if outcome == MissOutcome::Refused {
                    break;
                }
                replies += 1;
                assert_eq!(replies, 1);
            }
            both.check();
        }
        chances += both.resurrected;
    }
    // The test is vacuous if updates are never late.
    assert!(chances > 100, "{chances}");
}

#[test]
fn last_update_of_a_page_wins() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    for (frame, permissions) in [
        (3, Permissions::READ),
        (3, Permissions::WRITE),
        (4, Permissions::WRITE),
        (4, Permissions::READ_WRITE),
        (4, Permissions::READ),
    ] {
        iotlb.receive(&update(0, 1, frame, permissions)).unwrap();
        let mut burst = reader.online();
        let pin = burst.guard();
        for access in [Access::Read, Access::Write] {
            let found = pin.translate(range(0, 1), access).ok();
            let found = found.map(|pieces| pieces.first().start().get() / PAGE);
            assert_eq!(found, permissions.allows(access).then_some(frame));
        }
    }
}

/// QEMU grants read and write for every page. The device must get only the permissions that the
/// front-end checked.
#[test]
fn front_end_that_grants_both_permissions() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let both = update(0, 2, 3, Permissions::READ_WRITE);
    let mut check = |page, read: bool, write: bool| {
        let mut burst = reader.online();
        let pin = burst.guard();
        for (access, may) in [(Access::Read, read), (Access::Write, write)] {
            let found = pin.translate(range(page, 1), access);
            assert_eq!(found.is_ok(), may, "{access} of page {page}");
        }
    };
    let denied = || Fault {
        reason: FaultReason::WriteDenied,
        ..fault(0, Access::Write)
    };
    let Ok(MissAction::Send(reads, _)) = iotlb.miss(&fault(0, Access::Read)) else {
        panic!("a miss");
    };
    iotlb.receive(&both).unwrap();
    check(0, true, false);
    check(1, true, false);
    // The reply to the first miss is still pending.
    let Ok(MissAction::Send(writes, _)) = iotlb.miss(&denied()) else {
        panic!("a miss");
    };
    assert_eq!(iotlb.replied(reads, true), Ok(MissOutcome::Present));
    assert_eq!(iotlb.replied(writes, false), Ok(MissOutcome::Refused));
    check(0, true, false);
    let Ok(MissAction::Send(writes, _)) = iotlb.miss(&denied()) else {
        panic!("a miss");
    };
    iotlb.receive(&both).unwrap();
    assert_eq!(iotlb.replied(writes, true), Ok(MissOutcome::Present));
    check(0, true, true);
    // The next page of the same mapping was part of the update.
    check(1, true, true);
    // Without an invalidation, the permissions stay; after it, the device must miss again.
    iotlb
        .receive(&Message::Invalidate(Some(range(0, 1))))
        .unwrap();
    check(0, false, false);
}

/// Replies may stay unread for a long time. An update must not be matched to a miss whose
/// translation has arrived or that an invalidation affects.
#[test]
fn an_update_answers_the_oldest_open_miss() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let mut granted = |page| {
        let mut burst = reader.online();
        let pin = burst.guard();
        [Access::Read, Access::Write].map(|access| pin.translate(range(page, 1), access).is_ok())
    };
    let ask = |iotlb: &mut Iotlb<()>, page, access| match iotlb.miss(&fault(page, access)) {
        Ok(MissAction::Send(miss, _)) => miss,
        other => panic!("{other:?}"),
    };
    let both = |page, pages| update(page, pages, page, Permissions::READ_WRITE);

    let reads = ask(&mut iotlb, 0, Access::Read);
    iotlb.receive(&both(0, 1)).unwrap();
    assert_eq!(granted(0), [true, false]);
    let writes = ask(&mut iotlb, 0, Access::Write);
    iotlb.receive(&both(0, 1)).unwrap();
    assert_eq!(granted(0), [true, true]);
    assert_eq!(iotlb.replied(reads, true), Ok(MissOutcome::Present));
    assert_eq!(iotlb.replied(writes, true), Ok(MissOutcome::Present));

    let overtaken = ask(&mut iotlb, 2, Access::Read);
    iotlb
        .receive(&Message::Invalidate(Some(range(2, 1))))
        .unwrap();
    let writes = ask(&mut iotlb, 3, Access::Write);
    iotlb.receive(&both(2, 2)).unwrap();
    assert_eq!(granted(2), [false, false]);
    assert_eq!(granted(3), [false, true]);
    assert_eq!(iotlb.replied(overtaken, true), Ok(MissOutcome::Invalidated));
    assert_eq!(iotlb.replied(writes, true), Ok(MissOutcome::Present));

    // The late answer to a miss that an invalidation affects: QEMU checked only the read.
    let late = ask(&mut iotlb, 4, Access::Read);
    iotlb
        .receive(&Message::Invalidate(Some(range(4, 1))))
        .unwrap();
    iotlb.receive(&both(4, 2)).unwrap();
    assert_eq!(granted(4), [false, false]);
    assert_eq!(granted(5), [true, false]);
    assert_eq!(iotlb.replied(late, true), Ok(MissOutcome::Invalidated));
}

/// More invalidations than are remembered separately.
#[test]
fn many_invalidations_stay_remembered() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let Ok(MissAction::Send(miss, _)) = iotlb.miss(&fault(10, Access::Read)) else {
        panic!("a miss");
    };
    for page in (0..FRAMES).rev().filter(|page| page % 2 == 0) {
        for _ in 0..3 {
            let invalidate = Message::Invalidate(Some(range(page, 1)));
            iotlb.receive(&invalidate).unwrap();
        }
    }
    for page in 0..FRAMES {
        let late = update(page, 1, page, Permissions::READ);
        iotlb.receive(&late).unwrap();
        let mut burst = reader.online();
        let found = burst.guard().translate(range(page, 1), Access::Read);
        assert!(page % 2 == 1 || found.is_err(), "page {page}");
    }
    assert_eq!(iotlb.replied(miss, true), Ok(MissOutcome::Invalidated));
    // The record is dropped together with the miss that needed it.
    iotlb.receive(&update(0, 1, 0, Permissions::READ)).unwrap();
    let mut burst = reader.online();
    assert!(burst.guard().translate(range(0, 1), Access::Read).is_ok());
}

/// A hostile front-end can map only shared memory and cannot exceed the limits.
#[test]
fn malicious_front_end_stays_in_its_memory() {
    let limits = IotlbLimits {
        pages: 20,
        extra_pages: 8,
        tables: 16,
        misses: 4,
        ..IotlbLimits::default()
    };
    let mut iotlb = Iotlb::new(limits, DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let mut random = Random(7);
    let mut misses = Vec::new();
    let (mut followed, mut full) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = [0; 32];
        let words = [
            [0, 1 << 12, 1 << 21, 1 << 47, u64::MAX - 4095, random.next()],
            [1, 1 << 12, 1 << 13, 1 << 30, u64::MAX, random.next()],
            [USER, user(31), USER * 2, u64::MAX, user(63), random.next()],
        ];
        // Most messages are nearly valid: a rejected update evicts the pages it touches, and a
        // random one touches all of them.
        let wild = random.below(8) == 0;
        for (to, choices) in bytes.chunks_mut(8).zip(&words) {
            let near = random.below(6) * random.below(2) * PAGE;
            let choice = random.below(if wild { 6 } else { 3 }) as usize;
            let word = choices[choice].wrapping_add(near);
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[24] = random.below(5) as u8;
        // Mostly updates: an invalidation with an invalid range is global.
        bytes[25] = match random.below(40) {
            kind @ 0..=5 => kind as u8,
            _ => 2,
        };
        if random.below(8) == 0
            && let Ok(MissAction::Send(miss, _)) =
                iotlb.miss(&fault(random.next() >> 12, Access::Read))
        {
            misses.push(miss);
        }
        if random.below(4) == 0
            && let Some(miss) = misses.pop()
        {
            iotlb.replied(miss, random.below(2) == 0).unwrap();
        }
        let Ok(message) = Message::decode(&bytes) else {
            continue;
        };
        followed += usize::from(iotlb.receive(&message).is_ok());
        full += usize::from(iotlb.pages() > 12);
        assert!(iotlb.pages() <= 20 && iotlb.misses() <= 4);
        if let Message::Update {
            range: received, ..
        } = message
        {
            let mut burst = reader.online();
            let pin = burst.guard();
            for page in (0..=8).map_while(|n| (received.start().get() / PAGE).checked_add(n)) {
                let Some(whole) = IovaRange::new(Iova::new(page.wrapping_mul(PAGE)), PAGE) else {
                    break;
                };
                if let Ok(pieces) = pin.translate(whole, Access::Read) {
                    assert!(pieces.first().last().get() < FRAMES * PAGE);
                }
            }
        }
    }
    assert!(followed > 500 && full > 200, "{followed} {full}");
}

#[test]
fn messages_match_the_protocol() {
    let message = update(3, 2, 5, Permissions::WRITE);
    let mut expected = Vec::new();
    for word in [3 * PAGE, 2 * PAGE, USER + 5 * PAGE] {
        expected.extend(word.to_ne_bytes());
    }
    expected.extend([2, 2, 0, 0, 0, 0, 0, 0]);
    assert_eq!(message.encode().as_slice(), expected);
    for message in [
        message,
        Message::Invalidate(None),
        Message::Invalidate(Some(range(1, 1))),
        Message::Miss {
            iova: Iova::new(77),
            required: Permissions::READ_WRITE,
        },
        Message::AccessFail {
            iova: Iova::new(77),
            required: Permissions::READ,
        },
    ] {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
}

#[test]
fn invalid_messages_are_rejected() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let refused = |iotlb: &mut Iotlb<()>, message: Message| {
        let error = iotlb.receive(&message).unwrap_err();
        assert_eq!(iotlb.pages(), 0);
        error
    };
    let at = |user, range| Message::Update {
        range,
        user,
        permissions: Permissions::READ,
    };
    // One page beyond a region, and across the boundaries of regions.
    for message in [
        at(USER + (FRAMES / 2 - 1) * PAGE, range(0, 2)),
        at(USER - PAGE, range(0, 1)),
        at(u64::MAX - PAGE + 1, range(0, 1)),
    ] {
        let error = refused(&mut iotlb, message);
        assert!(matches!(error, IotlbError::NotShared { .. }), "{error}");
    }
    for message in [
        at(USER + 8, range(0, 1)),
        at(USER + 8, IovaRange::new(Iova::new(8), PAGE).unwrap()),
        at(USER, IovaRange::new(Iova::ZERO, PAGE - 1).unwrap()),
    ] {
        let error = refused(&mut iotlb, message);
        assert!(matches!(error, IotlbError::NoPage { .. }), "{error}");
    }
    let beyond = at(USER, range(1 << 36, 1));
    assert!(matches!(refused(&mut iotlb, beyond), IotlbError::Map(_)));
    let miss = Message::Miss {
        iova: Iova::ZERO,
        required: Permissions::READ,
    };
    assert_eq!(refused(&mut iotlb, miss), IotlbError::NotForUs);
    let mut other = fault(0, Access::Read);
    other.reason = FaultReason::AddressBeyondWidth;
    assert_eq!(iotlb.miss(&other), Err(IotlbError::NotAMiss(other)));

    // An update with partial pages is shrunk to whole pages; such an invalidation is extended to
    // whole pages.
    let inner = IovaRange::new(Iova::new(PAGE - 1), 2 * PAGE).unwrap();
    iotlb.receive(&at(USER + PAGE - 1, inner)).unwrap();
    assert_eq!(iotlb.pages(), 1);
    let byte = IovaRange::new(Iova::new(PAGE + 5), 1).unwrap();
    iotlb.receive(&Message::Invalidate(Some(byte))).unwrap();
    assert_eq!(iotlb.pages(), 0);

    let region = |user, bytes| Region {
        user,
        bytes,
        memory: PhysAddr::ZERO,
    };
    let made = |regions: &[Region]| Regions::new(regions).map(|_| ());
    assert_eq!(made(&[region(5, 0)]), Err(RegionError::Wraps { user: 5 }));
    let last = u64::MAX - 4;
    assert_eq!(
        made(&[region(last, 9)]),
        Err(RegionError::Wraps { user: last })
    );
    let overlap = [region(10, 10), region(5, 6)];
    assert_eq!(made(&overlap), Err(RegionError::Overlap { user: 10 }));
    let many = RegionError::TooMany {
        count: 513,
        limit: 512,
    };
    assert_eq!(made(&[region(5, 1); 513]), Err(many));
}

/// An invalidation is not acknowledged while a reader may hold the page. A thread with an open read
/// section must not wait for itself.
#[test]
fn a_thread_that_holds_a_pin_changes_nothing() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    iotlb.receive(&update(0, 1, 3, Permissions::READ)).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    assert!(pin.translate(range(0, 1), Access::Read).is_ok());
    let invalidate = Message::Invalidate(None);
    assert!(matches!(
        iotlb.receive(&invalidate),
        Err(IotlbError::ReadSectionOpen(_))
    ));
    assert!(matches!(
        iotlb.set_memory((), Regions::default()),
        Err(IotlbError::ReadSectionOpen(_))
    ));
    assert!(pin.translate(range(0, 1), Access::Read).is_ok());
    drop(burst);
    iotlb.receive(&invalidate).unwrap();
    assert!(
        reader
            .online()
            .guard()
            .translate(range(0, 1), Access::Read)
            .is_err()
    );
}
