//! What a device in a process of its own costs, beside the same device as a thread: a mapping that comes and goes, and a read of 4 KiB.
//!
//! Both go through the same scripted client, whose own time is in all numbers. `--quick` for fewer samples.
#![allow(missing_docs, dead_code)]

#[path = "../tests/client/guest.rs"]
mod guest;
#[path = "../tests/client/rig.rs"]
mod rig;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use guest::*;
use rig::*;
use ringfence_live::caps::Caps;
use ringfence_live::iommu::Behind;
use ringfence_live::isolate::{Front, Image, Program, start};
use ringfence_live::virtio::Device;
use ringfence_live::virtio::blk::Blk;
use ringfence_types::DeviceId;

/// Operations of a sample.
const EACH: u16 = 64;
/// Addresses that nothing else uses.
const FREE: u64 = 0x100_0000 + AWAY;

fn thread() -> Guest<Blk> {
    Guest::with(|_, counters| Blk::new(disk_file(), false, counters).unwrap())
}

fn process() -> Guest<Front> {
    let file = disk_file();
    let program = Program {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: Vec::new(),
    };
    Guest::with(|iommu, counters| {
        let image = Image {
            file: file.as_fd(),
            read_only: false,
            caps: Caps::default(),
            errant: &[],
        };
        let (grants, link) = start(&program, &image, &counters).unwrap();
        let device = DeviceId::new(ENDPOINT as u16);
        iommu.set_apart(device, grants);
        let disk = Blk::new(file.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
        Front::new(
            disk,
            link,
            Behind::Virtio(iommu.clone()),
            device,
            counters,
            Box::new(|_| {}),
        )
    })
}

/// Microseconds for each of `EACH` operations.
fn sample(mut operation: impl FnMut()) -> f64 {
    let begun = Instant::now();
    (0..EACH).for_each(|_| operation());
    begun.elapsed().as_secs_f64() * 1e6 / f64::from(EACH)
}

struct Bench<D: Device> {
    guest: Guest<D>,
    reads: u16,
}

impl<D: Device + Idle> Bench<D> {
    fn new(guest: Guest<D>) -> Self {
        Self {
            guest: guest.mapped(),
            reads: 0,
        }
    }

    /// A map and its unmap, a doorbell each.
    fn map(&mut self, pages: u64) -> f64 {
        let bytes = pages * 4096;
        sample(|| {
            assert_eq!(self.guest.map(FREE, bytes, 0, READ_WRITE), 0);
            assert_eq!(self.guest.unmap(FREE, bytes), 0);
        })
    }

    fn read(&mut self) -> f64 {
        sample(|| {
            self.reads = self.reads.wrapping_add(1);
            assert_eq!(
                read_bytes(&mut self.guest, self.reads, 0xb000 + AWAY, 4096),
                Some(0)
            );
        })
    }

    fn trips(&mut self, operation: impl FnOnce(&mut Self)) -> (f64, f64) {
        let counted = |bench: &Self| {
            let counters = &bench.guest.disk.counters;
            (counters.rounds.get() as f64, counters.calls.get() as f64)
        };
        let before = counted(self);
        operation(self);
        let after = counted(self);
        let each = f64::from(EACH);
        ((after.0 - before.0) / each, (after.1 - before.1) / each)
    }
}

fn median(samples: &mut [f64]) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples[(samples.len() - 1) * part / 4];
    (at(2), at(1), at(3))
}

/// One line: what `of` says of both, in turn.
fn line(name: &str, samples: usize, mut of: impl FnMut() -> (f64, f64)) {
    let (mut one, mut other): (Vec<f64>, Vec<f64>) = (0..samples).map(|_| of()).unzip();
    let ((one, one_from, one_to), (other, from, to)) = (median(&mut one), median(&mut other));
    println!(
        "{name:<24} thread {one:6.1} ({one_from:.1} to {one_to:.1})  process {other:6.1} ({from:.1} to {to:.1})  ratio {:.1}, difference {:.1}",
        other / one,
        other - one
    );
}

fn main() {
    let quick = std::env::args().any(|word| word == "--quick" || word == "--test");
    let samples = if quick { 3 } else { 201 };
    let (mut thread, mut process) = (Bench::new(thread()), Bench::new(process()));
    println!("microseconds: median (quartiles) of {samples} interleaved samples of {EACH}");
    for pages in [1, 16, 64] {
        line(&format!("map and unmap {pages} pages"), samples, || {
            (thread.map(pages), process.map(pages))
        });
    }
    line("read 4 KiB", samples, || (thread.read(), process.read()));
    let (rounds, calls) = process.trips(|bench| _ = bench.map(1));
    println!("a map and an unmap, a doorbell each: {rounds} rounds, {calls} calls");
    let (rounds, calls) = process.trips(|bench| _ = bench.read());
    println!("a read whose buffers are mapped: {rounds} rounds, {calls} calls");
}
