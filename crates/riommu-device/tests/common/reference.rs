//! Brute-force reference of docs/RIOMMU-DEVICE.md. It caches nothing. Instead, it knows every value
//! that an entry had since the last invalidation that covers it, and returns every outcome that
//! the specification permits.

use super::memory::{Entry, Memory, WordIndex};

/// CTRL's bits, then those of STS.
const TRANSLATE: u32 = 1;
const RECORD: u32 = 2;
const INTERRUPT: u32 = 4;
const LOST: u32 = 1;
const OUTSIDE: u32 = 2;
const MALFORMED: u32 = 4;

/// An access of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) device: u16,
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
}

/// Outcome of an access: the physical address of its first byte, or the address and the reason of
/// the fault.
pub(crate) type Outcome = Result<u64, (u64, u8)>;

/// Cached entries that an invalidation removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Ring(u16, u16),
    Device(u16),
    All,
}

/// The registers, and the time of each invalidation.
pub(crate) struct Reference {
    listed: Vec<u16>,
    prefetches: bool,
    root: u64,
    control: u32,
    status: u32,
    queue: u64,
    head: u32,
    tail: u32,
    /// True if the interrupt was raised since the last write to FQ_HEAD.
    raised: bool,
    /// True if an interrupt is to be delivered.
    pub(crate) interrupt: bool,
    invalidations: Vec<(Scope, u64)>,
}

impl Reference {
    pub(crate) fn new(listed: &[u16], prefetches: bool) -> Self {
        let mut listed = listed.to_vec();
        listed.sort_unstable();
        Self {
            listed,
            prefetches,
            root: 0,
            control: 0,
            status: 0,
            queue: 0,
            head: 0,
            tail: 0,
            raised: false,
            interrupt: false,
            invalidations: Vec::new(),
        }
    }

    /// Registers after a reset.
    pub(crate) fn reset(&mut self, now: u64) {
        let listed = std::mem::take(&mut self.listed);
        let invalidations = std::mem::take(&mut self.invalidations);
        *self = Self::new(&listed, self.prefetches);
        self.invalidations = invalidations;
        self.invalidate(Scope::All, now);
    }

    /// Another process continues with the same registers and without cached entries.
    pub(crate) fn hand_over(&mut self, now: u64) {
        self.invalidate(Scope::All, now);
    }

    pub(crate) fn read(&self, offset: u64, bytes: u64) -> u64 {
        match (offset, bytes) {
            (0x00, 4) => 0x474e_4952,
            (0x04, 4) => 0x0001_0000,
            (0x08, 8) => self.listed.len() as u64 | 12 << 16 | u64::from(self.prefetches) << 24,
            (0x10, 8) => self.root,
            (0x18, 4) => self.control.into(),
            (0x1c, 4) => self.status.into(),
            (0x28, 8) => self.queue,
            (0x30, 4) => self.head.into(),
            (0x34, 4) => self.tail.into(),
            (0x400.., 4) if offset.is_multiple_of(4) => {
                let index = (offset - 0x400) / 4;
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                self.listed.get(index).map_or(0, |id| u64::from(*id))
            }
            _ => 0,
        }
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: u64, value: u64, now: u64) {
        match (offset, bytes) {
            (0x10, 8) => {
                self.root = value >> 12 << 12;
                self.invalidate(Scope::All, now);
            }
            (0x18, 4) => {
                let control = value as u32 & 7;
                if (control ^ self.control) & TRANSLATE != 0 {
                    self.invalidate(Scope::All, now);
                }
                self.control = control;
            }
            (0x1c, 4) => self.status &= !(value as u32),
            (0x20, 8) => match Self::scope(value) {
                Some(scope) => self.invalidate(scope, now),
                None => {
                    self.status |= MALFORMED;
                    self.invalidate(Scope::All, now);
                }
            },
            (0x28, 8) if self.control & RECORD == 0 => {
                self.queue = value >> 12 << 12 | (value & 0x1f).min(12);
                (self.head, self.tail) = (0, 0);
            }
            (0x30, 4) => {
                self.head = value as u32;
                self.raised = false;
                if self.head != self.tail {
                    self.raise();
                }
            }
            _ => {}
        }
    }

