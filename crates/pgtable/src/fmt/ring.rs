//! The tables of a ring IOMMU, bit by bit (rIOMMU Fig. 9a to 9c): rDEVICE, rRING and rPTE, each two
//! little-endian 64-bit words.
//!
//! The figure fixes the fields of an rPTE and their order, and of the other two only what they
//! hold. Here all three have the same shape: an address, then a word with what makes it count, so
//! that the one rule for changing them is: second word last, and first when it goes. `tail` and
//! `nmapped`, which Fig. 9b marks as the software's, are in the driver and not in memory.

use core::fmt;

use ringfence_types::{Access, Permissions, PhysAddr, PhysRange, RingId, RingSlot};

/// Bytes of an rDEVICE, an rRING or an rPTE; all are aligned to it.
pub const RING_ENTRY_BYTES: u64 = 16;
/// The most slots a ring can have: its size has 18 bits, which cannot say 2^18 (Fig. 9b), so the
/// last slot that an address can name is in no ring.
pub const MAX_RING_SLOTS: u32 = (1 << 18) - 1;
/// The longest buffer of one slot: its size has 30 bits (Fig. 9c).
pub const MAX_RING_BUFFER: u64 = (1 << 30) - 1;

/// rPTE, second word, bits 0..=29: `size`.
const SIZE: u64 = MAX_RING_BUFFER;
/// rPTE, second word, bits 30..=31: `dir`, bit 30 reads and bit 31 writes. Bits 33..=63 are
/// `unused`.
pub(crate) const DIR_SHIFT: u32 = 30;
pub(crate) const DIR: u64 = 0b11;
/// rPTE, second word, bit 32: `valid`.
pub(crate) const VALID: u64 = 1 << 32;
/// rRING, second word, bits 0..=17: `size`.
const RING_SIZE: u64 = MAX_RING_SLOTS as u64;
/// rDEVICE, second word, bits 0..=15: `size`.
const DEVICE_SIZE: u64 = 0xffff;

/// A ring or a buffer that the tables cannot express.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RingFormatError {
    /// The buffer is longer than [`MAX_RING_BUFFER`].
    BufferTooLong {
        /// Its length in bytes.
        bytes: u64,
    },
    /// No slots, or more than [`MAX_RING_SLOTS`].
    Slots {
        /// How many were asked for.
        slots: u32,
    },
    /// The table or the array of rings is not 16-byte aligned.
    Misaligned {
        /// Its address.
        at: PhysAddr,
    },
    /// The table or the array of rings has no end below 2^64.
    TooHigh {
        /// Its address.
        at: PhysAddr,
    },
}

impl fmt::Display for RingFormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BufferTooLong { bytes } => write!(
                f,
                "a buffer of {bytes} bytes is longer than {MAX_RING_BUFFER}"
            ),
            Self::Slots { slots } => {
                write!(f, "a ring of {slots} slots; it takes 1 to {MAX_RING_SLOTS}")
            }
            Self::Misaligned { at } => write!(f, "ring table at {at} is not 16-byte aligned"),
            Self::TooHigh { at } => write!(f, "ring table at {at} passes the highest address"),
        }
    }
}

impl core::error::Error for RingFormatError {}

/// rPTE (Fig. 9c): one buffer of any alignment and length. Whatever two words hold is one; what is
/// [made](Self::new) here is sane.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingPte([u64; 2]);

impl RingPte {
    /// No buffer.
    pub const ABSENT: Self = Self([0, 0]);

    /// A valid entry.
    ///
    /// # Errors
    /// [`RingFormatError::BufferTooLong`].
    #[inline]
    pub const fn new(
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<Self, RingFormatError> {
        // Bytes after the first: of 2^64, the number itself would not fit, and would have to be
        // looked at.
        let extra = buffer.last().get().wrapping_sub(buffer.start().get());
        if extra >= MAX_RING_BUFFER {
            return Err(RingFormatError::BufferTooLong {
                bytes: buffer.bytes(),
            });
        }
        let bytes = extra.wrapping_add(1);
        Ok(Self([
            buffer.start().get(),
            bytes | permissions.bits() << DIR_SHIFT | VALID,
        ]))
    }

    /// As read from memory.
    #[inline]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// As it stands in memory, the word with `valid` second.
    #[inline]
    pub const fn words(self) -> [u64; 2] {
        self.0
    }

    /// `valid`.
    #[inline]
    pub const fn is_valid(self) -> bool {
        let [_, control] = self.0;
        control & VALID != 0
    }

    /// `phys_addr`: the first byte of the buffer.
    #[inline]
    pub const fn start(self) -> PhysAddr {
        let [start, _] = self.0;
        PhysAddr::new(start)
    }

    /// `size`, in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        let [_, control] = self.0;
        control & SIZE
    }

    /// Whether `dir` permits `access`.
    #[inline]
    pub const fn allows(self, access: Access) -> bool {
        match self.permissions() {
            Some(permissions) => permissions.allows(access),
            None => false,
        }
    }

    /// `dir`; `None` if it permits nothing.
    #[inline]
    pub const fn permissions(self) -> Option<Permissions> {
        let [_, control] = self.0;
        Permissions::from_bits(control >> DIR_SHIFT)
    }

    /// The second word between the stores of Fig. 11, which sets one field after the other and
    /// leaves the rest as `control` has it.
    #[inline]
    pub(crate) const fn field_by_field(self, control: u64) -> [u64; 3] {
        let [_, new] = self.0;
        let dir = DIR << DIR_SHIFT;
        let sized = control & !SIZE | new & SIZE;
        let directed = sized & !dir | new & dir;
        [sized, directed, directed | VALID]
    }
}

