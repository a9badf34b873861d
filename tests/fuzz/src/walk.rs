//! The hardware's walk over memory that an attacker has written: context lookup, then the table.
//!
//! Input: 12 bytes of header (format, page of the root, IOVA, device), then records of memory
//! (`memory.rs`):
//!
//! | bytes | meaning |
//! |---|---|
//! | 0 | bits 0..=1 format, 2..=3 largest page, 7 through root and context table |
//! | 1 | page where the walk begins; from 16 up outside memory |
//! | 2..=9 | IOVA, little-endian |
//! | 10..=11 | requester ID |

use std::sync::atomic::Ordering;

use ringfence_pgtable::{
    CalgaryTce, Context, ContextError, Cursor, Format, Leaf, Level, Levels, SecondStage,
    TranslationType, WalkErrorKind, find_context, walk,
};
use ringfence_types::{Access, Iova, PageSize, PhysAddr, PhysMemory, RequesterId};

use crate::OutcomeHook;
use crate::memory::{Memory, PAGE_BYTES};

/// Outcomes that the corpus reaches: every page size and every error.
pub const OUTCOMES: &[&str] = &[
    "leaf 4K",
    "leaf 2M",
    "leaf 1G",
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

    if header[0] & 0x80 != 0 {
        match find_context(&memory, root, device) {
            Ok(Context {
                translation:
                    TranslationType::Table { root, levels }
                    | TranslationType::DeviceTlb { root, levels, .. },
                ..
            }) => table(&second_stage(levels), &memory, root, iova, reached),
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
    match header[0] & 3 {
        0 => table(&second_stage(Levels::Three), &memory, root, iova, reached),
        1 => table(&second_stage(Levels::Four), &memory, root, iova, reached),
        2 => table(&second_stage(Levels::Five), &memory, root, iova, reached),
        _ => table(&CalgaryTce::FULL, &memory, root, iova, reached),
    }
}

fn table<F: Format>(
    format: &F,
    memory: &Memory,
    root: PhysAddr,
    iova: Iova,
    reached: OutcomeHook<'_>,
) {
    let start = Cursor::root(format, root);
    let mut path = vec![start];
    match walk(format, memory, start, iova, |cursor| path.push(cursor)) {
        Ok(leaf) => {
            check_leaf(format, memory, &path, iova, &leaf);
            reached(match leaf.page {
                PageSize::Size4K => "leaf 4K",
                PageSize::Size64K => "leaf 64K",
                PageSize::Size2M => "leaf 2M",
                PageSize::Size1G => "leaf 1G",
                other => panic!("no leaf of {other}"),
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
        assert_eq!(
            Some(pair[1].level()),
            pair[0].level().below(),
            "the walk sinks by one"
        );
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

/// Checks the invariants of a leaf: it is aligned, and permits no more than each entry on its path.
fn check_leaf<F: Format>(format: &F, memory: &Memory, path: &[Cursor], iova: Iova, leaf: &Leaf) {
    assert!(leaf.base.is_aligned(leaf.page.bytes()), "{leaf:?}");
    assert!(leaf.base.get() >> format.physical_bits() == 0, "{leaf:?}");
    assert!(iova.get() >> format.width() == 0, "{iova}");
    assert_eq!(
        leaf.translate(iova).offset_in(PAGE_BYTES),
        iova.offset_in(PAGE_BYTES)
    );
    for cursor in path {
        let index = format.index(cursor.level(), iova) as u64;
        let at = cursor.table().wrapping_add(index * 8);
        let word = memory
            .word(at)
            .expect("the walk read it")
            .load(Ordering::Relaxed);
        // In both formats bit 0 permits reads and bit 1 writes. (Calgary's words are big-endian.)
        let word = if format.width() == CalgaryTce::FULL.width() {
            word.swap_bytes()
        } else {
            word
        };
        assert!(
            word & 1 != 0 || !leaf.permissions.allows(Access::Read),
            "read through {at}"
        );
        assert!(
            word & 2 != 0 || !leaf.permissions.allows(Access::Write),
            "write through {at}"
        );
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
