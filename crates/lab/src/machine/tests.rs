//! Tests of the bundled machine profiles, their sources and their validation.

use super::*;
use crate::profile::ProfileError;

fn named(name: &str) -> MachineProfile {
    let found = MachineProfile::builtin()
        .into_iter()
        .find(|p| p.name == name);
    found.unwrap()
}

/// Numbers of a profile that are not absent, by field.
fn numbers(profile: &MachineProfile) -> Vec<String> {
    let value = serde_json::to_value(profile).unwrap();
    let fields = value.as_object().unwrap();
    SOURCED
        .into_iter()
        .filter(|field| fields.get(*field).is_some_and(|value| !value.is_null()))
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_number_of_a_bundled_profile_has_its_source() {
    for profile in MachineProfile::builtin() {
        assert_eq!(profile.validate(), Ok(()), "{}", profile.name);
        let mut sourced: Vec<String> = profile.sources.keys().cloned().collect();
        let mut numbers = numbers(&profile);
        sourced.sort();
        numbers.sort();
        assert_eq!(sourced, numbers, "{}", profile.name);
        for (field, source) in &profile.sources {
            assert!(!source.is_empty(), "{}: {field}", profile.name);
        }
        for row in &profile.reported {
            assert!(!row.source.is_empty(), "{}", profile.name);
            assert!(
                [row.none, row.lazy, row.strict]
                    .into_iter()
                    .flatten()
                    .count()
                    >= 2,
                "{}: {}",
                profile.name,
                row.workload
            );
        }
    }
}

#[test]
fn only_the_default_assumes_numbers() {
    for profile in MachineProfile::builtin() {
        let assumed = profile
            .sources
            .values()
            .any(|text| text.contains("assumed"));
        assert_eq!(assumed, profile.name == "r210-2015", "{}", profile.name);
    }
}

#[test]
fn profiles_have_the_published_numbers() {
    // frontier: 16.5 passthrough, 16.4 lazy, 2.8 strict M IOPS; 14.9 strict, 39.8 lazy Gb/s.
    let grace = &named("grace-2025").reported[0];
    assert_eq!(
        (grace.none, grace.lazy, grace.strict),
        (Some(16.5), Some(16.4), Some(2.8))
    );
    let graviton = &named("graviton4-2026").reported[0];
    assert_eq!(
        (graviton.none, graviton.lazy, graviton.strict),
        (None, Some(39.8), Some(14.9))
    );
    // The time of a page on the link, times the cores, times the clock.
    let page_ns = 8.0 * 4096.0 / 100.0;
    for (name, cores) in [("cascade-lake-2024", 5.0), ("ice-lake-2024", 4.0)] {
        let profile = named(name);
        let cycles = cores * page_ns * profile.clock_ghz.unwrap();
        assert!(
            (profile.page_cycles.unwrap() - cycles).abs() < 1.0,
            "{name}: {cycles}"
        );
    }
    let desktop = named("ryzen-2021");
    let request_ns = 1e9 / 10e6;
    let cycles = request_ns * desktop.clock_ghz.unwrap();
    assert_eq!(desktop.block_request_cycles, Some(cycles));
}

/// One core receives 69.3 Gb/s (Toukan, 2025): a page of it takes 472.8 ns at 2.3 GHz.
#[test]
fn the_page_of_ice_lake_2025_follows_from_its_throughput() {
    let server = named("ice-lake-2025");
    let page_ns = 4096.0 * 8.0 / 69.3;
    let cycles = page_ns * server.clock_ghz.unwrap();
    assert!(
        (cycles - server.page_cycles.unwrap()).abs() < 1.0,
        "{cycles}"
    );
}

/// F&S, section 2.2: memory reads per 4 KB, and the throughput that the paper prints: 20% and 65%
/// below 100 Gb/s. The derived numbers of `frontier_fands_model.csv` are 79.6 and 35.5.
#[test]
fn the_device_side_gives_the_published_points_of_fands() {
    let side = named("cascade-lake-2024").device_side.unwrap();
    let near = |value: f64, published: f64| (value / published - 1.0).abs() <= 0.1;
    for (reads, derived, printed) in [(1.76, 79.6, 80.0), (4.36, 35.5, 35.0)] {
        let ceiling = side.ceiling_gbps(reads, 1);
        assert!((ceiling - derived).abs() < 0.1, "{reads}: {ceiling}");
        assert!(near(ceiling, printed), "{reads}: {ceiling} and {printed}");
        assert!((side.relative_throughput(reads) - ceiling / 100.0).abs() < 1e-9);
    }
    // F&S: one IOTLB miss and 0.054 L3 misses per page reach the line rate; 1.3 IOTLB misses come
    // within 10% of it.
    assert!(side.ceiling_gbps(1.054, 1) >= 100.0);
    assert!(near(side.relative_throughput(1.354), 1.0));
    assert!((side.relative_throughput(1.054) - 1.0).abs() < 1e-12);
}

#[test]
fn unknown_numbers_stay_unknown() {
    let nothing = MachineProfile::unknown("x", "none");
    assert_eq!(nothing.validate(), Ok(()));
    let value = serde_json::to_value(&nothing).unwrap();
    for field in SOURCED {
        // The prefetch of the IOTLB is a mechanism, which is off unless a profile turns it on.
        if field != "iotlb_prefetch" {
            assert!(value[field].is_null(), "{field}");
        }
    }
    for operation in Operation::ALL {
        let prices = nothing.prices(operation, 4);
        assert_eq!(prices.baseline, None);
        assert_eq!(prices.invalidation_cycles, None);
        assert_eq!(prices.kick_cycles, None);
        assert_eq!(prices.hypercall_cycles, None);
        assert_eq!(prices.device_side, None);
    }
    // The geometry of the replay is that of r210-2015.
    let (model, replay) = (Profile::r210_2015(), nothing.for_replay());
    assert_eq!(replay.iotlb_sets, model.iotlb_sets);
    assert_eq!(replay.walk_cache_entries, model.walk_cache_entries);
}

#[test]
fn the_default_is_the_profile_of_the_papers() {
    let machine = MachineProfile::r210_2015();
    assert_eq!(machine.for_replay(), Profile::r210_2015());
    let prices = machine.prices(Operation::Packet, 1);
    // A model without a machine has no clock.
    let model = Prices::from(&Profile::r210_2015());
    let with_clock = Prices {
        clock_ghz: Some(3.1),
        ..model
    };
    assert_eq!((prices, model.clock_ghz), (with_clock, None));
}

#[test]
fn invalid_profiles_are_refused() {
    type Case = (fn(&mut MachineProfile), ProfileError);
    fn side(profile: &mut MachineProfile) -> &mut DeviceSide {
        let side = named("cascade-lake-2024").device_side;
        profile.device_side.insert(side.unwrap())
    }
    let range = |field, value| ProfileError::OutOfRange { field, value };
    let cases: [Case; 14] = [
        (|p| p.name.clear(), ProfileError::NoName),
        (|p| p.iotlb_ways = None, ProfileError::HalfGeometry),
        (
            |p| p.baseline_cycles = Some(-1.0),
            ProfileError::NotPositive(-1.0),
        ),
        (|p| p.clock_ghz = Some(0.0), range("clock_ghz", 0.0)),
        (|p| p.page_cycles = Some(-2.0), range("page_cycles", -2.0)),
        (
            |p| p.block_request_cycles = Some(f64::INFINITY),
            range("block_request_cycles", f64::INFINITY),
        ),
        (
            |p| side(p).transfer_bytes = 0,
            range("device_side.transfer_bytes", 0.0),
        ),
        (
            |p| side(p).transfer_ns = -1.0,
            range("device_side.transfer_ns", -1.0),
        ),
        (|p| side(p).read_ns = 0.0, range("device_side.read_ns", 0.0)),
        (
            |p| side(p).line_rate_gbps = f64::INFINITY,
            range("device_side.line_rate_gbps", f64::INFINITY),
        ),
        (
            |p| p.invalidation_cycles = Some(u64::MAX),
            ProfileError::TooManyCycles {
                field: "invalidation_cycles",
                cycles: u64::MAX,
            },
        ),
        (
            |p| p.page_cycles = Some(f64::INFINITY),
            range("page_cycles", f64::INFINITY),
        ),
        (
            |p| {
                p.reported = named("grace-2025").reported;
                p.reported[0].strict = Some(-2.8);
            },
            range("reported", -2.8),
        ),
        (
            |p| {
                p.sources.insert("speed".into(), "hearsay".into());
            },
            ProfileError::NoSuchField("speed".into()),
        ),
    ];
    for (index, (change, expected)) in cases.into_iter().enumerate() {
        let mut profile = MachineProfile::r210_2015();
        change(&mut profile);
        assert_eq!(profile.validate(), Err(expected), "case {index}");
    }
}
