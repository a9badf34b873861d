//! Bitmaps shared by CPUs under shuttle's schedules. While one CPU flushes for addresses, others
//! may allocate the released ones; every map succeeds nevertheless.
// The coroutines of shuttle do not exist for s390x.
#![cfg(not(target_arch = "s390x"))]

#[path = "support/machine.rs"]
mod machine;

use machine::{Port, Processor, shuttled};
use ringfence_dma::flush::PerWrap;
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Dma, ReleasedStale};
use ringfence_iova::Bitmap;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{Direction, Iova, Nanos, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId};
use shuttle::sync::Arc;
use shuttle::thread;

const PAGE: u64 = 4096;
const PROCESSORS: u64 = 3;

/// There are as many addresses as CPUs, and each CPU holds one at a time. A CPU that retries often
/// enough always finds one.
fn run() {
    let hardware = Port(std::sync::Arc::default());
    let arena = std::sync::Arc::new(Arena::new(64 * PAGE).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, 64 * PAGE).unwrap();
    let frames = std::sync::Arc::new(Frames::new(std::sync::Arc::clone(&arena), region));
    let mut dma = Dma::<_, _, u64>::new(PerWrap);
    let at = dma
        .attach(RequesterId::new(1), Iova::new(u64::MAX), |domain| {
            let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(PROCESSORS)).unwrap();
            let bitmap = Bitmap::new(space, shuttled).unwrap();
            let format = SecondStage::new(Levels::Three);
            let table = Table::new(format, domain, Coherency::Coherent, &*arena, &*frames);
            let table = PlainTable(table.unwrap());
            Ok::<_, ()>(Paged::new(bitmap, table, Rounding::Exact))
        })
        .unwrap();
    let dma = Arc::new(dma);
    let workers: Vec<_> = (0..PROCESSORS)
        .map(|worker| {
            let dma = Arc::clone(&dma);
            let mut board = Processor {
                arena: arena.clone(),
                frames: frames.clone(),
                port: hardware.clone(),
                now: Nanos(0),
            };
            let mut cpu = dma.cpu();
            thread::spawn(move || {
                for turn in 0..4 {
                    let memory = PhysRange::new(PhysAddr::new(worker * PAGE), PAGE).unwrap();
                    let both = Direction::Bidirectional;
                    let (mapping, _) = dma
                        .map_single(&mut cpu, &mut board, &at, turn, memory, both)
                        .unwrap_or_else(|(_, error)| panic!("{error}"));
                    let ReleasedStale(back) = dma
                        .unmap_single(&mut cpu, &mut board, &at, mapping)
                        .unwrap();
                    assert_eq!(back, turn);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn there_is_an_address_for_everyone() {
    shuttle::check_random(run, 3000);
    shuttle::check_pct(run, 2000, 3);
}
