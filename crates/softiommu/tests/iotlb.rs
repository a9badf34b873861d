//! The vhost-user IOTLB against a front-end that does everything at the worst time, and against one that means harm.

use std::collections::{BTreeMap, VecDeque};

use ringfence_softiommu::Reader;
use ringfence_softiommu::iotlb::{
    Asked, Iotlb, IotlbError, IotlbLimits, Message, MissId, Outcome, Region, RegionError, Regions,
};
use ringfence_types::{
    Access, DeviceId, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr,
};

const DISK: DeviceId = DeviceId::new(0x20);
const PAGE: u64 = 1 << 12;
/// Pages that the driver uses.
const PAGES: u64 = 24;
const FRAMES: u64 = 64;
/// Where the front-end has the guest's memory.
const USER: u64 = 0x7f00_0000_0000;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }
}

fn regions() -> Regions {
    Regions::new(&[
        Region {
            user: USER,
            bytes: FRAMES / 2 * PAGE,
            memory: PhysAddr::ZERO,
        },
        // Not beside the first one in the front-end.
        Region {
            user: USER * 2,
            bytes: FRAMES / 2 * PAGE,
            memory: PhysAddr::new(FRAMES / 2 * PAGE),
        },
    ])
    .unwrap()
}

fn user(frame: u64) -> u64 {
    if frame < FRAMES / 2 {
        USER + frame * PAGE
    } else {
        USER * 2 + (frame - FRAMES / 2) * PAGE
    }
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

fn fault(page: u64, access: Access) -> Fault {
    Fault {
        device: DISK,
        iova: Iova::new(page * PAGE + 8),
        access,
        reason: FaultReason::NotPresent,
    }
}

fn update(page: u64, pages: u64, frame: u64, permissions: Permissions) -> Message {
    Message::Update {
        range: range(page, pages),
        user: user(frame),
        permissions,
    }
}

type Grant = (u64, Permissions);

/// What the front-end does with a miss: it looks up, later it sends, later it replies.
enum Handling {
    LookedUp(MissId, Option<Message>),
    Sent(MissId),
    Acknowledged(MissId, bool),
}

/// A front-end of many threads, and the guest behind it.
struct Front {
    grants: BTreeMap<u64, Grant>,
    /// Grants that were taken away by an invalidation that is not acknowledged yet: its number.
    going: Vec<(u64, Grant, u64)>,
    handling: Vec<Handling>,
    /// To the back-end, in order; the number of an invalidation, or the miss that an update answers.
    main: VecDeque<(Message, u64, Option<MissId>)>,
    requests: VecDeque<(MissId, Message)>,
    number: u64,
}

struct Both {
    iotlb: Iotlb<()>,
    reader: Reader<()>,
    front: Front,
    random: Random,
    /// Misses that the device waits for.
    waiting: Vec<MissId>,
    resurrected: usize,
}

impl Both {
    fn new(seed: u64) -> Self {
        let limits = IotlbLimits {
            pages: 12,
            ahead: 3,
            tables: 8,
            misses: 6,
            ..IotlbLimits::default()
        };
        let iotlb = Iotlb::new(limits, DISK, (), regions()).unwrap();
        Self {
            reader: iotlb.reader().unwrap(),
            iotlb,
            front: Front {
                grants: BTreeMap::new(),
                going: Vec::new(),
                handling: Vec::new(),
                main: VecDeque::new(),
                requests: VecDeque::new(),
                number: 0,
            },
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            waiting: Vec::new(),
            resurrected: 0,
        }
    }

    /// The guest maps, or unmaps. The front-end tells of what no longer holds.
    fn change(&mut self) {
        let (page, pages) = (self.random.below(PAGES), 1 + self.random.below(6));
        let pages = pages.min(PAGES - page);
        let frame = self.random.below(FRAMES - pages);
        let map = self.random.below(3) != 0;
        let permissions = Permissions::from_bits(1 + self.random.below(3)).unwrap();
        self.front.number += 1;
        for n in 0..pages {
            let before = match map {
                true => self.front.grants.insert(page + n, (frame + n, permissions)),
                false => self.front.grants.remove(&(page + n)),
            };
            let number = self.front.number;
            self.front
                .going
                .extend(before.map(|grant| (page + n, grant, number)));
        }
        let all = self.random.below(20) == 0;
        let message = Message::Invalidate((!all).then(|| range(page, pages)));
        self.front
            .main
            .push_back((message, self.front.number, None));
    }

    /// What the front-end says of `page`: an update of all that is mapped like it around it.
    fn look_up(&mut self, page: u64, wanted: Permissions) -> Option<Message> {
        let grants = &self.front.grants;
        let (frame, permissions) = *grants.get(&page)?;
        if permissions.union(wanted) != permissions {
            return None;
        }
        let alike = |to: u64| {
            let frame = (frame + to).checked_sub(page);
            // One region.
            frame.is_some_and(|frame| {
                grants.get(&to) == Some(&(frame, permissions))
                    && (frame < FRAMES / 2) == (grants[&page].0 < FRAMES / 2)
            })
        };
        let first = (0..=page).rev().take_while(|to| alike(*to)).last()?;
        let last = (page..PAGES).take_while(|to| alike(*to)).last()?;
        Some(update(
            first,
            last - first + 1,
            frame + first - page,
            permissions,
        ))
    }

    fn front_end(&mut self) {
        if self.random.below(2) == 0
            && let Some((miss, message)) = self.front.requests.pop_front()
        {
            let Message::Miss { iova, wanted } = message else {
                panic!("{message:?}");
            };
            let found = self.look_up(iova.get() / PAGE, wanted);
            self.front.handling.push(Handling::LookedUp(miss, found));
        }
        if self.front.handling.is_empty() {
            return;
        }
        let at = self.random.below(self.front.handling.len() as u64) as usize;
        match self.front.handling.swap_remove(at) {
            Handling::LookedUp(miss, Some(message)) => {
                self.front.main.push_back((message, 0, Some(miss)));
                self.front.handling.push(Handling::Sent(miss));
            }
            Handling::LookedUp(miss, None) => {
                self.front
                    .handling
                    .push(Handling::Acknowledged(miss, false));
            }
            Handling::Sent(miss) => self.front.handling.push(Handling::Sent(miss)),
            Handling::Acknowledged(miss, done) => {
                let outcome = self.iotlb.replied(miss, done).unwrap();
                assert!(self.waiting.contains(&miss));
                self.waiting.retain(|waiting| *waiting != miss);
                // It is refused only if it was not granted when it was looked up.
                assert!(done || outcome != Outcome::Gone);
            }
        }
    }

    fn back_end(&mut self) {
        let Some((message, number, miss)) = self.front.main.pop_front() else {
            return;
        };
        if let Message::Update { range, .. } = message
            && self
                .front
                .going
                .iter()
                .any(|(page, ..)| range.contains_address(Iova::new(page * PAGE)))
        {
            self.resurrected += 1;
        }
        self.iotlb.receive(&message).unwrap();
        if let Some(miss) = miss {
            for handling in &mut self.front.handling {
                if matches!(handling, Handling::Sent(sent) if *sent == miss) {
                    *handling = Handling::Acknowledged(miss, true);
                }
            }
        } else {
            self.front.going.retain(|(.., going)| *going > number);
        }
    }

    fn device(&mut self) {
        let page = self.random.below(PAGES);
        let access = match self.random.below(2) {
            0 => Access::Read,
            _ => Access::Write,
        };
        let result = self
            .reader
            .online()
            .pin()
            .translate(range(page, 1), access)
            .map(|pieces| pieces.first());
        if let Err(fault) = result {
            match self.iotlb.miss(&fault) {
                Ok(Asked::Send(miss, message)) => {
                    self.front.requests.push_back((miss, message));
                    self.waiting.push(miss);
                }
                Ok(Asked::Wait(miss)) => assert!(self.waiting.contains(&miss)),
                Ok(Asked::Present) => panic!("{fault} and present"),
                Err(error) => {
                    assert_eq!((error, self.iotlb.misses()), (IotlbError::TooManyMisses, 6))
                }
            }
        }
    }

    fn fault_at(&mut self, page: u64) -> Option<Fault> {
        let mut burst = self.reader.online();
        burst.pin().translate(range(page, 1), Access::Read).err()
    }

    /// Every translation is one that the guest has granted, or whose invalidation has not been acknowledged.
    fn check(&mut self) {
        assert!(self.iotlb.pages() <= 12);
        let mut burst = self.reader.online();
        let pin = burst.pin();
        for page in 0..PAGES {
            for access in [Access::Read, Access::Write] {
                let Ok(pieces) = pin.translate(range(page, 1), access) else {
                    continue;
                };
                let frame = pieces.first().start().get() / PAGE;
                let now = self.front.grants.get(&page).map(|grant| (page, *grant));
                let going = self
                    .front
                    .going
                    .iter()
                    .map(|(page, grant, _)| (*page, *grant));
                let granted = now
                    .into_iter()
                    .chain(going)
                    .any(|(granted, (at, allowed))| {
                        granted == page && at == frame && allowed.allows(access)
                    });
                assert!(granted, "page {page} still reaches frame {frame}");
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(10) {
            0 => self.change(),
            1..=3 => self.device(),
            4..=6 => self.front_end(),
            _ => self.back_end(),
        }
        self.check();
    }
}

#[test]
fn what_is_invalidated_stays_away() {
    let mut chances = 0;
    for seed in 1..200 {
        println!("seed {seed}");
        let mut both = Both::new(seed);
        for _ in 0..400 {
            both.step();
        }
        // When the guest has settled, everything that it grants is to be had, and nothing else.
        for _ in 0..1000 {
            both.front_end();
            both.back_end();
        }
        assert!(both.front.main.is_empty() && both.waiting.is_empty());
        for page in 0..PAGES {
            let mut replies = 0;
            while let Some(fault) = both.fault_at(page) {
                let Ok(Asked::Send(miss, Message::Miss { iova, wanted })) = both.iotlb.miss(&fault)
                else {
                    panic!("a miss");
                };
                let found = both.look_up(iova.get() / PAGE, wanted);
                if let Some(message) = found {
                    both.iotlb.receive(&message).unwrap();
                }
                let outcome = both.iotlb.replied(miss, found.is_some()).unwrap();
                assert_ne!(outcome, Outcome::Gone);
                if outcome == Outcome::Refused {
                    break;
                }
                replies += 1;
                assert_eq!(replies, 1);
            }
            both.check();
        }
        chances += both.resurrected;
    }
    // The test is about nothing if updates never come late.
    assert!(chances > 100, "{chances}");
}

#[test]
fn a_page_that_is_told_of_again_is_what_was_said_last() {
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
        let pin = burst.pin();
        for access in [Access::Read, Access::Write] {
            let found = pin.translate(range(0, 1), access).ok();
            let found = found.map(|pieces| pieces.first().start().get() / PAGE);
            assert_eq!(found, permissions.allows(access).then_some(frame));
        }
    }
}

/// QEMU says of every page that it may be read and written. What the device may do is what the front-end let pass when it was asked.
#[test]
fn a_front_end_that_always_says_both_grants_what_was_asked() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let both = update(0, 2, 3, Permissions::READ_WRITE);
    let mut check = |page, read: bool, write: bool| {
        let mut burst = reader.online();
        let pin = burst.pin();
        for (access, may) in [(Access::Read, read), (Access::Write, write)] {
            let found = pin.translate(range(page, 1), access);
            assert_eq!(found.is_ok(), may, "{access} of page {page}");
        }
    };
    let denied = || Fault {
        reason: FaultReason::WriteDenied,
        ..fault(0, Access::Write)
    };
    let Ok(Asked::Send(reads, _)) = iotlb.miss(&fault(0, Access::Read)) else {
        panic!("a miss");
    };
    iotlb.receive(&both).unwrap();
    check(0, true, false);
    check(1, true, false);
    // The reply to the first one is still to come.
    let Ok(Asked::Send(writes, _)) = iotlb.miss(&denied()) else {
        panic!("a miss");
    };
    assert_eq!(iotlb.replied(reads, true), Ok(Outcome::Present));
    assert_eq!(iotlb.replied(writes, false), Ok(Outcome::Refused));
    check(0, true, false);
    let Ok(Asked::Send(writes, _)) = iotlb.miss(&denied()) else {
        panic!("a miss");
    };
    iotlb.receive(&both).unwrap();
    assert_eq!(iotlb.replied(writes, true), Ok(Outcome::Present));
    check(0, true, true);
    // The next page came with it, of the same mapping.
    check(1, true, true);
    // Without an invalidation in between nothing more is asked; after it everything is.
    iotlb
        .receive(&Message::Invalidate(Some(range(0, 1))))
        .unwrap();
    check(0, false, false);
}

/// More invalidations than are remembered one by one.
#[test]
fn many_invalidations_stay_remembered() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let Ok(Asked::Send(miss, _)) = iotlb.miss(&fault(10, Access::Read)) else {
        panic!("a miss");
    };
    for page in (0..FRAMES).rev().filter(|page| page % 2 == 0) {
        for _ in 0..3 {
            let gone = Message::Invalidate(Some(range(page, 1)));
            iotlb.receive(&gone).unwrap();
        }
    }
    for page in 0..FRAMES {
        let late = update(page, 1, page, Permissions::READ);
        iotlb.receive(&late).unwrap();
        let mut burst = reader.online();
        let found = burst.pin().translate(range(page, 1), Access::Read);
        assert!(page % 2 == 1 || found.is_err(), "page {page}");
    }
    assert_eq!(iotlb.replied(miss, true), Ok(Outcome::Gone));
    // Forgotten with the miss that they were remembered for.
    iotlb.receive(&update(0, 1, 0, Permissions::READ)).unwrap();
    let mut burst = reader.online();
    assert!(burst.pin().translate(range(0, 1), Access::Read).is_ok());
}

