//! Each axis of the sweep, its rows, and a reference of the IOTLB.

use super::*;

#[test]
fn each_axis_moves_what_it_should() {
    let misses = |design| run(design).unwrap().miss_rate();
    let quiet = Design {
        invalidate: Invalidate::Every(256),
        ..BASE
    };
    // Two rings of 32 live buffers: 64 entries hold the working set, 16 do not.
    let [small, right] = [4, 64].map(|sets| misses(Design { sets, ..quiet }));
    assert!(small > 1.5 * right, "{small} {right}");
    // Ways matter only at the edge of the working set. Two rings in one way conflict. All ways
    // lose each third access: 64 other pages are used since the second.
    for (sets, ways, expected) in [
        (64, 1, 8461),
        (16, 4, 4726),
        (1, 64, 8428),
        (64, 4, 4726),
        (1, 128, 4726),
    ] {
        let found = run(Design {
            sets,
            ways,
            ..quiet
        })
        .unwrap();
        let reference = least_recently_used(u64::from(sets), ways as usize, 1);
        assert_eq!((found.accesses, found.misses), (12226, expected));
        assert_eq!((found.misses, found.stale), reference, "{sets} {ways}");
    }
    // A flush of everything costs the neighbours' entries; one page costs only its own.
    let wide = run(BASE).unwrap();
    let narrow = run(Design {
        granularity: InvalidationGranularity::Selective,
        ..BASE
    })
    .unwrap();
    assert!(wide.misses > 2 * narrow.misses, "{wide:?} {narrow:?}");
    assert_eq!((wide.stale, narrow.stale), (0, 0));
    // A later flush keeps translations of unmapped buffers.
    assert!(run(Design { sets: 64, ..quiet }).unwrap().stale > 0);
    // Private IOTLBs with the same number of entries miss as often when each ring fits.
    let device = Design {
        location: Location::Device,
        sets: 64,
        ..quiet
    };
    let shared = misses(Design { sets: 64, ..quiet });
    assert!((misses(device) - shared).abs() < 0.02);
    // Devices with an IOTLB of their own keep their entries at a flush for the neighbour. The
    // core and the chipset have one IOTLB for all devices.
    let [core, chip, device] = [Location::Core, Location::Chip, Location::Device]
        .map(|location| run(Design { location, ..BASE }).unwrap());
    assert_eq!(core, chip);
    assert!(chip.misses > device.misses, "{chip:?} {device:?}");
}

/// Returns the misses and the stale accesses of sets of pages in the order of their last use,
/// with a flush at each 256th unmap. Pages of the two devices begin at different sets. The sets
/// are those of one IOTLB, or of one for each device.
fn least_recently_used(sets: u64, ways: usize, units: u64) -> (u64, u64) {
    let mut cache = vec![Vec::new(); sets as usize];
    let (mut misses, mut stale, mut unmaps) = (0, 0, 0);
    let each = sets / units;
    let set_of = |bus: u64, page: u64| {
        let in_unit = (16 + page + (bus + 1) * 0x9e37_79b1) % each;
        (bus % units * each + in_unit) as usize
    };
    for round in 0..ROUNDS {
        for bus in 0..2 {
            let used = (0..ACCESSES).map(|touch| touch * RING / ACCESSES);
            for page in used.filter_map(|older| round.checked_sub(older)) {
                let set: &mut Vec<(u64, u64)> = &mut cache[set_of(bus, page)];
                match set.iter().position(|held| *held == (bus, page)) {
                    Some(at) => drop(set.remove(at)),
                    None => {
                        misses += 1;
                        if set.len() == ways {
                            set.remove(0);
                        }
                    }
                }
                set.push((bus, page));
            }
            let Some(page) = round.checked_sub(RING) else {
                continue;
            };
            unmaps += 1;
            if unmaps % 256 == 0 {
                cache.iter_mut().for_each(Vec::clear);
            }
            let set = &mut cache[set_of(bus, page)];
            if let Some(at) = set.iter().position(|held| *held == (bus, page)) {
                stale += 1;
                let held = set.remove(at);
                set.push(held);
            }
        }
    }
    (misses, stale)
}

