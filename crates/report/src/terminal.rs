//! A report at a terminal: for each trace a recommendation, the cost of each mode, its
//! exposure, and the hardware counters.

use super::agreement::agreement_line;
use super::data::{Report, TraceNotes};
use super::family;
use super::grid::{Cell, CellStyle, Column, Grid, TableStyle, wrap};
use super::hardware::{HARDWARE, hardware, uses_host};
use super::line_rate::{self, line_rates};
use super::machine;
use super::notes::oddities;
use super::number::{byte_seconds, component, count, cycles, or_dash, percent, span};
use super::recommend::advice;
use super::release_delays::{DELAYS, release_delays};
use super::round_trips::{ROUND_TRIPS, round_trips};
use super::ways::{self, WAYS, ways};
use ringfence_lab::agreement::Verdict;
use ringfence_lab::meter::Cycles;
use ringfence_lab::row::Row;
use ringfence_trace::printable_line;

/// Formats the whole report as text.
pub fn terminal(report: &Report, look: TableStyle) -> String {
    let mut out = String::new();
    for notes in &report.traces {
        let rows = report.rows_of(&notes.trace);
        for part in sections(report, notes, &rows, look) {
            if let Some(title) = part.title {
                out.push_str(&title);
                out.push('\n');
            }
            out.push_str(&part.text);
            out.push('\n');
        }
    }
    out
}

/// A section of a trace's report: a title with a table or lines.
pub(super) struct Section {
    pub(super) title: Option<String>,
    pub(super) text: String,
}

fn sections(report: &Report, notes: &TraceNotes, rows: &[&Row], look: TableStyle) -> Vec<Section> {
    let titled = |title: &str, text: String| Section {
        title: Some(title.into()),
        text,
    };
    let mut out = vec![Section {
        title: None,
        text: format!("{}\n", printable_line(&headline(notes, rows))),
    }];
    if report.repetitions > 0 {
        let text = advice(rows, &report.profile);
        let text = format!("{}\n", wrap(&text, look, 0));
        out.push(titled("Recommendation", text));
    }
    if let Some(hint) = omitted(report) {
        out.push(Section {
            title: None,
            text: format!("{}\n", wrap(&hint, look, 0)),
        });
    }
    if report.repetitions > 0 {
        out.push(titled(COST, cost(rows).render(look)));
    }
    out.push(titled(EXPOSURE, safety(rows).render(look)));
    if let Some(grid) = release_delays(rows) {
        out.push(titled(DELAYS, grid.render(look)));
    }
    if let Some(grid) = round_trips(rows) {
        out.push(titled(ROUND_TRIPS, grid.render(look)));
    }
    if let Some(grid) = ways(rows) {
        out.push(titled(WAYS, grid.render(look)));
    }
    out.push(titled(HARDWARE, hardware(rows).render(look)));
    if let Some(grid) = machine::device_side(report, rows) {
        out.push(titled(machine::DEVICE_SIDE, grid.render(look)));
    }
    for (title, grid) in line_rates(report, rows) {
        out.push(titled(&title, grid.render(look)));
    }
    let mut lines = String::new();
    for line in remarks(report, notes, rows) {
        lines.push_str(&wrap(&line, look, 2));
        lines.push('\n');
    }
    out.push(Section {
        title: None,
        text: lines,
    });
    out
}

/// Titles of two tables.
pub(super) const COST: &str = "Cost: cycles of a map and of an unmap";
pub(super) const EXPOSURE: &str = "Exposure under attack";

/// Returns a sentence on the modes that the default selection leaves out; `None` without such
/// modes.
pub(super) fn omitted(report: &Report) -> Option<String> {
    let omitted = report.modes_omitted.len();
    (omitted > 0).then(|| {
        format!(
            "{} of {} modes replayed; --all-modes replays all, `ringfence modes` lists them.",
            report.modes.len(),
            report.modes.len() + omitted
        )
    })
}

/// Summarises the trace in one line.
pub(super) fn headline(notes: &TraceNotes, rows: &[&Row]) -> String {
    let devices = match notes.devices.as_slice() {
        [] => "no device".to_owned(),
        [one] => format!("device {one}"),
        [first, ..] => format!("{} devices ({first}, ...)", notes.devices.len()),
    };
    let (maps, unmaps) = rows.first().map_or((0, 0), |row| (row.maps, row.unmaps));
    format!(
        "{}: {devices}, {} maps, {} unmaps in {} bursts",
        notes.trace,
        count(maps),
        count(unmaps),
        count(notes.bursts)
    )
}

