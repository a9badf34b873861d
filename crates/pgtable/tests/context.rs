//! Root and context tables: attach, lookup, rollback, hostile memory.

mod common;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Memory, frames, memory, snapshot};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{
    Coherency, Context, ContextError, ContextTables, Levels, TableError, TranslationType,
    find_context,
};
use ringfence_types::{
    DomainId, FaultReason, MemoryError, PhysAddr, PhysMemory, RequesterId, TABLE_WORDS,
};

fn device(raw: u16) -> RequesterId {
    RequesterId::new(raw)
}

fn context(domain: u16) -> Context {
    Context {
        domain: DomainId::new(domain),
        translation: TranslationType::Table {
            root: PhysAddr::new(0x9000),
            levels: Levels::Four,
        },
    }
}

#[test]
fn attach_and_detach_as_the_device_sees_them() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        let mem = memory();
        let frames = frames(&mem);
        let mut tables = ContextTables::new(coherency, &mem, &frames).expect("frames");
        let root = tables.root();
        let see = |mem: &Memory, device| match coherency {
            Coherency::Coherent => find_context(mem, root, device),
            Coherency::NonCoherent => find_context(mem.device_view(), root, device),
        };
        let devices = [0x0000, 0x00ff, 0x0100, 0xff00, 0xffff].map(device);
        for at in devices {
            assert_eq!(
                see(&mem, at),
                Err(if at.devfn() == 0xff {
                    ContextError::ContextNotPresent
                } else {
                    ContextError::RootNotPresent
                })
            );
            assert_eq!(tables.attach(&mem, &frames, at, &context(at.get())), Ok(()));
            assert_eq!(see(&mem, at), Ok(context(at.get())));
        }
        assert_eq!(
            frames.outstanding(),
            4,
            "the root and a table for each of three buses"
        );
        let replaced = Context {
            translation: TranslationType::PassThrough {
                levels: Levels::Five,
            },
            ..context(9)
        };
        assert_eq!(
            tables.attach(&mem, &frames, device(0xff00), &replaced),
            Ok(())
        );
        assert_eq!(see(&mem, device(0xff00)), Ok(replaced));
        assert_eq!(
            see(&mem, device(0xffff)),
            Ok(context(0xffff)),
            "its neighbour is untouched"
        );
        assert_eq!(tables.detach(&mem, device(0xff00)), Ok(Some(replaced)));
        assert_eq!(
            see(&mem, device(0xff00)),
            Err(ContextError::ContextNotPresent)
        );
        assert_eq!(tables.detach(&mem, device(0xff00)), Ok(None));
        assert_eq!(tables.detach(&mem, device(0x5500)), Ok(None));
        tables.destroy(&mem, &frames);
        assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
    }
}

/// Real hardware may accept an entry that this model rejects, so a detach must clear it too.
#[test]
fn detach_clears_malformed_entries() {
    let at = device(0x0102);
    for (low, high, error) in [
        (0x9011, 0x102, ContextError::ReservedBit),
        (0x9001, 1 << 63 | 0x102, ContextError::ReservedBit),
        (0x9001, 0x107, ContextError::Unsupported),
        // TT = 11b with a width: neither a table nor rings.
        (0x900d, 0x102, ContextError::Unsupported),
        (u64::MAX, u64::MAX, ContextError::ReservedBit),
    ] {
        let mem = memory();
        let frames = frames(&mem);
        let mut tables = ContextTables::new(Coherency::NonCoherent, &mem, &frames).expect("frames");
        assert_eq!(tables.attach(&mem, &frames, at, &context(1)), Ok(()));
        let root_entry = mem.word(tables.root().wrapping_add(16)).expect("inside");
        let table = root_entry.load(Ordering::Relaxed) & !0xfff;
        let entry = PhysAddr::new(table + 2 * 16);
        for words in [&mem as &dyn PhysMemory, mem.device_view()] {
            let words = words.words(entry, 2).expect("inside");
            words[0].store(low, Ordering::Relaxed);
            words[1].store(high, Ordering::Relaxed);
        }
        let seen = find_context(mem.device_view(), tables.root(), at);
        assert_eq!(seen, Err(error));
        let detached = tables.detach(&mem, at);
        let seen = mem.device_view().words(entry, 2).expect("inside");
        let seen: Vec<u64> = seen
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        assert_eq!(seen, [0, 0], "{low:#x} {high:#x}: {detached:?}");
        assert_eq!(detached, Ok(None));
    }
}

