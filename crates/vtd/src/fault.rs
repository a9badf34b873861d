//! Fault records (VT-d specification, "Fault Recording Registers").

use ringfence_types::{FaultReason, Iova, Pasid, Registers, RequesterId};

use crate::capabilities::Capabilities;
use crate::registers::{ABSENT, FSTS, PFO, PPF};

/// F, bit 127 of a record: the record is valid. Writing it clears the record.
const F: u64 = 1 << 63;
/// T1 and T2, bits 126 and 92: the kind of request.
const T1: u64 = 1 << 62;
const T2: u64 = 1 << 28;
/// PP, bit 95: the request had a PASID.
const PP: u64 = 1 << 31;
/// FI: the page of the address.
const FI: u64 = 0xffff_ffff_ffff_f000;

/// The kind of a stopped request (T1, T2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// A DMA write.
    Write,
    /// A DMA read, or a translation request.
    Read,
    /// A page request.
    Page,
    /// An atomic operation.
    Atomic,
}

/// A record of a stopped request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// SID: the device.
    pub device: RequesterId,
    /// FI: first address of the page.
    pub page: Iova,
    /// PV: the PASID, if the request had one.
    pub pasid: Option<Pasid>,
    /// T1 and T2.
    pub request: Request,
    /// FR: the fault reason (VT-d specification, section 7.1.3).
    pub reason: u8,
    /// The record, low word first.
    pub raw: [u64; 2],
}

/// A record of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultRecord {
    /// A stopped request.
    Fault(Fault),
    /// The record has the reserved fault reason 0.
    Malformed([u64; 2]),
    /// The unit had no free register for further faults (PFO), until now.
    Lost,
}

impl Fault {
    /// Returns the reason in the terms of all units (VT-d specification, section 7.1.3, "Fault
    /// Conditions and Remapping Hardware Behavior for Various Requests"); `None` for
    /// one that this crate does not know. Codes from 0x30 up are those of scalable mode.
    pub const fn known_reason(&self) -> Option<FaultReason> {
        Some(match self.reason {
            0x01 | 0x39 => FaultReason::RootNotPresent,
            0x02 | 0x41 => FaultReason::ContextNotPresent,
            0x03 | 0x43 | 0x5b => FaultReason::ContextInvalid,
            0x04 | 0x80 | 0x83 | 0x84 => FaultReason::AddressBeyondWidth,
            0x05 | 0x85 => FaultReason::WriteDenied,
            0x06 | 0x86 => FaultReason::ReadDenied,
            // Second stage: the code does not tell reads from writes.
            0x79 => match self.request {
                Request::Read => FaultReason::ReadDenied,
                _ => FaultReason::WriteDenied,
            },
            0x07..=0x09 | 0x38 | 0x40 | 0x50 | 0x58 | 0x70 | 0x73 | 0x78 => {
                FaultReason::TableAccess
            }
            0x0a..=0x0c | 0x3a | 0x42 | 0x52 | 0x5a | 0x72 | 0x7a => FaultReason::ReservedBit,
            0x0d | 0x44 | 0x45 | 0x47 => FaultReason::RequestTypeBlocked,
            0x51 | 0x59 => FaultReason::Blocked,
            0x71 => FaultReason::NotPresent,
            _ => return None,
        })
    }
}

impl FaultRecord {
    const fn decode(raw: [u64; 2]) -> Self {
        let [low, high] = raw;
        let reason = (high >> 32) as u8;
        if reason == 0 {
            return Self::Malformed(raw);
        }
        let request = match (high & T1 != 0, high & T2 != 0) {
            (false, false) => Request::Write,
            (true, false) => Request::Read,
            (false, true) => Request::Page,
            (true, true) => Request::Atomic,
        };
        let pasid = if high & PP == 0 {
            None
        } else {
            // PV, bits 123:104.
            Pasid::new((high >> 40) as u32 & 0xf_ffff)
        };
        Self::Fault(Fault {
            device: RequesterId::new(high as u16),
            page: Iova::new(low & FI),
            pasid,
            request,
            reason,
            raw,
        })
    }
}

/// Reads the fault recording registers, a ring of NFR records.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Index of the record after the last one read; `None` before the first.
    next: Option<u32>,
    /// The overflow was reported, and the unit has not cleared PFO.
    is_reported: bool,
}

