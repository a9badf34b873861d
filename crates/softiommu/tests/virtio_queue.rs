//! A device written against vm-memory and virtio-queue, unmodified, over a guard. Rings,
//! descriptors and buffers have I/O virtual addresses; their pages are scattered over guest memory.
#![cfg(feature = "vm-memory")]

use ringfence_softiommu::{AccessError, ReadGuard, SoftIommu, SoftIommuLimits};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr, PhysRange,
    RequesterId,
};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueOwnedT, QueueT, Reader, Writer};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions as Wanted};

const DISK: RequesterId = RequesterId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);
const PAGE: u64 = 1 << 12;
/// `VIRTQ_DESC_F_NEXT` and `VIRTQ_DESC_F_WRITE` (virtio 1.3, section 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// I/O virtual address of the rings.
const RINGS: u64 = 0x10_0000_0000;
/// I/O virtual address of the device-readable buffers.
const INPUT: u64 = 0xffff_0000;
/// I/O virtual address of the device-writable buffers.
const OUTPUT: u64 = 0x7_fffe_f000;

/// The device, which is not aware of the IOMMU. Answers each chain with its readable bytes in
/// reverse.
fn serve<M: GuestMemory>(queue: &mut Queue, memory: &M) -> Result<usize, virtio_queue::Error> {
    let mut served = 0;
    while let Some(chain) = queue.iter(memory)?.next() {
        let head = chain.head_index();
        let mut input = Vec::new();
        let mut reader = Reader::new(memory, chain.clone())?;
        let mut writer = Writer::new(memory, chain)?;
        std::io::Read::read_to_end(&mut reader, &mut input).unwrap();
        input.reverse();
        std::io::Write::write_all(&mut writer, &input).unwrap();
        queue.add_used(memory, head, input.len() as u32)?;
        served += 1;
    }
    Ok(served)
}

/// The driver. Offers one chain of two readable and two writable buffers that cross pages in the
/// I/O address space.
fn offer<M: GuestMemory>(memory: &M) -> Queue {
    let rings = MockSplitQueue::create(memory, GuestAddress(RINGS), 256);
    let chain = [
        (INPUT + 100, 5000, NEXT),
        (INPUT + 3 * PAGE - 7, 9, NEXT),
        (OUTPUT + PAGE - 1, 4098, NEXT | WRITE),
        (OUTPUT + 3 * PAGE, 911, WRITE),
    ];
    let chain: Vec<RawDescriptor> = chain
        .iter()
        .zip(1..)
        .map(|((address, bytes, flags), next)| {
            RawDescriptor::from(Descriptor::new(*address, *bytes, *flags, next))
        })
        .collect();
    rings.add_desc_chains(&chain, 0).unwrap();
    rings.create_queue().unwrap()
}

fn input() -> Vec<u8> {
    (0..5009_u32).map(|n| (n * 7 % 251) as u8).collect()
}

fn guest_memory() -> GuestMemoryMmap {
    // Two adjacent regions, so that a physically contiguous run can cross their boundary.
    GuestMemoryMmap::from_ranges(&[
        (GuestAddress(0), 16 << 12),
        (GuestAddress(16 << 12), 16 << 12),
    ])
    .unwrap()
}

fn unit(input: Permissions, output: Permissions) -> SoftIommu<GuestMemoryMmap> {
    let mut unit = SoftIommu::new(SoftIommuLimits::default(), guest_memory());
    unit.add_endpoint(DISK).unwrap();
    let mut domain = unit.create_domain(DOMAIN).unwrap();
    // Contiguous I/O virtual addresses, scattered frames. The middle of the input is one physical
    // run across both regions.
    let pages = [
        (RINGS, [3, 29, 5, 7], Permissions::READ_WRITE),
        (INPUT, [20, 15, 16, 2], input),
        (OUTPUT, [9, 31, 8, 0], output),
    ];
    for (start, frames, permissions) in pages {
        for (n, frame) in (0..).zip(frames) {
            let page = IovaRange::new(Iova::new(start + n * PAGE), PAGE).unwrap();
            domain
                .map(page, PhysAddr::new(frame * PAGE), permissions)
                .unwrap();
        }
    }
    unit.attach(DISK, DOMAIN).unwrap();
    unit
}

