//! The profile in a report: its costs in sentences, and the table of the device's side.

use super::data::Report;
use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::{cycles, or_dash};
use ringfence_lab::row::{Limit, Row};
use ringfence_lab::{Baseline, MachineProfile, Operation, Reported};

/// Title of the table of the device's side.
pub(super) const DEVICE_SIDE: &str = "Device side: page walks and the throughput at which they end";

/// Returns the table of page walks and ceilings; `None` if the profile has no device side.
pub(super) fn device_side(report: &Report, rows: &[&Row]) -> Option<Grid> {
    const PER_PAGE: &str = "per page";
    const CEILING: &str = "ceiling in Gb/s";
    const RELATIVE: &str = "relative throughput";
    report.profile.device_side?;
    let prefetches = rows
        .iter()
        .any(|row| row.prefetch_reads_per_page > Some(0.0));
    let mut columns = vec![
        Column::left("mode"),
        Column::right(PER_PAGE, "misses"),
        Column::right(PER_PAGE, "reads"),
        Column::right("reads", "per walk"),
        Column::right(CEILING, "1 walker"),
        Column::right(CEILING, "k walkers"),
        Column::right(RELATIVE, "processor"),
        Column::right(RELATIVE, "device"),
        Column::right(RELATIVE, "smaller"),
        Column::right("limited", "by"),
    ];
    if prefetches {
        columns.insert(3, Column::right(PER_PAGE, "prefetch"));
    }
    let mut grid = Grid::new(&columns);
    for row in rows {
        let number = |value: Option<f64>, decimals: usize| {
            Cell::new(or_dash(value, |value| format!("{value:.decimals$}")))
        };
        let walk = row
            .misses_per_page
            .filter(|misses| *misses > 0.0)
            .zip(row.reads_per_page)
            .map(|(misses, reads)| reads / misses);
        let limited = row.limited_by.map(Limit::name);
        let mut cells = vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            number(row.misses_per_page, 3),
            number(row.reads_per_page, 3),
            number(walk, 2),
            number(row.device_ceiling_gbps, 1),
            number(row.parallel_ceiling_gbps, 1),
            number(row.processor_throughput, 2),
            number(row.device_throughput, 2),
            number(row.relative_throughput, 2),
            Cell::new(or_dash(limited, str::to_owned)),
        ];
        if prefetches {
            cells.insert(3, number(row.prefetch_reads_per_page, 3));
        }
        grid.rows.push(cells);
    }
    Some(grid)
}

/// Returns the sentences on measured and modelled cycles. `hosted` is true if a host owns the table
/// of a row.
pub(super) fn measured(report: &Report, hosted: bool) -> String {
    let (on, profile) = (&report.measured_on, &report.profile);
    let each = |value: Option<u64>, event: &str| match value {
        Some(cycles) => format!("{cycles} cycles for each {event}"),
        None => format!("an unknown number of cycles for each {event}"),
    };
    let kicks = match profile.kick_cycles {
        _ if !hosted => String::new(),
        Some(cycles) => format!(", {cycles} for each kick of a host"),
        None => ", an unknown number for each kick of a host".to_owned(),
    };
    format!(
        "Measured: {} build on {} ({} cycles, median of {}). Modelled by profile {}: {}{kicks} \
        ({}). Relative throughput = {}, {}. <n: below the n cycles that the meter resolves; the \
        sums contain the component as measured.",
        on.build,
        on.cpu,
        on.cycle_unit,
        report.repetitions,
        profile.name,
        each(profile.invalidation_cycles, "invalidation"),
        profile.source,
        if profile.device_side.is_some() {
            "the smaller of c / (c + map + unmap) and the device's"
        } else {
            "c / (c + map + unmap)"
        },
        baseline(profile, report.operation),
    )
}

fn baseline(profile: &MachineProfile, operation: Operation) -> String {
    let name = operation.name();
    match profile.baseline(operation) {
        Some(Baseline::PerMapping(c)) if operation == Operation::Packet => {
            format!("c = {}", cycles(c))
        }
        Some(Baseline::PerMapping(c)) => format!("c = {} for a {name}", cycles(c)),
        Some(Baseline::PerPage(c)) => format!("c = {} for each page", cycles(c)),
        None => {
            let known = Operation::ALL.into_iter();
            let known = known.filter(|other| profile.baseline(*other).is_some());
            match known.map(Operation::name).next() {
                Some(other) => format!(
                    "c of a {name} is unknown: give --baseline-cycles, or --operation {other}"
                ),
                None => format!("c of a {name} is unknown: give --baseline-cycles"),
            }
        }
    }
}

