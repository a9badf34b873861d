//! Tests with a process that was killed and is stuck in the kernel.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Instant;

use ringfence_types::RequesterId;
use ringfence_vfio_user::{HEADER_BYTES, Header, Inbox, Message};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::counters::DeviceCounters;
use crate::dma::{Dma, MemoryInUse};
use crate::handover::{HandOverBlocker, save};
use crate::iommu::VirtioIommu;
use crate::memory::GuestRam;
use crate::pci::layout;
use crate::pviommu::PvIommu;
use crate::server::{ClientConnection, ClientSlot, LogBudget, PolledFunction};
use crate::session::{Function, FunctionError, Session};
use crate::virtio::iommu::IommuDevice;
use crate::virtio::pviommu::PvIommuDevice;
use crate::virtio::{Device, DmaAddresses, VirtioPci};

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
        windows: GrantWindows::new(),
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
    assert_eq!(memory.complete_set_memory(), Err(MemoryInUse));
    rustix::io::write(exited, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(memory.complete_set_memory(), Ok(()), "it has exited");
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

/// The daemon does not keep the client's memory: only the process may still have its pages.
#[test]
fn refused_memory_is_replaced() {
    let (mut grants, exited) = stuck_grants();
    let region = |start, bytes| {
        GuestMemoryMmap::from_ranges(&[(vm_memory::GuestAddress(start), bytes)]).unwrap()
    };
    grants.memory = region(0, 0x1000);
    grants.files.push((1, 2));
    let next = region(0x10_0000, 0x2000);
    assert_eq!(grants.set_memory(&next), Err(StuckProcess));
    let starts = |grants: &Grants| -> Vec<u64> {
        let regions = grants.memory.iter();
        regions.map(|region| region.start_addr().0).collect()
    };
    assert_eq!(starts(&grants), [0x10_0000]);
    assert!(grants.files.is_empty() && grants.granted.is_empty());
    assert_eq!(grants.commit(), Err(StuckProcess));
    rustix::io::write(&exited, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(grants.commit(), Ok(()));
    assert_eq!(starts(&grants), [0x10_0000]);
}

/// Offset of `device_status` in BAR 0.
const STATUS: u64 = layout::COMMON as u64 + 0x14;
/// The bit `DEVICE_NEEDS_RESET` of `device_status`.
const NEEDS_RESET: u8 = 64;

fn status<D: Device, A: Dma>(function: &mut VirtioPci<D, A>) -> u8 {
    let mut status = [0];
    let bar = layout::BAR.into();
    function.read(bar, STATUS, &mut status).unwrap();
    status[0]
}

fn write_status<D: Device, A: Dma>(function: &mut VirtioPci<D, A>, value: u8) {
    let bar = layout::BAR.into();
    function.write(bar, STATUS, &[value]).unwrap();
}

/// Resets an IOMMU whose sandboxed device has a stuck process: as a driver, and as a client.
fn reset<D: Device, A: Dma>(device: D, memory: A, exited: &OwnedFd) {
    let counters = Arc::<DeviceCounters>::default();
    let mut function = VirtioPci::new(device, memory, DmaAddresses::GuestPhysical, counters);
    write_status(&mut function, 1);
    assert_eq!(status(&mut function), 1);
    write_status(&mut function, 0);
    for _ in 0..3 {
        assert_eq!(
            status(&mut function),
            NEEDS_RESET,
            "the reset is incomplete"
        );
        write_status(&mut function, 3);
        write_status(&mut function, 0);
    }
    assert_eq!(function.reset(), Err(FunctionError::ResetPending));
    assert_eq!(status(&mut function), NEEDS_RESET, "after a function reset");
    assert!(function.save().is_err(), "another process cannot wait");
    rustix::io::write(exited, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(status(&mut function), 0, "the process has exited");
    write_status(&mut function, 1);
    assert_eq!(status(&mut function), 1);
    assert!(function.save().is_ok());
    assert_eq!(function.reset(), Ok(()));
}

/// A client that disconnects leaves nobody who polls `device_status`.
#[test]
fn a_pause_completes_a_reset_that_nobody_polls() {
    let counters = Arc::<DeviceCounters>::default();
    let iommu = VirtioIommu::new(Arc::clone(&counters)).unwrap();
    let (grants, exited) = stuck_grants();
    iommu.set_sandboxed(DISK, grants);
    let memory = iommu.memory();
    let device = IommuDevice::new(iommu, Arc::clone(&counters));
    let mut function = VirtioPci::new(device, memory, DmaAddresses::GuestPhysical, counters);
    write_status(&mut function, 1);
    assert_eq!(function.reset(), Err(FunctionError::ResetPending));
    let now = Instant::now();
    assert!(function.pause(now));
    assert!(function.save().is_err(), "the process is stuck");
    rustix::io::write(&exited, &1u64.to_ne_bytes()).unwrap();
    assert!(function.pause(now));
    assert!(function.save().is_ok(), "the process has exited");
}

/// The second process could not see the process exit, and no process would serve the device.
#[test]
fn an_incomplete_unmap_blocks_the_hand_over() {
    let counters = Arc::<DeviceCounters>::default();
    let iommu = VirtioIommu::new(Arc::clone(&counters)).unwrap();
    let (grants, exited) = stuck_grants();
    iommu.set_sandboxed(DISK, grants);
    let memory = iommu.memory();
    let device = IommuDevice::new(iommu, Arc::clone(&counters));
    let function = VirtioPci::new(device, memory, DmaAddresses::GuestPhysical, counters);
    let mut session = Session::resume(function, GuestRam::default(), true);
    let mut send = |command: u16, words: &[u64]| {
        let body = words.iter().flat_map(|word| word.to_le_bytes());
        let body: Vec<u8> = body.collect();
        let header = Header {
            id: 1,
            command,
            size: HEADER_BYTES + body.len(),
            no_reply: false,
        };
        let message = Message {
            header,
            body,
            fds: Vec::new(),
            too_many_fds: false,
        };
        session.handle(message).refusal
    };
    // DMA_MAP of 2 pages without a file, and DMA_UNMAP: argument size, flags, addresses.
    assert!(send(2, &[32, 0, 0x4000, 0x2000]).is_none());
    assert!(send(3, &[24, 0x4000, 0x2000]).is_some());
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("iommu.sock")).unwrap();
    let (stream, _client) = UnixStream::pair().unwrap();
    let mut slot = ClientSlot::with(
        listener,
        ClientConnection {
            stream,
            session,
            inbox: Inbox::default(),
            words: LogBudget::default(),
        },
    );
    slot.complete_unmaps();
    let error = save(&slot).map(|_| ()).unwrap_err();
    let HandOverBlocker::UnmapPending { range } = error else {
        panic!("{error}");
    };
    assert_eq!((range.start().get(), range.bytes()), (0x4000, 0x2000));
    rustix::io::write(&exited, &1u64.to_ne_bytes()).unwrap();
    slot.complete_unmaps();
    let saved = save(&slot).unwrap();
    assert!(
        saved.session.unwrap().ranges.is_empty(),
        "the process has exited"
    );
}

#[test]
fn a_reset_of_the_virtio_iommu_completes_when_a_stuck_process_has_exited() {
    let counters = Arc::<DeviceCounters>::default();
    let iommu = VirtioIommu::new(Arc::clone(&counters)).unwrap();
    let (grants, exited) = stuck_grants();
    iommu.set_sandboxed(DISK, grants);
    let memory = iommu.memory();
    reset(IommuDevice::new(iommu, counters), memory, &exited);
}

#[test]
fn a_reset_of_the_para_virtual_iommu_completes_when_a_stuck_process_has_exited() {
    let counters = Arc::<DeviceCounters>::default();
    let iommu = PvIommu::new(&[DISK], Arc::clone(&counters)).unwrap();
    let (grants, exited) = stuck_grants();
    assert!(iommu.set_sandboxed(DISK, grants));
    let memory = iommu.memory();
    reset(PvIommuDevice::new(iommu, counters), memory, &exited);
}