/// A detach that cannot reach the entry says so.
#[test]
fn detach_below_a_malformed_root_entry_fails() {
    let mem = memory();
    let frames = frames(&mem);
    let at = device(0x0102);
    for (low, error) in [
        (0x3, ContextError::ReservedBit),
        (0xffff_f000_0000_0001, ContextError::TableAccess),
    ] {
        let mut tables = ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");
        let root_entry = mem.word(tables.root().wrapping_add(16)).expect("inside");
        root_entry.store(low, Ordering::Relaxed);
        let before = snapshot(&mem);
        assert_eq!(tables.detach(&mem, at), Err(error));
        assert_eq!(snapshot(&mem), before);
    }
}

#[test]
fn without_frames_nothing_changes() {
    let mem = memory();
    let frames = frames(&mem);
    frames.fail_after(0);
    let none = ContextTables::new(Coherency::Coherent, &mem, &frames).err();
    assert_eq!(none, Some(TableError::OutOfFrames));
    frames.recover();
    let mut tables = ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");
    let before = snapshot(&mem);
    frames.fail_after(0);
    let refused = tables.attach(&mem, &frames, device(3), &context(1));
    assert_eq!(refused, Err(TableError::OutOfFrames));
    assert_eq!(snapshot(&mem), before);
    assert_eq!(frames.outstanding(), 1);
}

#[test]
fn a_reader_never_sees_a_mixture() {
    let mem = memory();
    let frames = frames(&mem);
    let mut tables = ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");
    let mixed = |tag: u16| Context {
        domain: DomainId::new(tag),
        translation: TranslationType::Table {
            root: PhysAddr::new(u64::from(tag) << 12),
            levels: Levels::Four,
        },
    };
    tables
        .attach(&mem, &frames, device(0), &mixed(1))
        .expect("frames");
    let root = tables.root();
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match find_context(&mem, root, device(0)) {
                    Ok(context) => {
                        let tag = context.domain.get();
                        assert_eq!(context, mixed(tag), "low and high word of two contexts");
                    }
                    Err(error) => assert_eq!(error, ContextError::ContextNotPresent),
                }
                reads.fetch_add(1, Ordering::Release);
            }
        });
        for turn in 0..2_000 {
            tables
                .attach(&mem, &frames, device(0), &mixed(1 + turn % 7))
                .expect("frames");
            // Wait as for an invalidation: no read may span two refills of an entry.
            let read = reads.load(Ordering::Relaxed);
            while reads.load(Ordering::Acquire) == read && !reader.is_finished() {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(reader.join().is_ok(), "a mixture was seen");
    });
}

/// Memory that lets the device read before each access to a word.
struct Watched<'m> {
    inner: &'m Memory,
    look: &'m dyn Fn(),
}

impl PhysMemory for Watched<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        (self.look)();
        self.inner.word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        (self.look)();
        self.inner.table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        (self.look)();
        self.inner.words(at, count)
    }
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        (self.look)();
        self.inner.write_back(at, bytes);
    }
    fn drain(&self) {
        (self.look)();
        self.inner.drain();
    }
}

