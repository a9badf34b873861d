//! The hardware's walk over memory that an attacker has written: context lookup, then the table.
//!
//! Input: 12 bytes of header (format, page of the root, IOVA, device), then records of memory
//! (`memory.rs`):
//!
//! | bytes | meaning |
//! |---|---|
//! | 0 | bits 0..=1 geometry, 2..=3 largest page, 4..=6 family, 7 through root and context table |
//! | 1 | page where the walk begins; from 16 up outside memory |
//! | 2..=9 | IOVA, little-endian |
//! | 10..=11 | requester ID |
//!
//! | family | geometry |
//! |---|---|
//! | 0: VT-d second stage, Calgary | 3, 4, 5 levels, Calgary |
//! | 1: VT-d first stage | 4 or 5 levels |
//! | 2: AMD-Vi | 3 to 6 levels |
//! | 3: RISC-V first stage, 4: second stage | 3, 4, 5 levels; with 3 levels Svnapot |
//! | 5: Arm stage 1, 6: stage 2 | 4, 16, 64 KiB granule with 48 bits, 4 KiB granule with 39 |
//! | 7 | none |

use std::sync::atomic::Ordering;

use ringfence_pgtable::{
    AmdV1, Arm, CalgaryTce, Context, ContextError, Cursor, FirstStage, Format, Granule, Granule4K,
    Granule16K, Granule64K, Leaf, Level, Levels, RiscV, SecondStage, TranslationType,
    WalkErrorKind, find_context, walk,
};
use ringfence_types::{Access, Iova, PageSize, PhysAddr, PhysMemory, RequesterId};

use crate::OutcomeHook;
use crate::memory::{Memory, PAGE_BYTES};

/// Outcomes that the corpus reaches: every page size and every error.
pub const OUTCOMES: &[&str] = &[
    "leaf 4K",
    "leaf 64K",
    "leaf 2M",
    "leaf 1G",
    "leaf of another size",
    "first stage",
    "AMD-Vi",
    "RISC-V first stage",
    "RISC-V second stage",
    "Arm stage 1",
    "Arm stage 2",
    "pass-through",
    "rings",
    "walk: BeyondWidth",
    "walk: NotPresent",
    "walk: NoPermission",
    "walk: ReservedBit",
    "walk: TableAccess",
    "context: RootNotPresent",
    "context: ContextNotPresent",
    "context: ReservedBit",
    "context: Unsupported",
    "context: TableAccess",
];

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((header, records)) = data.split_first_chunk::<12>() else {
        return;
    };
    let memory = Memory::parse(records);
    let root = PhysAddr::new(u64::from(header[1]) * PAGE_BYTES);
    let iova = Iova::new(u64::from_le_bytes(
        header[2..10].try_into().expect("8 bytes"),
    ));
    let device = RequesterId::new(u16::from_le_bytes([header[10], header[11]]));
    let largest = match header[0] >> 2 & 3 {
        0 => PageSize::Size4K,
        1 => PageSize::Size2M,
        _ => PageSize::Size1G,
    };
    let second_stage = |levels| SecondStage::new(levels).with_pages_up_to(largest);
    let input = Input {
        memory: &memory,
        root,
        iova,
    };

    if header[0] & 0x80 != 0 {
        match find_context(&memory, root, device) {
            Ok(Context {
                translation:
                    TranslationType::Table { root, levels }
                    | TranslationType::DeviceTlb { root, levels, .. },
                ..
            }) => Input { root, ..input }.table(&second_stage(levels), low_bits, reached),
            Ok(Context {
                translation: TranslationType::PassThrough { .. },
                ..
            }) => reached("pass-through"),
            // The target `rtranslate` covers the ring unit.
            Ok(Context {
                translation: TranslationType::Rings { .. },
                ..
            }) => reached("rings"),
            Err(error) => reached(context_error(error)),
        }
        return;
    }
    let geometry = header[0] & 3;
    let levels = match geometry {
        0 => Levels::Three,
        1 => Levels::Four,
        _ => Levels::Five,
    };
    match header[0] >> 4 & 7 {
        0 if geometry == 3 => input.table(&CalgaryTce::FULL, big_endian_low_bits, reached),
        0 => input.table(&second_stage(levels), low_bits, reached),
        1 => {
            let Some(format) = FirstStage::new(levels) else {
                return;
            };
            let format = format.with_pages_up_to(largest);
            input.family(
                "first stage",
                &format,
                |word, _| (word & 1 != 0, word & 2 != 0),
                reached,
            );
        }
        2 => {
            let levels = Level::new(3 + geometry).expect("3 to 6");
            let format = AmdV1::new(levels).with_pages_up_to(largest);
            let permits = |word, _| (word & 1 << 61 != 0, word & 1 << 62 != 0);
            input.family("AMD-Vi", &format, permits, reached);
        }
        3 | 4 => {
            let second = header[0] >> 4 & 7 == 4;
            let format = match second {
                true => RiscV::second_stage(levels),
                false => RiscV::first_stage(levels),
            };
            let format = format.with_pages_up_to(largest);
            let format = if geometry == 0 {
                format.with_napot()
            } else {
                format
            };
            // Table entries have no permissions.
            let permits =
                |word, is_leaf: bool| (!is_leaf || word & 2 != 0, !is_leaf || word & 4 != 0);
            let name = if second {
                "RISC-V second stage"
            } else {
                "RISC-V first stage"
            };
            input.family(name, &format, permits, reached);
        }
        5 | 6 => {
            let stage_2 = header[0] >> 4 & 7 == 6;
            match geometry {
                0 => input.arm::<Granule4K>(48, stage_2, largest, reached),
                1 => input.arm::<Granule16K>(48, stage_2, largest, reached),
                2 => input.arm::<Granule64K>(48, stage_2, largest, reached),
                _ => input.arm::<Granule4K>(39, stage_2, largest, reached),
            }
        }
        _ => {}
    }
}