impl fmt::Debug for RingPte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_valid() {
            return f.write_str("absent");
        }
        write!(f, "{:#x}+{:#x} ", self.start(), self.bytes())?;
        match self.permissions() {
            Some(permissions) => permissions.fmt(f),
            None => f.write_str("--"),
        }
    }
}

/// rRING (Fig. 9b) as the hardware sees it: where the flat table of one ring is and how many slots
/// it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingTable {
    base: PhysAddr,
    slots: u32,
}

impl RingTable {
    /// A ring without slots: what an rRING of zeroes says.
    pub const EMPTY: Self = Self {
        base: PhysAddr::ZERO,
        slots: 0,
    };

    /// A table of `slots` entries of 16 bytes at `base`.
    ///
    /// # Errors
    /// [`RingFormatError`]: the number of slots, or the alignment or end of the table.
    pub const fn new(base: PhysAddr, slots: u32) -> Result<Self, RingFormatError> {
        if slots == 0 || slots > MAX_RING_SLOTS {
            return Err(RingFormatError::Slots { slots });
        }
        match check_array(base, slots as u64) {
            Ok(()) => Ok(Self { base, slots }),
            Err(error) => Err(error),
        }
    }

    /// The words in memory, the one with `size` second.
    #[inline]
    pub const fn encode(&self) -> [u64; 2] {
        [self.base.get(), self.slots as u64]
    }

    /// As the hardware reads it: a size of 0 is a ring without slots, higher bits of the size's
    /// word are ignored.
    ///
    /// # Errors
    /// The table is misaligned.
    #[inline]
    pub const fn decode([base, size]: [u64; 2]) -> Result<Self, RingFormatError> {
        match aligned(base) {
            // 18 bits fit.
            Ok(base) => Ok(Self {
                base,
                slots: (size & RING_SIZE) as u32,
            }),
            Err(error) => Err(error),
        }
    }

    /// Where the table is.
    #[inline]
    pub const fn base(&self) -> PhysAddr {
        self.base
    }

    /// How many slots it has.
    #[inline]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Where the entry of `slot` is; `None` if the ring has no such slot. In a table that a hostile
    /// system wrote, the address may have wrapped.
    #[inline]
    pub const fn entry(&self, slot: RingSlot) -> Option<PhysAddr> {
        if slot.get() >= self.slots {
            return None;
        }
        Some(
            self.base
                .wrapping_add((slot.get() as u64).wrapping_mul(RING_ENTRY_BYTES)),
        )
    }
}

/// rDEVICE (Fig. 9a, section 4 "Data Structures"): "a physical pointer to an array of rRING
/// structures and a matching size". A context entry leads to it
/// ([`TranslationType::Rings`](crate::TranslationType::Rings)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingDevice {
    rings: PhysAddr,
    count: u16,
}

impl RingDevice {
    /// A device with `count` rings, whose rRINGs of 16 bytes are at `rings`. Its size has 16 bits,
    /// so ring 65535 is in no device.
    ///
    /// # Errors
    /// [`RingFormatError`]: the alignment or end of the array.
    pub const fn new(rings: PhysAddr, count: u16) -> Result<Self, RingFormatError> {
        match check_array(rings, count as u64) {
            Ok(()) => Ok(Self { rings, count }),
            Err(error) => Err(error),
        }
    }

    /// The words in memory, the one with `size` second.
    #[inline]
    pub const fn encode(&self) -> [u64; 2] {
        [self.rings.get(), self.count as u64]
    }

    /// As the hardware reads it: higher bits of the size's word are ignored.
    ///
    /// # Errors
    /// The array is misaligned.
    #[inline]
    pub const fn decode([rings, size]: [u64; 2]) -> Result<Self, RingFormatError> {
        match aligned(rings) {
            // 16 bits fit.
            Ok(rings) => Ok(Self {
                rings,
                count: (size & DEVICE_SIZE) as u16,
            }),
            Err(error) => Err(error),
        }
    }

    /// How many rings it has.
    #[inline]
    pub const fn count(&self) -> u16 {
        self.count
    }

    /// Where the rRING of `ring` is; `None` if the device has no such ring.
    #[inline]
    pub const fn ring(&self, ring: RingId) -> Option<PhysAddr> {
        if ring.get() >= self.count {
            return None;
        }
        Some(
            self.rings
                .wrapping_add((ring.get() as u64).wrapping_mul(RING_ENTRY_BYTES)),
        )
    }
}

/// An array of 16-byte entries begins at a multiple of 16.
const fn aligned(raw: u64) -> Result<PhysAddr, RingFormatError> {
    let at = PhysAddr::new(raw);
    if at.is_aligned(RING_ENTRY_BYTES) {
        Ok(at)
    } else {
        Err(RingFormatError::Misaligned { at })
    }
}

/// An array of `count` entries at `at` is aligned and ends below 2^64.
const fn check_array(at: PhysAddr, count: u64) -> Result<(), RingFormatError> {
    if let Err(error) = aligned(at.get()) {
        return Err(error);
    }
    if count > 0 && PhysRange::new(at, count.wrapping_mul(RING_ENTRY_BYTES)).is_none() {
        return Err(RingFormatError::TooHigh { at });
    }
    Ok(())
}