#[test]
fn device_sees_old_no_or_new_entry_between_stores() {
    let mem = memory();
    let frames = frames(&mem);
    let mut tables = ContextTables::new(Coherency::Coherent, &mem, &frames).expect("frames");
    let root = tables.root();
    let device = device(0x0304);
    let (old, new) = (
        context(1),
        Context {
            domain: DomainId::new(2),
            translation: TranslationType::Table {
                root: PhysAddr::new(0xa000),
                levels: Levels::Three,
            },
        },
    );
    let looks = Cell::new(0);
    let look = || {
        let seen = find_context(&mem, root, device).ok();
        assert!([None, Some(old), Some(new)].contains(&seen), "{seen:?}");
        looks.set(looks.get() + 1);
    };
    let watched = Watched {
        inner: &mem,
        look: &look,
    };
    assert_eq!(tables.attach(&watched, &frames, device, &old), Ok(()));
    assert_eq!(tables.attach(&watched, &frames, device, &new), Ok(()));
    assert_eq!(tables.detach(&watched, device), Ok(Some(new)));
    assert!(looks.get() > 10);
}

#[test]
fn valid_root_entries() {
    let mut mem = SparseMemory::new();
    let (root, table) = (PhysAddr::new(0x1000), 0x2000);
    mem.add(root);
    mem.add(PhysAddr::new(table));
    let at = device(0x0102);
    let root_entry = PhysAddr::new(0x1010);
    let cases = [
        (
            [0, 0],
            ContextError::RootNotPresent,
            FaultReason::RootNotPresent,
        ),
        (
            [0xffff_fffe, !0],
            ContextError::RootNotPresent,
            FaultReason::RootNotPresent,
        ),
        (
            [table | 1, 0],
            ContextError::ContextNotPresent,
            FaultReason::ContextNotPresent,
        ),
        (
            [table | 3, 0],
            ContextError::ReservedBit,
            FaultReason::ReservedBit,
        ),
        (
            [table | 0x801, 0],
            ContextError::ReservedBit,
            FaultReason::ReservedBit,
        ),
        (
            [table | 1, 1],
            ContextError::ReservedBit,
            FaultReason::ReservedBit,
        ),
        (
            [0xffff_f000_0000_0001, 0],
            ContextError::TableAccess,
            FaultReason::TableAccess,
        ),
        (
            [u64::MAX << 12 | 1, 0],
            ContextError::TableAccess,
            FaultReason::TableAccess,
        ),
    ];
    for ([low, high], error, reason) in cases {
        mem.set(root_entry, low);
        mem.set(PhysAddr::new(0x1018), high);
        assert_eq!(
            find_context(&mem, root, at),
            Err(error),
            "{low:#x} {high:#x}"
        );
        assert_eq!(error.fault_reason(), reason);
    }
    assert_eq!(
        find_context(&mem, PhysAddr::new(0x7000), at),
        Err(ContextError::TableAccess)
    );
    assert_eq!(
        find_context(&mem, PhysAddr::new(1), at),
        Err(ContextError::TableAccess)
    );
    assert_eq!(
        find_context(&mem, PhysAddr::new(u64::MAX), at),
        Err(ContextError::TableAccess)
    );
    // The root table serves as its own context table. The lookup decodes its entries as context
    // entries and terminates.
    mem.set(root_entry, 0x1001);
    mem.set(PhysAddr::new(0x1018), 0);
    mem.set(PhysAddr::new(0x1020), 0x5001);
    mem.set(PhysAddr::new(0x1028), 0x302);
    assert!(find_context(&mem, root, at).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0xc0),
        ..ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn any_words_decode_or_are_refused(low: u64, high: u64, root: u64, at: u16) {
        if let Ok(context) = Context::decode([low, high]) {
            // Decoding keeps every bit except FPD and the available bits.
            let [low_again, high_again] = context.encode();
            let low_kept = match context.translation {
                TranslationType::Table { .. }
                | TranslationType::DeviceTlb { .. }
                | TranslationType::Rings { .. } => low & !2,
                TranslationType::PassThrough { .. } => low & 0xd,
            };
            prop_assert_eq!([low_again, high_again], [low_kept, high & !0x78]);
        }
        let mut mem = SparseMemory::new();
        mem.set(PhysAddr::new(root & !0xfff), low);
        let _ = find_context(&mem, PhysAddr::new(root), device(at));
        prop_assert!(mem.word(PhysAddr::new(root & !0xfff)).is_ok());
    }
}