#[test]
fn rows_of_sets_ways_and_locations() {
    let mut found = Findings::default();
    add(&mut found).unwrap();
    let value = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        let row = row.unwrap_or_else(|| panic!("{what}"));
        row.measured.unwrap().median
    };
    let geometry = |of: &str| value(&format!("IOTLB of {of}: misses per access"));
    assert_eq!(geometry("16 sets and 4 ways"), 4726.0 / 12226.0);
    assert_eq!(geometry("64 sets and 1 ways"), 8461.0 / 12226.0);
    assert_eq!(geometry("1 sets and 64 ways"), 8428.0 / 12226.0);
    for (sets, ways) in [(4, 4), (64, 4), (16, 16)] {
        let (misses, _) = least_recently_used(sets, ways, 1);
        let here = geometry(&format!("{sets} sets and {ways} ways"));
        assert_eq!(here, misses as f64 / 12226.0, "{sets} {ways}");
    }
    let at = |location: &str| {
        ["misses", "wait"].map(|of| value(&format!("IOMMU in the {location}: {of} per access")))
    };
    let [core, chip, device] = ["core", "chip", "device"].map(at);
    // One IOTLB for both devices, which misses as often in either location and waits differently.
    assert_eq!(core[0], 4726.0 / 12226.0);
    assert_eq!(chip[0], core[0]);
    assert_eq!(core[1], 100.0 * core[0]);
    assert_eq!(chip[1], 1532.0 * chip[0]);
    // A device's own IOTLB has half of the entries.
    let (misses, _) = least_recently_used(16, 4, 2);
    assert_eq!(device[0], misses as f64 / 12226.0);
    assert_eq!(device[1], 2.0 * 1532.0 * device[0]);
    assert!(device[1] > chip[1] && device[0] >= chip[0], "{device:?}");
}

/// The IOTLB misses as often in each location in the rows, because each ring fits its share. With
/// a flush at each unmap it does not: each location has the counts of its own run.
#[test]
fn each_location_has_its_own_counts() {
    let [(core, of_core), (chip, of_chip), (device, of_device)] = at_locations(BASE).unwrap();
    let locations = [Location::Core, Location::Chip, Location::Device];
    assert_eq!([core, chip, device], locations);
    let [core, chip, device] = locations.map(|location| run(Design { location, ..BASE }).unwrap());
    assert_eq!([of_core, of_chip, of_device], [core, chip, device]);
    assert_ne!(of_chip, of_device);
}

/// Each of the eight rows of invalidation is that of its own design, written out here.
#[test]
fn rows_of_invalidation() {
    use InvalidationGranularity::{GlobalOnly, Selective};
    let mut found = Findings::default();
    add(&mut found).unwrap();
    let value = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.unwrap().measured.unwrap().median
    };
    let rows = [
        (
            "all entries at each unmap",
            16,
            GlobalOnly,
            Invalidate::PerUnmap,
        ),
        (
            "one page at each unmap",
            16,
            Selective,
            Invalidate::PerUnmap,
        ),
        (
            "all entries at each 256th unmap",
            16,
            GlobalOnly,
            Invalidate::Every(256),
        ),
        (
            "all of 256 entries at each 256th unmap",
            64,
            GlobalOnly,
            Invalidate::Every(256),
        ),
    ]
    .map(|(name, sets, granularity, invalidate)| {
        let design = Design {
            sets,
            ways: 4,
            granularity,
            invalidate,
            location: Location::Chip,
        };
        let counts = run(design).unwrap();
        let [misses, reached] = ["misses per access", "unmapped buffers reached"]
            .map(|of| value(&format!("invalidation of {name}: {of}")));
        assert_eq!(misses, counts.misses as f64 / 12226.0, "{name}");
        let unmaps = 2 * (ROUNDS - RING);
        assert_eq!(reached, counts.stale as f64 / unmaps as f64, "{name}");
        (misses, reached)
    });
    let [all, one, late, late_of_256] = rows;
    assert!(one.0 < all.0 && late.0 < all.0, "{rows:?}");
    assert_eq!([all.1, one.1, late.1], [0.0; 3]);
    assert!(late_of_256.1 > 0.0, "{rows:?}");
}

#[test]
fn counts_are_those_of_the_devices_alone() {
    // Every access walks: no IOTLB entry survives the next unmap of either device.
    let counts = run(Design {
        sets: 1,
        ways: 1,
        ..BASE
    })
    .unwrap();
    let expected = (0..ROUNDS)
        .map(|round| {
            (0..ACCESSES)
                .filter(|t| round >= t * RING / ACCESSES)
                .count() as u64
        })
        .sum::<u64>();
    assert_eq!(counts.accesses, 2 * expected);
    assert_eq!(counts.misses, counts.accesses);
    assert_eq!(counts.invalidations, 2 * (ROUNDS - RING));
}
