//! Sums of the timed replays, on replays whose cycles are known.

use ringfence_types::Nanos;

use super::*;
use crate::plan::{Step, TimedStep};

/// A replay in which every map and every unmap takes a number of cycles.
struct Known {
    map: u64,
    unmap: u64,
}

impl DynTimedReplay for Known {
    fn prepare_for(&mut self, _: &PlanResources) -> Result<(), LabError> {
        Ok(())
    }

    fn run_plan(&mut self, plan: &Plan, clock: &mut Clock, _: Option<&AllocTrace>) {
        let (maps, unmaps) = (plan.maps * self.map, plan.unmaps * self.unmap);
        clock.blocks.push(maps + unmaps);
        clock.in_maps.push(maps);
        clock.in_unmaps.push(unmaps);
    }

    fn layer_type(&self) -> &'static str {
        "known"
    }
}

/// Cycles of a map and of an unmap in each timed replay, in the order of [`CONFIG_NAMES`]. Maps: 10
/// for the allocator, 20 for the table, 2 for all else. Unmaps: 1 for the lookup, 4 for the free, 6
/// for the table, 30 for the invalidation, 3 for all else. The loop takes 1.
const KNOWN: [(u64, u64); CONFIGS] = [
    (33, 45),
    (33, 44),
    (23, 40),
    (3, 34),
    (3, 4),
    (33, 15),
    (13, 9),
    (1, 1),
];

fn plan(maps: u64, unmaps: u64) -> Plan {
    let step = TimedStep {
        time: Nanos(0),
        step: Step::Tick,
    };
    Plan {
        steps: vec![step],
        maps,
        unmaps,
        ..Plan::default()
    }
}

/// Of three repetitions, one is slower than the others a hundred times.
#[test]
fn each_component_has_the_cycles_of_its_maps_and_unmaps() {
    let mut sets = 0;
    let mut set = || {
        sets += 1;
        let slower = if sets % 3 == 0 { 100 } else { 1 };
        let replicas = KNOWN.map(|(map, unmap)| -> Option<Box<dyn DynTimedReplay>> {
            Some(Box::new(Known {
                map: slower * map,
                unmap: slower * unmap,
            }))
        });
        Ok(AblationSet { replicas })
    };
    let recorder = Box::new(Known { map: 0, unmap: 0 });
    let mut meter = Ablations::new(3, Rc::default(), recorder, &mut set).unwrap();
    meter.chunk(&plan(5, 3)).unwrap();
    meter.chunk(&Plan::default()).unwrap();
    meter.chunk(&plan(7, 8)).unwrap();
    let found = meter.finish();
    let cycles = found.cycles;
    for (name, found, wanted) in [
        ("map_iova_alloc", cycles.map_iova_alloc, 10.0),
        ("map_table", cycles.map_table, 20.0),
        ("map_other", cycles.map_other, 2.0),
        ("unmap_iova_find", cycles.unmap_iova_find, 1.0),
        ("unmap_iova_free", cycles.unmap_iova_free, 4.0),
        ("unmap_table", cycles.unmap_table, 6.0),
        ("unmap_invalidation", cycles.unmap_invalidation, 30.0),
        ("unmap_other", cycles.unmap_other, 3.0),
    ] {
        assert!(
            (found - wanted).abs() < 1e-9,
            "{name}: {found}, not {wanted}"
        );
    }
    assert!(
        (found.repetition_spread - 99.0).abs() < 1e-9,
        "{}",
        found.repetition_spread
    );
}