impl Faults {
    /// Returns the oldest record and clears it. Reports an overflow (PFO) after all records, and
    /// clears it, which lets the unit record further faults.
    pub(crate) fn next(
        &mut self,
        registers: &impl Registers,
        capabilities: &Capabilities,
    ) -> Option<FaultRecord> {
        let fsts = registers.read32(FSTS);
        if fsts == ABSENT {
            return None;
        }
        if fsts & PPF != 0 {
            // FRI, bits 15:8, is the index of the first record that set PPF.
            let oldest = self.next.unwrap_or(fsts >> 8 & 0xff);
            let found = (0..capabilities.fault_records)
                .map(|step| oldest.wrapping_add(step) % capabilities.fault_records.max(1))
                .find_map(|index| Some((index, take(registers, capabilities, index)?)));
            if let Some((index, record)) = found {
                self.next = Some(index.wrapping_add(1));
                return Some(record);
            }
        }
        self.next = None;
        let is_new = !self.is_reported;
        self.is_reported = fsts & PFO != 0;
        if !self.is_reported || !is_new {
            return None;
        }
        registers.write32(FSTS, PFO);
        self.is_reported = registers.read32(FSTS) & PFO != 0;
        Some(FaultRecord::Lost)
    }
}

/// Returns record `index` and clears it; `None` if it is not valid.
fn take(
    registers: &impl Registers,
    capabilities: &Capabilities,
    index: u32,
) -> Option<FaultRecord> {
    let offset = u64::from(index).wrapping_mul(16);
    let low = capabilities.fault_records_at.wrapping_add(offset);
    let high = low.wrapping_add(8);
    let word = registers.read64(high);
    if word & F == 0 {
        return None;
    }
    let record = FaultRecord::decode([registers.read64(low), word]);
    registers.write64(high, F);
    Some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_records() {
        // The record of QEMU for a write by 00:04.0 to a page that is not present.
        let raw = [0x4020_2000, 0x8000_0005_0000_0020];
        let FaultRecord::Fault(fault) = FaultRecord::decode(raw) else {
            panic!("malformed");
        };
        assert_eq!(fault.device, RequesterId::new(0x20));
        assert_eq!(fault.page, Iova::new(0x4020_2000));
        assert_eq!((fault.request, fault.reason), (Request::Write, 5));
        assert_eq!(fault.known_reason(), Some(FaultReason::WriteDenied));
        assert_eq!(fault.pasid, None);

        for (high, request) in [
            (0xc000_0071_0000_0000, Request::Read),
            (0x8000_0071_1000_0000, Request::Page),
            (0xc000_0071_1000_0000, Request::Atomic),
        ] {
            let FaultRecord::Fault(fault) = FaultRecord::decode([0x0fff, high]) else {
                panic!("malformed");
            };
            assert_eq!((fault.request, fault.page), (request, Iova::new(0)));
            assert_eq!(fault.known_reason(), Some(FaultReason::NotPresent));
        }
        for (reason, request, known) in [
            (0x39, Request::Read, Some(FaultReason::RootNotPresent)),
            (0x41, Request::Read, Some(FaultReason::ContextNotPresent)),
            (0x59, Request::Read, Some(FaultReason::Blocked)),
            (0x79, Request::Read, Some(FaultReason::ReadDenied)),
            (0x79, Request::Write, Some(FaultReason::WriteDenied)),
            (0x80, Request::Write, Some(FaultReason::AddressBeyondWidth)),
            (0x5a, Request::Write, Some(FaultReason::ReservedBit)),
            (0x87, Request::Write, None),
        ] {
            let fault = Fault {
                reason,
                request,
                ..fault
            };
            assert_eq!(fault.known_reason(), known, "{reason:x}");
        }
        let with_pasid = FaultRecord::decode([0, 0x8123_4571_8000_1234]);
        assert!(matches!(
            with_pasid,
            FaultRecord::Fault(Fault { pasid: Some(pasid), .. }) if pasid.get() == 0x1_2345
        ));
        assert_eq!(FaultRecord::decode([5, F]), FaultRecord::Malformed([5, F]));
    }
}
