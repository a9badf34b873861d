//! Sandboxed devices, most of which try to break out.
#![allow(missing_docs)]

#[path = "../client/guest.rs"]
mod guest;
#[path = "../client/pviommu_driver.rs"]
mod pviommu_driver;
#[path = "../client/rig.rs"]
#[allow(dead_code)]
mod rig;

mod access;
mod bus_master;
mod confinement;
mod memory_scan;
mod partial_revoke;
mod protocol_violations;

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::iommu::GuestIommu;
use ringfence_live::limits::{BoundedLog, GuestLimits};
use ringfence_live::sandbox::{
    DiskProxy, Grants, ProtocolViolation, ProxyEvent, SandboxDisk, SandboxProgram, start,
};
use ringfence_live::virtio::blk::Blk;
use ringfence_types::RequesterId;

use guest::{ENDPOINT, Guest, Virtio};
use pviommu_driver::Para;
use rig::RAM_BYTES;

const DEVICE: RequesterId = RequesterId::new(ENDPOINT as u16);

/// Messages about the process.
type MessageLog = Arc<Mutex<Vec<String>>>;

fn program(behaviour: &str) -> SandboxProgram {
    SandboxProgram {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: vec![behaviour.into()],
    }
}

/// The kind of IOMMU. The tests run every process behind both.
trait Boundary: Sized {
    /// Status of an unmap of an unmapped page.
    const NOT_MAPPED: u8;
    fn guest(
        make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> DiskProxy,
    ) -> Guest<DiskProxy, Self>;
    /// Maps the disk's rings and a data page, and starts the disk.
    fn mapped(guest: Guest<DiskProxy, Self>) -> Guest<DiskProxy, Self>;
    fn map(guest: &mut Guest<DiskProxy, Self>, start: u64, bytes: u64, to: u64, flags: u32) -> u8;
    fn unmap(guest: &mut Guest<DiskProxy, Self>, start: u64, bytes: u64) -> u8;
    /// Removes all mappings at once.
    fn withdraw(guest: &mut Guest<DiskProxy, Self>);
    /// Lets the driver map again.
    fn again(guest: &mut Guest<DiskProxy, Self>);
    fn wait_for_a_fault(guest: &mut Guest<DiskProxy, Self>);
    fn fault(guest: &mut Guest<DiskProxy, Self>) -> Option<(u32, u64)>;
    fn ram(guest: &mut Guest<DiskProxy, Self>) -> &mut File;
    /// The client unshares the guest's memory.
    fn unshare(guest: &mut Guest<DiskProxy, Self>);
    fn share(guest: &mut Guest<DiskProxy, Self>);
}

/// Methods that have the same body for both types.
macro_rules! boundary {
    () => {
        fn mapped(guest: Guest<DiskProxy, Self>) -> Guest<DiskProxy, Self> {
            guest.mapped()
        }
        fn map(
            guest: &mut Guest<DiskProxy, Self>,
            start: u64,
            bytes: u64,
            to: u64,
            flags: u32,
        ) -> u8 {
            guest.map(start, bytes, to, flags)
        }
        fn unmap(guest: &mut Guest<DiskProxy, Self>, start: u64, bytes: u64) -> u8 {
            guest.unmap(start, bytes)
        }
        fn wait_for_a_fault(guest: &mut Guest<DiskProxy, Self>) {
            guest.wait_for_a_fault();
        }
        fn fault(guest: &mut Guest<DiskProxy, Self>) -> Option<(u32, u64)> {
            guest.fault()
        }
        fn ram(guest: &mut Guest<DiskProxy, Self>) -> &mut File {
            &mut guest.iommu.ram
        }
        fn unshare(guest: &mut Guest<DiskProxy, Self>) {
            assert_eq!(guest.iommu.unmap(0, RAM_BYTES, 0).errno, 0);
        }
        fn share(guest: &mut Guest<DiskProxy, Self>) {
            guest.iommu.share_memory();
        }
    };
}

impl Boundary for Virtio {
    const NOT_MAPPED: u8 = 0;
    boundary!();

    fn guest(
        make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> DiskProxy,
    ) -> Guest<DiskProxy, Self> {
        Guest::with(|iommu, counters| make(GuestIommu::Virtio(iommu.clone()), counters))
    }

    fn withdraw(guest: &mut Guest<DiskProxy, Self>) {
        assert_eq!(guest.detach(), 0);
    }

    fn again(guest: &mut Guest<DiskProxy, Self>) {
        assert_eq!(guest.attach(), 0);
    }
}

impl Boundary for Para {
    const NOT_MAPPED: u8 = 6;
    boundary!();

    fn guest(
        make: impl FnOnce(GuestIommu, Arc<DeviceCounters>) -> DiskProxy,
    ) -> Guest<DiskProxy, Self> {
        Guest::behind_para(|iommu, counters| make(GuestIommu::Para(iommu.clone()), counters))
    }

    /// Stops the driver.
    fn withdraw(guest: &mut Guest<DiskProxy, Self>) {
        guest.iommu.set(0x14, &[0]);
    }

    fn again(guest: &mut Guest<DiskProxy, Self>) {
        guest.attach();
    }
}

/// A guest whose disk is a sandboxed process with a given behaviour.
struct SandboxedGuest<I> {
    guest: Guest<DiskProxy, I>,
    iommu: GuestIommu,
    log: MessageLog,
}

fn sandboxed_guest<I: Boundary>(
    behaviour: &str,
    injected: &[InjectedDma],
    image: &File,
) -> SandboxedGuest<I> {
    sandboxed_guest_with_limits(&GuestLimits::default(), behaviour, injected, image)
}

fn sandboxed_guest_with_limits<I: Boundary>(
    caps: &GuestLimits,
    behaviour: &str,
    injected: &[InjectedDma],
    image: &File,
) -> SandboxedGuest<I> {
    let log = MessageLog::default();
    let mut shared = None;
    let guest = I::guest(|iommu, counters| {
        let mut disk = Blk::new(image.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
        let refused = Arc::clone(&log);
        let tell = move |error: &(dyn Error + 'static)| {
            refused.lock().unwrap().push(error.to_string());
        };
        disk.set_limits(caps, BoundedLog::new(tell));
        let of = SandboxDisk {
            file: image.as_fd(),
            read_only: false,
            limits: *caps,
            injected,
        };
        let (grants, link) = start(&program(behaviour), &of, &counters).unwrap();
        iommu.set_sandboxed(DEVICE, grants).unwrap();
        shared = Some(iommu.clone());
        let log = Arc::clone(&log);
        let tell = move |said: &ProxyEvent<'_>| {
            let text = match said {
                ProxyEvent::Ended(breach) => breach.to_string(),
                ProxyEvent::InjectedDma(tried) => tried.to_string(),
            };
            log.lock().unwrap().push(text);
        };
        DiskProxy::new(disk, link, iommu, DEVICE, counters, Box::new(tell))
    });
    SandboxedGuest {
        guest,
        iommu: shared.unwrap(),
        log,
    }
}

impl<I: Boundary> SandboxedGuest<I> {
    fn mapped(self) -> Self {
        Self {
            guest: I::mapped(self.guest),
            ..self
        }
    }

    fn breach(&self) -> Option<ProtocolViolation> {
        self.iommu
            .with_grants(DEVICE, Grants::take_violation)
            .flatten()
    }

    fn broken(&mut self) -> bool {
        while self.guest.wait() {}
        self.guest.disk.register(0x14, 1) & 64 != 0
    }
}
