//! The PASID-table entry (VT-d specification, "Scalable-Mode PASID Table Entry").

use ringfence_pgtable::{Coherency, Levels};
use ringfence_types::DomainId;

use crate::attachment::Translation;

/// P, in word 0.
pub(crate) const PRESENT: u64 = 1;
/// Address of a table or root, in all entries of scalable mode.
pub(crate) const POINTER: u64 = 0xffff_ffff_ffff_f000;
/// AW, bits 4:2 of word 0: depth of the second stage.
const AW: u32 = 2;
/// PGTT, bits 8:6 of word 0.
const PGTT: u32 = 6;
const PGTT_FIRST: u64 = 0b001;
const PGTT_SECOND: u64 = 0b010;
const PGTT_PASS_THROUGH: u64 = 0b100;
/// PWSNP, bit 87: the walk snoops. Reserved without SMPWCS.
const PWSNP: u64 = 1 << 23;
/// PGSNP, bit 88: accesses snoop whatever the device requests. Reserved without SC.
const PGSNP: u64 = 1 << 24;
/// FSPM, bits 131:130: 01b for five levels of the first stage.
const FIVE_LEVELS: u64 = 0b01 << 2;

/// Words of an entry.
pub(crate) const WORDS: usize = 8;

/// Encodes the entry of a PASID. `deepest` is the depth of second-stage tables that AW names where
/// the specification ignores it.
///
/// QEMU checks addresses of the first stage against AW, which the specification defines for the
/// second stage only. AW therefore always has a value.
///
/// Leaves of the first stage have no bit that forces snooping. With `snoop_control` the entry has:
/// an access that bypassed the CPU caches could read what a page held before it was cleared.
pub(crate) const fn entry(
    domain: DomainId,
    translation: Translation,
    deepest: Levels,
    coherency: Coherency,
    snoop_control: bool,
) -> [u64; WORDS] {
    let (word0, first) = match translation {
        Translation::FirstStage { root, levels } => {
            let mode = match levels {
                Levels::Three | Levels::Four => 0,
                Levels::Five => FIVE_LEVELS,
            };
            let word0 = PGTT_FIRST << PGTT | address_width(deepest) << AW;
            (word0, mode | root.get() & POINTER)
        }
        Translation::SecondStage { root, levels } => {
            let word0 = PGTT_SECOND << PGTT | address_width(levels) << AW;
            (word0 | root.get() & POINTER, 0)
        }
        Translation::PassThrough => (PGTT_PASS_THROUGH << PGTT | address_width(deepest) << AW, 0),
    };
    let snoop = match coherency {
        Coherency::Coherent => PWSNP,
        Coherency::NonCoherent => 0,
    };
    let forced = match translation {
        Translation::FirstStage { .. } if snoop_control => PGSNP,
        _ => 0,
    };
    let word1 = domain.get() as u64 | snoop | forced;
    [word0 | PRESENT, word1, first, 0, 0, 0, 0, 0]
}

const fn address_width(levels: Levels) -> u64 {
    match levels {
        Levels::Three => 0b001,
        Levels::Four => 0b010,
        Levels::Five => 0b011,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::PhysAddr;

    #[test]
    fn golden_entries() {
        let root = PhysAddr::new(0x1_2345_6000);
        let first = |levels| Translation::FirstStage { root, levels };
        let second = |levels| Translation::SecondStage { root, levels };
        let (coherent, other) = (Coherency::Coherent, Coherency::NonCoherent);
        for (translation, coherency, words) in [
            (first(Levels::Four), other, [0x49, 0xbeef, 0x1_2345_6000]),
            (
                first(Levels::Five),
                coherent,
                [0x49, 0x80_beef, 0x1_2345_6004],
            ),
            (second(Levels::Three), other, [0x1_2345_6085, 0xbeef, 0]),
            (
                second(Levels::Four),
                coherent,
                [0x1_2345_6089, 0x80_beef, 0],
            ),
            (second(Levels::Five), other, [0x1_2345_608d, 0xbeef, 0]),
            (Translation::PassThrough, other, [0x109, 0xbeef, 0]),
        ] {
            let [a, b, c, rest @ ..] = entry(
                DomainId::new(0xbeef),
                translation,
                Levels::Four,
                coherency,
                false,
            );
            assert_eq!([a, b, c], words, "{translation:?}");
            assert_eq!(rest, [0; 5]);
            let forced = entry(
                DomainId::new(0xbeef),
                translation,
                Levels::Four,
                coherency,
                true,
            );
            let is_first = matches!(translation, Translation::FirstStage { .. });
            assert_eq!(
                forced[1],
                words[1] | u64::from(is_first) << 24,
                "{translation:?}"
            );
        }
    }
}
