//! The flat table of AMD's GART, the graphics aperture that K8 machines also use for DMA (CG04).
//!
//! An entry is a 32-bit word. Bits are those of Linux (`arch/x86/kernel/amd_gart_64.c`,
//! `GPTE_ENCODE`): bit 0 valid, bit 1 coherent, bits 4..=11 bits 32..=39 of the address, bits
//! 12..=31 the same bits of the address. A valid entry allows reads and writes. All devices share
//! the one table of a GART. Addresses outside the aperture are not translated.

use ringfence_types::{Iova, PageSize, Permissions, PhysAddr};

use crate::{Entry, FlatFormat, HalfWord};

/// GPTE_VALID: the entry maps a page.
pub(crate) const VALID: u32 = 1;
/// GPTE_COHERENT: accesses snoop the processors' caches. Linux always sets it.
const COHERENT: u32 = 2;
/// Bits 2 and 3: unused. They must be zero.
const UNUSED: u32 = 0b1100;
/// Bits 12 to 31 of the address.
const LOW: u32 = 0xffff_f000;
/// Bits 32 to 39 of the address.
const HIGH: u32 = 0xff0;

/// GART's flat format for an aperture of 2^bits bytes. [`GartTable`](crate::GartTable) writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gart {
    bits: u32,
}

impl Gart {
    /// An aperture of 2^`address_bits` bytes; `None` unless `address_bits` is 25 to 31: the sizes
    /// that the aperture control register encodes, 32 MiB to 2 GiB.
    #[inline]
    pub const fn new(address_bits: u32) -> Option<Self> {
        if address_bits < 25 || address_bits > 31 {
            return None;
        }
        Some(Self { bits: address_bits })
    }

    /// Returns the address in the table of a DMA address, for an aperture at `base`. `None` outside
    /// the aperture: the device then reaches the physical address itself.
    #[inline]
    pub const fn in_aperture(&self, base: PhysAddr, at: Iova) -> Option<Iova> {
        let offset = at.get().wrapping_sub(base.get());
        if offset >> self.bits == 0 {
            Some(Iova::new(offset))
        } else {
            None
        }
    }
}

impl FlatFormat for Gart {
    const BYTES: u64 = 4;
    /// GART_MAX_PHYS_ADDR: 1 TiB.
    const PHYSICAL_BITS: u32 = 40;

    #[inline]
    fn address_bits(&self) -> u32 {
        self.bits
    }

    /// An entry cannot restrict accesses: `permissions` has no effect.
    #[inline]
    fn encode(base: PhysAddr, _permissions: Permissions) -> u64 {
        let high = (base.get() >> 32) as u32;
        u64::from(base.get() as u32 & LOW | high << 4 & HIGH | VALID | COHERENT)
    }

    #[inline]
    fn decode_entry(raw: u64) -> Entry {
        let entry = raw as u32;
        if entry & VALID == 0 {
            return Entry::Absent;
        }
        if entry & UNUSED != 0 {
            return Entry::Reserved;
        }
        let base = u64::from(entry & LOW) | u64::from(entry & HIGH) << 28;
        Entry::Leaf {
            base: PhysAddr::new(base),
            size: PageSize::Size4K,
            permissions: Permissions::READ_WRITE,
        }
    }

    #[inline]
    fn is_empty(raw: u64) -> bool {
        raw as u32 & VALID == 0
    }
}

impl HalfWord for Gart {}
