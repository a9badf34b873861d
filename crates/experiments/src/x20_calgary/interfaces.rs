//! The interfaces between driver, hypervisor and IOMMU as a sweep (CG17): calls of a batch, entries
//! of a crossing, and traps beside hypercalls and requests.
//!
//! A batch of 1 to 64 buffers is unmapped in one call, and mapped in one. Crossings and flushes are
//! counted by running each interface; their cycles are modelled.

use ringfence_lab::{LabError, Profile};
use ringfence_types::Direction;

use super::drivers::{Counts, Driver, Ring, run_rings};
use super::modes::mode;
use crate::figure::{Figure, Series};
use crate::finding::{FindingRow, Findings, Measured};

/// Buffers of a call.
const BATCHES: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Batches with a row. The figure has all.
const PRINTED: [u64; 3] = [1, 32, 64];

/// An interface: its name in the rows, and mode. All invalidate before an unmap returns.
const INTERFACES: [(&str, &str); 5] = [
    ("hypercall for each entry", "xen"),
    ("hypercall for up to 32 entries", "xen-multicall"),
    ("request on a virtqueue", "virtio-strict"),
    ("trapped queue of an emulated VT-d", "emulated-strict"),
    ("direct: the kernel writes the table", "calgary"),
];

/// Runs a ring of 64 buffers, in batches of `group`.
fn counts(name: &str, group: u64) -> Result<Counts, LabError> {
    let ring = Ring {
        direction: Direction::FromDevice,
        first: 0,
        pages: 128,
        in_flight: 64,
        group,
        completed: 256,
    };
    run_rings(Driver::Batches, name, &[ring])
}

/// Adds the sweep.
pub(super) fn add(found: &mut Findings, profile: &Profile) -> Result<(), LabError> {
    let mut lines = Vec::new();
    for (interface, name) in INTERFACES {
        let crossing = profile.crossing_cycles(mode(name)?.owner) as f64;
        let mut points = Vec::new();
        for group in BATCHES {
            let counts = counts(name, group)?;
            let crossed = counts.per_pair(counts.crossings);
            let flushed = counts.per_pair(counts.flushes);
            points.push((group as f64, crossed));
            if !PRINTED.contains(&group) {
                continue;
            }
            let what = format!("interface {interface}, batches of {group}");
            let mut row = |of: &str, unit: &'static str, value: Measured| {
                found.push(FindingRow::new(format!("{what}: {of}"), unit, value));
            };
            row("crossings per pair", "", Measured::counted(crossed));
            row("flushes per pair", "", Measured::counted(flushed));
            let cycles = crossed * crossing + flushed * profile.invalidation_cycles as f64;
            let cycles = Measured::timed(cycles, 0.0);
            row("modelled cycles of a map and an unmap", "cycles", cycles);
        }
        lines.push(Series::line(interface, points));
    }
    let title = "interfaces: crossings".to_owned();
    let y = "crossings of a map and an unmap";
    found
        .figures
        .push(Figure::logarithmic(title, "buffers of a call", y, lines));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Setting;

    #[test]
    fn only_interfaces_with_batches_cross_less_for_larger_calls() {
        for group in BATCHES {
            // Entries of a crossing; none if the kernel needs no crossing.
            for (name, entries) in [
                ("xen", Some(1)),
                ("xen-multicall", Some(32)),
                ("calgary", None),
            ] {
                let found = counts(name, group).unwrap();
                let calls = found.pairs / group;
                let crossings = entries.map_or(0, |entries| 2 * calls * group.div_ceil(entries));
                assert_eq!(found.crossings, crossings, "{name} {group}");
                assert_eq!(found.flushes, calls, "{name} {group}");
                assert_eq!(found.reached, 0, "{name} {group}");
            }
            // A batch notifies the virtqueue once. An emulated VT-d in caching mode traps for each
            // map, and once for the invalidation of a batch of unmaps. The host of a virtqueue
            // joins the requests of a notification to one flush if their addresses ascend. The
            // freelists return the addresses of a batch in reverse order, so they descend in half
            // of the batches, each buffer of which has a flush.
            let calls = 256 / group;
            for (name, crossings, flushes) in [
                ("virtio-strict", 2 * calls, calls * (group + 1) / 2),
                ("emulated-strict", 256 + calls, calls),
            ] {
                let found = counts(name, group).unwrap();
                assert_eq!(
                    (found.crossings, found.flushes, found.reached),
                    (crossings, flushes, 0),
                    "{name} {group}"
                );
            }
        }
    }

    /// Each row by hand: crossings, flushes, and cycles with the profile's costs.
    #[test]
    fn rows_and_lines_are_those_of_their_interface() {
        let profile = Setting::smoke().profile;
        let mut found = Findings::default();
        add(&mut found, &profile).unwrap();
        let value = |interface: &str, group: u64, of: &str| {
            let what = format!("interface {interface}, batches of {group}: {of}");
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.unwrap_or_else(|| panic!("{what}"))
                .measured
                .unwrap()
                .median
        };
        let invalidation = profile.invalidation_cycles as f64;
        let once = [1.0, 1.0 / 32.0, 1.0 / 64.0];
        // The host of a virtqueue joins requests of ascending addresses. Half of the batches have
        // them, and each other buffer has a flush.
        let by_request = [1.0, 33.0 / 64.0, 65.0 / 128.0];
        for (interface, mode_name, per_pair, flushed) in [
            ("hypercall for each entry", "xen", [2.0, 2.0, 2.0], once),
            (
                "hypercall for up to 32 entries",
                "xen-multicall",
                [2.0, 2.0 / 32.0, 2.0 / 32.0],
                once,
            ),
            (
                "request on a virtqueue",
                "virtio-strict",
                [2.0, 2.0 / 32.0, 2.0 / 64.0],
                by_request,
            ),
            (
                "trapped queue of an emulated VT-d",
                "emulated-strict",
                [2.0, 1.0 + 1.0 / 32.0, 1.0 + 1.0 / 64.0],
                once,
            ),
            (
                "direct: the kernel writes the table",
                "calgary",
                [0.0, 0.0, 0.0],
                once,
            ),
        ] {
            let crossing = profile.crossing_cycles(mode(mode_name).unwrap().owner) as f64;
            for (index, group) in [1, 32, 64].into_iter().enumerate() {
                let crossings = per_pair[index];
                assert_eq!(value(interface, group, "crossings per pair"), crossings);
                let flushes = value(interface, group, "flushes per pair");
                assert_eq!(flushes, flushed[index], "{interface} {group}");
                let cycles = value(interface, group, "modelled cycles of a map and an unmap");
                let wanted = crossings * crossing + flushes * invalidation;
                assert!((cycles - wanted).abs() < 1e-9, "{interface} {group}");
            }
            let line = found.figures[0].series.iter();
            let mut line = line.filter(|line| line.name == interface);
            let points = &line.next().unwrap().points;
            let of = |group: f64| points.iter().find(|point| point.0 == group).unwrap().1;
            assert_eq!([1.0, 32.0, 64.0].map(of), per_pair, "{interface}");
        }
    }
}
