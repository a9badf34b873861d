//! The table of the ways of buffers: copied, mapped, or mapped and withheld.

use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::count;
use ringfence_lab::replay::{Buffers, Ways};
use ringfence_lab::row::Row;

/// Title of the table of ways.
pub(super) const WAYS: &str = "Ways of the unmapped buffers";

/// Returns true if a mode chose between its pool and a mapping.
fn chooses(ways: &Ways) -> bool {
    ways.pooled.buffers > 0 && ways.mapped.buffers + ways.withheld.buffers > 0
}

/// Returns the table of the ways of buffers; `None` if every row has one way for all.
pub(super) fn ways(rows: &[&Row]) -> Option<Grid> {
    const POOL: &str = "in the pool";
    const MAPPED: &str = "mapped, back at the unmap";
    const WITHHELD: &str = "mapped, withheld";
    if !rows.iter().any(|row| chooses(&row.ways)) {
        return None;
    }
    let mut columns = vec![Column::left("mode")];
    for way in [POOL, MAPPED, WITHHELD] {
        columns.push(Column::right(way, "buffers"));
        columns.push(Column::right(way, "bytes"));
    }
    let mut grid = Grid::new(&columns);
    for row in rows.iter().filter(|row| row.ways != Ways::default()) {
        let mut cells = vec![Cell::toned(&row.mode, CellStyle::Strong)];
        let Ways {
            pooled,
            mapped,
            withheld,
        } = row.ways;
        for Buffers { buffers, bytes } in [pooled, mapped, withheld] {
            cells.extend([Cell::new(count(buffers)), Cell::new(count(bytes))]);
        }
        grid.rows.push(cells);
    }
    Some(grid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: &str, [pooled, mapped, withheld]: [u64; 3]) -> Row {
        let of = |buffers| Buffers {
            buffers,
            bytes: 100 * buffers,
        };
        Row {
            mode: mode.into(),
            ways: Ways {
                pooled: of(pooled),
                mapped: of(mapped),
                withheld: of(withheld),
            },
            ..Row::of_run(false, false)
        }
    }

    #[test]
    fn the_table_needs_a_mode_with_a_choice() {
        let one_way = [
            row("copy", [9, 0, 0]),
            row("fence", [0, 9, 0]),
            row("fence-burst", [0, 0, 9]),
        ];
        let rows: Vec<&Row> = one_way.iter().collect();
        assert!(ways(&rows).is_none());
        for parts in [[4, 5, 0], [4, 0, 5], [4, 2, 3]] {
            let mixed = row("fence-copy", parts);
            let rows: Vec<&Row> = one_way.iter().chain([&mixed]).collect();
            let grid = ways(&rows).unwrap();
            assert_eq!(grid.rows.len(), 4);
            let texts: Vec<&str> = grid.rows[3].iter().map(|cell| cell.text.as_str()).collect();
            let wanted: Vec<String> = std::iter::once("fence-copy".to_owned())
                .chain(parts.iter().flat_map(|n| [count(*n), count(100 * n)]))
                .collect();
            assert_eq!(texts, wanted);
        }
    }
}
