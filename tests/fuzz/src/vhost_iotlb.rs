//! A vhost-user IOTLB with a hostile front-end that sends any message in any order.
//!
//! The input is a sequence of steps, each a byte and its arguments. The byte, modulo 5, selects the
//! step:
//!
//! - 0: message. The 32 bytes of a message from the front-end.
//! - 1: short message, in the checked range. Byte 0: bits 0..=2 type, 3..=4 permissions; bytes 1,
//!   2, 3: page, pages, frame.
//! - 2: access. Byte 0: bit 0 write; byte 1: page. A refused access is a miss.
//! - 3: reply. Byte 0: bit 0 done, else which miss.
//! - 4: memory. Byte 0: pages shared.
//!
//! Invariants: each translation leads to shared memory, at the address of the last update of its
//! page and with no more rights, whatever the size of that update. An invalidated page is not
//! translated before the next update. Limits hold.

use std::collections::BTreeMap;

use ringfence_softiommu::Reader;
use ringfence_softiommu::iotlb::{
    Iotlb, IotlbError, IotlbLimits, Message, MessageError, MissAction, MissId, MissOutcome, Region,
    Regions,
};
use ringfence_types::{
    Access, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr, RequesterId,
};

use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every answer and every error except those that only the
/// embedder can cause.
pub const OUTCOMES: &[&str] = &[
    "updated",
    "outdated",
    "invalidated",
    "sent",
    "waiting",
    "translated",
    "Present",
    "Gone",
    "Refused",
    "Kind",
    "Permissions",
    "Range",
    "NotForUs",
    "NotShared",
    "NoPage",
    "Map",
    "NotAMiss",
    "TooManyMisses",
    "NoMiss",
];

const DISK: RequesterId = RequesterId::new(0x20);
const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;
/// Number of pages whose last update is remembered: those that short messages can name, and some
/// behind them.
const WINDOW: u64 = 512;
const LIMITS: IotlbLimits = IotlbLimits {
    pages: 16,
    extra_pages: 4,
    tables: 8,
    misses: 3,
    width: ringfence_softiommu::Width::BITS_39,
    readers: 1,
};

struct Session<'a> {
    iotlb: Iotlb<()>,
    reader: Reader<()>,
    misses: Vec<MissId>,
    /// Number of shared pages, from frame 0 on.
    shared: u64,
    /// Frame and rights of each page of the window after its last update.
    said: BTreeMap<u64, (u64, Permissions)>,
    reached: OutcomeHook<'a>,
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let iotlb = Iotlb::new(LIMITS, DISK, (), regions(64)).expect("sound limits");
    let reader = iotlb.reader().expect("room for one");
    let mut session = Session {
        iotlb,
        reader,
        misses: Vec::new(),
        shared: 64,
        said: BTreeMap::new(),
        reached,
    };
    let mut data = data;
    while let Some(rest) = session.step(data) {
        data = rest;
        assert!(session.iotlb.pages() <= LIMITS.pages);
        assert!(session.iotlb.misses() <= LIMITS.misses);
    }
}

fn regions(pages: u64) -> Regions {
    let region = Region {
        user: USER,
        bytes: pages * PAGE,
        memory: PhysAddr::ZERO,
    };
    Regions::new(&[region]).expect("one region")
}

