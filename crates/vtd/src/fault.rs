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
/// FI of a DMA request: the page of the address.
const FI: u64 = 0xffff_ffff_ffff_f000;
/// FI of an interrupt request: the interrupt index, from this bit on.
const INTERRUPT_INDEX_SHIFT: u32 = 48;

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

/// A record of a blocked interrupt request. The driver keeps interrupt remapping as the embedder
/// has set it, so the unit may record such faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InterruptFault {
    /// SID: the device.
    pub device: RequesterId,
    /// FI: the index into the interrupt-remapping table. Valid for the reasons that the
    /// specification lists with an index.
    pub index: u16,
    /// FR: the fault reason, from 0x20 to 0x2f (VT-d specification, section 7.1.3).
    pub reason: u8,
    /// The record, low word first.
    pub raw: [u64; 2],
}

/// A record of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultRecord {
    /// A stopped request.
    Fault(Fault),
    /// A blocked interrupt request.
    Interrupt(InterruptFault),
    /// The record has the reserved fault reason 0.
    Malformed([u64; 2]),
    /// The unit had no free register for further faults (PFO), until now.
    Lost,
}

impl Fault {
    /// Returns the reason in the terms of all units (VT-d specification, section 7.1.3, "Fault
    /// Conditions and Remapping Hardware Behavior for Various Requests"); `None` for
    /// one that this crate does not know. Codes from 0x30 up are those of scalable mode.
    ///
    /// In a second stage, a leaf that is not present allows neither reads nor writes: the unit
    /// reports it as [`FaultReason::ReadDenied`] or [`FaultReason::WriteDenied`].
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
            0x0d | 0x31 | 0x32 | 0x44 | 0x45 | 0x47 => FaultReason::RequestTypeBlocked,
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
        if matches!(reason, 0x20..=0x2f) {
            return Self::Interrupt(InterruptFault {
                device: RequesterId::new(high as u16),
                index: (low >> INTERRUPT_INDEX_SHIFT) as u16,
                reason,
                raw,
            });
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
        let with_pasid = FaultRecord::decode([0, 0x8123_4571_8000_1234]);
        assert!(matches!(
            with_pasid,
            FaultRecord::Fault(Fault { pasid: Some(pasid), .. }) if pasid.get() == 0x1_2345
        ));
        assert_eq!(FaultRecord::decode([5, F]), FaultRecord::Malformed([5, F]));
    }

    /// All 256 codes. Names as in the tables of the specification and in Linux
    /// (`dma_remap_fault_reasons`, `dma_remap_sm_fault_reasons`).
    #[test]
    fn every_code_has_its_reason() {
        use FaultReason as Reason;
        const CODES: [(Reason, &[u8]); 10] = [
            // Present bit in root entry is clear.
            (Reason::RootNotPresent, &[0x01, 0x39]),
            // Present bit in context entry is clear.
            (Reason::ContextNotPresent, &[0x02, 0x41]),
            // Invalid context entry, invalid PASID-table entry.
            (Reason::ContextInvalid, &[0x03, 0x43, 0x5b]),
            // Beyond MGAW, not canonical, beyond the hardware's width.
            (Reason::AddressBeyondWidth, &[0x04, 0x80, 0x83, 0x84]),
            (Reason::WriteDenied, &[0x05, 0x85]),
            (Reason::ReadDenied, &[0x06, 0x86]),
            // Error attempting to access an entry, invalid pointer to a table.
            (
                Reason::TableAccess,
                &[7, 8, 9, 0x38, 0x40, 0x50, 0x58, 0x70, 0x73, 0x78],
            ),
            // Non-zero reserved field.
            (
                Reason::ReservedBit,
                &[0x0a, 0x0b, 0x0c, 0x3a, 0x42, 0x52, 0x5a, 0x72, 0x7a],
            ),
            // Translation request, TTM 0 (PASID, page request), DTE, PASIDE, PRE clear.
            (
                Reason::RequestTypeBlocked,
                &[0x0d, 0x31, 0x32, 0x44, 0x45, 0x47],
            ),
            // Present bit in PASID-directory or PASID-table entry is clear.
            (Reason::Blocked, &[0x51, 0x59]),
        ];
        for reason in 0..=u8::MAX {
            let listed = CODES
                .iter()
                .find(|(_, codes)| codes.contains(&reason))
                .map(|(known, _)| *known);
            for (request, of_request) in [
                (Request::Read, Reason::ReadDenied),
                (Request::Write, Reason::WriteDenied),
                (Request::Atomic, Reason::WriteDenied),
            ] {
                let known = match reason {
                    0x71 => Some(Reason::NotPresent),
                    0x79 => Some(of_request),
                    _ => listed,
                };
                let fault = Fault {
                    device: RequesterId::new(0x20),
                    page: Iova::new(0x1000),
                    pasid: None,
                    request,
                    reason,
                    raw: [0; 2],
                };
                assert_eq!(fault.known_reason(), known, "{reason:x} {request:?}");
            }
        }
    }

    /// FI holds the interrupt index, not an address.
    #[test]
    fn blocked_interrupt_requests_have_no_address() {
        for reason in 0x1f..=0x30_u8 {
            // Index 3, by 00:04.0.
            let raw = [3 << 48, F | u64::from(reason) << 32 | 0x20];
            let found = FaultRecord::decode(raw);
            let expected = FaultRecord::Interrupt(InterruptFault {
                device: RequesterId::new(0x20),
                index: 3,
                reason,
                raw,
            });
            let is_interrupt = (0x20..=0x2f).contains(&reason);
            assert_eq!(found == expected, is_interrupt, "{found:?}");
            assert_eq!(matches!(found, FaultRecord::Fault(_)), !is_interrupt);
        }
    }
}
