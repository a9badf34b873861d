//! HW09: a fault of a device leads to its re-initialisation, under the judge.

use ringfence_devices::nic::{Environment, Nic, NicTestbed, QueueDir, TestbedError};
use ringfence_devices::recovery::{DeviceIsolation, PortOptions, Recovery, handle_faults};
use ringfence_devices::ring::RingAddresses;
use ringfence_devices::workload::NetperfStream;
use ringfence_devices::{Buffer, DmaError};
use ringfence_dma::{FlushPolicy, Mapping};
use ringfence_types::{Access, Iova};

use super::rig::{self, GateEvent, OracleChecked, Pages, Rig};
use super::small_nic;

/// An address that the driver never maps.
const WILD: Iova = Iova::new(0x7_dead_0000);
const BURST: u32 = 4;

fn port<F: FlushPolicy<Pages, Buffer>>(
    env: &mut Rig<Pages, F, Buffer, ()>,
) -> (NicTestbed<Mapping<Buffer>>, PortOptions) {
    let profile = small_nic::profile(2, 0);
    let bytes = Nic::<Mapping<Buffer>>::buffer_bytes(&profile, BURST);
    let options = PortOptions {
        profile,
        memory: rig::buffers(bytes),
        burst: BURST,
        seed: 3,
    };
    let port = NicTestbed::open(env, rig::NIC, profile, options.memory, BURST, 3).unwrap();
    (port, options)
}

fn recover_from<F: FlushPolicy<Pages, Buffer>>(mut env: Rig<Pages, F, Buffer, ()>) {
    let (mut port, options) = port(&mut env);
    let mut stream = NetperfStream::new(3000, 1);
    port.run(&mut env, &mut stream, 200).unwrap();
    assert_eq!(env.judge().faults, 0);
    // Without a fault, nothing happens.
    let (mut port, outcome) = handle_faults(port, &mut env, &options).unwrap();
    assert_eq!(outcome, Recovery::NotNeeded);
    assert_eq!(env.gate_events(), []);

    // The device loses a base register: it fetches its descriptors from a wrong address.
    let rings: Vec<_> = port.nic().rings().collect();
    let (dir, index, at) = rings[0];
    assert_eq!(dir, QueueDir::Rx);
    let mut wrong: RingAddresses = at;
    wrong.descriptors.at = WILD;
    port.device_mut().program(dir, index, &wrong);
    port.device_mut().doorbell(dir, index, small_nic::SIZE);
    let stopped = port.run(&mut env, &mut stream, 100);
    let Err(TestbedError::Device(DmaError::Fault(fault))) = stopped else {
        panic!("{stopped:?}");
    };
    assert_eq!((fault.iova, fault.access), (WILD, Access::Read));
    let live = env.judge().granted().len();
    assert!(live > 0);

    // The system reads the record, blocks the device, and opens the port again.
    let (mut port, outcome) = handle_faults(port, &mut env, &options).unwrap();
    let Recovery::Reinitialised(record) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(record.source, rig::NIC);
    assert_eq!(
        (record.page, record.access),
        (WILD.align_down(4096), Access::Read)
    );
    // While the driver still had its mappings, the device reached none of them. It got its access
    // back only after the driver had unmapped all.
    assert_eq!(
        env.gate_events(),
        [
            GateEvent::Blocked { live, reached: 0 },
            GateEvent::Unblocked { live: 0 },
        ]
    );
    assert_eq!(env.take_fault(rig::NIC), None);

    // The port works, with new mappings, and closes without loss.
    let mut stream = NetperfStream::new(3000, 1);
    port.run(&mut env, &mut stream, 200).unwrap();
    assert!(port.stats().received > 100, "{:?}", port.stats());
    port.close(&mut env).unwrap();
    let judge = env.judge();
    assert_eq!(
        (judge.violations, judge.false_faults, judge.live()),
        (0, 0, 0)
    );
    assert_eq!(judge.faults, 1);
}

#[test]
fn a_fault_blocks_resets_and_reopens_the_device() {
    recover_from(rig::strict());
    recover_from(rig::burst(7));
    recover_from(rig::deferred());
}

/// A fault of another device neither changes the port nor gets lost.
#[test]
fn faults_of_other_devices_are_not_the_ports() {
    let mut env = rig::strict();
    let (port, options) = port(&mut env);
    let other = ringfence_types::RequesterId::new(0x0400);
    let stopped = env.bus().write(other, WILD, &[1; 8]);
    assert!(matches!(stopped, Err(DmaError::Fault(_))), "{stopped:?}");
    let (port, outcome) = handle_faults(port, &mut env, &options).unwrap();
    assert_eq!((outcome, env.gate_events()), (Recovery::NotNeeded, vec![]));
    let record = env.take_fault(other).expect("a pending fault");
    assert_eq!((record.source, record.page), (other, WILD));
    assert_eq!(env.take_fault(other), None);
    port.close(&mut env).unwrap();
}
