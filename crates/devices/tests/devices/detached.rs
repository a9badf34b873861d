//! A device is detached while its driver uses it. The driver's own calls return the mapped buffers,
//! and the device can no longer access them.

use ringfence_devices::api::{DeviceRing, DmaApi, MapFailure};
use ringfence_devices::nic::Environment;
use ringfence_devices::{DmaError, Pool};
use ringfence_dma::MapReason;
use ringfence_types::{Direction, PhysRange};

use super::rig::{self, OracleChecked};

const RING: DeviceRing = DeviceRing {
    queue: 0,
    direction: Direction::FromDevice,
};

#[test]
fn buffers_of_a_detached_domain_are_returned() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(16 << 12), 4096).unwrap();
    let mut handles = Vec::new();
    for _ in 0..5 {
        let buffer = pool.alloc().unwrap();
        let memory = PhysRange::new(buffer.start(), 1500).unwrap();
        handles.push(env.api().map(RING, buffer, memory).unwrap());
    }
    let iovas: Vec<_> = handles.iter().map(|mapped| mapped.iova).collect();
    for iova in &iovas {
        env.bus().write(rig::NIC, *iova, &[7; 64]).unwrap();
    }
    env.detach();
    for iova in &iovas {
        let stopped = env.bus().write(rig::NIC, *iova, &[8; 64]);
        assert!(matches!(stopped, Err(DmaError::Fault(_))), "{stopped:?}");
    }
    // Each unmap returns its own buffer at once, even in a mode whose unmap otherwise clears and
    // flushes.
    for mapped in handles {
        let back = env.api().unmap(RING, mapped.handle).unwrap();
        pool.free(back.expect("nobody reaches it")).unwrap();
    }
    assert_eq!((pool.in_use(), env.judge().live()), (0, 0));
    assert_eq!(env.judge().violations, 0);

    let buffer = pool.alloc().unwrap();
    let memory = PhysRange::new(buffer.start(), 1500).unwrap();
    let refused = env.api().map(RING, buffer, memory).unwrap_err();
    assert!(
        matches!(
            refused.failure,
            MapFailure::Failed(error) if error.reason == MapReason::NotAttached
        ),
        "{:?}",
        refused.failure
    );
    pool.free(refused.buffer).unwrap();
}
