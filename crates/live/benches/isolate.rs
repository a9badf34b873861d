//! Cost of a sandboxed device, compared with the same device as a thread: a map and its unmap, and
//! a read of 4 KiB. Each runs behind the virtio-iommu and behind the para-virtual IOMMU. A map ends
//! with a grant to the process, an unmap with its revocation.
//!
//! All four use the same scripted client, whose own time is part of all numbers, and run
//! alternately. `--quick` takes fewer samples.
#![allow(missing_docs, dead_code)]

#[path = "../tests/client/guest.rs"]
mod guest;
#[path = "../tests/client/pviommu_driver.rs"]
mod pviommu_driver;
#[path = "../tests/client/rig.rs"]
mod rig;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use guest::*;
use pviommu_driver::Para;
use rig::*;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::iommu::GuestIommu;
use ringfence_live::limits::GuestLimits;
use ringfence_live::sandbox::{DiskProxy, SandboxDisk, SandboxProgram, start};
use ringfence_live::virtio::Device;
use ringfence_live::virtio::blk::Blk;
use ringfence_types::RequesterId;

/// Operations per sample.
const EACH: u16 = 64;
/// An unused IOVA range.
const FREE: u64 = 0x100_0000 + AWAY;

/// A guest by its IOMMU.
trait Boundary: Sized {
    fn guest<D: Device>(make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> D) -> Guest<D, Self>;
    fn mapped<D: Device>(guest: Guest<D, Self>) -> Guest<D, Self>;
    /// Maps a range with one request.
    fn map<D: Device>(guest: &mut Guest<D, Self>, bytes: u64) -> u8;
    fn unmap<D: Device>(guest: &mut Guest<D, Self>, bytes: u64) -> u8;
}

macro_rules! requests {
    () => {
        fn mapped<D: Device>(guest: Guest<D, Self>) -> Guest<D, Self> {
            guest.mapped()
        }
        fn map<D: Device>(guest: &mut Guest<D, Self>, bytes: u64) -> u8 {
            guest.map(FREE, bytes, 0, READ_WRITE)
        }
        fn unmap<D: Device>(guest: &mut Guest<D, Self>, bytes: u64) -> u8 {
            guest.unmap(FREE, bytes)
        }
    };
}

impl Boundary for Virtio {
    fn guest<D: Device>(make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> D) -> Guest<D, Self> {
        Guest::with(|iommu, counters| make(GuestIommu::Virtio(iommu.clone()), counters))
    }
    requests!();
}

impl Boundary for Para {
    fn guest<D: Device>(make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> D) -> Guest<D, Self> {
        Guest::behind_para(|iommu, counters| make(GuestIommu::Para(iommu.clone()), counters))
    }
    requests!();
}

fn thread(_: GuestIommu, counters: Arc<DeviceCounters>) -> Blk {
    Blk::new(disk_file(), false, counters).unwrap()
}

