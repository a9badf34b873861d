//! Devices in processes of their own, most of which break out.
#![allow(missing_docs)]

#[path = "../client/guest.rs"]
mod guest;
#[path = "../client/para.rs"]
mod para;
#[path = "../client/rig.rs"]
#[allow(dead_code)]
mod rig;

mod apart;
mod breaches;
mod joined;
mod master;
mod reached;
mod started;

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use ringfence_live::caps::{Caps, Complaints};
use ringfence_live::counters::DeviceCounters;
use ringfence_live::errant::Errant;
use ringfence_live::iommu::Behind;
use ringfence_live::isolate::{Breach, Front, Grants, Image, Program, Said, start};
use ringfence_live::virtio::blk::Blk;
use ringfence_types::DeviceId;

use guest::{ENDPOINT, Guest, Virtio};
use para::Para;
use rig::RAM_BYTES;

const DEVICE: DeviceId = DeviceId::new(ENDPOINT as u16);

/// What was said about the process.
type Told = Arc<Mutex<Vec<String>>>;

fn program(behaviour: &str) -> Program {
    Program {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: vec![behaviour.into()],
    }
}

/// Behind which IOMMU. Every process is tried behind both.
trait Boundary: Sized {
    /// The answer to an unmap of what is not mapped.
    const NOT_MAPPED: u8;
    fn guest(make: impl FnOnce(Behind, Arc<DeviceCounters>) -> Front) -> Guest<Front, Self>;
    /// The disk's rings and a page for data are mapped, and it runs.
    fn mapped(guest: Guest<Front, Self>) -> Guest<Front, Self>;
    fn map(guest: &mut Guest<Front, Self>, start: u64, bytes: u64, to: u64, flags: u32) -> u8;
    fn unmap(guest: &mut Guest<Front, Self>, start: u64, bytes: u64) -> u8;
    /// All mappings go, at once.
    fn withdraw(guest: &mut Guest<Front, Self>);
    /// And can be made again.
    fn again(guest: &mut Guest<Front, Self>);
    fn wait_for_a_fault(guest: &mut Guest<Front, Self>);
    fn fault(guest: &mut Guest<Front, Self>) -> Option<(u32, u64)>;
    fn ram(guest: &mut Guest<Front, Self>) -> &mut File;
    /// The guest's memory goes.
    fn unshare(guest: &mut Guest<Front, Self>);
    fn share(guest: &mut Guest<Front, Self>);
}

/// What is the same in name only.
macro_rules! boundary {
    () => {
        fn mapped(guest: Guest<Front, Self>) -> Guest<Front, Self> {
            guest.mapped()
        }
        fn map(guest: &mut Guest<Front, Self>, start: u64, bytes: u64, to: u64, flags: u32) -> u8 {
            guest.map(start, bytes, to, flags)
        }
        fn unmap(guest: &mut Guest<Front, Self>, start: u64, bytes: u64) -> u8 {
            guest.unmap(start, bytes)
        }
        fn wait_for_a_fault(guest: &mut Guest<Front, Self>) {
            guest.wait_for_a_fault();
        }
        fn fault(guest: &mut Guest<Front, Self>) -> Option<(u32, u64)> {
            guest.fault()
        }
        fn ram(guest: &mut Guest<Front, Self>) -> &mut File {
            &mut guest.iommu.ram
        }
        fn unshare(guest: &mut Guest<Front, Self>) {
            assert_eq!(guest.iommu.unmap(0, RAM_BYTES, 0).errno, 0);
        }
        fn share(guest: &mut Guest<Front, Self>) {
            guest.iommu.share_memory();
        }
    };
}

impl Boundary for Virtio {
    const NOT_MAPPED: u8 = 0;
    boundary!();

    fn guest(make: impl FnOnce(Behind, Arc<DeviceCounters>) -> Front) -> Guest<Front, Self> {
        Guest::with(|iommu, counters| make(Behind::Virtio(iommu.clone()), counters))
    }

    fn withdraw(guest: &mut Guest<Front, Self>) {
        assert_eq!(guest.detach(), 0);
    }

    fn again(guest: &mut Guest<Front, Self>) {
        assert_eq!(guest.attach(), 0);
    }
}

impl Boundary for Para {
    const NOT_MAPPED: u8 = 6;
    boundary!();

    fn guest(make: impl FnOnce(Behind, Arc<DeviceCounters>) -> Front) -> Guest<Front, Self> {
        Guest::behind_para(|iommu, counters| make(Behind::Para(iommu.clone()), counters))
    }

    /// Its driver goes.
    fn withdraw(guest: &mut Guest<Front, Self>) {
        guest.iommu.set(0x14, &[0]);
    }

    fn again(guest: &mut Guest<Front, Self>) {
        guest.attach();
    }
}

/// A guest whose disk is a process that behaves like this.
struct Apart<I> {
    guest: Guest<Front, I>,
    behind: Behind,
    told: Told,
}

fn apart<I: Boundary>(behaviour: &str, errant: &[Errant], image: &File) -> Apart<I> {
    apart_within(&Caps::default(), behaviour, errant, image)
}

fn apart_within<I: Boundary>(
    caps: &Caps,
    behaviour: &str,
    errant: &[Errant],
    image: &File,
) -> Apart<I> {
    let told = Told::default();
    let mut shared = None;
    let guest = I::guest(|behind, counters| {
        let mut disk = Blk::new(image.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
        let refused = Arc::clone(&told);
        let tell = move |error: &(dyn Error + 'static)| {
            refused.lock().unwrap().push(error.to_string());
        };
        disk.keep_within(caps, Complaints::new(tell));
        let of = Image {
            file: image.as_fd(),
            read_only: false,
            caps: *caps,
            errant,
        };
        let (grants, link) = start(&program(behaviour), &of, &counters).unwrap();
        behind.set_apart(DEVICE, grants).unwrap();
        shared = Some(behind.clone());
        let told = Arc::clone(&told);
        let tell = move |said: &Said<'_>| {
            let text = match said {
                Said::Ended(breach) => breach.to_string(),
                Said::Errant(tried) => tried.to_string(),
            };
            told.lock().unwrap().push(text);
        };
        Front::new(disk, link, behind, DEVICE, counters, Box::new(tell))
    });
    Apart {
        guest,
        behind: shared.unwrap(),
        told,
    }
}

impl<I: Boundary> Apart<I> {
    fn mapped(self) -> Self {
        Self {
            guest: I::mapped(self.guest),
            ..self
        }
    }

    fn breach(&self) -> Option<Breach> {
        self.behind
            .with_grants(DEVICE, Grants::take_breach)
            .flatten()
    }

    fn broken(&mut self) -> bool {
        while self.guest.wait() {}
        self.guest.disk.register(0x14, 1) & 64 != 0
    }
}
