//! The needs of modes at line rates: a table for each rate.

use super::data::Report;
use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::or_dash;
use ringfence_lab::LineRate;
use ringfence_lab::row::Row;

/// Returns a title and a table for each line rate of the report, for one trace.
pub(super) fn line_rates(report: &Report, rows: &[&Row]) -> Vec<(String, Grid)> {
    let tables = report.gbps.iter();
    tables
        .map(|gbps| (title(*gbps), table(report, rows, *gbps)))
        .collect()
}

fn title(gbps: f64) -> String {
    format!("Line rate {gbps} Gb/s: what each mode needs (modelled)")
}

fn table(report: &Report, rows: &[&Row], gbps: f64) -> Grid {
    const PER_PAGE: &str = "per page";
    const FEWEST: &str = "fewest";
    const INVALIDATIONS: &str = "invalidations";
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::right(PER_PAGE, "reads"),
        Column::right(PER_PAGE, "invalidations"),
        Column::right(FEWEST, "walkers"),
        Column::right(FEWEST, "streams"),
        Column::right(INVALIDATIONS, "M/s"),
        Column::right(INVALIDATIONS, "cores"),
        Column::right("copies", "GB/s"),
    ]);
    for row in rows {
        let of_row = |rate: &&LineRate| {
            rate.gbps == gbps && rate.mode == row.mode && rate.trace == row.trace
        };
        let Some(rate) = report.line_rates.iter().find(of_row) else {
            continue;
        };
        let number = |value: Option<f64>, decimals: usize| {
            Cell::new(or_dash(value, |value| format!("{value:.decimals$}")))
        };
        let count = |value: Option<u32>| Cell::new(or_dash(value, |value| value.to_string()));
        let pages = (row.accesses > 0).then_some(row.accesses as f64);
        grid.rows.push(vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            number(row.reads_per_page, 3),
            number(pages.map(|pages| row.invalidations as f64 / pages), 3),
            count(rate.walkers),
            count(rate.streams),
            number(rate.invalidations_per_second.map(|each| each / 1e6), 2),
            number(rate.invalidation_cores, 2),
            number(rate.copy_gigabytes_per_second, 1),
        ]);
    }
    grid
}

/// Returns sentences on the tables; none without a line rate.
pub(super) fn remarks(report: &Report) -> Vec<String> {
    if report.gbps.is_empty() {
        return Vec::new();
    }
    let profile = &report.profile;
    let bytes = profile.device_side.map_or(4096, |side| side.transfer_bytes);
    let mut out = vec![format!(
        "Line rates: modelled from the counts of this replay and profile {}, at {bytes} bytes for \
        each page. Walkers: fewest k with p / (l0 + M x lm / k) at the rate, in units of the \
        machine's; a dash if l0 alone takes longer. Streams: fewest n with n x p / (l0 + M x lm) \
        at the rate. Cores: processors that wait for invalidations, one after the other. Copies: \
        one read and one write for each copied byte.",
        profile.name
    )];
    if profile.device_side.is_none() {
        out.push(format!(
            "Line rates: profile {} has no device's side, so walkers and streams are unknown.",
            profile.name
        ));
    }
    let missing = match (profile.invalidation_cycles, profile.clock_ghz) {
        (None, _) => "the cost of an invalidation (--invalidation-cycles)",
        (Some(_), None) => "the rate of the time-stamp counter (clock_ghz)",
        (Some(_), Some(_)) => return out,
    };
    out.push(format!(
        "Line rates: profile {} does not state {missing}, so cores are unknown.",
        profile.name
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredOn;
    use ringfence_lab::MachineProfile;

    fn report(name: &str, gbps: &[f64]) -> (Report, Row) {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "release",
            processors: 2,
        };
        let profile = MachineProfile::builtin();
        let profile = profile.into_iter().find(|p| p.name == name).unwrap();
        let mut report = Report::new(profile, measured_on, 0, false, &[], &[]);
        report.gbps = gbps.to_vec();
        let row = Row {
            trace: "t".into(),
            mode: "copy".into(),
            accesses: 4,
            invalidations: 2,
            reads_per_page: Some(1.0),
            copied_per_byte: Some(1.0),
            ..Row::default()
        };
        report.line_rates = gbps
            .iter()
            .map(|gbps| LineRate::new(&row, &report.profile, *gbps))
            .collect();
        (report, row)
    }

    #[test]
    fn each_rate_has_a_table_of_all_modes() {
        let (report, row) = report("cascade-lake-2024", &[400.0, 800.0]);
        let tables = line_rates(&report, &[&row]);
        let cells = |index: usize| -> Vec<&str> {
            let row = tables[index].1.rows[0].iter();
            row.map(|cell| cell.text.as_str()).collect()
        };
        assert_eq!(
            cells(0),
            ["copy", "1.000", "0.500", "12", "4", "6.10", "-", "100.0"]
        );
        assert_eq!(cells(1)[3..5], ["-", "7"]);
        assert!(
            tables[1].0.starts_with("Line rate 800 Gb/s"),
            "{}",
            tables[1].0
        );
        let text = remarks(&report).join(" ");
        assert!(text.contains("--invalidation-cycles"), "{text}");
        assert!(!text.contains("no device's side"), "{text}");
    }

    #[test]
    fn what_a_profile_lacks_is_named() {
        let (report, row) = report("r210-2015", &[100.0]);
        let tables = line_rates(&report, &[&row]);
        let cells: Vec<&str> = tables[0].1.rows[0]
            .iter()
            .map(|cell| cell.text.as_str())
            .collect();
        assert_eq!(cells[3..7], ["-", "-", "1.53", "1.06"]);
        let text = remarks(&report).join(" ");
        assert!(
            text.contains("no device's side") && !text.contains("cores are"),
            "{text}"
        );
        let (report, _) = self::report("r210-2015", &[]);
        assert!(remarks(&report).is_empty());
    }
}