fn process(behind: GuestIommu, counters: Arc<DeviceCounters>) -> DiskProxy {
    let file = disk_file();
    let program = SandboxProgram {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: Vec::new(),
    };
    let image = SandboxDisk {
        file: file.as_fd(),
        read_only: false,
        limits: GuestLimits::default(),
        injected: &[],
    };
    let (grants, link) = start(&program, &image, &counters).unwrap();
    let device = RequesterId::new(ENDPOINT as u16);
    behind.set_sandboxed(device, grants).unwrap();
    let disk = Blk::new(file.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
    DiskProxy::new(disk, link, behind, device, counters, Box::new(|_| {}))
}

/// Returns the operation's time in microseconds.
fn timed(operation: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    operation();
    begun.elapsed().as_secs_f64() * 1e6
}

struct Bench<D: Device, I> {
    guest: Guest<D, I>,
    reads: u16,
}

impl<D: Device + Idle, I: Boundary> Bench<D, I> {
    fn new(make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> D) -> Self {
        Self {
            guest: I::mapped(I::guest(make)),
            reads: 0,
        }
    }

    /// Maps and unmaps, with a doorbell each. Returns the microseconds of the map and of the unmap.
    fn map(&mut self, pages: u64) -> [f64; 2] {
        let (mut map, mut unmap) = (0.0, 0.0);
        for _ in 0..EACH {
            map += timed(|| assert_eq!(I::map(&mut self.guest, pages * 4096), 0));
            unmap += timed(|| assert_eq!(I::unmap(&mut self.guest, pages * 4096), 0));
        }
        [map, unmap].map(|all| all / f64::from(EACH))
    }

    fn read(&mut self) -> f64 {
        let all = timed(|| {
            for _ in 0..EACH {
                self.reads = self.reads.wrapping_add(1);
                let read = read_bytes(&mut self.guest, self.reads, 0xb000 + AWAY, 4096);
                assert_eq!(read, Some(0));
            }
        });
        all / f64::from(EACH)
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

/// Returns the median and the two quartiles.
fn quartiles(mut samples: Vec<f64>) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples[(samples.len() - 1) * part / 4];
    (at(2), at(1), at(3))
}

/// One sample: thread and process behind the virtio-iommu, thread and process behind the
/// para-virtual IOMMU.
type Sample = [f64; 4];

/// Prints one line per IOMMU. Each ratio is computed within one sample.
fn say(name: &str, samples: &[Sample]) {
    let of = |value: &dyn Fn(&Sample) -> f64| quartiles(samples.iter().map(value).collect());
    for (iommu, at) in [("virtio-iommu", 0), ("para-virtual", 2)] {
        let (one, one_from, one_to) = of(&|sample| sample[at]);
        let (other, from, to) = of(&|sample| sample[at + 1]);
        let (ratio, ratio_from, ratio_to) = of(&|sample| sample[at + 1] / sample[at]);
        print!(
            "{name:<22} {iommu}  thread {one:6.1} ({one_from:.1} to {one_to:.1})  process \
            {other:6.1} ({from:.1} to {to:.1})  ratio {ratio:.2} ({ratio_from:.2} to {ratio_to:.2})"
        );
        if at > 0 {
            let (ratio, from, to) = of(&|sample| sample[3] / sample[1]);
            print!("  process over the virtio-iommu's {ratio:.2} ({from:.2} to {to:.2})");
        }
        println!();
    }
}

fn main() {
    let quick = std::env::args().any(|word| word == "--quick" || word == "--test");
    let samples = if quick { 3 } else { 201 };
    let mut virtio = (
        Bench::<_, Virtio>::new(thread),
        Bench::<_, Virtio>::new(process),
    );
    let mut para = (
        Bench::<_, Para>::new(thread),
        Bench::<_, Para>::new(process),
    );
    println!("microseconds: median (quartiles) of {samples} interleaved samples of {EACH}");
    for pages in [1, 16, 64] {
        let taken: Vec<[[f64; 2]; 4]> = (0..samples)
            .map(|_| {
                [
                    virtio.0.map(pages),
                    virtio.1.map(pages),
                    para.0.map(pages),
                    para.1.map(pages),
                ]
            })
            .collect();
        let part = |of: fn([f64; 2]) -> f64| taken.iter().map(|each| each.map(of)).collect();
        let (map, unmap): (Vec<Sample>, Vec<Sample>) = (part(|[map, _]| map), part(|[_, un]| un));
        let both: Vec<Sample> = part(|[map, unmap]| map + unmap);
        say(&format!("map, pages: {pages}"), &map);
        say(&format!("unmap, pages: {pages}"), &unmap);
        say(&format!("both, pages: {pages}"), &both);
    }
    let reads: Vec<Sample> = (0..samples)
        .map(|_| {
            [
                virtio.0.read(),
                virtio.1.read(),
                para.0.read(),
                para.1.read(),
            ]
        })
        .collect();
    say("read 4 KiB", &reads);
    trips("virtio-iommu", &mut virtio.1);
    trips("para-virtual", &mut para.1);
}

fn trips<I: Boundary>(iommu: &str, process: &mut Bench<DiskProxy, I>) {
    for pages in [1, 64] {
        let (rounds, calls) = process.trips(|bench| _ = bench.map(pages));
        println!(
            "{iommu}: a map and an unmap, a doorbell each, pages: {pages}: {rounds} rounds, \
            {calls} calls"
        );
    }
    let (rounds, calls) = process.trips(|bench| _ = bench.read());
    println!("{iommu}: a read whose buffers are mapped: {rounds} rounds, {calls} calls");
}