/// Returns the table of cycles by component, as in Table 1 of the rIOMMU paper. The sums include
/// modelled cycles.
pub(super) fn cost(rows: &[&Row]) -> Grid {
    const MAP: &str = "map";
    const UNMAP: &str = "unmap";
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::left("safety"),
        Column::right(MAP, "alloc"),
        Column::right(MAP, "table"),
        Column::right(MAP, "other"),
        Column::right(MAP, "sum"),
        Column::right(UNMAP, "find"),
        Column::right(UNMAP, "free"),
        Column::right(UNMAP, "table"),
        Column::right(UNMAP, "inval"),
        Column::right(UNMAP, "other"),
        Column::right(UNMAP, "sum"),
        Column::right("", "modelled"),
        Column::right("relative", "throughput"),
    ]);
    for row in rows {
        let parts = row.components;
        // A sum is exact, whatever its components print as.
        let sum = |value: Option<f64>| {
            let tone = if value.is_none_or(|value| value == 0.0) {
                CellStyle::Faint
            } else {
                CellStyle::Plain
            };
            Cell::toned(or_dash(value, cycles), tone)
        };
        let part = |of: fn(&Cycles) -> f64| {
            let measured = parts.map(|parts| (of(&parts.cycles), parts.resolution));
            let seen = measured.is_some_and(|(value, resolution)| value >= resolution);
            let tone = if seen {
                CellStyle::Plain
            } else {
                CellStyle::Faint
            };
            let text = or_dash(measured, |(value, resolution)| component(value, resolution));
            Cell::toned(text, tone)
        };
        let mut cells = vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            Cell::toned(&row.safety, promise(row)),
        ];
        let values = [
            part(|parts| parts.map_iova_alloc),
            part(|parts| parts.map_table),
            part(|parts| parts.map_other),
            sum(row.map_cycles),
            part(|parts| parts.unmap_iova_find),
            part(|parts| parts.unmap_iova_free),
            part(|parts| parts.unmap_table),
            part(|parts| parts.unmap_invalidation),
            part(|parts| parts.unmap_other),
            sum(row.unmap_cycles),
        ];
        cells.extend(values);
        cells.push(Cell::new(modelled_cell(row)));
        cells.push(Cell::toned(
            or_dash(row.relative_throughput, |share| format!("{share:.2}")),
            CellStyle::Strong,
        ));
        grid.rows.push(cells);
    }
    grid
}

/// Formats the modelled cycles and their share of all cycles of a map and an unmap.
fn modelled_cell(row: &Row) -> String {
    let share = row
        .modelled_share
        .map_or_else(String::new, |share| format!(" ({})", percent(share)));
    or_dash(row.modelled_cycles, |number| {
        format!("{}{share}", cycles(number))
    })
}

/// Returns the table of violations and stale windows.
pub(super) fn safety(rows: &[&Row]) -> Grid {
    const ALLOWED: &str = "accesses let through";
    const WINDOW: &str = "stale window";
    let copies = rows.iter().any(|row| row.shadow_accesses > Some(0));
    let mutable = rows.iter().any(|row| row.mutable_after_release > Some(0));
    let mut columns = vec![
        Column::left("mode"),
        Column::left("safety"),
        Column::right("accesses", "device's"),
        Column::right("accesses", "attacker's"),
        Column::right(ALLOWED, "violations"),
        Column::right(ALLOWED, "colocated"),
        Column::right("false", "faults"),
        Column::right(WINDOW, "longest"),
        Column::right(WINDOW, "byte-seconds"),
    ];
    if copies {
        // Beside its group.
        columns.insert(6, Column::right(ALLOWED, "own pool"));
    }
    if mutable {
        columns.insert(6 + usize::from(copies), Column::right(ALLOWED, "mutable"));
    }
    let mut grid = Grid::new(&columns);
    for row in rows {
        let wrong = |number: Option<u64>| {
            let tone = match number {
                None => CellStyle::Faint,
                Some(0) => CellStyle::Good,
                Some(_) => CellStyle::Bad,
            };
            Cell::toned(or_dash(number, count), tone)
        };
        let mut cells = vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            Cell::toned(&row.safety, promise(row)),
            Cell::new(count(row.accesses)),
            Cell::new(or_dash(row.attack_accesses, count)),
            wrong(row.violations.map(|violations| violations.total)),
            Cell::new(or_dash(row.colocated, count)),
            wrong(Some(row.false_faults)),
            Cell::new(span(row.stale_window_max_ns)),
            Cell::new(byte_seconds(row.stale_byte_seconds)),
        ];
        if copies {
            cells.insert(6, Cell::new(or_dash(row.shadow_accesses, count)));
        }
        if mutable {
            cells.insert(
                6 + usize::from(copies),
                Cell::new(or_dash(row.mutable_after_release, count)),
            );
        }
        grid.rows.push(cells);
    }
    grid
}

