//! Attackers inside the device, reacting to what its own driver does.

use ringfence_devices::api::Attacked;
use ringfence_devices::nic::{Nic, Profile, Station};
use ringfence_devices::workload::{BURST, Stream};
use ringfence_devices::{Buffer, Passive, Racer, Replayer, Reuse};
use ringfence_dma::Flush;
use ringfence_dma::flush::{Burst, Deferred, Strict};

use super::rig::{self, Pages, Rig};

/// Violations and stopped accesses of an attacked adapter.
fn attacked<F: Flush<Pages, Buffer>>(flush: F) -> (u64, u64) {
    let attacker = (Passive, (Racer::new(), Replayer::new(Reuse::Page)));
    let mut world = Rig::paged(flush, Attacked(attacker));
    let profile = Profile::MLX;
    let bytes = Nic::<ringfence_dma::Mapping<Buffer>>::buffer_bytes(&profile, BURST);
    let memory = rig::buffers(bytes);
    let mut station = Station::open(&mut world, rig::NIC, profile, memory, BURST, 1).unwrap();
    let mut stream = Stream::default();
    station.run(&mut world, &mut stream, 3_000).unwrap();
    let judge = &world.machine.judge;
    (judge.violations, judge.faults)
}

#[test]
fn strict_and_burst_stop_what_deferred_lets_through() {
    let (violations, faults) = attacked(Strict);
    assert_eq!(violations, 0);
    assert!(faults > 1_000, "{faults} attempts");
    let (violations, _) = attacked(Burst::new(512));
    assert_eq!(violations, 0);
    let (violations, _) = attacked(Deferred::new(std::cell::RefCell::new));
    assert!(violations > 1_000, "{violations} violations");
}