fn put(pin: &ReadGuard<'_, GuestMemoryMmap>, at: u64, bytes: &[u8]) {
    // Write by physical address, as the guest's CPU would.
    let range = IovaRange::new(Iova::new(at), bytes.len() as u64).unwrap();
    let mut bytes = bytes;
    for piece in pin.translate(range, Access::Read).unwrap() {
        let (part, rest) = bytes.split_at(piece.bytes() as usize);
        let at = GuestAddress(piece.start().get());
        pin.memory().write_slice(part, at).unwrap();
        bytes = rest;
    }
}

#[test]
fn a_queue_device_runs_unchanged() {
    let mut unit = unit(Permissions::READ, Permissions::READ_WRITE);
    let mut reader = unit.reader(DISK).unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    put(&pin, INPUT + 100, &input()[..5000]);
    put(&pin, INPUT + 3 * PAGE - 7, &input()[5000..]);
    let mut queue = offer(&pin);
    assert_eq!(serve(&mut queue, &pin).unwrap(), 1);
    assert_eq!(pin.take_fault(), None);

    let mut output = vec![0; 4098 + 911];
    pin.read_slice(&mut output[..4098], GuestAddress(OUTPUT + PAGE - 1))
        .unwrap();
    pin.read_slice(&mut output[4098..], GuestAddress(OUTPUT + 3 * PAGE))
        .unwrap();
    output.reverse();
    assert!(output == input());
    // The device has used one chain.
    assert_eq!(queue.next_used(), 1);

    // After unmap, the output pages fault, but the rings are still mapped.
    drop(burst);
    let removed = IovaRange::new(Iova::new(OUTPUT), 4 * PAGE).unwrap();
    assert_eq!(unit.domain(DOMAIN).unwrap().unmap(removed), Ok(4));
    let mut burst = reader.online();
    let pin = burst.guard();
    let mut queue = offer(&pin);
    assert!(serve(&mut queue, &pin).is_err());
    let fault = pin.take_fault().unwrap();
    assert_eq!(fault.reason, FaultReason::NotPresent);
    assert_eq!(fault.iova, Iova::new(OUTPUT + PAGE - 1));
}

#[test]
fn forbidden_accesses_are_refused_and_reported() {
    let cases = [
        // The device reads from a write-only mapping,
        (
            Permissions::WRITE,
            Permissions::WRITE,
            FaultReason::ReadDenied,
            INPUT + 100,
        ),
        // and writes to a read-only mapping.
        (
            Permissions::READ,
            Permissions::READ,
            FaultReason::WriteDenied,
            OUTPUT + PAGE - 1,
        ),
    ];
    for (input, output, reason, at) in cases {
        let unit = unit(input, output);
        let mut reader = unit.reader(DISK).unwrap();
        let mut burst = reader.online();
        let pin = burst.guard();
        let mut queue = offer(&pin);
        assert!(serve(&mut queue, &pin).is_err());
        let fault = pin.take_fault().unwrap();
        assert_eq!((fault.reason, fault.iova), (reason, Iova::new(at)));
        assert_eq!(pin.take_fault(), None, "told once");
    }
}

#[test]
fn a_blocked_device_does_not_see_its_rings() {
    let mut unit = unit(Permissions::READ, Permissions::WRITE);
    let mut reader = unit.reader(DISK).unwrap();
    let mut queue = offer(&reader.online().guard());
    unit.detach(DISK).unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    assert!(serve(&mut queue, &pin).is_err());
    assert_eq!(pin.take_fault().unwrap().reason, FaultReason::Blocked);
}