/// Returns the style of a promise: good if kept, bad if broken.
fn promise(row: &Row) -> CellStyle {
    match row.safety.as_str() {
        "strict" | "byte-granular" | "own-pool"
            if row.violations.is_some_and(|all| all.total > 0) =>
        {
            CellStyle::Bad
        }
        "strict" | "byte-granular" => CellStyle::Good,
        _ => CellStyle::Plain,
    }
}

/// Returns remarks on the tables: measured and modelled costs, bounds, warnings and oddities.
pub(super) fn remarks(report: &Report, notes: &TraceNotes, rows: &[&Row]) -> Vec<String> {
    let mut out = Vec::new();
    if report.repetitions > 0 {
        out.push(machine::measured(report, uses_host(rows)));
    }
    out.push(machine::modelled(&report.profile));
    out.extend(family::sentences(report, rows));
    out.extend(report.entries.sentences());
    out.extend(ways::sizes(&report.thresholds));
    out.extend(machine::remarks(report));
    out.extend(line_rate::remarks(report));
    out.extend(bounds(rows));
    if let Some(warning) = component_warning(report, rows) {
        out.push(warning);
    }
    out.extend(sidecore_warning(report, rows));
    for row in rows.iter().filter(|row| !row.status.is_ok()) {
        if rows.iter().all(|other| other.status == row.status) {
            out.push(format!("All modes: {}", row.status));
            break;
        }
        out.push(format!("{}: {}", row.mode, row.status));
    }
    if let Some(agreement) = &notes.addresses
        && agreement.verdict == Verdict::Agrees
    {
        out.push(format!(
            "Addresses: {}.",
            agreement_line("linux-strict", agreement)
        ));
    }
    let odd = oddities(notes);
    if !odd.is_empty() {
        out.push(format!("Trace: {}.", odd.join("; ")));
    }
    out
}

/// Returns a line for each bound, with the modes that state it.
fn bounds(rows: &[&Row]) -> Vec<String> {
    let mut bounds: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows {
        let Some(bound) = row.bound.as_deref() else {
            continue;
        };
        match bounds.iter_mut().find(|(text, _)| *text == bound) {
            Some((_, modes)) => modes.push(&row.mode),
            None => bounds.push((bound, vec![&row.mode])),
        }
    }
    let line =
        |(bound, modes): (&str, Vec<&str>)| format!("Bound of {}: {bound}.", modes.join(", "));
    bounds.into_iter().map(line).collect()
}

/// Returns a warning, with advice, if the split into components is unreliable.
fn component_warning(report: &Report, rows: &[&Row]) -> Option<String> {
    if report.repetitions == 0 {
        return None;
    }
    if report.measured_on.build == "debug" {
        return Some(
            "Warning: cycles of a debug build are meaningless; use cargo run --release.".into(),
        );
    }
    let noisy: Vec<&str> = rows
        .iter()
        .filter(|row| row.components.is_some_and(|of| of.order_spread > 0.25))
        .map(|row| row.mode.as_str())
        .collect();
    if noisy.is_empty() {
        return None;
    }
    Some(format!(
        "Warning: the components of {} vary by more than a quarter with the order of measurement; \
        use a longer trace, an idle machine or --repeat {}.",
        noisy.join(", "),
        report.repetitions * 4
    ))
}

