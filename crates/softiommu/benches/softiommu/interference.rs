//! Interference between two threads: two readers, or a reader and unmap. Each thread is pinned to
//! its own CPU.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use ringfence_softiommu::Reader;
use ringfence_types::{Access, Permissions, PhysAddr};
use vm_memory::GuestMemoryMmap;

use crate::ACCESSES;
use crate::clock::quantile;
use crate::interleaved::{run, side};
use crate::processors::Processor;
use crate::unit::{DISK, DOMAIN, PAGE, addresses, again, eight, page, pages_of, unit};

/// Going online from the idle state: a `membarrier`, whose cost depends on the other running
/// threads.
pub(crate) fn waking(samples: usize, other: Processor) {
    let mut unit = unit(1);
    let mut reader = unit.reader(DISK).expect("room");
    let mut domain = unit.domain(DOMAIN).expect("there");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for title in ["no other thread runs", "another thread runs"] {
            let mut nanos: Vec<f64> = (0..samples)
                .map(|_| {
                    // More operations than it takes to go idle.
                    for _ in 0..2 * ACCESSES {
                        again(&mut domain, page(0));
                    }
                    let start = Instant::now();
                    black_box(reader.online().guard().device());
                    start.elapsed().as_nanos() as f64
                })
                .collect();
            let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(&mut nanos, share));
            println!("online at a parked gate, {title}: {median:.0} ns ({low:.0} to {high:.0})");
            scope.spawn(|| {
                other.take();
                while !stop.load(Ordering::Relaxed) {
                    black_box(());
                }
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A second thread translates continuously, with one guard per four accesses.
pub(crate) fn busy(live: u64, samples: usize, other: Processor) {
    let mut watched = unit(live);
    let mut reader = watched.reader(DISK).expect("room");
    let mut here = watched.reader(DISK).expect("room");
    let addresses = addresses(live);
    let ranges = pages_of(&addresses);
    let stop = AtomicBool::new(false);
    let translate = |reader: &mut Reader<GuestMemoryMmap>| {
        let mut burst = reader.online();
        for four in addresses.chunks(4) {
            let pin = burst.guard();
            for at in four {
                let found = pin.translate(eight(*at), Access::Read);
                black_box(found.map(|pieces| pieces.first().start().get()).ok());
            }
        }
    };
    run(
        &format!("one reader alone, {live} pages live, a pin for each four"),
        samples,
        &mut [side("translation", || translate(&mut here))],
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            other.take();
            while !stop.load(Ordering::Relaxed) {
                translate(&mut reader);
            }
        });
        run(
            &format!("one reader beside another, {live} pages live"),
            samples,
            &mut [side("translation", || translate(&mut here))],
        );
        let domain = RefCell::new(watched.domain(DOMAIN).expect("there"));
        run(
            &format!("unmap and map of one page beside a busy reader, {live} pages live"),
            samples,
            &mut [
                side("one at a time", || {
                    for range in &ranges {
                        again(&mut domain.borrow_mut(), *range);
                    }
                }),
                side("unmapped in batches of 16", || {
                    let mut domain = domain.borrow_mut();
                    for batch in ranges.chunks(16) {
                        black_box(domain.unmap_all(batch.iter().copied()).is_ok());
                        for range in batch {
                            let to = PhysAddr::new(PAGE);
                            let mapped = domain.map(*range, to, Permissions::READ_WRITE);
                            black_box(mapped.is_ok());
                        }
                    }
                }),
            ],
        );
        stop.store(true, Ordering::Relaxed);
    });
}
