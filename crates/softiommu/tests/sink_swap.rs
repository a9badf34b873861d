//! Two devices and their sinks.
#![cfg(feature = "virtio-iommu")]
#![allow(missing_docs)]

use ringfence_softiommu::{IommuSink, Reader, SoftIommuLimits};
use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::{Device, EndpointId, Options};

const ENDPOINT: EndpointId = EndpointId::new(8);
const DISK: RequesterId = RequesterId::new(0x20);

fn device() -> (Device<IommuSink<()>>, Reader<()>) {
    let mut sink = IommuSink::new(SoftIommuLimits::default(), ());
    sink.add_endpoint(ENDPOINT, DISK).unwrap();
    let reader = sink.reader(DISK).unwrap();
    let mut device = Device::new(Options::default(), sink).unwrap();
    device.add_endpoint(ENDPOINT, &[]).unwrap();
    device.accept_features(device.features());
    (device, reader)
}

fn send(device: &mut Device<IommuSink<()>>, words: &[u32]) {
    let request: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let handled = device.handle(&request, &mut [0; 4]).unwrap();
    assert_eq!(handled.result, Ok(()));
}

/// Swapping handles does not swap sinks: an UNMAP affects the readers of its own device.
#[test]
fn unmap_waits_for_the_readers_of_its_device() {
    let ((mut a, mut reader), (mut b, _)) = (device(), device());
    for device in [&mut a, &mut b] {
        send(device, &[1, 1, 8, 0, 0]);
        send(device, &[3, 1, 0x1000, 0, 0x1fff, 0, 0x5000, 0, 1]);
    }
    let (mut of_a, mut of_b) = (a.sink_mut(), b.sink_mut());
    std::mem::swap(&mut of_a, &mut of_b);
    // These now refer to `b` and `a`.
    of_a.remove_endpoint(ENDPOINT).unwrap();
    of_b.set_memory(()).unwrap();
    assert!(b.sink().reader(DISK).is_err() && a.sink().reader(DISK).is_ok());
    send(&mut a, &[4, 1, 0x1000, 0, 0x1fff, 0, 0]);
    let page = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
    let mut burst = reader.online();
    let pin = burst.guard();
    assert!(pin.translate(page, Access::Read).is_err());
}

/// Changes endpoints and memory of a device that already owns its sink.
#[test]
fn the_sink_of_a_device_is_changed_by_its_handle() {
    let (mut device, mut reader) = device();
    let other = EndpointId::new(9);
    let mut sink = device.sink_mut();
    sink.add_endpoint(other, RequesterId::new(0x28)).unwrap();
    assert!(sink.add_endpoint(other, RequesterId::new(0x28)).is_err());
    sink.set_memory(()).unwrap();
    sink.remove_endpoint(other).unwrap();
    assert!(device.sink().reader(RequesterId::new(0x28)).is_err());
    {
        let _burst = reader.online();
        assert!(device.sink_mut().set_memory(()).is_err());
        assert!(device.sink_mut().remove_endpoint(ENDPOINT).is_err());
    }
    device.sink_mut().remove_endpoint(ENDPOINT).unwrap();
    assert!(device.sink().reader(DISK).is_err());
}