    fn scope(value: u64) -> Option<Scope> {
        let (device, ring) = (value as u16, (value >> 16) as u16);
        match value >> 32 {
            0 => Some(Scope::Ring(device, ring)),
            1 if ring == 0 => Some(Scope::Device(device)),
            2 if value as u32 == 0 => Some(Scope::All),
            _ => None,
        }
    }

    fn raise(&mut self) {
        if self.control & INTERRUPT != 0 && !self.raised {
            self.raised = true;
            self.interrupt = true;
        }
    }

    fn invalidate(&mut self, scope: Scope, now: u64) {
        self.invalidations.push((scope, now));
    }

    /// Returns the time of the last invalidation of a scope for which `covers` is true.
    fn since(&self, covers: impl Fn(Scope) -> bool) -> u64 {
        let mut latest = self.invalidations.iter().rev();
        let found = latest.find(|(scope, _)| covers(*scope));
        found.map_or(0, |(_, time)| *time)
    }

    /// Returns the outcomes that the specification permits for an access that began at `began` and
    /// has ended. Memory may have changed meanwhile.
    pub(crate) fn outcomes(&self, memory: &Memory, request: &Request, began: u64) -> Vec<Outcome> {
        let Request {
            device,
            iova,
            bytes,
            ..
        } = *request;
        if self.control & TRANSLATE == 0 || !self.listed.contains(&device) {
            return vec![Err((iova, 1))];
        }
        if bytes == 0 || bytes > 1 << 30 {
            return vec![Err((iova, 13))];
        }
        let mut walk = Walk {
            memory,
            request,
            began,
            outcomes: Vec::new(),
        };
        let ring = (iova >> 48) as u16;
        let root_since = self.since(|scope| scope == Scope::All);
        let context_since =
            self.since(|scope| scope == Scope::All || scope == Scope::Device(device));
        let ring_since = self.since(|scope| {
            scope == Scope::All
                || scope == Scope::Device(device)
                || scope == Scope::Ring(device, ring)
        });
        let root = self.root.wrapping_add(u64::from(device >> 8) * 16);
        let contexts = walk.step(root, root_since, |[low, high]| match (low, high) {
            _ if low & 1 == 0 => Err(Stop::Now(2)),
            _ if low & 0xffe != 0 || high != 0 => Err(Stop::Now(6)),
            _ => Ok(low >> 12 << 12),
        });
        for contexts in contexts {
            let at = contexts.wrapping_add(u64::from(device & 0xff) * 16);
            for table in walk.step(at, context_since, context) {
                let ring = |entry| array(entry, 0xffff, ring.into(), 7);
                for ring in walk.step(table, context_since, ring) {
                    let slot = iova >> 30 & 0x3_ffff;
                    let slot = |entry| array(entry, 0x3_ffff, slot, 8);
                    for slot in walk.step(ring, ring_since, slot) {
                        walk.buffer(slot, ring_since);
                    }
                }
            }
        }
        walk.outcomes
    }

    /// Accounts for a fault, and for the entry that the function must have stored.
    pub(crate) fn record(&mut self, memory: &Memory, request: &Request, (iova, reason): (u64, u8)) {
        if self.control & RECORD == 0 {
            return;
        }
        let entries = 1u32 << (self.queue & 0x1f);
        let index = u64::from(self.tail % entries);
        let at = (self.queue >> 12 << 12).checked_add(index * 16);
        let words = at.and_then(|at| Some([WordIndex::at(at)?, WordIndex::at(at + 8)?]));
        if self.tail.wrapping_sub(self.head) >= entries {
            self.status |= LOST;
        } else if let Some([first, second]) = words {
            let access = u64::from(request.write) << 16 | u64::from(reason) << 24;
            memory.expect(first, iova);
            memory.expect(second, u64::from(request.device) | access);
            self.tail = self.tail.wrapping_add(1);
        } else {
            self.status |= OUTSIDE;
            self.control &= !RECORD;
        }
        self.raise();
    }
}

