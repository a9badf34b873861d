//! Attackers inside the device, which react to the device's own driver.

use std::cell::RefCell;

use ringfence_devices::api::AttackHook;
use ringfence_devices::nic::{Environment, Nic, NicProfile, NicTestbed};
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_devices::{Buffer, Neighbour, Passive, Racer, Replayer, Reuse};
use ringfence_dma::Mapping;
use ringfence_dma::flush::{Burst, Deferred, Strict};

use super::rig::{self, OracleChecked, Rig, RingRig};

type Tricks = AttackHook<(Passive, (Racer, (Replayer, Neighbour)))>;

fn tricks() -> Tricks {
    let replayer = Replayer::new(Reuse::Page);
    AttackHook((Passive, (Racer::new(), (replayer, Neighbour))))
}

/// Returns the violations and blocked accesses of an attacked adapter.
fn attacked<W: OracleChecked + Environment<Handle = Mapping<Buffer>>>(mut env: W) -> (u64, u64) {
    let profile = NicProfile::MLX;
    let bytes = Nic::<Mapping<Buffer>>::buffer_bytes(&profile, BURST);
    let memory = rig::buffers(bytes);
    let mut testbed = NicTestbed::open(&mut env, rig::NIC, profile, memory, BURST, 1).unwrap();
    let mut stream = NetperfStream::default();
    testbed.run(&mut env, &mut stream, 2_400).unwrap();
    let judge = env.judge();
    (judge.violations, judge.faults)
}

#[test]
fn only_rings_are_byte_granular_only_deferred_are_stale() {
    let rings = |times| {
        let live = NicProfile::MLX.api_rings();
        let rings = live.map(|(ring, live)| (ring, live * times));
        RingRig::rings(rings, rig::TAIL, tricks())
    };
    // The judge counts access to a neighbouring byte, so page-granular modes have violations.
    let (violations, faults) = attacked(rings(2));
    assert_eq!(violations, 0);
    assert!(faults > 1_000, "{faults} attempts");
    let (strict, faults) = attacked(Rig::paged(Strict, tricks()));
    assert!(strict > 0);
    assert!(faults > 1_000, "{faults} attempts");
    let (burst, _) = attacked(Rig::paged(Burst::new(512), tricks()));
    assert!(burst > 0);
    let stale = Deferred::new(RefCell::new);
    let (deferred, _) = attacked(Rig::paged(stale, tricks()));
    assert!(deferred > strict + 1_000, "{deferred} violations");
}

#[test]
fn without_neighbours_strict_and_burst_stop_everything() {
    let quiet = || AttackHook((Passive, (Racer::new(), Replayer::new(Reuse::Page))));
    let (violations, faults) = attacked(Rig::paged(Strict, quiet()));
    assert_eq!(violations, 0);
    assert!(faults > 1_000, "{faults} attempts");
    let (violations, _) = attacked(Rig::paged(Burst::new(512), quiet()));
    assert_eq!(violations, 0);
}
