//! Concurrent changes of one table: chosen interleavings, and threads.

mod common;

use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use common::{DOMAIN, Memory, Source, flushed, frames, memory, page, range};
use ringfence_pgtable::{
    Coherency, Cursor, Levels, MapRequest, SecondStage, Table, UnmapError, walk,
};
use ringfence_types::{
    FrameSource, MemoryError, OutOfFrames, Permissions, PhysAddr, PhysMemory, TABLE_WORDS,
};

const FORMAT: SecondStage = SecondStage::new(Levels::Four);

fn request(first: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: page(first),
        pa: PhysAddr::new(first << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

/// Runs another CPU's operation at the `at`th use of memory or of the frame source.
struct Interleaved<'a, T> {
    inner: T,
    calls: &'a Cell<u32>,
    at: u32,
    other: &'a dyn Fn(),
}

impl<T> Interleaved<'_, T> {
    fn step(&self) {
        let call = self.calls.get();
        self.calls.set(call + 1);
        if call == self.at {
            (self.other)();
        }
    }
}

impl PhysMemory for Interleaved<'_, &Memory> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.step();
        self.inner.word(at)
    }
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.step();
        self.inner.table(at)
    }
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.step();
        self.inner.words(at, count)
    }
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        self.step();
        self.inner.write_back(at, bytes);
    }
    fn drain(&self) {
        self.step();
        self.inner.drain();
    }
}

impl FrameSource for Interleaved<'_, &Source<'_>> {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.step();
        self.inner.alloc_zeroed()
    }
    fn free(&self, frame: PhysAddr) {
        self.step();
        self.inner.free(frame);
    }
}

/// One CPU maps `own_range`. In each run, another CPU maps `other_range` at a different step of the
/// first.
fn interleave(coherency: Coherency, own_range: (u64, u64), other_range: (u64, u64)) -> u32 {
    let mut lost = 0;
    for at in 0.. {
        let mem = memory();
        let frames = frames(&mem);
        let table = Table::new(FORMAT, DOMAIN, coherency, &mem, &frames).expect("frames");
        let ran = Cell::new(false);
        let other = || {
            let map = request(other_range.0, other_range.1);
            assert_eq!(table.map(&mem, &frames, map), Ok(()));
            // The other CPU may give this address to its device now, so the mapping must be
            // complete regardless of the first CPU's progress.
            assert!(found(&mem, &table, coherency, other_range), "step {at}");
            ran.set(true);
        };
        let calls = Cell::new(0);
        let outer = Interleaved {
            inner: &mem,
            calls: &calls,
            at,
            other: &other,
        };
        let source = Interleaved {
            inner: &frames,
            calls: &calls,
            at,
            other: &other,
        };
        let requests = frames.requests();
        assert_eq!(
            table.map(&outer, &source, request(own_range.0, own_range.1)),
            Ok(()),
            "step {at}"
        );
        if !ran.get() {
            assert!(at > 5, "there were steps to interleave with");
            return lost;
        }
        assert!(found(&mem, &table, coherency, own_range), "step {at}");
        assert!(found(&mem, &table, coherency, other_range), "step {at}");
        let linked = table.table_bytes() / 4096;
        assert_eq!(
            frames.outstanding() as u64,
            linked,
            "a loser's frame goes back"
        );
        lost += u32::from(frames.requests() - requests > linked - 1);
        for (first, pages) in [own_range, other_range] {
            assert!(table.unmap(&mem, range(first, pages)).is_ok());
        }
        assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
        assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
    }
    lost
}

fn found(
    mem: &Memory,
    table: &Table<SecondStage>,
    coherency: Coherency,
    (first, pages): (u64, u64),
) -> bool {
    (first..first + pages).all(|pfn| {
        let start = Cursor::root(&FORMAT, table.root());
        let leaf = match coherency {
            Coherency::Coherent => walk(&FORMAT, mem, start, page(pfn), |_| {}),
            Coherency::NonCoherent => walk(&FORMAT, mem.device_view(), start, page(pfn), |_| {}),
        };
        leaf.is_ok_and(|leaf| leaf.base == request(pfn, 1).pa)
    })
}

#[test]
fn two_mappers_in_every_interleaving_of_their_steps() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        // The same leaf table, neighbours under one directory and one root entry, and a range over
        // three tables: both CPUs need the same new tables. Under another root entry they share no
        // table.
        let cases = [
            ((8, 1), true),
            ((512, 1), true),
            ((1 << 18, 1), true),
            ((500, 600), true),
            ((1 << 27, 1), false),
        ];
        for (other_range, shared) in cases {
            let lost = interleave(coherency, (7, 1), other_range);
            assert_eq!(
                lost > 0,
                shared,
                "{coherency:?} {other_range:?}: superfluous frames"
            );
        }
        interleave(coherency, (100, 1300), (1400, 700));
    }
}

#[test]
fn threads_share_the_path() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        let mem = memory();
        let frames = frames(&mem);
        let table = Table::new(FORMAT, DOMAIN, coherency, &mem, &frames).expect("frames");
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let (table, mem, frames) = (&table, &mem, &frames);
                scope.spawn(move || {
                    let mut cache = table.leaf_cache();
                    for round in 0..600_u64 {
                        // All threads need the same new tables at about the same time.
                        let first = round % 150 * 512 + thread * 160;
                        let pages = 1 + round % 150;
                        let map = request(first, pages);
                        let unmapped = if round % 2 == 0 {
                            assert_eq!(table.map(mem, frames, map), Ok(()));
                            assert!(found(mem, table, coherency, (first, pages)));
                            table.unmap(mem, range(first, pages))
                        } else {
                            assert_eq!(cache.map(table, mem, frames, map), Ok(()));
                            assert!(found(mem, table, coherency, (first, pages)));
                            cache.unmap(table, mem, range(first, pages))
                        };
                        assert!(unmapped.is_ok());
                        let again = table.unmap(mem, range(first, pages)).err();
                        assert_eq!(again, Some(UnmapError::NotMapped { iova: page(first) }));
                    }
                });
            }
        });
        assert_eq!(frames.outstanding() as u64, table.table_bytes() / 4096);
        assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
        assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
    }
}
