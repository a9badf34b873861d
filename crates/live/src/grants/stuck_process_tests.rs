//! Tests with a process that was killed and is stuck in the kernel.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;

use ringfence_types::RequesterId;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::counters::DeviceCounters;
use crate::dma::{Dma, MemoryInUse};
use crate::iommu::VirtioIommu;
use crate::pviommu::PvIommu;

const DISK: RequesterId = RequesterId::new(0x20);

/// Creates the grants of a killed process, which exits when the returned eventfd is written.
fn stuck_grants() -> (Grants, OwnedFd) {
    let exited = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let child = Command::new("/bin/true").spawn().unwrap();
    let child = ChildProcess::stuck(child, exited.as_fd().try_clone_to_owned().unwrap());
    let control = Arc::new(ControlRegion::create().unwrap());
    let grants = Grants {
        table: empty_table(&control).unwrap(),
        control,
        windows: Windows::new(),
        windows_in_use: BTreeMap::new(),
        granted: BTreeMap::new(),
        pending: Vec::new(),
        latest: None,
        revoked: true,
        memory: GuestMemoryMmap::default(),
        files: Vec::new(),
        dev_null: File::open("/dev/null").unwrap(),
        child: Arc::new(child.unwrap()),
        supervisor: None,
        violation: None,
    };
    (grants, exited)
}

/// Replaces the memory until the process has exited.
fn replace_memory(memory: &mut impl Dma, exited: &OwnedFd) {
    let none = GuestMemoryMmap::default();
    assert_eq!(memory.set_memory(&none), Err(MemoryInUse));
    assert_eq!(memory.set_memory(&none), Err(MemoryInUse), "a retry");
    rustix::io::write(exited, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(memory.set_memory(&none), Ok(()), "the process has exited");
}

#[test]
fn a_stuck_process_behind_the_virtio_iommu_keeps_the_old_memory() {
    let iommu = VirtioIommu::new(Arc::<DeviceCounters>::default()).unwrap();
    let (grants, exited) = stuck_grants();
    iommu.set_sandboxed(DISK, grants);
    replace_memory(&mut iommu.memory(), &exited);
}

#[test]
fn a_stuck_process_behind_the_para_virtual_iommu_keeps_the_old_memory() {
    let iommu = PvIommu::new(&[DISK], Arc::<DeviceCounters>::default()).unwrap();
    let (grants, exited) = stuck_grants();
    assert!(iommu.set_sandboxed(DISK, grants));
    replace_memory(&mut iommu.memory(), &exited);
}
