//! The PASID table entry of VT-d scalable mode, which selects one or two stages of translation
//! (VT-d specification, section 9.6 "Scalable-Mode PASID Table Entry").

use core::sync::atomic::Ordering;

use ringfence_types::{DomainId, GuestPhysAddr, PhysAddr, PhysMemory};

use crate::{ContextError, Levels};

/// Words of an entry; this module uses the first three.
const WORDS: usize = 8;
/// P: present.
const PRESENT: u64 = 1;
/// AW, bits 2..=4 of word 0: depth of the second stage.
const AW_SHIFT: u32 = 2;
/// PGTT, bits 6..=8 of word 0: PASID granular translation type.
const PGTT_SHIFT: u32 = 6;
const PGTT: u64 = 0b111 << PGTT_SHIFT;
const PGTT_NESTED: u64 = 0b011 << PGTT_SHIFT;
/// SLPTPTR (word 0) and FLPTPTR (word 2).
const POINTER: u64 = 0xffff_ffff_ffff_f000;
/// DID, bits 0..=15 of word 1.
const DID: u64 = 0xffff;
/// FLPM, bits 2..=3 of word 2: 0 for four levels, 1 for five.
const FLPM_SHIFT: u32 = 2;

/// An entry for nested translation (PGTT = 011b).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NestedEntry {
    /// Domain-id of the second stage, the tag of cached translations.
    pub domain: DomainId,
    /// Guest-physical address of the first-stage root (FLPTPTR).
    pub first_root: GuestPhysAddr,
    /// Depth of the first stage, four or five (FLPM).
    pub first_levels: Levels,
    /// Physical address of the second-stage root (SLPTPTR).
    pub second_root: PhysAddr,
    /// Depth of the second stage (AW).
    pub second_levels: Levels,
}

impl NestedEntry {
    /// Bytes of an entry.
    pub const BYTES: u64 = 8 * WORDS as u64;

    /// Encodes the words of the entry.
    pub const fn encode(&self) -> [u64; WORDS] {
        let aw = match self.second_levels {
            Levels::Three => 0b001,
            Levels::Four => 0b010,
            Levels::Five => 0b011,
        };
        let flpm = match self.first_levels {
            Levels::Three | Levels::Four => 0,
            Levels::Five => 1,
        };
        [
            PRESENT | aw << AW_SHIFT | PGTT_NESTED | self.second_root.get() & POINTER,
            self.domain.get() as u64,
            flpm << FLPM_SHIFT | self.first_root.get() & POINTER,
            0,
            0,
            0,
            0,
            0,
        ]
    }

    /// Decodes an entry as the hardware does.
    ///
    /// # Errors
    /// [`ContextError`] if the entry is not present or selects another type or an unsupported
    /// depth.
    pub const fn decode([first, second, third]: [u64; 3]) -> Result<Self, ContextError> {
        if first & PRESENT == 0 {
            return Err(ContextError::ContextNotPresent);
        }
        if first & PGTT != PGTT_NESTED {
            return Err(ContextError::Unsupported);
        }
        let second_levels = match first >> AW_SHIFT & 0b111 {
            0b001 => Levels::Three,
            0b010 => Levels::Four,
            0b011 => Levels::Five,
            _ => return Err(ContextError::Unsupported),
        };
        let first_levels = match third >> FLPM_SHIFT & 0b11 {
            0 => Levels::Four,
            1 => Levels::Five,
            _ => return Err(ContextError::Unsupported),
        };
        Ok(Self {
            domain: DomainId::new((second & DID) as u16),
            first_root: GuestPhysAddr::new(third & POINTER),
            first_levels,
            second_root: PhysAddr::new(first & POINTER),
            second_levels,
        })
    }

    /// Reads the entry at `at`. The writer must make it not present before a change and invalidate
    /// the unit's caches.
    ///
    /// # Errors
    /// As for [`decode`](Self::decode), and [`ContextError::TableAccess`] if the entry lies outside
    /// memory.
    pub fn read<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr) -> Result<Self, ContextError> {
        let words = mem
            .words(at, WORDS)
            .map_err(|_| ContextError::TableAccess)?;
        let [first, second, third, ..] = words else {
            return Err(ContextError::TableAccess);
        };
        Self::decode([
            first.load(Ordering::Acquire),
            second.load(Ordering::Acquire),
            third.load(Ordering::Acquire),
        ])
    }

    /// Writes the entry to `at`; its first word last.
    ///
    /// # Errors
    /// [`ContextError::TableAccess`] if the entry lies outside memory.
    pub fn write<M: PhysMemory + ?Sized>(&self, mem: &M, at: PhysAddr) -> Result<(), ContextError> {
        let words = mem
            .words(at, WORDS)
            .map_err(|_| ContextError::TableAccess)?;
        for (word, raw) in words.iter().zip(self.encode()).rev() {
            word.store(raw, Ordering::Release);
        }
        mem.write_back(at, Self::BYTES);
        mem.drain();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bits() {
        let entry = NestedEntry {
            domain: DomainId::new(0xbeef),
            first_root: GuestPhysAddr::new(0x7000),
            first_levels: Levels::Five,
            second_root: PhysAddr::new(0x1_2345_6000),
            second_levels: Levels::Four,
        };
        let [first, second, third, rest @ ..] = entry.encode();
        let words = [first, second, third];
        assert_eq!(words, [0x1_2345_60c9, 0xbeef, 0x7004]);
        assert_eq!(rest, [0; 5]);
        assert_eq!(NestedEntry::decode(words), Ok(entry));
        for (words, error) in [
            ([first & !1, second, third], ContextError::ContextNotPresent),
            // PGTT = 001b, 010b, 100b and 111b.
            (
                [first & !0x1c0 | 0x40, second, third],
                ContextError::Unsupported,
            ),
            (
                [first & !0x1c0 | 0x80, second, third],
                ContextError::Unsupported,
            ),
            ([first | 0x100, second, third], ContextError::Unsupported),
            ([first & !0x1c, second, third], ContextError::Unsupported),
            ([first, second, third | 0x8], ContextError::Unsupported),
        ] {
            assert_eq!(NestedEntry::decode(words), Err(error), "{words:x?}");
        }
    }
}