/// Reads and writes that an entry permits. The flag is true for a leaf.
type Permits = fn(u64, bool) -> (bool, bool);

/// VT-d second stage: bit 0 permits reads and bit 1 writes.
const fn low_bits(word: u64, _: bool) -> (bool, bool) {
    (word & 1 != 0, word & 2 != 0)
}

/// As [`low_bits`]; Calgary's words are big-endian.
const fn big_endian_low_bits(word: u64, is_leaf: bool) -> (bool, bool) {
    low_bits(word.swap_bytes(), is_leaf)
}

/// Memory, and where the walk begins.
struct Input<'a> {
    memory: &'a Memory,
    root: PhysAddr,
    iova: Iova,
}

impl Input<'_> {
    fn arm<G: Granule>(
        &self,
        width: u32,
        stage_2: bool,
        largest: PageSize,
        reached: OutcomeHook<'_>,
    ) {
        let (format, name, permits): (_, _, Permits) = match stage_2 {
            true => (Arm::<G>::stage2(width), "Arm stage 2", |word, is_leaf| {
                (
                    !is_leaf || word & 1 << 6 != 0,
                    !is_leaf || word & 1 << 7 != 0,
                )
            }),
            false => (Arm::<G>::stage1(width), "Arm stage 1", |word, is_leaf| {
                let read_only = if is_leaf { 1 << 7 } else { 1 << 62 };
                let privileged = if is_leaf {
                    word & 1 << 6 == 0
                } else {
                    word & 1 << 61 != 0
                };
                (!privileged, !privileged && word & read_only == 0)
            }),
        };
        let format = format.expect("a width of the format");
        let format = format.with_pages_up_to(largest).with_contiguous_hint();
        self.family(name, &format, permits, reached);
    }

    /// Walks a table, and names the family if the walk found a leaf.
    fn family<F: Format>(
        &self,
        name: &'static str,
        format: &F,
        permits: Permits,
        reached: OutcomeHook<'_>,
    ) {
        self.table(format, permits, &mut |outcome| {
            if outcome.starts_with("leaf") {
                reached(name);
            }
            reached(outcome);
        });
    }

    fn table<F: Format>(&self, format: &F, permits: Permits, reached: OutcomeHook<'_>) {
        let Self { memory, root, iova } = *self;
        let start = Cursor::root(format, root);
        let mut path = vec![start];
        match walk(format, memory, start, iova, |cursor| path.push(cursor)) {
            Ok(leaf) => {
                self.check_leaf(format, permits, &path, &leaf);
                reached(match leaf.page {
                    PageSize::Size4K => "leaf 4K",
                    PageSize::Size64K => "leaf 64K",
                    PageSize::Size2M => "leaf 2M",
                    PageSize::Size1G => "leaf 1G",
                    _ => "leaf of another size",
                });
            }
            Err(error) => {
                let last = path.last().expect("the root");
                assert_eq!(
                    error.level,
                    last.level(),
                    "the error names where the walk ended"
                );
                // Every error has a fault reason.
                let _ = error.kind.fault_reason(Access::Read);
                let _ = error.to_string();
                reached(walk_error(error.kind));
            }
        }
        for pair in path.windows(2) {
            assert!(pair[1].level() < pair[0].level(), "the walk descends");
        }
        assert!(
            path.len() <= usize::from(Level::MAX.get()),
            "the walk is bounded"
        );
        // A walk cache may resume from any table of the path and must give the same result.
        let whole = walk(format, memory, start, iova, |_| {});
        for cursor in path {
            assert_eq!(walk(format, memory, cursor, iova, |_| {}), whole, "resumed");
        }
    }

    /// Checks the invariants of a leaf: it is aligned, and permits no more than each entry on its
    /// path.
    fn check_leaf<F: Format>(&self, format: &F, permits: Permits, path: &[Cursor], leaf: &Leaf) {
        let iova = self.iova;
        assert!(leaf.base.is_aligned(leaf.page.bytes()), "{leaf:?}");
        assert!(leaf.base.get() >> format.physical_bits() == 0, "{leaf:?}");
        assert!(format.translates(iova), "{iova}");
        assert_eq!(
            leaf.translate(iova).offset_in(PAGE_BYTES),
            iova.offset_in(PAGE_BYTES)
        );
        let last = path.len() - 1;
        for (step, cursor) in path.iter().enumerate() {
            let index = format.index(cursor.level(), iova) as u64;
            let at = cursor.table().wrapping_add(index * 8);
            let word = self.memory.word(at).expect("the walk read it");
            let (reads, writes) = permits(word.load(Ordering::Relaxed), step == last);
            for (permitted, access) in [(reads, Access::Read), (writes, Access::Write)] {
                let allowed = leaf.permissions.allows(access);
                assert!(permitted || !allowed, "{access} through {at}");
            }
        }
    }
}

const fn walk_error(kind: WalkErrorKind) -> &'static str {
    match kind {
        WalkErrorKind::BeyondWidth => "walk: BeyondWidth",
        WalkErrorKind::NotPresent => "walk: NotPresent",
        WalkErrorKind::NoPermission => "walk: NoPermission",
        WalkErrorKind::ReservedBit => "walk: ReservedBit",
        WalkErrorKind::TableAccess => "walk: TableAccess",
    }
}

/// A variant added later has no name here, which the corpus test reports.
const fn context_error(error: ContextError) -> &'static str {
    match error {
        ContextError::RootNotPresent => "context: RootNotPresent",
        ContextError::ContextNotPresent => "context: ContextNotPresent",
        ContextError::ReservedBit => "context: ReservedBit",
        ContextError::Unsupported => "context: Unsupported",
        ContextError::TableAccess => "context: TableAccess",
        _ => "context: unknown",
    }
}
