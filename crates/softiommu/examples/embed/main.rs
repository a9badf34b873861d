//! A monitor with a virtio-iommu, and one device behind it (docs/EMBEDDING-MONITOR.md).
mod driver;

use ringfence_softiommu::{IommuSink, SoftIommuLimits};
use ringfence_types::{Fault, RequesterId};
use ringfence_virtio_iommu::{Device, EndpointId, Options, Queues, Sink};
use ringfence_virtio_iommu::{TranslationFault, TranslationFaultReason};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
/// The disk's endpoint id in the guest's VIOT table, and its requester ID in the unit.
const DISK: (EndpointId, RequesterId) = (EndpointId::new(0x20), RequesterId::new(0x20));

fn main() -> Outcome<()> {
    // The unit over the guest's memory, and the device in front. The disk reaches nothing yet.
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)])?;
    let mut unit = IommuSink::new(SoftIommuLimits::default(), memory.clone());
    unit.add_endpoint(DISK.0, DISK.1)?;
    let mut reader = unit.reader(DISK.1)?;
    let mut iommu = Device::new(Options::default(), unit)?;
    iommu.add_endpoint(DISK.0, &[])?;

    // The driver agrees on features, attaches the disk, maps 0x10000 to 0x5000, and rings.
    iommu.accept_features(iommu.features());
    let mut requests = driver::attach_and_map(&memory)?;
    while ring(&mut iommu, &mut requests, &memory)? {}

    // The disk's thread: online for a burst, a pin for each request. A pin is a `GuestMemory`.
    let mut burst = reader.online();
    let pin = burst.guard();
    pin.write_slice(b"from the disk", GuestAddress(0x10000))?;
    let refused = pin.write_slice(b"anywhere", GuestAddress(0x20000));
    let fault = pin.take_fault();
    drop(burst); // before anything that waits
    println!("memory: {:?}", driver::text(&memory, 0x5000)?);

    // The guest hears of the fault with its next event buffer.
    if let (Err(_), Some(fault)) = (refused, fault) {
        iommu.report(denied(&fault));
        println!("stopped: {fault}; reports: {}", iommu.events_waiting());
    }
    Ok(())
}
/// The doorbell: what was unmapped is out of reach when it returns. Whether to ring it again.
fn ring<S: Sink>(unit: &mut Device<S>, queue: &mut Queue, ram: &GuestMemoryMmap) -> Outcome<bool> {
    let served = Queues::default().serve_requests(unit, queue, ram, |_, _| ())?;
    println!("requests: {}", served.buffers);
    Ok(queue.enable_notification(ram)? || served.more)
}

fn denied(fault: &Fault) -> TranslationFault {
    TranslationFault {
        endpoint: DISK.0,
        iova: fault.iova,
        access: fault.access,
        reason: TranslationFaultReason::NotMapped,
    }
}