/// What a hostile front-end says is confined to what it has shared, and costs no more than the limits say.
#[test]
fn a_hostile_front_end_stays_in_its_memory() {
    let limits = IotlbLimits {
        pages: 20,
        ahead: 8,
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
        for (to, choices) in bytes.chunks_mut(8).zip(&words) {
            let near = random.below(3) * random.below(2) * PAGE;
            let word = choices[random.below(6) as usize].wrapping_add(near);
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[24] = random.below(5) as u8;
        // Updates, mostly: an invalidation of nonsense is one of everything.
        bytes[25] = match random.below(40) {
            kind @ 0..=5 => kind as u8,
            _ => 2,
        };
        if random.below(8) == 0
            && let Ok(Asked::Send(miss, _)) = iotlb.miss(&fault(random.next() >> 12, Access::Read))
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
        if let Message::Update { range: told, .. } = message {
            let mut burst = reader.online();
            let pin = burst.pin();
            for page in (0..=8).map_while(|n| (told.start().get() / PAGE).checked_add(n)) {
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
fn messages_are_what_the_protocol_says() {
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
            wanted: Permissions::READ_WRITE,
        },
        Message::AccessFail {
            iova: Iova::new(77),
            wanted: Permissions::READ,
        },
    ] {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
}

#[test]
fn what_cannot_be_is_refused() {
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
    // One byte beyond the region, and across two.
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
        wanted: Permissions::READ,
    };
    assert_eq!(refused(&mut iotlb, miss), IotlbError::NotForUs);
    let mut other = fault(0, Access::Read);
    other.reason = FaultReason::AddressBeyondWidth;
    assert_eq!(iotlb.miss(&other), Err(IotlbError::NotAMiss(other)));

    // A range that is no whole number of pages is taken inward by an update and outward by an invalidation.
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
        given: 513,
        most: 512,
    };
    assert_eq!(made(&[region(5, 1); 513]), Err(many));
}

/// An invalidation is not acknowledged while a reader may hold the page, and a thread that holds one does not wait for itself.
#[test]
fn a_thread_that_holds_a_pin_changes_nothing() {
    let mut iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions()).unwrap();
    iotlb.receive(&update(0, 1, 3, Permissions::READ)).unwrap();
    let mut reader = iotlb.reader().unwrap();
    let mut burst = reader.online();
    let pin = burst.pin();
    assert!(pin.translate(range(0, 1), Access::Read).is_ok());
    let invalidate = Message::Invalidate(None);
    assert!(matches!(
        iotlb.receive(&invalidate),
        Err(IotlbError::PinHeld(_))
    ));
    assert!(matches!(
        iotlb.set_memory((), Regions::default()),
        Err(IotlbError::PinHeld(_))
    ));
    assert!(pin.translate(range(0, 1), Access::Read).is_ok());
    drop(burst);
    iotlb.receive(&invalidate).unwrap();
    assert!(
        reader
            .online()
            .pin()
            .translate(range(0, 1), Access::Read)
            .is_err()
    );
}
