//! Interrupt Remapping Table Entry (IRTE; VT-d specification, section 9.10).

use ringfence_types::RequesterId;

use super::Interrupt;

/// P: the unit uses the entry.
const PRESENT: u64 = 1;
/// IM: posted mode, bit 15. This model has no posted interrupts.
const POSTED: u64 = 1 << 15;
/// Low word: bits 12..=14 and 24..=31 are reserved.
const RESERVED: u64 = 0xff00_7000;
/// High word: bits 20..=63 are reserved (0..=15 are SID, 16..=17 SQ, 18..=19 SVT).
const RESERVED_HIGH: u64 = !0xf_ffff;
const VECTOR_SHIFT: u32 = 16;
const DESTINATION_SHIFT: u32 = 32;
const QUALIFIER_SHIFT: u32 = 16;
const VALIDATION_SHIFT: u32 = 18;

/// A present entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterruptEntry {
    /// The interrupt of the entry.
    pub interrupt: Interrupt,
    /// The check of the requester.
    pub validation: SourceValidation,
}

/// Source validation of an entry (SVT, SQ and SID).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceValidation {
    /// SVT = 00b: every requester may use the entry.
    None,
    /// SVT = 01b: only this requester.
    Requester {
        /// Requester ID of the permitted device (SID).
        source: RequesterId,
        /// SQ: number of function bits to ignore, the highest first, for phantom functions. With
        /// 1 the unit ignores bit 2, with 2 bits 1 and 2, with 3 the whole function.
        ignored_function_bits: u8,
    },
    /// SVT = 10b: requesters of these buses.
    Buses {
        /// First bus (SID bits 8..=15).
        first: u8,
        /// Last bus, inclusive (SID bits 0..=7).
        last: u8,
    },
}

impl SourceValidation {
    /// Returns true if `requester` may use the entry.
    pub const fn accepts(&self, requester: RequesterId) -> bool {
        match *self {
            Self::None => true,
            Self::Requester {
                source,
                ignored_function_bits,
            } => {
                let ignored = match ignored_function_bits & 3 {
                    0 => 0b000,
                    1 => 0b100,
                    2 => 0b110,
                    _ => 0b111,
                };
                (source.get() ^ requester.get()) & !ignored == 0
            }
            Self::Buses { first, last } => first <= requester.bus() && requester.bus() <= last,
        }
    }
}

/// An entry that the unit cannot use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryError {
    NotPresent,
    Reserved,
}

impl InterruptEntry {
    /// Encodes the entry, low word first.
    pub const fn encode(&self) -> [u64; 2] {
        let (validation, qualifier, source) = match self.validation {
            SourceValidation::None => (0b00, 0, 0),
            SourceValidation::Requester {
                source,
                ignored_function_bits,
            } => (0b01, ignored_function_bits as u64 & 3, source.get() as u64),
            SourceValidation::Buses { first, last } => (0b10, 0, (first as u64) << 8 | last as u64),
        };
        [
            PRESENT
                | (self.interrupt.vector as u64) << VECTOR_SHIFT
                | (self.interrupt.destination as u64) << DESTINATION_SHIFT,
            source | qualifier << QUALIFIER_SHIFT | validation << VALIDATION_SHIFT,
        ]
    }

    pub(super) const fn decode([low, high]: [u64; 2]) -> Result<Self, EntryError> {
        if low & PRESENT == 0 {
            return Err(EntryError::NotPresent);
        }
        if low & (RESERVED | POSTED) != 0 || high & RESERVED_HIGH != 0 {
            return Err(EntryError::Reserved);
        }
        let validation = match high >> VALIDATION_SHIFT & 0b11 {
            0b00 => SourceValidation::None,
            0b01 => SourceValidation::Requester {
                source: RequesterId::new(high as u16),
                ignored_function_bits: (high >> QUALIFIER_SHIFT & 3) as u8,
            },
            0b10 => SourceValidation::Buses {
                first: (high >> 8) as u8,
                last: high as u8,
            },
            _ => return Err(EntryError::Reserved),
        };
        Ok(Self {
            interrupt: Interrupt {
                destination: (low >> DESTINATION_SHIFT) as u32,
                vector: (low >> VECTOR_SHIFT) as u8,
            },
            validation,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bits() {
        let source = RequesterId::new(0x3afd);
        for (validation, high) in [
            (SourceValidation::None, 0),
            (
                SourceValidation::Requester {
                    source,
                    ignored_function_bits: 3,
                },
                0x7_3afd,
            ),
            (
                SourceValidation::Buses {
                    first: 0x10,
                    last: 0x1f,
                },
                0x8_101f,
            ),
        ] {
            let entry = InterruptEntry {
                interrupt: Interrupt {
                    destination: 0x1234,
                    vector: 0x41,
                },
                validation,
            };
            let words = [0x1234_0041_0001, high];
            assert_eq!(entry.encode(), words);
            assert_eq!(InterruptEntry::decode(words), Ok(entry));
            assert_eq!(
                InterruptEntry::decode([words[0] & !1, high]),
                Err(EntryError::NotPresent)
            );
            for bit in [12, 13, 14, 15, 24, 31] {
                let low = words[0] | 1 << bit;
                assert_eq!(
                    InterruptEntry::decode([low, high]),
                    Err(EntryError::Reserved)
                );
            }
            for reserved in [high | 1 << 20, high | 1 << 63, high | 3 << 18] {
                assert_eq!(
                    InterruptEntry::decode([words[0], reserved]),
                    Err(EntryError::Reserved)
                );
            }
        }
    }

    #[test]
    fn sources_are_compared_as_the_qualifier_says() {
        let exact = |ignored_function_bits| SourceValidation::Requester {
            source: RequesterId::new(0x0108),
            ignored_function_bits,
        };
        let buses = SourceValidation::Buses { first: 2, last: 4 };
        for (validation, requester, accepted) in [
            (SourceValidation::None, 0xffff, true),
            (exact(0), 0x0108, true),
            (exact(0), 0x0109, false),
            (exact(0), 0x010c, false),
            (exact(1), 0x010c, true),
            (exact(1), 0x010a, false),
            (exact(2), 0x010e, true),
            (exact(2), 0x0109, false),
            (exact(3), 0x010f, true),
            (exact(3), 0x0110, false),
            (exact(3), 0x0208, false),
            (buses, 0x01ff, false),
            (buses, 0x0200, true),
            (buses, 0x04ff, true),
            (buses, 0x0500, false),
        ] {
            let found = validation.accepts(RequesterId::new(requester));
            assert_eq!(found, accepted, "{validation:?} {requester:#x}");
        }
    }
}
