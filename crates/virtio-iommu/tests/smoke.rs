//! One guest's session, written by hand.

use ringfence_types::{Access, Iova, IovaRange, PhysAddr, PhysRange};
use ringfence_virtio_iommu::{AccessTarget, Device, EndpointId, Options};

#[test]
fn the_specifications_first_example() {
    let mut device = Device::new(Options::default(), ()).unwrap();
    let endpoint = EndpointId::new(8);
    device.add_endpoint(endpoint, &[]).unwrap();
    device.accept_features(device.features());
    let send = |device: &mut Device<()>, request: &[u8]| {
        let mut reply = [0xff; 4];
        let handled = device.handle(request, &mut reply).unwrap();
        assert_eq!((handled.used, reply), (4, [0; 4]), "{:?}", handled.result);
    };
    let attach = [1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    send(&mut device, &attach);
    let mut map = vec![3, 0, 0, 0, 1, 0, 0, 0];
    map.extend(0x1000_u64.to_le_bytes());
    map.extend(0x1fff_u64.to_le_bytes());
    map.extend(0xa000_u64.to_le_bytes());
    map.extend(1_u32.to_le_bytes());
    send(&mut device, &map);
    let range = IovaRange::new(Iova::new(0x1010), 16).unwrap();
    let there = PhysRange::new(PhysAddr::new(0xa010), 16).unwrap();
    assert!(matches!(
        device.translate(endpoint, range, Access::Read),
        Ok(AccessTarget::Memory { physical, .. }) if physical == there
    ));
    assert!(device.translate(endpoint, range, Access::Write).is_err());
    let mut unmap = map[..24].to_vec();
    unmap[0] = 4;
    unmap.extend([0; 4]);
    send(&mut device, &unmap);
    assert!(device.translate(endpoint, range, Access::Read).is_err());
    let mut detach = attach;
    detach[0] = 2;
    send(&mut device, &detach);
    assert_eq!((device.domains(), device.mappings()), (0, 0));
}
