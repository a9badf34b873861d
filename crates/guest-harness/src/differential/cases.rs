//! Random accesses, allowed and forbidden ones close to each other.

use ringfence_types::{Access, Iova, IovaRange};

use super::shadow_iommu::QemuMapping;

const PAGE_BYTES: u64 = 4096;
/// Longest access in bytes.
const MAX_BYTES: u64 = 4096;
/// Addresses whose writes are interrupts, not DMA.
const DOORBELLS: std::ops::RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// Deterministic random numbers for a seed (SplitMix64: Steele, Lea and Flood, OOPSLA 2014).
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let count = u64::try_from(of.len()).unwrap_or(0);
        of.get(usize::try_from(self.below(count)).ok()?).copied()
    }
}

/// An access to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) access: Access,
    pub(super) range: IovaRange,
    /// Name of the case's kind.
    pub(super) kind: &'static str,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            access,
            range,
            kind,
        } = self;
        let (start, bytes) = (range.start(), range.bytes());
        write!(f, "{access} of {bytes} bytes at {start} ({kind})")
    }
}

/// Returns the next case, chosen among live and past mappings.
pub(super) fn next(random: &mut Random, live: &[QemuMapping], past: &[IovaRange]) -> Case {
    loop {
        if let Some(case) = candidate(random, live, past) {
            return case;
        }
    }
}

fn candidate(random: &mut Random, live: &[QemuMapping], past: &[IovaRange]) -> Option<Case> {
    let access = if random.below(2) == 0 {
        Access::Read
    } else {
        Access::Write
    };
    let most = random.one_of(&[8, 512, MAX_BYTES])?;
    let bytes = 1 + random.below(most);
    let (kind, start, bytes) = match random.below(10) {
        0..=3 => {
            let range = random.one_of(live)?.range;
            let bytes = bytes.min(range.bytes());
            let room = range.bytes() - bytes;
            let start = range.start().get() + random.below(room.saturating_add(1));
            ("inside", start, bytes)
        }
        4 => {
            let mapping = random.one_of(live).filter(|mapping| !mapping.writable)?;
            (
                "read-only",
                mapping.range.start().get(),
                bytes.min(PAGE_BYTES),
            )
        }
        5 => {
            let end = random.one_of(live)?.range.last().get();
            let before = random.below(bytes);
            ("over the end", end.checked_sub(before)?, bytes)
        }
        6 => {
            let start = random.one_of(live)?.range.start().get();
            (
                "over the beginning",
                start.checked_sub(1 + random.below(bytes))?,
                bytes,
            )
        }
        7 => (
            "unmapped",
            random.one_of(past)?.start().get(),
            bytes.min(PAGE_BYTES),
        ),
        8 => {
            let top = 1u64 << 32;
            ("near", top - PAGE_BYTES - random.below(1 << 24), bytes)
        }
        _ => {
            // Addresses of all magnitudes.
            let shift = random.below(64);
            ("anywhere", random.next() >> shift, bytes)
        }
    };
    let range = IovaRange::new(Iova::new(start), bytes)?;
    let interrupts = *DOORBELLS.start() <= range.last().get() && start <= *DOORBELLS.end();
    (!interrupts).then_some(Case {
        access,
        range,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_access_occurs_and_none_is_an_interrupt() {
        let mapping = |start, writable| QemuMapping {
            range: IovaRange::new(Iova::new(start), PAGE_BYTES).unwrap(),
            writable,
        };
        let live = [mapping(0xffff_f000, true), mapping(0xffff_d000, false)];
        let past = [mapping(0xffff_0000, true).range];
        let mut random = Random::new(7);
        let mut kinds = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            let case = next(&mut random, &live, &past);
            assert!(case.range.bytes() <= MAX_BYTES, "{case}");
            assert!(!DOORBELLS.contains(&case.range.last().get()), "{case}");
            kinds.insert(case.kind);
        }
        assert_eq!(kinds.len(), 7, "{kinds:?}");
        assert_eq!(
            next(&mut Random::new(7), &live, &past),
            next(&mut Random::new(7), &live, &past)
        );
    }
}
