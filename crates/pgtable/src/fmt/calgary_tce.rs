//! The flat table of IBM Calgary and CalIOC2.
//!
//! The table is indexed by the I/O page number. An entry (TCE) holds a real page number and access
//! control bits (Calgary slides, "TCE format").
//!
//! The slides do not give bit positions. They are taken from the Linux driver
//! (`arch/x86/include/asm/tce.h`, 2.6.18 to 5.3): bit 0 read, bit 1 write, bits 12..=47 real page
//! number, other bits unused or reserved. Words are **big-endian**. Tables have 2^13 to 2^20
//! entries (32 MiB to 4 GiB).

use ringfence_types::{PageSize, Permissions, PhysAddr};

use crate::{Entry, FlatFormat};

/// Read and write bits.
const RW: u64 = 0b11;
/// Real page number.
const RPN: u64 = 0x0000_ffff_ffff_f000;
/// Bits 48..=63: unused. They must be zero, so that an address is never truncated silently.
const UNUSED: u64 = 0xffff_0000_0000_0000;

/// Calgary's flat format for an address space of 2^bits bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CalgaryTce {
    bits: u32,
}

impl CalgaryTce {
    /// The 4 GiB space of one PCI host bridge: 2^20 entries, 8 MiB of table.
    pub const FULL: Self = Self { bits: 32 };

    /// A space of 2^`address_bits` bytes; `None` unless `address_bits` is 25 to 32, the table sizes
    /// that exist.
    #[inline]
    pub const fn new(address_bits: u32) -> Option<Self> {
        if address_bits < 25 || address_bits > 32 {
            return None;
        }
        Some(Self { bits: address_bits })
    }
}

impl FlatFormat for CalgaryTce {
    const BYTES: u64 = 8;
    const PHYSICAL_BITS: u32 = 48;

    #[inline]
    fn address_bits(&self) -> u32 {
        self.bits
    }

    #[inline]
    fn encode(base: PhysAddr, permissions: Permissions) -> u64 {
        ((base.get() & RPN) | permissions.bits()).to_be()
    }

    #[inline]
    fn decode_entry(raw: u64) -> Entry {
        let tce = u64::from_be(raw);
        let Some(permissions) = Permissions::from_bits(tce) else {
            return Entry::Absent;
        };
        if tce & UNUSED != 0 {
            return Entry::Reserved;
        }
        Entry::Leaf {
            base: PhysAddr::new(tce & RPN),
            size: PageSize::Size4K,
            permissions,
        }
    }

    #[inline]
    fn is_empty(raw: u64) -> bool {
        raw & RW.to_be() == 0
    }
}
