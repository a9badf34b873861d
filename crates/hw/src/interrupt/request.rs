//! Formats of an interrupt request (VT-d specification, section 5.1.2).

use ringfence_types::{Address, PhysAddr, PhysRange};

/// First address of interrupt requests.
const FIRST: u64 = 0xfee0_0000;
const BYTES: u64 = 1 << 20;
/// Interrupt format, bit 4 of the address: set in the remappable format.
const REMAPPABLE: u64 = 1 << 4;
/// SHV, bit 3: the data holds a subhandle.
const SUBHANDLE_VALID: u64 = 1 << 3;
/// Interrupt index: bits 0..=14 in bits 5..=19 of the address, bit 15 in bit 2.
const INDEX_SHIFT: u32 = 5;
const INDEX_LOW: u64 = 0x7fff;
const INDEX_HIGH: u64 = 1 << 2;
/// Destination of the compatibility format, bits 12..=19 of the address.
const DESTINATION_SHIFT: u32 = 12;

/// The addresses of interrupt requests.
pub const INTERRUPT_RANGE: PhysRange = match PhysRange::new(PhysAddr::new(FIRST), BYTES) {
    Some(range) => range,
    None => PhysRange::ALL,
};

/// A decoded interrupt request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InterruptRequest {
    /// Compatibility format: the request itself holds the interrupt.
    Compatibility(Interrupt),
    /// Remappable format: the request names an entry of the remapping table.
    Remappable {
        /// Index of the entry: handle plus subhandle. Up to 0x1fffe.
        index: u32,
    },
}

/// An interrupt for a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Interrupt {
    /// APIC id of the destination.
    pub destination: u32,
    /// Vector.
    pub vector: u8,
}

impl InterruptRequest {
    /// Decodes a write of `data` to `at`; `None` if the address is no interrupt request or is not
    /// aligned to 4 bytes.
    pub const fn decode<Space>(at: &Address<Space>, data: u32) -> Option<Self> {
        let at = at.get();
        if at < FIRST || at - FIRST >= BYTES || at & 0b11 != 0 {
            return None;
        }
        if at & REMAPPABLE == 0 {
            return Some(Self::Compatibility(Interrupt {
                destination: (at >> DESTINATION_SHIFT) as u32 & 0xff,
                vector: data as u8,
            }));
        }
        let handle = (at >> INDEX_SHIFT & INDEX_LOW) | (at & INDEX_HIGH) << 13;
        let subhandle = if at & SUBHANDLE_VALID == 0 {
            0
        } else {
            data & 0xffff
        };
        Some(Self::Remappable {
            // At most 0xffff + 0xffff.
            index: (handle as u32).wrapping_add(subhandle),
        })
    }

    /// Returns the address and the data of a remappable request for entry `index`, without a
    /// subhandle. A driver writes them to the device's MSI capability.
    pub const fn message(index: u16) -> (PhysAddr, u32) {
        let index = index as u64;
        let at =
            FIRST | REMAPPABLE | (index & INDEX_LOW) << INDEX_SHIFT | (index >> 15) * INDEX_HIGH;
        (PhysAddr::new(at), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_the_specification() {
        let compatibility = |destination, vector| {
            Some(InterruptRequest::Compatibility(Interrupt {
                destination,
                vector,
            }))
        };
        let remappable = |index| Some(InterruptRequest::Remappable { index });
        for (at, data, expected) in [
            (0xfedf_fffc, 0, None),
            (0xfef0_0000, 0, None),
            (0xfee0_0001, 0, None),
            (0xfee0_0000, 0x41, compatibility(0, 0x41)),
            (0xfeef_f00c, 0x1_4030, compatibility(0xff, 0x30)),
            (0xfee0_0010, 7, remappable(0)),
            (0xfee0_0018, 7, remappable(7)),
            (0xfee0_0030, 7, remappable(1)),
            (0xfee0_0014, 7, remappable(0x8000)),
            (0xfeef_fff4, 7, remappable(0xffff)),
            (0xfeef_fffc, 0xffff, remappable(0x1fffe)),
        ] {
            let found = InterruptRequest::decode(&PhysAddr::new(at), data);
            assert_eq!(found, expected, "{at:#x}");
        }
        for index in [0, 1, 0x7fff, 0x8000, 0xffff] {
            let (at, data) = InterruptRequest::message(index);
            let found = InterruptRequest::decode(&at, data);
            assert_eq!(found, remappable(u32::from(index)));
        }
    }
}
