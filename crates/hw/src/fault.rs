//! Fault recording (VT-d specification, sections 7.2 "Non-recoverable fault reporting" and 11.4.14
//! "Fault recording registers").

use alloc::collections::VecDeque;

use ringfence_types::{Access, Fault, FaultReason, Iova, RequesterId};

/// F: the register holds a fault that software has not read yet.
const F: u64 = 1 << 63;
/// T1 (T2 stays 0): set for reads, clear for writes.
const T1: u64 = 1 << 62;
/// FR: fault reason, bits 96..=103 of the record.
const FR_SHIFT: u32 = 32;
/// SID: requester ID, bits 64..=79 of the record.
const SID: u64 = 0xffff;
/// FI: the page of the faulting address, bits 12..=63 of the record.
const FI: u64 = !0xfff;

/// One recorded fault: the page instead of the address, and the reason as a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultRecord {
    /// Source identifier (SID).
    pub source: RequesterId,
    /// Fault information (FI): the first byte of the page.
    pub page: Iova,
    /// Type (T1): the attempted access.
    pub access: Access,
    /// Fault reason (FR), a code of section 7.1.3.
    pub reason: u8,
}

impl FaultRecord {
    /// Creates the record of `fault`.
    #[inline]
    pub const fn new(fault: &Fault) -> Self {
        Self {
            source: fault.device,
            page: fault.iova.align_down(4096),
            access: fault.access,
            reason: reason_code(fault.reason, fault.access),
        }
    }

    /// Encodes the record as in the register, low word first.
    #[inline]
    pub const fn encode(&self) -> [u64; 2] {
        let t1 = match self.access {
            Access::Read => T1,
            Access::Write => 0,
        };
        [
            self.page.get() & FI,
            F | t1 | (self.reason as u64) << FR_SHIFT | self.source.get() as u64,
        ]
    }

    /// Decodes a register; `None` if it holds no fault.
    #[inline]
    pub const fn decode(raw: [u64; 2]) -> Option<Self> {
        let [low, high] = raw;
        if high & F == 0 {
            return None;
        }
        Some(Self {
            source: RequesterId::new((high & SID) as u16),
            page: Iova::new(low & FI),
            access: if high & T1 != 0 {
                Access::Read
            } else {
                Access::Write
            },
            reason: (high >> FR_SHIFT) as u8,
        })
    }
}

/// Second-stage entries have no present bit. An absent entry lacks the requested permission, so the
/// hardware reports a write to it as denied.
const fn reason_code(reason: FaultReason, access: Access) -> u8 {
    match (reason, access) {
        (FaultReason::NotPresent, Access::Write) => FaultReason::WriteDenied.code(),
        _ => reason.code(),
    }
}

/// The fault recording registers, a bounded queue. A fault that finds the queue full sets the
/// overflow bit (PFO). No fault is recorded while PFO is set; software must clear it.
#[derive(Debug, Clone)]
pub struct FaultLog {
    records: VecDeque<FaultRecord>,
    capacity: usize,
    overflowed: bool,
    lost: u64,
}

impl FaultLog {
    /// Maximum number of registers that the capability field NFR can express.
    pub const MAX_CAPACITY: usize = 256;

