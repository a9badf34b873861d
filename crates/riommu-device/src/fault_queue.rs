//! The queue of faults in the guest's memory.

use core::sync::atomic::Ordering;

use ringfence_types::{Access, Fault, FaultReason, Iova, PhysAddr, PhysMemory, RequesterId};

use crate::register::{MAX_QUEUE_SHIFT, OVERFLOW, QUEUE_ERROR};

/// Size of an entry in bytes.
const ENTRY_BYTES: u64 = 16;
/// Words of an entry.
const ENTRY_WORDS: usize = 2;
/// FQ: the size field, bits 0 to 4. Bits 5 to 11 are reserved and read as 0.
const SIZE: u64 = 0x1f;
/// FQ: the address.
const ADDRESS: u64 = !0xfff;
/// Second word of an entry, bit 16: the device wrote.
const WRITE: u64 = 1 << 16;
/// Second word of an entry, bits 24 to 31: the reason.
const REASON_SHIFT: u32 = 24;

/// An entry of the fault queue: the address of the first byte that the device may not access, then
/// a word with requester ID (bits 0 to 15), access (bit 16) and reason (bits 24 to 31).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultEntry([u64; ENTRY_WORDS]);

impl FaultEntry {
    /// Creates the entry of a blocked access.
    pub const fn new(fault: &Fault) -> Self {
        let write = match fault.access {
            Access::Read => 0,
            Access::Write => WRITE,
        };
        let reason = (reason_code(fault.reason) as u64) << REASON_SHIFT;
        Self([fault.iova.get(), fault.device.get() as u64 | write | reason])
    }

    /// Interprets two words that a driver read.
    pub const fn from_words(words: [u64; ENTRY_WORDS]) -> Self {
        Self(words)
    }

    /// Returns the words as stored in memory.
    pub const fn words(self) -> [u64; ENTRY_WORDS] {
        self.0
    }

    /// Returns the device.
    pub const fn device(self) -> RequesterId {
        let [_, what] = self.0;
        RequesterId::new(what as u16)
    }

    /// Returns the address of the first byte that the device may not access.
    pub const fn iova(self) -> Iova {
        let [iova, _] = self.0;
        Iova::new(iova)
    }

    /// Returns the direction of the access.
    pub const fn access(self) -> Access {
        let [_, what] = self.0;
        if what & WRITE == 0 {
            Access::Read
        } else {
            Access::Write
        }
    }

    /// Returns the code of the reason (docs/RIOMMU-DEVICE.md, "Faults").
    pub const fn reason(self) -> u8 {
        let [_, what] = self.0;
        (what >> REASON_SHIFT) as u8
    }
}

/// Codes of the reasons that a ring unit has. Unlike VT-d's codes, they are one to one.
const fn reason_code(reason: FaultReason) -> u8 {
    match reason {
        FaultReason::Blocked => 1,
        FaultReason::RootNotPresent => 2,
        FaultReason::ContextNotPresent => 3,
        FaultReason::ContextInvalid => 4,
        FaultReason::TableAccess => 5,
        FaultReason::ReservedBit => 6,
        FaultReason::RingBeyondDevice => 7,
        FaultReason::SlotBeyondRing => 8,
        FaultReason::NotPresent => 9,
        FaultReason::ReadDenied => 10,
        FaultReason::WriteDenied => 11,
        FaultReason::BeyondBuffer => 12,
        FaultReason::BadLength => 13,
        // A ring unit has no address widths and no translation requests.
        _ => 255,
    }
}

/// FQ, FQ_HEAD and FQ_TAIL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FaultQueue {
    base: u64,
    shift: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
}

impl FaultQueue {
    /// Sets base and size from a value of FQ, and empties the queue. A size above the largest one
    /// becomes the largest one.
    pub(crate) fn set(&mut self, raw: u64) {
        let shift = (raw & SIZE) as u32;
        *self = Self {
            base: raw & ADDRESS,
            shift: shift.min(MAX_QUEUE_SHIFT),
            head: 0,
            tail: 0,
        };
    }

    /// Returns the value of FQ.
    pub(crate) const fn get(&self) -> u64 {
        self.base | self.shift as u64
    }

    /// Appends an entry. The second word is stored after the first, and the caller's tail is
    /// visible after both.
    ///
    /// # Errors
    /// The bits of STS to set: the queue is full, or the entry lies outside memory.
    pub(crate) fn push<M: PhysMemory + ?Sized>(
        &mut self,
        memory: &M,
        entry: FaultEntry,
    ) -> Result<(), u32> {
        let entries = 1u32.wrapping_shl(self.shift);
        // A driver that has set a wrong head makes the queue full.
        if self.tail.wrapping_sub(self.head) >= entries {
            return Err(OVERFLOW);
        }
        let index = u64::from(self.tail & entries.wrapping_sub(1));
        let at = self.base.checked_add(index.wrapping_mul(ENTRY_BYTES));
        let at = PhysAddr::new(at.ok_or(QUEUE_ERROR)?);
        let words = memory.words(at, ENTRY_WORDS).map_err(|_| QUEUE_ERROR)?;
        for (word, value) in words.iter().zip(entry.words()) {
            word.store(value, Ordering::Release);
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }
}
