//! The table of round trips: the time that each mode adds to one of a request-response trace.

use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::{or_dash, percent_of, span};
use ringfence_lab::row::Row;

/// Title of the table of round trips.
pub(super) const ROUND_TRIPS: &str = "Round trips of this request-response trace";

/// Largest share of a round trip that a recommended mode may add.
pub const ROUND_TRIP_LIMIT: f64 = 0.02;

/// Returns the table of round trips; `None` if no row has a time for them.
pub(super) fn round_trips(rows: &[&Row]) -> Option<Grid> {
    let added = |row: &Row| row.round_trip.and_then(|trip| trip.added_ns);
    if rows.iter().all(|row| added(row).is_none()) {
        return None;
    }
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::right("trace", "round trip"),
        Column::right("mode", "adds"),
        Column::right("mode", "share"),
    ]);
    for row in rows {
        let trip = row.round_trip;
        let median = trip.map(|trip| trip.median_ns);
        let share = trip.and_then(|trip| trip.loss);
        grid.rows.push(vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            Cell::new(or_dash(median, span)),
            Cell::new(or_dash(added(row), |ns| span(ns.round() as u64))),
            Cell::new(or_dash(share, |share| percent_of(share, 1))),
        ]);
    }
    Some(grid)
}

/// Returns the words for a row that adds more to a round trip than [`ROUND_TRIP_LIMIT`]; `None` if
/// it adds less, or if its share is unknown.
pub(super) fn too_slow(row: &Row) -> Option<String> {
    let trip = row.round_trip?;
    let (added, loss) = (trip.added_ns?, trip.loss?);
    (loss > ROUND_TRIP_LIMIT).then(|| {
        format!(
            "adds {} to a round trip of {}, beyond the limit of {:.0}%",
            span(added.round() as u64),
            span(trip.median_ns),
            ROUND_TRIP_LIMIT * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use ringfence_lab::round_trips::RoundTripCost;

    use super::*;

    fn row(mode: &str, added_ns: Option<f64>) -> Row {
        Row {
            mode: mode.into(),
            round_trip: Some(RoundTripCost {
                count: 5000,
                median_ns: 300_000,
                added_ns,
                loss: added_ns.map(|added| added / 300_000.0),
            }),
            ..Row::of_run(true, true)
        }
    }

    #[test]
    fn every_row_has_its_share_if_one_is_timed() {
        let other = Row {
            round_trip: None,
            ..Row::of_run(true, true)
        };
        assert!(round_trips(&[&other]).is_none());
        assert!(round_trips(&[&row("fence", None)]).is_none());
        let rows = [row("fence", Some(2_600.0)), row("fs", None)];
        let grid = round_trips(&[&rows[0], &rows[1]]).unwrap();
        let texts = |index: usize| -> Vec<&str> {
            let row = grid.rows[index].iter();
            row.map(|cell| cell.text.as_str()).collect()
        };
        assert_eq!(texts(0), ["fence", "300 us", "2.60 us", "0.9%"]);
        assert_eq!(texts(1), ["fs", "300 us", "-", "-"]);
    }

    #[test]
    fn a_row_may_add_the_limit_and_no_more() {
        for (added, slow) in [(Some(6_000.0), false), (Some(6_001.0), true), (None, false)] {
            assert_eq!(too_slow(&row("fs", added)).is_some(), slow, "{added:?}");
        }
        assert_eq!(
            too_slow(&row("fs", Some(60_000.0))).unwrap(),
            "adds 60.0 us to a round trip of 300 us, beyond the limit of 2%"
        );
    }
}