/// Returns the sentences on the modelled hardware.
pub(super) fn modelled(profile: &MachineProfile) -> String {
    let replay = profile.for_replay();
    let [leaf, middle, upper] = replay.walk_cache_entries;
    let assumed = |known: bool| if known { "" } else { " (unknown; assumed)" };
    let miss = match profile.miss_cycles {
        Some(cycles) => format!("{cycles} cycles"),
        None => "an unknown number of cycles".to_owned(),
    };
    format!(
        "Hardware model: IOTLB {} sets x {} ways{}, walk caches of {leaf}, {middle}, {upper} \
        entries for levels L1, L2, L3{}, {} page walks{}. A miss costs the device {miss}, which no \
        column includes.",
        replay.iotlb_sets,
        replay.iotlb_ways,
        assumed(profile.iotlb_sets.is_some()),
        assumed(profile.walk_cache_entries.is_some()),
        if replay.coherent {
            "coherent"
        } else {
            "non-coherent"
        },
        assumed(profile.coherent.is_some()),
    )
}

/// Returns a line on the device's side, if the profile has one, and a line for each throughput that
/// its sources report.
pub(super) fn remarks(report: &Report) -> Vec<String> {
    let profile = &report.profile;
    let side = profile.device_side.map(|side| {
        format!(
            "Device side: T = p / (l0 + M x lm) with p = {} bytes, l0 = {} ns, lm = {} ns and M \
            reads per page; with k = {} walkers, M / k. The line rate of {} Gb/s limits the \
            device's throughput.",
            side.transfer_bytes,
            side.transfer_ns,
            side.read_ns,
            report.walkers,
            side.line_rate_gbps
        )
    });
    side.into_iter()
        .chain(profile.reported.iter().map(reported))
        .collect()
}

fn reported(row: &Reported) -> String {
    let values = [
        ("none", row.none),
        ("lazy", row.lazy),
        ("strict", row.strict),
    ];
    let values = values.map(|(name, value)| match value {
        Some(value) => format!("{name} {value}"),
        None => format!("{name} unknown"),
    });
    format!(
        "Reported on this machine, {} ({}): {}. {}.",
        row.workload,
        row.unit,
        values.join(", "),
        row.source
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredOn;

    fn report(profile: MachineProfile) -> Report {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "release",
            processors: 2,
        };
        Report::new(profile, measured_on, 3, true, &[], &[])
    }

    fn named(name: &str) -> MachineProfile {
        let all = MachineProfile::builtin();
        all.into_iter().find(|p| p.name == name).unwrap()
    }

    #[test]
    fn unknown_numbers_read_as_unknown() {
        let text = measured(&report(MachineProfile::r210_2015()), true);
        assert!(!text.contains("unknown"), "{text}");
        let text = modelled(&MachineProfile::r210_2015());
        assert!(!text.contains("unknown"), "{text}");

        let text = measured(&report(named("grace-2025")), true);
        for part in [
            "an unknown number of cycles for each invalidation, an unknown number for each kick",
            "c of a packet is unknown: give --baseline-cycles.",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = modelled(&named("grace-2025"));
        assert_eq!(text.matches("(unknown; assumed)").count(), 3, "{text}");
        let text = measured(&report(named("cascade-lake-2024")), false);
        assert!(text.contains("or --operation page"), "{text}");
        let lines = remarks(&report(named("graviton4-2026")));
        assert!(
            lines[0].contains("(Gb/s): none unknown, lazy 39.8, strict 14.9."),
            "{lines:?}"
        );
    }

    #[test]
    fn the_device_side_is_shown_if_the_profile_has_one() {
        let row = Row {
            mode: "strict".into(),
            misses_per_page: Some(1.0),
            reads_per_page: Some(1.76),
            device_ceiling_gbps: Some(79.59),
            parallel_ceiling_gbps: Some(133.3),
            device_throughput: Some(0.7959),
            processor_throughput: Some(0.9),
            relative_throughput: Some(0.7959),
            limited_by: Some(Limit::Device),
            ..Row::of_run(true, true)
        };
        assert!(device_side(&report(MachineProfile::r210_2015()), &[&row]).is_none());
        let grid = device_side(&report(named("cascade-lake-2024")), &[&row]).unwrap();
        let texts: Vec<&str> = grid.rows[0].iter().map(|cell| cell.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "strict", "1.000", "1.760", "1.76", "79.6", "133.3", "0.90", "0.80", "0.80",
                "device"
            ]
        );
    }
}