/// Returns a warning if modes with a sidecore were timed on one processor.
fn sidecore_warning(report: &Report, rows: &[&Row]) -> Option<String> {
    if report.repetitions == 0 || report.measured_on.processors > 1 {
        return None;
    }
    let offloaded =
        |row: &&&Row| row.mode.starts_with("sidecore") || row.mode.ends_with("/sidecore");
    let modes: Vec<&str> = rows
        .iter()
        .filter(offloaded)
        .map(|row| row.mode.as_str())
        .collect();
    if modes.is_empty() {
        return None;
    }
    Some(format!(
        "Warning: the program may use one processor, so the cycles of {} contain the work of the \
        sidecore and the switches to it; use two.",
        modes.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredOn;
    use ringfence_lab::MachineProfile;
    use ringfence_lab::meter::Components;

    #[test]
    fn a_sidecore_on_one_processor_is_noted() {
        let rows = ["linux-strict", "sidecore", "magazine/radix/async/sidecore"].map(|mode| {
            let mut row = Row::of_run(true, true);
            row.mode = mode.into();
            row
        });
        let rows: Vec<&Row> = rows.iter().collect();
        let warning = |processors, repetitions, rows: &[&Row]| {
            let measured_on = MeasuredOn {
                cpu: "test".into(),
                arch: "test",
                cycle_unit: "tsc",
                build: "release",
                processors,
            };
            let profile = MachineProfile::r210_2015();
            let report = Report::new(profile, measured_on, repetitions, true, &[], &[]);
            remarks(&report, &TraceNotes::default(), rows)
                .into_iter()
                .find(|line| line.contains("one processor"))
        };
        let found = warning(1, 3, &rows).unwrap();
        assert!(
            found.contains("cycles of sidecore, magazine/radix/async/sidecore contain"),
            "{found}"
        );
        for (processors, repetitions, rows) in
            [(2, 3, &rows[..]), (1, 0, &rows), (1, 3, &rows[..1])]
        {
            assert_eq!(warning(processors, repetitions, rows), None);
        }
    }

    #[test]
    fn each_kind_of_access_has_one_column() {
        let text = |shadow, mutable| {
            let row = Row {
                shadow_accesses: Some(shadow),
                mutable_after_release: Some(mutable),
                ..Row::of_run(true, true)
            };
            safety(&[&row]).render(TableStyle::PLAIN)
        };
        for (shadow, mutable) in [(0, 0), (7, 0), (0, 9), (7, 9)] {
            let text = text(shadow, mutable);
            let columns = |name| text.matches(name).count() as u64;
            assert_eq!(columns("own pool"), shadow.min(1), "{text}");
            assert_eq!(columns("mutable"), mutable.min(1), "{text}");
        }
    }

    #[test]
    fn noise_reads_as_below_the_resolution_and_sums_stay_exact() {
        let mut row = Row::of_run(true, true);
        row.mode = "strict".into();
        row.components = Some(Components {
            cycles: Cycles {
                map_iova_alloc: -7.0,
                map_table: 400.0,
                map_other: 0.0,
                unmap_iova_find: 11.9,
                unmap_iova_free: 12.0,
                ..Cycles::default()
            },
            resolution: 11.95,
            ..Components::default()
        });
        row.map_cycles = Some(393.0);
        row.unmap_cycles = Some(23.9);
        let grid = cost(&[&row]);
        let texts: Vec<&str> = grid.rows[0].iter().map(|cell| cell.text.as_str()).collect();
        assert_eq!(texts[2..6], ["<12", "400", "<12", "393"]);
        assert_eq!(texts[6..9], ["<12", "12", "<12"]);
        assert_eq!(texts[11], "24");
        // A sum of components that are all below the resolution is still a number.
        row.components = Some(Components {
            cycles: Cycles {
                unmap_iova_find: 9.0,
                ..Cycles::default()
            },
            resolution: 11.95,
            ..Components::default()
        });
        row.unmap_cycles = Some(9.0);
        let grid = cost(&[&row]);
        let texts = [6, 11].map(|column| grid.rows[0][column].text.as_str());
        assert_eq!(texts, ["<12", "9.0"]);
        // A mode that was not timed has no resolution.
        let untimed = cost(&[&Row::of_run(false, true)]);
        assert_eq!(untimed.rows[0][2].text, "-");
    }
}
