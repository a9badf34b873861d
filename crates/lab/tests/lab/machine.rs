//! Rows by the profile of a machine: unknown prices, c by operation, and the device's side.

use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::row::{Limit, Row};
use ringfence_lab::{Baseline, DeviceSide, MachineProfile, Operation, Prices, Profile};

use crate::script::*;

const SIDE: DeviceSide = DeviceSide {
    transfer_bytes: 4096,
    transfer_ns: 65.0,
    read_ns: 197.0,
    line_rate_gbps: 100.0,
};

/// 200 mappings of `bytes` each, every one unmapped before the next but one is mapped.
fn lines(bytes: u64) -> Vec<String> {
    let at = |pair: u64| (pair + 1) << 20;
    let mut lines = vec![map_line("eth", at(0), bytes)];
    for pair in 1..200 {
        lines.push(map_line("eth", at(pair), bytes));
        lines.push(unmap_line("eth", at(pair - 1), bytes));
    }
    lines.push(unmap_line("eth", at(199), bytes));
    lines
}

fn rows(modes: &[&str], bytes: u64, prices: Prices) -> Vec<Row> {
    let options = CompareOptions {
        modes: modes.iter().map(|name| mode(name)).collect(),
        prices: Some(prices),
        repetitions: 1,
        ..judged_only(false)
    };
    let comparison = compare("script", trace(&lines(bytes)), &options, |_| {});
    comparison.unwrap().rows
}

fn known() -> Prices {
    Prices::from(&Profile::r210_2015())
}

#[test]
fn unknown_prices_leave_cycles_and_throughput_unknown() {
    let nothing = MachineProfile::unknown("x", "none").prices(Operation::Packet, 4);
    let rows = rows(&["none", "strict", "virtio-strict"], 100, nothing);
    let [none, strict, hosted] = &rows[..] else {
        panic!("{rows:?}");
    };
    // Nothing of this mode is modelled: its cycles are known. c is not.
    assert_eq!(none.modelled_cycles, Some(0.0));
    assert!(none.cycles().is_some());
    for row in [none, strict, hosted] {
        let name = &row.mode;
        assert_eq!(row.baseline_cycles, None, "{name}");
        assert_eq!(row.processor_throughput, None, "{name}");
        assert_eq!(row.relative_throughput, None, "{name}");
        assert_eq!(row.limited_by, None, "{name}");
        assert_eq!(row.device_ceiling_gbps, None, "{name}");
        let cycles = row.components.unwrap().cycles;
        assert!(cycles.measured().is_finite(), "{name}");
    }
    assert!(strict.invalidations > 0);
    assert!(strict.map_cycles.is_some());
    for row in [strict, hosted] {
        assert_eq!(row.modelled_cycles, None, "{}", row.mode);
        assert_eq!(row.modelled_share, None, "{}", row.mode);
        assert_eq!(row.unmap_cycles, None, "{}", row.mode);
        let json = serde_json::to_value(row).unwrap();
        let components = &json["components"];
        assert!(components["unmap_invalidation_modelled_cycles"].is_null());
        assert!(components["unmap_table_cycles"].is_number());
    }
    assert!(hosted.kicks > 0);
    assert_eq!(hosted.map_cycles, None);
}

#[test]
fn c_is_that_of_the_operation() {
    let mut profile = MachineProfile::r210_2015();
    profile.block_request_cycles = Some(340.0);
    profile.page_cycles = Some(1000.0);
    for (operation, per_mapping) in [
        (Operation::Packet, 908.0),
        (Operation::BlockRequest, 340.0),
        (Operation::Page, 3000.0),
    ] {
        let prices = profile.prices(operation, 1);
        // Three pages per mapping.
        for row in rows(&["none", "strict"], 3 * 4096, prices) {
            assert_eq!(row.baseline_cycles, Some(per_mapping), "{operation:?}");
            let share = per_mapping / (per_mapping + row.cycles().unwrap());
            let found = row.relative_throughput.unwrap();
            assert!((found - share).abs() < 1e-12, "{operation:?}: {found}");
        }
    }
}

#[test]
fn the_device_side_follows_the_page_walks() {
    for bytes in [4096, 3 * 4096] {
        let prices = Prices {
            device_side: Some(SIDE),
            walkers: 4,
            ..known()
        };
        let modes = ["none", "strict", "linux-lazy", "riommu"];
        for row in rows(&modes, bytes, prices) {
            let name = &row.mode;
            let pages = row.accesses as f64;
            assert_eq!(row.accesses, 200 * bytes / 4096, "{name}");
            // The same numbers by another path: hit rate, and words per walk. An entry of a ring
            // has two words.
            let misses = row.iotlb_hit_rate.map_or(0.0, |hits| (1.0 - hits) * pages);
            let words = if name == "riommu" { 2.0 } else { 1.0 };
            let reads = row.words_per_walk.unwrap_or(0.0) * misses / words;
            let near = |value: Option<f64>, expected: f64| {
                let value = value.unwrap();
                assert!(
                    (value - expected).abs() < 1e-9,
                    "{name}: {value}, {expected}"
                );
            };
            near(row.misses_per_page, misses / pages);
            near(row.reads_per_page, reads / pages);
            let walking = 197.0 * reads / pages;
            near(row.device_ceiling_gbps, 32768.0 / (65.0 + walking));
            near(row.parallel_ceiling_gbps, 32768.0 / (65.0 + walking / 4.0));
            if name == "none" {
                assert_eq!(row.reads_per_page, Some(0.0));
            } else {
                assert!(reads > 0.0, "{name}");
            }
        }
    }
}

#[test]
fn the_smaller_side_limits_and_is_named() {
    let free = Prices {
        baseline: Some(Baseline::PerMapping(1e12)),
        ..known()
    };
    let slow = DeviceSide {
        read_ns: 1e6,
        ..SIDE
    };
    for (prices, limit) in [
        (known(), None),
        (
            Prices {
                device_side: Some(SIDE),
                ..known()
            },
            Some(Limit::Processor),
        ),
        (
            Prices {
                device_side: Some(slow),
                ..free
            },
            Some(Limit::Device),
        ),
    ] {
        for row in rows(&["strict"], 4096, prices) {
            assert_eq!(row.limited_by, limit);
            let processor = row.processor_throughput.unwrap();
            let smaller = match limit {
                Some(Limit::Device) => row.device_throughput.unwrap(),
                _ => processor,
            };
            assert_eq!(row.relative_throughput, Some(smaller));
            assert!(row.device_throughput.is_none_or(|device| device >= smaller));
            assert!(processor >= smaller);
        }
    }
    // With an unknown side, the smaller one is unknown.
    let unknown = Prices {
        baseline: None,
        device_side: Some(slow),
        ..known()
    };
    for row in rows(&["strict"], 4096, unknown) {
        assert!(row.device_throughput.unwrap() < 0.01);
        assert_eq!((row.relative_throughput, row.limited_by), (None, None));
    }
}