#[test]
fn truncated_requests_have_no_effect() {
    let unit = unit(Permissions::READ_WRITE, Permissions::READ_WRITE);
    let mut reader = unit.reader(DISK).unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    let end = INPUT + 4 * PAGE;
    // The last byte is not mapped: no byte before it may be written.
    let before: u64 = pin.read(Iova::new(end - 8)).unwrap();
    assert!(pin.write_slice(&[0xff; 9], GuestAddress(end - 8)).is_err());
    assert_eq!(pin.take_fault().unwrap().iova, Iova::new(end));
    assert!(matches!(
        pin.write(Iova::new(end - 4), u64::MAX),
        Err(AccessError::Fault(Fault { reason: FaultReason::NotPresent, iova, .. }))
            if iova == Iova::new(end)
    ));
    assert_eq!(pin.read::<u64>(Iova::new(end - 8)), Ok(before));
    // Ranges that wrap, are empty, or request no access.
    for (at, bytes, wanted, ok) in [
        (u64::MAX, 2, Wanted::Read, false),
        (u64::MAX - 11, 100, Wanted::Read, false),
        (INPUT, 0, Wanted::Read, true),
        (u64::MAX, 0, Wanted::Write, true),
        (INPUT, 8, Wanted::No, false),
        (INPUT, 8, Wanted::ReadWrite, true),
        (INPUT, 4 * PAGE as usize, Wanted::ReadWrite, true),
        (INPUT, 4 * PAGE as usize + 1, Wanted::ReadWrite, false),
        (INPUT, usize::MAX / 2, Wanted::Read, false),
    ] {
        assert_eq!(
            pin.check_range(GuestAddress(at), bytes, wanted),
            ok,
            "{at:#x} {bytes}"
        );
        let slices = pin.get_slices(GuestAddress(at), bytes, wanted);
        assert_eq!(slices.is_ok(), ok, "{at:#x} {bytes}");
        let total = slices.map_or(0, |slices| slices.map(|slice| slice.unwrap().len()).sum());
        assert_eq!(total, if ok { bytes } else { 0 });
    }
}

#[test]
fn objects_cross_pages_and_regions() {
    let unit = unit(Permissions::READ_WRITE, Permissions::WRITE);
    let mut reader = unit.reader(DISK).unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    // Within a page, across two scattered pages, and across two regions, at every alignment.
    for base in [INPUT + 64, INPUT + PAGE, INPUT + 2 * PAGE] {
        for offset in 0..16 {
            let (at, value) = (base - offset, 0x0123_4567_89ab_cdef ^ offset);
            pin.write(Iova::new(at), value).unwrap();
            assert_eq!(pin.read::<u64>(Iova::new(at)), Ok(value));
            let mut bytes = [0; 8];
            pin.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), value);
        }
    }
}

#[test]
fn memory_that_is_not_there_is_no_memory() {
    let mut unit = unit(Permissions::READ, Permissions::READ);
    let far = IovaRange::new(Iova::new(0x5000), PAGE).unwrap();
    let nowhere = PhysAddr::new(1 << 40);
    let mut domain = unit.domain(DOMAIN).unwrap();
    domain.map(far, nowhere, Permissions::READ).unwrap();
    let mut reader = unit.reader(DISK).unwrap();
    assert_eq!(
        reader.online().guard().read::<u64>(Iova::new(0x5008)),
        Err(AccessError::NoMemory {
            range: PhysRange::new(nowhere.wrapping_add(8), 8).unwrap()
        })
    );
    assert!(
        reader
            .online()
            .guard()
            .read_obj::<u64>(GuestAddress(0x5008))
            .is_err()
    );
    // New memory is accessible; removed memory is not.
    let ranges = [(GuestAddress(1 << 40), 4096)];
    unit.set_memory(GuestMemoryMmap::from_ranges(&ranges).unwrap())
        .unwrap();
    assert_eq!(
        reader.online().guard().read::<u64>(Iova::new(0x5008)),
        Ok(0)
    );
    assert!(
        reader
            .online()
            .guard()
            .read::<u64>(Iova::new(INPUT))
            .is_err()
    );
}
