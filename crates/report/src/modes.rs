//! The table of modes: four axes and a promise for each mode.

use serde::Serialize;

use super::grid::{Cell, CellStyle, Column, Grid, TableStyle};
use ringfence_lab::compose::Axis;
use ringfence_lab::modes::{Alloc, FlushKind, Mode, Owner, Safety, TableKind};

/// A mode, as `ringfence modes --json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModeRow {
    /// Name of the mode.
    pub mode: String,
    /// Axis 1: the source of the I/O virtual address.
    pub alloc: String,
    /// Axis 2: the structure that the hardware looks up.
    pub table: String,
    /// Axis 3: the time at which a stale translation is invalidated.
    pub flush: String,
    /// Axis 4: the owner of the table.
    pub owner: String,
    /// The protection that the mode promises.
    pub safety: String,
    /// The stated bound of a bounded mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// Origin of the mode.
    pub about: String,
}

/// Returns the rows for `modes`.
pub fn mode_rows(modes: &[Mode]) -> Vec<ModeRow> {
    modes
        .iter()
        .map(|mode| ModeRow {
            mode: mode.name.clone(),
            alloc: mode.alloc.name(),
            table: mode.table.name(),
            flush: mode.flush.name(),
            owner: mode.owner.name(),
            safety: mode.safety().to_string(),
            bound: mode.bound().map(str::to_owned),
            about: mode.about.to_owned(),
        })
        .collect()
}

/// Formats the modes as a table.
pub fn modes_table(modes: &[Mode], look: TableStyle) -> String {
    let mut grid = Grid::new(&[
        Column::left("mode"),
        Column::left("alloc"),
        Column::left("table"),
        Column::left("flush"),
        Column::left("owner"),
        Column::left("safety"),
        Column::left("bound"),
        Column::left("about"),
    ]);
    for (mode, row) in modes.iter().zip(mode_rows(modes)) {
        grid.rows.push(vec![
            Cell::toned(row.mode, CellStyle::Strong),
            Cell::new(row.alloc),
            Cell::new(row.table),
            Cell::new(row.flush),
            Cell::new(row.owner),
            Cell::toned(row.safety, safety_tone(mode.safety())),
            Cell::new(row.bound.unwrap_or_else(|| "-".into())),
            Cell::toned(row.about, CellStyle::Faint),
        ]);
    }
    grid.render(look)
}

/// Formats the choices that `--mode` accepts as a table.
pub fn axes_table(look: TableStyle) -> String {
    let mut grid = Grid::new(&[Column::left("axis"), Column::left("choices")]);
    for (axis, names) in [
        (Alloc::KEY, Alloc::names()),
        (TableKind::KEY, TableKind::names()),
        (FlushKind::KEY, FlushKind::names()),
        (Owner::KEY, Owner::names()),
    ] {
        // Keep lines to a width that most terminals have.
        let mut line = String::new();
        let mut label = axis;
        for name in &names {
            if line.len() + name.len() > 60 {
                line.push(',');
                grid.rows.push(vec![
                    Cell::toned(label, CellStyle::Strong),
                    Cell::new(std::mem::take(&mut line)),
                ]);
                label = "";
            }
            if !line.is_empty() {
                line.push_str(", ");
            }
            line.push_str(name);
        }
        grid.rows
            .push(vec![Cell::toned(label, CellStyle::Strong), Cell::new(line)]);
    }
    grid.render(look)
}

fn safety_tone(safety: Safety) -> CellStyle {
    match safety {
        Safety::None | Safety::Bounded | Safety::OwnPool => CellStyle::Plain,
        Safety::Strict | Safety::ByteGranular => CellStyle::Good,
    }
}
