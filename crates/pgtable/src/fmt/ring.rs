//! Bit layout of ring IOMMU tables (rIOMMU Fig. 9a to 9c): rDEVICE, rRING and rPTE, each two
//! little-endian 64-bit words.
//!
//! The figure specifies the fields of an rPTE and their order. For rDEVICE and rRING it specifies
//! only the contents. Here all three consist of an address word and a second word that makes it
//! valid. One rule therefore covers all updates: store the second word last, and clear it first.
//!
//! Fig. 9b marks `tail` and `nmapped` as software fields. The driver keeps them; they are not in
//! these tables.

use core::fmt;

use ringfence_types::{Access, Permissions, PhysAddr, PhysRange, RingId, RingSlot};

/// Size and alignment in bytes of an rDEVICE, an rRING and an rPTE.
pub const RING_ENTRY_BYTES: u64 = 16;
/// Maximum number of slots of a ring. The size field has 18 bits and cannot express 2^18 (Fig. 9b),
/// so the last slot number that an address can encode is in no ring.
pub const MAX_RING_SLOTS: u32 = (1 << 18) - 1;
/// Maximum length in bytes of the buffer of one slot; the size field has 30 bits (Fig. 9c).
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
        /// The requested length in bytes.
        bytes: u64,
    },
    /// The number of slots is zero or above [`MAX_RING_SLOTS`].
    Slots {
        /// The requested number of slots.
        slots: u32,
    },
    /// The table or the array of rings is not 16-byte aligned.
    Misaligned {
        /// The misaligned address.
        at: PhysAddr,
    },
    /// The end of the table or of the array of rings exceeds 2^64.
    TooHigh {
        /// The address of the array.
        at: PhysAddr,
    },
}

impl fmt::Display for RingFormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BufferTooLong { bytes } => write!(
                f,
                "a buffer of {bytes} bytes exceeds the maximum of {MAX_RING_BUFFER}"
            ),
            Self::Slots { slots } => {
                write!(
                    f,
                    "a ring cannot have {slots} slots; the limits are 1 and {MAX_RING_SLOTS}"
                )
            }
            Self::Misaligned { at } => {
                write!(f, "the ring table at {at} is not aligned to 16 bytes")
            }
            Self::TooHigh { at } => write!(f, "the ring table at {at} extends beyond 2^64"),
        }
    }
}

impl core::error::Error for RingFormatError {}

/// rPTE (Fig. 9c): one buffer of any alignment and length. Any two words form an rPTE;
/// [`new`](Self::new) creates only well-formed ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingPte([u64; 2]);

impl RingPte {
    /// An entry that is not valid.
    pub const ABSENT: Self = Self([0, 0]);

