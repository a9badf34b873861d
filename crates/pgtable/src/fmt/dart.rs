//! The flat table of IBM's DART (U3 and U4, PowerPC 970 machines).
//!
//! An entry is a **big-endian 32-bit word**, so two entries share the 64-bit words of this crate.
//! Bits are those of Linux (`arch/powerpc/sysdev/dart.h`): bit 31 valid, bits 0..=23 real page
//! number. There are no access control bits: a valid entry allows reads and writes. All devices
//! share the one table of a DART.

use ringfence_types::{PageSize, Permissions, PhysAddr};

use crate::{Entry, FlatFormat, HalfWord};

/// DARTMAP_VALID: the entry maps a page.
pub(crate) const VALID: u32 = 0x8000_0000;
/// DARTMAP_RPNMASK: the real page number.
const RPN: u32 = 0x00ff_ffff;
/// Bits 24..=30: unused. They must be zero, so that an address is never truncated silently.
const UNUSED: u32 = !(VALID | RPN);

/// DART's flat format for an address space of 2^bits bytes. [`DartTable`](crate::DartTable) writes
/// it; [`Table`](crate::Table) cannot, because its entries are 64-bit words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dart {
    bits: u32,
}

impl Dart {
    /// The 2 GiB space that Linux uses: 2^19 entries, 2 MiB of table.
    pub const FULL: Self = Self { bits: 31 };

    /// A space of 2^`address_bits` bytes; `None` unless `address_bits` is 22 to 31: one page of
    /// table at least, and the size that Linux uses at most.
    #[inline]
    pub const fn new(address_bits: u32) -> Option<Self> {
        if address_bits < 22 || address_bits > 31 {
            return None;
        }
        Some(Self { bits: address_bits })
    }
}

impl FlatFormat for Dart {
    const BYTES: u64 = 4;
    const PHYSICAL_BITS: u32 = 36;

    #[inline]
    fn address_bits(&self) -> u32 {
        self.bits
    }

    /// The word is big-endian. An entry cannot restrict accesses: `permissions` has no effect.
    #[inline]
    fn encode(base: PhysAddr, _permissions: Permissions) -> u64 {
        u64::from((VALID | (base.get() >> 12) as u32 & RPN).to_be())
    }

    #[inline]
    fn decode_entry(raw: u64) -> Entry {
        let entry = u32::from_be(raw as u32);
        if entry & VALID == 0 {
            return Entry::Absent;
        }
        if entry & UNUSED != 0 {
            return Entry::Reserved;
        }
        Entry::Leaf {
            base: PhysAddr::new(u64::from(entry & RPN) << 12),
            size: PageSize::Size4K,
            permissions: Permissions::READ_WRITE,
        }
    }

    #[inline]
    fn is_empty(raw: u64) -> bool {
        u32::from_be(raw as u32) & VALID == 0
    }
}

impl HalfWord for Dart {}
