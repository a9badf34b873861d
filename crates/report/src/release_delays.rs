//! The table of release delays: the times for which layers withhold buffers after their unmap.

use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::{or_dash, span};
use ringfence_lab::row::Row;

/// Title of the table of release delays.
pub(super) const DELAYS: &str = "Release delay: from an unmap to the return of its buffer";

/// Returns the table of the times for which layers withhold buffers; `None` if no row withholds.
pub(super) fn release_delays(rows: &[&Row]) -> Option<Grid> {
    const ALL: &str = "all buffers";
    const P99: &str = "99th percentile";
    if rows.iter().all(|row| row.release_delay_max_ns == 0) {
        return None;
    }
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::right(ALL, "median"),
        Column::right(ALL, "p99"),
        Column::right(ALL, "longest"),
        Column::right(P99, "receive"),
        Column::right(P99, "transmit"),
    ]);
    for row in rows {
        let delay = |value: Option<u64>| Cell::new(or_dash(value, span));
        grid.rows.push(vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            delay(row.release_delay_median_ns),
            delay(row.release_delay_p99_ns),
            delay(Some(row.release_delay_max_ns)),
            delay(row.receive_delay_p99_ns),
            delay(row.transmit_delay_p99_ns),
        ]);
    }
    Some(grid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_delays_if_one_withholds() {
        let fence = Row {
            mode: "fence".into(),
            ..Row::of_run(false, false)
        };
        let burst = Row {
            mode: "fence-burst".into(),
            release_delay_median_ns: Some(3_000),
            release_delay_p99_ns: Some(40_000),
            release_delay_max_ns: 50_000,
            receive_delay_p99_ns: None,
            transmit_delay_p99_ns: Some(41_000),
            ..Row::of_run(false, false)
        };
        assert!(release_delays(&[&fence]).is_none());
        let grid = release_delays(&[&fence, &burst]).unwrap();
        let texts = |index: usize| -> Vec<&str> {
            let row = grid.rows[index].iter();
            row.map(|cell| cell.text.as_str()).collect()
        };
        assert_eq!(texts(0), ["fence", "0", "0", "0", "0", "0"]);
        assert_eq!(
            texts(1),
            [
                "fence-burst",
                "3.00 us",
                "40.0 us",
                "50.0 us",
                "-",
                "41.0 us"
            ]
        );
    }
}
