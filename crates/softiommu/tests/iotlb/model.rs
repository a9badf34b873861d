//! Model of the front-end's grants and of every valid message order, and a check that no other
//! translation is available.

use std::collections::{BTreeMap, VecDeque};

use ringfence_softiommu::Reader;
use ringfence_softiommu::iotlb::{
    Iotlb, IotlbError, IotlbLimits, Message, MissAction, MissId, MissOutcome, Region, Regions,
};
use ringfence_types::{
    Access, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr, RequesterId,
};

pub(crate) const DISK: RequesterId = RequesterId::new(0x20);
pub(crate) const PAGE: u64 = 1 << 12;
/// Number of pages that the driver uses.
pub(crate) const PAGES: u64 = 24;
pub(crate) const FRAMES: u64 = 64;
/// Address of the guest's memory in the front-end.
pub(crate) const USER: u64 = 0x7f00_0000_0000;

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }
}

pub(crate) fn regions() -> Regions {
    Regions::new(&[
        Region {
            user: USER,
            bytes: FRAMES / 2 * PAGE,
            memory: PhysAddr::ZERO,
        },
        // Not adjacent to the first region in the front-end's address space.
        Region {
            user: USER * 2,
            bytes: FRAMES / 2 * PAGE,
            memory: PhysAddr::new(FRAMES / 2 * PAGE),
        },
    ])
    .unwrap()
}

pub(crate) fn user(frame: u64) -> u64 {
    if frame < FRAMES / 2 {
        USER + frame * PAGE
    } else {
        USER * 2 + (frame - FRAMES / 2) * PAGE
    }
}

pub(crate) fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

pub(crate) fn fault(page: u64, access: Access) -> Fault {
    Fault {
        device: DISK,
        iova: Iova::new(page * PAGE + 8),
        access,
        reason: FaultReason::NotPresent,
    }
}

pub(crate) fn update(page: u64, pages: u64, frame: u64, permissions: Permissions) -> Message {
    Message::Update {
        range: range(page, pages),
        user: user(frame),
        permissions,
    }
}

type Grant = (u64, Permissions);

/// State of a miss in the front-end: looked up, sent, then replied to.
enum Handling {
    LookedUp(MissId, Option<Message>),
    Sent(MissId),
    Acknowledged(MissId, bool),
}

/// A multi-threaded front-end and its guest.
pub(crate) struct FrontEnd {
    grants: BTreeMap<u64, Grant>,
    /// Revoked grants whose invalidation is not acknowledged yet, with the number of the
    /// invalidation.
    revoked: Vec<(u64, Grant, u64)>,
    handling: Vec<Handling>,
    /// Messages to the back-end, in order, with the number of an invalidation or the miss that an
    /// update answers.
    pub(crate) main: VecDeque<(Message, u64, Option<MissId>)>,
    requests: VecDeque<(MissId, Message)>,
    number: u64,
}

/// The front-end, and the back-end whose translations are checked against it.
pub(crate) struct Both {
    pub(crate) iotlb: Iotlb<()>,
    reader: Reader<()>,
    pub(crate) front_end: FrontEnd,
    random: Random,
    /// Misses that the device waits for.
    pub(crate) waiting: Vec<MissId>,
    /// Number of updates that arrived after their grant was revoked.
    pub(crate) resurrected: usize,
}