/// Reason for which an entry ends a walk.
enum Stop {
    /// The entry is not sound, so the function keeps no copy: it was so during the access.
    Now(u8),
    /// The entry is sound, and the function may have a copy.
    Cached(u8),
}

/// The outcomes of one access.
struct Walk<'a> {
    memory: &'a Memory,
    request: &'a Request,
    began: u64,
    outcomes: Vec<Outcome>,
}

impl Walk<'_> {
    fn add(&mut self, outcome: Outcome) {
        if !self.outcomes.contains(&outcome) {
            self.outcomes.push(outcome);
        }
    }

    /// Reads an entry and returns what `decode` makes of each value that the function may use: the
    /// values during the access, and the sound ones since the invalidation at `since`.
    fn step(
        &mut self,
        at: u64,
        since: u64,
        decode: impl Fn(Entry) -> Result<u64, Stop>,
    ) -> Vec<u64> {
        let mut found = Vec::new();
        let Some(values) = self.memory.values_since(at, since.min(self.began)) else {
            self.add(Err((self.request.iova, 5)));
            return found;
        };
        for (value, until) in values {
            match decode(value) {
                Ok(next) if !found.contains(&next) => found.push(next),
                Ok(_) => {}
                Err(Stop::Now(_)) if until <= self.began => {}
                Err(Stop::Now(reason) | Stop::Cached(reason)) => {
                    self.add(Err((self.request.iova, reason)));
                }
            }
        }
        found
    }

    /// Reads the entry of the slot, and checks the access.
    fn buffer(&mut self, at: u64, since: u64) {
        let Some(values) = self.memory.values_since(at, since.min(self.began)) else {
            self.add(Err((self.request.iova, 5)));
            return;
        };
        for ([start, control], until) in values {
            if control >> 32 & 1 == 1 {
                let outcome = self.checked(start, control);
                self.add(outcome);
            } else if until > self.began {
                self.add(Err((self.request.iova, 9)));
            }
        }
    }

    fn checked(&self, start: u64, control: u64) -> Outcome {
        let Request {
            iova, bytes, write, ..
        } = *self.request;
        let (offset, size) = (iova & 0x3fff_ffff, control & 0x3fff_ffff);
        if offset + bytes > size {
            let first = offset.max(size);
            return Err((iova >> 30 << 30 | first, 12));
        }
        match (write, control >> 30 & 3) {
            (false, 0 | 2) => return Err((iova, 10)),
            (true, 0 | 1) => return Err((iova, 11)),
            _ => {}
        }
        let first = start.checked_add(offset).ok_or((iova, 5))?;
        // The last byte of the access has an address.
        first.checked_add(bytes - 1).ok_or((iova, 5))?;
        Ok(first)
    }
}

/// Decodes a context entry to the address of the rDEVICE.
fn context([low, high]: Entry) -> Result<u64, Stop> {
    // In VT-d's translation type 1, bit 4 is the page request enable.
    let reserved = if low & 0b1100 == 0b0100 { 0xfe0 } else { 0xff0 };
    if low & 1 == 0 {
        Err(Stop::Now(3))
    } else if low & reserved != 0 || high & 0xffff_ffff_ff00_0080 != 0 {
        Err(Stop::Now(6))
    } else if low & 0b1100 != 0b1100 || high & 0b111 != 0 {
        Err(Stop::Now(4))
    } else {
        Ok(low >> 12 << 12)
    }
}

/// Decodes an array of 16-byte entries, with its size in the bits of `mask`, to the address of
/// entry `index`. Addresses are modulo 2^64.
fn array([base, size]: Entry, mask: u64, index: u64, beyond: u8) -> Result<u64, Stop> {
    if base % 16 != 0 {
        Err(Stop::Now(6))
    } else if index >= size & mask {
        Err(Stop::Cached(beyond))
    } else {
        Ok(base.wrapping_add(index * 16))
    }
}