    /// Creates a log with `capacity` registers, at most [`MAX_CAPACITY`](Self::MAX_CAPACITY).
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(Self::MAX_CAPACITY);
        Self {
            records: VecDeque::with_capacity(capacity),
            capacity,
            overflowed: false,
            lost: 0,
        }
    }

    /// Records `fault`, or counts it as lost.
    pub fn record(&mut self, fault: &Fault) {
        if self.overflowed || self.records.len() >= self.capacity {
            self.overflowed = true;
            self.lost = self.lost.saturating_add(1);
            return;
        }
        self.records.push_back(FaultRecord::new(fault));
    }

    /// Removes and returns the oldest record.
    pub fn take(&mut self) -> Option<FaultRecord> {
        self.records.pop_front()
    }

    /// Removes and returns the oldest record of `source`. Leaves the records of other devices.
    pub fn take_of(&mut self, source: RequesterId) -> Option<FaultRecord> {
        let mut records = self.records.iter();
        let index = records.position(|record| record.source == source)?;
        self.records.remove(index)
    }

    /// Returns the pending records, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &FaultRecord> {
        self.records.iter()
    }

    /// Returns the number of pending records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns true if no record is pending.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the number of registers.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns true if a fault was lost since [`clear_overflow`](Self::clear_overflow) (PFO).
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Clears PFO, which resumes recording.
    pub fn clear_overflow(&mut self) {
        self.overflowed = false;
    }

    /// Returns the total number of lost faults.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(iova: u64, access: Access, reason: FaultReason) -> Fault {
        Fault {
            device: RequesterId::from_parts(0x3a, 0x1f, 5).unwrap(),
            iova: Iova::new(iova),
            access,
            reason,
        }
    }

    #[test]
    fn golden_bits() {
        use Access::{Read, Write};
        let cases = [
            (
                0x1234_5678_9abc,
                Read,
                FaultReason::NotPresent,
                [0x1234_5678_9000, 0xc000_0006_0000_3afd],
            ),
            (
                0x1234_5678_9abc,
                Write,
                FaultReason::NotPresent,
                [0x1234_5678_9000, 0x8000_0005_0000_3afd],
            ),
            (
                0x0,
                Write,
                FaultReason::WriteDenied,
                [0, 0x8000_0005_0000_3afd],
            ),
            (
                0xfff,
                Read,
                FaultReason::ReadDenied,
                [0, 0xc000_0006_0000_3afd],
            ),
            (
                u64::MAX,
                Read,
                FaultReason::AddressBeyondWidth,
                [!0xfff, 0xc000_0004_0000_3afd],
            ),
            (
                0x1000,
                Write,
                FaultReason::ReservedBit,
                [0x1000, 0x8000_000c_0000_3afd],
            ),
            (
                0x1000,
                Read,
                FaultReason::RootNotPresent,
                [0x1000, 0xc000_0001_0000_3afd],
            ),
            (
                0x1000,
                Read,
                FaultReason::ContextNotPresent,
                [0x1000, 0xc000_0002_0000_3afd],
            ),
            (
                0x1000,
                Read,
                FaultReason::ContextInvalid,
                [0x1000, 0xc000_0003_0000_3afd],
            ),
            (
                0x1000,
                Read,
                FaultReason::TableAccess,
                [0x1000, 0xc000_0007_0000_3afd],
            ),
        ];
        for (iova, access, reason, raw) in cases {
            let record = FaultRecord::new(&fault(iova, access, reason));
            assert_eq!(record.encode(), raw, "{iova:#x} {access} {reason}");
            assert_eq!(FaultRecord::decode(raw), Some(record));
        }
        assert_eq!(FaultRecord::decode([0x1000, 0x4000_0006_0000_3afd]), None);
    }

    #[test]
    fn overflow_loses_the_newest_until_cleared() {
        let mut log = FaultLog::new(2);
        let at = |page: u64| fault(page << 12, Access::Read, FaultReason::NotPresent);
        for page in 0..5 {
            log.record(&at(page));
        }
        assert_eq!((log.len(), log.lost(), log.overflowed()), (2, 3, true));
        assert_eq!(log.take().map(|r| r.page), Some(Iova::new(0)));
        // Free space alone does not resume recording.
        log.record(&at(5));
        assert_eq!((log.len(), log.lost()), (1, 4));
        log.clear_overflow();
        log.record(&at(6));
        assert_eq!(log.take().map(|r| r.page), Some(Iova::new(0x1000)));
        assert_eq!(log.take().map(|r| r.page), Some(Iova::new(0x6000)));
        assert_eq!((log.take(), log.overflowed(), log.lost()), (None, false, 4));
        assert_eq!(FaultLog::new(usize::MAX).capacity(), FaultLog::MAX_CAPACITY);
        let mut none = FaultLog::new(0);
        none.record(&at(0));
        assert_eq!((none.len(), none.lost()), (0, 1));
    }
}