impl Both {
    pub(crate) fn new(seed: u64) -> Self {
        let limits = IotlbLimits {
            pages: 12,
            extra_pages: 3,
            tables: 8,
            misses: 6,
            ..IotlbLimits::default()
        };
        let iotlb = Iotlb::new(limits, DISK, (), regions()).unwrap();
        Self {
            reader: iotlb.reader().unwrap(),
            iotlb,
            front_end: FrontEnd {
                grants: BTreeMap::new(),
                revoked: Vec::new(),
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

    /// The guest maps or unmaps. The front-end sends an invalidation for each revoked grant.
    fn change(&mut self) {
        let (page, pages) = (self.random.below(PAGES), 1 + self.random.below(6));
        let pages = pages.min(PAGES - page);
        let frame = self.random.below(FRAMES - pages);
        let map = self.random.below(3) != 0;
        let permissions = Permissions::from_bits(1 + self.random.below(3)).unwrap();
        self.front_end.number += 1;
        for n in 0..pages {
            let before = match map {
                true => self
                    .front_end
                    .grants
                    .insert(page + n, (frame + n, permissions)),
                false => self.front_end.grants.remove(&(page + n)),
            };
            let number = self.front_end.number;
            self.front_end
                .revoked
                .extend(before.map(|grant| (page + n, grant, number)));
        }
        let all = self.random.below(20) == 0;
        let message = Message::Invalidate((!all).then(|| range(page, pages)));
        self.front_end
            .main
            .push_back((message, self.front_end.number, None));
    }

    /// Returns the front-end's answer for `page`: an update of the surrounding pages with the same
    /// mapping.
    pub(crate) fn look_up(&mut self, page: u64, required: Permissions) -> Option<Message> {
        let grants = &self.front_end.grants;
        let (frame, permissions) = *grants.get(&page)?;
        if permissions.union(required) != permissions {
            return None;
        }
        let alike = |to: u64| {
            let frame = (frame + to).checked_sub(page);
            // Within one region.
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

    pub(crate) fn front_end(&mut self) {
        if self.random.below(2) == 0
            && let Some((miss, message)) = self.front_end.requests.pop_front()
        {
            let Message::Miss { iova, required } = message else {
                panic!("{message:?}");
            };
            let found = self.look_up(iova.get() / PAGE, required);
            self.front_end
                .handling
                .push(Handling::LookedUp(miss, found));
        }
        if self.front_end.handling.is_empty() {
            return;
        }
        let at = self.random.below(self.front_end.handling.len() as u64) as usize;
        match self.front_end.handling.swap_remove(at) {
            Handling::LookedUp(miss, Some(message)) => {
                self.front_end.main.push_back((message, 0, Some(miss)));
                self.front_end.handling.push(Handling::Sent(miss));
            }
            Handling::LookedUp(miss, None) => {
                self.front_end
                    .handling
                    .push(Handling::Acknowledged(miss, false));
            }
            Handling::Sent(miss) => self.front_end.handling.push(Handling::Sent(miss)),
            Handling::Acknowledged(miss, done) => {
                let outcome = self.iotlb.replied(miss, done).unwrap();
                assert!(self.waiting.contains(&miss));
                self.waiting.retain(|waiting| *waiting != miss);
                // The front-end refuses only if the page was not granted at the lookup.
                assert!(done || outcome != MissOutcome::Invalidated);
            }
        }
    }

    pub(crate) fn back_end(&mut self) {
        let Some((message, number, miss)) = self.front_end.main.pop_front() else {
            return;
        };
        if let Message::Update { range, .. } = message
            && self
                .front_end
                .revoked
                .iter()
                .any(|(page, ..)| range.contains_address(Iova::new(page * PAGE)))
        {
            self.resurrected += 1;
        }
        self.iotlb.receive(&message).unwrap();
        if let Some(miss) = miss {
            for handling in &mut self.front_end.handling {
                if matches!(handling, Handling::Sent(sent) if *sent == miss) {
                    *handling = Handling::Acknowledged(miss, true);
                }
            }
        } else {
            self.front_end
                .revoked
                .retain(|(.., number_of)| *number_of > number);
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
            .guard()
            .translate(range(page, 1), access)
            .map(|pieces| pieces.first());
        if let Err(fault) = result {
            match self.iotlb.miss(&fault) {
                Ok(MissAction::Send(miss, message)) => {
                    self.front_end.requests.push_back((miss, message));
                    self.waiting.push(miss);
                }
                Ok(MissAction::Wait(miss)) => assert!(self.waiting.contains(&miss)),
                Ok(MissAction::Present) => panic!("{fault} and present"),
                Err(error) => {
                    assert_eq!((error, self.iotlb.misses()), (IotlbError::TooManyMisses, 6))
                }
            }
        }
    }

    pub(crate) fn fault_at(&mut self, page: u64) -> Option<Fault> {
        let mut burst = self.reader.online();
        burst.guard().translate(range(page, 1), Access::Read).err()
    }

    /// Checks that every translation is granted by the guest, or that its invalidation is not
    /// acknowledged yet.
    pub(crate) fn check(&mut self) {
        assert!(self.iotlb.pages() <= 12);
        let mut burst = self.reader.online();
        let pin = burst.guard();
        for page in 0..PAGES {
            for access in [Access::Read, Access::Write] {
                let Ok(pieces) = pin.translate(range(page, 1), access) else {
                    continue;
                };
                let frame = pieces.first().start().get() / PAGE;
                let now = self.front_end.grants.get(&page).map(|grant| (page, *grant));
                let revoked = self
                    .front_end
                    .revoked
                    .iter()
                    .map(|(page, grant, _)| (*page, *grant));
                let granted = now
                    .into_iter()
                    .chain(revoked)
                    .any(|(granted, (at, allowed))| {
                        granted == page && at == frame && allowed.allows(access)
                    });
                assert!(granted, "page {page} still reaches frame {frame}");
            }
        }
    }

    pub(crate) fn step(&mut self) {
        match self.random.below(10) {
            0 => self.change(),
            1..=3 => self.device(),
            4..=6 => self.front_end(),
            _ => self.back_end(),
        }
        self.check();
    }
}