impl Session<'_> {
    fn step<'d>(&mut self, data: &'d [u8]) -> Option<&'d [u8]> {
        let (step, data) = data.split_first()?;
        match step % 5 {
            0 => {
                let (bytes, data) = data.split_first_chunk()?;
                self.message(bytes);
                Some(data)
            }
            1 => {
                let (&[kind, page, pages, frame], data) = data.split_first_chunk()?;
                let mut bytes = [0; 32];
                let words = [page, pages, frame].map(u64::from);
                for (to, word) in bytes.chunks_mut(8).zip([
                    words[0] * PAGE,
                    words[1] * PAGE,
                    USER + words[2] * PAGE,
                ]) {
                    to.copy_from_slice(&word.to_ne_bytes());
                }
                (bytes[24], bytes[25]) = (kind >> 3 & 3, kind & 7);
                self.message(&bytes);
                Some(data)
            }
            2 => {
                let (&[kind, page], data) = data.split_first_chunk()?;
                let access = [Access::Read, Access::Write][usize::from(kind & 1)];
                // Some addresses exceed the width, which no front-end can fix.
                let far = u64::from(kind >> 7) << 39;
                self.access(far + u64::from(page) * PAGE, access);
                Some(data)
            }
            3 => {
                let (&which, data) = data.split_first()?;
                self.reply(which);
                Some(data)
            }
            _ => {
                let (&pages, data) = data.split_first()?;
                self.shared = u64::from(pages).max(1);
                let told = self.iotlb.set_memory((), regions(self.shared));
                self.said.clear();
                assert_eq!((told, self.iotlb.pages()), (Ok(()), 0));
                Some(data)
            }
        }
    }

    fn message(&mut self, bytes: &[u8; 32]) {
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(error) => {
                return (self.reached)(match error {
                    MessageError::Kind(_) => "Kind",
                    MessageError::Permissions(_) => "Permissions",
                    MessageError::Range { .. } => "Range",
                });
            }
        };
        // The range of the whole address space has no length that the message can encode.
        assert!(Message::decode(&message.encode()) == Ok(message));
        let before = self.iotlb.pages();
        let received = self.iotlb.receive(&message);
        self.judge(&message, before);
        match (received, message) {
            (Ok(()), Message::Invalidate(range)) => {
                (self.reached)("invalidated");
                let range = range.or(IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX)));
                let range = range.expect("a range");
                for at in [range.start(), range.last()] {
                    assert!(self.translate(at.get(), Access::Read).is_err());
                    assert!(self.translate(at.get(), Access::Write).is_err());
                }
            }
            (Ok(()), _) => (self.reached)("updated"),
            (Err(error), _) => (self.reached)(name(&error)),
        }
    }

    /// Checks that the pages of a message have at most the translation that it gives them.
    fn judge(&mut self, message: &Message, before: usize) {
        let (range, told) = match *message {
            Message::Update {
                range,
                user,
                permissions,
            } => (Some(range), Some((user, permissions))),
            Message::Invalidate(range) => (range, None),
            Message::Miss { .. } | Message::AccessFail { .. } => return,
        };
        let all = IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX));
        let range = range.or(all).expect("a range");
        let pages = range.start().get() / PAGE..=(range.last().get() / PAGE).min(WINDOW - 1);
        for page in pages.clone() {
            let most = told.and_then(|(user, said)| self.most(page, range, user, said));
            match most {
                Some(most) => self.said.insert(page, most),
                None => self.said.remove(&page),
            };
        }
        let first = *pages.start();
        if told.is_some() && pages.count() > LIMITS.extra_pages && self.iotlb.pages() < before {
            (self.reached)("outdated");
        }
        for page in first..WINDOW.min(first + 2 * LIMITS.pages as u64) {
            self.check(page);
        }
    }

    /// Returns the frame and rights of `page` after an update that covers at least a part of it.
    fn most(
        &self,
        page: u64,
        range: IovaRange,
        user: u64,
        said: Permissions,
    ) -> Option<(u64, Permissions)> {
        let offset = user.checked_sub(USER)?;
        let end = offset.checked_add(range.last().get() - range.start().get())?;
        let address = (page * PAGE)
            .wrapping_add(offset)
            .wrapping_sub(range.start().get());
        if end >= self.shared * PAGE || !address.is_multiple_of(PAGE) {
            return None;
        }
        let reached = address / PAGE;
        let (start, last) = (page * PAGE, page * PAGE + (PAGE - 1));
        if range.start().get() <= start && last <= range.last().get() {
            return Some((reached, said));
        }
        // The update covers a part of the page: the rights for the other part remain where both
        // agree.
        let (frame, had) = self.said.get(&page)?;
        let both = Permissions::from_bits(had.bits() & said.bits())?;
        (*frame == reached).then_some((reached, both))
    }

    fn check(&mut self, page: u64) {
        for access in [Access::Read, Access::Write] {
            let byte = IovaRange::new(Iova::new(page * PAGE), 1).expect("one byte");
            let mut burst = self.reader.online();
            if let Ok(pieces) = burst.guard().translate(byte, access) {
                let frame = pieces.first().start().get() / PAGE;
                let said = self.said.get(&page);
                let right = said.is_some_and(|(at, most)| *at == frame && most.allows(access));
                assert!(
                    right,
                    "{access} of page {page}: frame {frame}, said {said:?}"
                );
            }
        }
    }

    fn access(&mut self, at: u64, access: Access) {
        let Err(fault) = self.translate(at, access) else {
            return (self.reached)("translated");
        };
        match self.iotlb.miss(&fault) {
            Ok(MissAction::Send(miss, Message::Miss { iova, required })) => {
                assert_eq!((iova.get(), required.allows(access)), (at, true));
                self.misses.push(miss);
                (self.reached)("sent");
            }
            Ok(MissAction::Wait(miss)) => {
                assert!(self.misses.contains(&miss));
                (self.reached)("waiting");
            }
            Ok(other) => panic!("{other:?} after {fault}"),
            Err(error) => (self.reached)(name(&error)),
        }
    }

    fn reply(&mut self, which: u8) {
        let done = which & 1 != 0;
        let at = usize::from(which >> 1);
        if self.misses.is_empty() {
            return;
        }
        let miss = self.misses.swap_remove(at % self.misses.len());
        let arrived = self.iotlb.has_arrived(miss);
        let outcome = self.iotlb.replied(miss, done).expect("under way");
        assert_eq!(arrived, outcome == MissOutcome::Present);
        (self.reached)(match outcome {
            MissOutcome::Present => "Present",
            MissOutcome::Invalidated => "Gone",
            MissOutcome::Refused => "Refused",
        });
        let again = self.iotlb.replied(miss, done).expect_err("over");
        (self.reached)(name(&again));
    }

    fn translate(&mut self, at: u64, access: Access) -> Result<(), Fault> {
        let byte = IovaRange::inclusive(Iova::new(at), Iova::new(at)).expect("one byte");
        let mut burst = self.reader.online();
        let pieces = burst.guard().translate(byte, access)?;
        assert!(pieces.first().start().get() < self.shared * PAGE);
        Ok(())
    }
}

fn name(error: &IotlbError) -> &'static str {
    match error {
        IotlbError::NotForUs => "NotForUs",
        IotlbError::NotShared { .. } => "NotShared",
        IotlbError::NoPage { .. } => "NoPage",
        IotlbError::Map(_) => "Map",
        IotlbError::NotAMiss(fault) => {
            assert_eq!(fault.reason, FaultReason::AddressBeyondWidth);
            "NotAMiss"
        }
        IotlbError::TooManyMisses => "TooManyMisses",
        IotlbError::NoMiss => "NoMiss",
        other => panic!("{other}"),
    }
}
