//! Table of a trace's report: searches, invalidations, caches and memory of each mode.

use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::{bytes, count, or_dash, percent_of};
use ringfence_lab::row::Row;

/// Title of the table.
pub(super) const HARDWARE: &str = "Allocator and hardware";

/// Returns the table of searches, invalidations, caches and memory.
pub(super) fn hardware(rows: &[&Row]) -> Grid {
    const SEARCH: &str = "search steps";
    const INVALIDATIONS: &str = "invalidations";
    const HITS: &str = "hit rate";
    const HOST: &str = "host";
    let host = uses_host(rows);
    let mut columns = vec![
        Column::left("mode"),
        Column::left("iommu"),
        Column::right(SEARCH, "mean"),
        Column::right(SEARCH, "max"),
        Column::right(INVALIDATIONS, "number"),
        Column::right(INVALIDATIONS, "per unmap"),
        Column::right(HITS, "IOTLB"),
        Column::right(HITS, "L1"),
        Column::right(HITS, "L2"),
        Column::right(HITS, "L3"),
        Column::right("words", "per walk"),
        Column::right("peak", "tables"),
    ];
    let commands = rows.iter().any(|row| row.invalidation_commands.is_some());
    if commands {
        columns.insert(5, Column::right(INVALIDATIONS, "commands"));
    }
    // Pools stay mapped, beside the tables.
    let pools = rows.iter().any(|row| row.pool_bytes > 0);
    if pools {
        columns.push(Column::right("mapped", "pools"));
    }
    if host {
        columns.push(Column::right(HOST, "requests"));
        columns.push(Column::right(HOST, "kicks"));
    }
    let walks = rows.iter().any(|row| row.host_walks > 0);
    if walks {
        columns.push(Column::right(HOST, "walks"));
    }
    let mut grid = Grid::new(&columns);
    for row in rows {
        // Without lookups there is no rate.
        let share = |rate: Option<f64>| or_dash(rate, |rate| percent_of(rate, row.accesses));
        let mut cells = vec![
            Cell::toned(&row.mode, CellStyle::Strong),
            Cell::new(&row.iommu),
            Cell::new(or_dash(row.search_steps_mean, |mean| format!("{mean:.1}"))),
            Cell::new(count(row.search_steps_max.into())),
            Cell::new(count(row.invalidations)),
            Cell::new(or_dash((row.unmaps > 0).then_some(row.unmaps), |unmaps| {
                format!("{:.3}", row.invalidations as f64 / unmaps as f64)
            })),
            Cell::new(share(row.iotlb_hit_rate)),
        ];
        if commands {
            cells.insert(5, Cell::new(or_dash(row.invalidation_commands, count)));
        }
        cells.extend(row.walk_cache_hit_rate.map(|rate| Cell::new(share(rate))));
        let words = or_dash(row.words_per_walk, |words| format!("{words:.2}"));
        cells.push(Cell::new(words));
        cells.push(Cell::new(bytes(row.table_bytes)));
        if pools {
            cells.push(Cell::new(bytes(row.pool_bytes)));
        }
        if host {
            cells.push(Cell::new(count(row.requests)));
            cells.push(Cell::new(count(row.kicks)));
        }
        if walks {
            cells.push(Cell::new(count(row.host_walks)));
        }
        grid.rows.push(cells);
    }
    grid
}

/// Returns true if a host owns the table of any row.
pub(super) fn uses_host(rows: &[&Row]) -> bool {
    rows.iter().any(|row| row.requests > 0)
}