    /// Creates a valid entry for `buffer`.
    ///
    /// # Errors
    /// [`RingFormatError::BufferTooLong`].
    #[inline]
    pub const fn new(
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<Self, RingFormatError> {
        // Length minus one: a length of 2^64 does not fit in 64 bits and would need its own check.
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

    /// Interprets two words read from memory.
    #[inline]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// Returns the words as stored in memory, the one with `valid` second.
    #[inline]
    pub const fn words(self) -> [u64; 2] {
        self.0
    }

    /// Returns the `valid` bit.
    #[inline]
    pub const fn is_valid(self) -> bool {
        let [_, control] = self.0;
        control & VALID != 0
    }

    /// Returns `phys_addr`: the address of the first byte of the buffer.
    #[inline]
    pub const fn start(self) -> PhysAddr {
        let [start, _] = self.0;
        PhysAddr::new(start)
    }

    /// Returns `size` in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        let [_, control] = self.0;
        control & SIZE
    }

    /// Returns true if `dir` permits `access`.
    #[inline]
    pub const fn allows(self, access: Access) -> bool {
        match self.permissions() {
            Some(permissions) => permissions.allows(access),
            None => false,
        }
    }

    /// Returns `dir`; `None` if it permits no access.
    #[inline]
    pub const fn permissions(self) -> Option<Permissions> {
        let [_, control] = self.0;
        Permissions::from_bits(control >> DIR_SHIFT)
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

/// rRING (Fig. 9b) as the hardware reads it: base and number of slots of the flat table of one
/// ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingTable {
    base: PhysAddr,
    slots: u32,
}

impl RingTable {
    /// A ring without slots, encoded as zeroes.
    pub const EMPTY: Self = Self {
        base: PhysAddr::ZERO,
        slots: 0,
    };

    /// A table of `slots` 16-byte entries at `base`.
    ///
    /// # Errors
    /// [`RingFormatError`] if the number of slots, or the alignment or end of the table, is
    /// invalid.
    pub const fn new(base: PhysAddr, slots: u32) -> Result<Self, RingFormatError> {
        if slots == 0 || slots > MAX_RING_SLOTS {
            return Err(RingFormatError::Slots { slots });
        }
        match check_array(base, slots as u64) {
            Ok(()) => Ok(Self { base, slots }),
            Err(error) => Err(error),
        }
    }

    /// Returns the words as stored in memory, the one with `size` second.
    #[inline]
    pub const fn encode(&self) -> [u64; 2] {
        [self.base.get(), self.slots as u64]
    }

    /// Decodes an rRING as the hardware does. A size of 0 means a ring without slots. Bits above
    /// the size field are ignored.
    ///
    /// # Errors
    /// [`RingFormatError::Misaligned`] if the table is misaligned.
    #[inline]
    pub const fn decode([base, size]: [u64; 2]) -> Result<Self, RingFormatError> {
        match aligned(base) {
            // 18 bits fit in a `u32`.
            Ok(base) => Ok(Self {
                base,
                slots: (size & RING_SIZE) as u32,
            }),
            Err(error) => Err(error),
        }
    }

    /// Returns the address of the table.
    #[inline]
    pub const fn base(&self) -> PhysAddr {
        self.base
    }

    /// Returns the number of slots.
    #[inline]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the address of the entry of `slot`; `None` if the ring has no such slot. For a table
    /// that hostile software wrote, the address may have wrapped.
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
    /// A device with `count` rings, whose 16-byte rRINGs lie at `rings`. The size field has 16
    /// bits, so no device has a ring 65535.
    ///
    /// # Errors
    /// [`RingFormatError`] if the alignment or end of the array is invalid.
    pub const fn new(rings: PhysAddr, count: u16) -> Result<Self, RingFormatError> {
        match check_array(rings, count as u64) {
            Ok(()) => Ok(Self { rings, count }),
            Err(error) => Err(error),
        }
    }

    /// Returns the words as stored in memory, the one with `size` second.
    #[inline]
    pub const fn encode(&self) -> [u64; 2] {
        [self.rings.get(), self.count as u64]
    }

    /// Decodes an rDEVICE as the hardware does. Bits above the size field are ignored.
    ///
    /// # Errors
    /// [`RingFormatError::Misaligned`] if the array is misaligned.
    #[inline]
    pub const fn decode([rings, size]: [u64; 2]) -> Result<Self, RingFormatError> {
        match aligned(rings) {
            // 16 bits fit in a `u16`.
            Ok(rings) => Ok(Self {
                rings,
                count: (size & DEVICE_SIZE) as u16,
            }),
            Err(error) => Err(error),
        }
    }

    /// Returns the number of rings.
    #[inline]
    pub const fn count(&self) -> u16 {
        self.count
    }

    /// Returns the address of the rRING of `ring`; `None` if the device has no such ring.
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

/// Checks that an array of 16-byte entries is 16-byte aligned.
const fn aligned(raw: u64) -> Result<PhysAddr, RingFormatError> {
    let at = PhysAddr::new(raw);
    if at.is_aligned(RING_ENTRY_BYTES) {
        Ok(at)
    } else {
        Err(RingFormatError::Misaligned { at })
    }
}

/// Checks that an array of `count` entries at `at` is aligned and ends below 2^64.
const fn check_array(at: PhysAddr, count: u64) -> Result<(), RingFormatError> {
    if let Err(error) = aligned(at.get()) {
        return Err(error);
    }
    if count > 0 && PhysRange::new(at, count.wrapping_mul(RING_ENTRY_BYTES)).is_none() {
        return Err(RingFormatError::TooHigh { at });
    }
    Ok(())
}
