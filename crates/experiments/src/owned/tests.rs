//! Tests of rings that the driver owns.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::NetperfStream;
use ringfence_types::{PhysMemory, RingId};

use super::*;
use crate::capture::Capture;

/// A device that does not snoop sees nothing of the rings, which are those of `riommu`.
#[test]
fn owned_rings_are_not_written_back() {
    let memory = Arena::with_device_view(ARENA).unwrap();
    let mut owned = rings(&memory, &[16]).unwrap();
    let piece = PhysRange::new(PhysAddr::new(1 << 20), 64).unwrap();
    let mapped = owned[0].map(&memory, 0, &piece, Direction::ToDevice);
    assert!(mapped.is_ok());
    owned[0].sync_map(&memory);
    let seen = |memory: &Arena| {
        let mut words = (0x2000..0x4000).step_by(8).map(PhysAddr::new);
        words.any(|at| memory.word(at).unwrap().load(Relaxed) != 0)
    };
    assert!(seen(&memory));
    assert!(!seen(memory.device_view().unwrap().memory()));
}

#[test]
fn each_burst_is_one_invalidation_and_waiting_takes_its_time() {
    const WAIT: u64 = 1_000_000;
    let mut capture = Capture::with(NicProfile::BRCM, NetperfStream::default(), 50, 1200).unwrap();
    let runs = [capture.run().unwrap(), capture.run().unwrap()];
    let counted = costs(&runs, 1, InvalidationModel::Counted).unwrap();
    let waited = costs(&runs, 1, InvalidationModel::Waited(WAIT)).unwrap();
    for ((run, counted), waited) in runs.iter().zip(&counted).zip(&waited) {
        assert_eq!(counted.invalidations, run.bursts());
        assert_eq!(waited.invalidations, run.bursts());
        assert_eq!(counted.pairs, run.plan.maps.max(run.plan.unmaps));
        // The wait is a lower bound, whatever else the CPU executes.
        assert!(waited.measured > (run.bursts() * WAIT) as f64 * 0.9);
    }
}

/// Time advances by 1 at each reading, so a wait of N cycles ends N after its first reading,
/// and no later. A counted invalidation reads no time.
#[test]
fn an_invalidation_waits_as_long_as_its_model_and_no_longer() {
    let memory = Rc::new(Arena::new(ARENA).unwrap());
    let request = Invalidation::Ring {
        domain: DomainId::new(1),
        device: RequesterId::new(0x0300),
        ring: RingId::new(0),
    };
    for (model, wanted) in [
        (InvalidationModel::Counted, 0),
        (InvalidationModel::Waited(1), 2),
        (InvalidationModel::Waited(2150), 2151),
    ] {
        let time = Cell::new(7);
        let bare: [NoProtection; 0] = [];
        let mut unit = Port::new(&memory, bare, model, || advance(&time)).unit;
        for invalidation in 1..=3 {
            assert!(unit.submit(request).is_ok());
            assert_eq!(time.get(), 7 + invalidation * wanted, "{model:?}");
            assert_eq!(unit.count, invalidation, "{model:?}");
        }
    }
}

/// Reads a clock that advances by 1 at each reading.
fn advance(time: &Cell<u64>) -> u64 {
    time.set(time.get() + 1);
    time.get()
}

/// Loops and waits have one clock. On a clock that advances by 1 at each reading, the loops take as
/// long as those without protection, and each wait of N cycles takes N + 1.
#[test]
fn waits_and_loops_have_the_same_clock() {
    let mut capture = Capture::with(NicProfile::BRCM, NetperfStream::default(), 50, 1200).unwrap();
    let runs = [capture.run().unwrap(), capture.run().unwrap()];
    let time = Cell::new(0);
    for (model, wait) in [
        (InvalidationModel::Counted, 0),
        (InvalidationModel::Waited(40), 41),
        (InvalidationModel::Waited(2150), 2151),
    ] {
        let found = costs_by(&runs, 2, model, || advance(&time)).unwrap();
        for (run, cost) in runs.iter().zip(&found) {
            assert!(run.bursts() > 0);
            assert_eq!(cost.measured, (run.bursts() * wait) as f64, "{model:?}");
        }
    }
}
