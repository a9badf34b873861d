//! Text tables. Columns are as wide as their contents; a table that exceeds the terminal is split
//! into several.

use unicode_width::UnicodeWidthStr;

use ringfence_trace::printable_line;

/// The style of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableStyle {
    /// Columns of the terminal; `None` for a pipe, where lines are never split.
    pub width: Option<usize>,
    /// True if the output may use colours.
    pub colour: bool,
}

impl TableStyle {
    /// The style for pipes and files.
    pub const PLAIN: Self = Self {
        width: None,
        colour: false,
    };

    /// Returns the style with at most `columns` columns, in pipes too.
    pub fn within(self, columns: usize) -> Self {
        Self {
            width: Some(self.width.map_or(columns, |width| width.min(columns))),
            ..self
        }
    }
}

/// The meaning of a cell, shown as a colour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum CellStyle {
    /// No particular meaning; printed without colour.
    #[default]
    Plain,
    /// An expected value.
    Good,
    /// A value that indicates a problem.
    Bad,
    /// An unimportant value.
    Faint,
    /// The subject of the table.
    Strong,
}

impl CellStyle {
    fn codes(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Good => Some("32"),
            Self::Bad => Some("31;1"),
            Self::Faint => Some("2"),
            Self::Strong => Some("1"),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) tone: CellStyle,
}

impl Cell {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self::toned(text, CellStyle::Plain)
    }

    /// Removes terminal control characters from the text: only [`push`] writes escape sequences.
    pub(super) fn toned(text: impl Into<String>, tone: CellStyle) -> Self {
        let text = text.into();
        Self {
            text: printable_line(&text).into_owned(),
            tone,
        }
    }
}

/// One column with its group; adjacent columns share a group name, and a blank name is no group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) group: &'static str,
    pub(super) name: &'static str,
    pub(super) left: bool,
}

impl Column {
    pub(super) const fn left(name: &'static str) -> Self {
        Self {
            group: "",
            name,
            left: true,
        }
    }

    pub(super) const fn right(group: &'static str, name: &'static str) -> Self {
        Self {
            group,
            name,
            left: false,
        }
    }
}

/// A table whose first column names its rows.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<Cell>>,
}

const GAP: usize = 2;

impl Grid {
    pub(super) fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells
            .map(|cell| cell.text.width())
            .chain(self.columns.get(column).map(|column| column.name.width()))
            .max()
            .unwrap_or(0)
    }

    /// Returns the columns of each partial table: as many as fit, each with the first column.
    fn split(&self, widths: &[usize], limit: Option<usize>) -> Vec<Vec<usize>> {
        let Some(limit) = limit else {
            return vec![(0..widths.len()).collect()];
        };
        let first = widths.first().copied().unwrap_or(0);
        let mut tables = Vec::new();
        let mut table = vec![0];
        let mut used = first;
        for (column, width) in widths.iter().enumerate().skip(1) {
            if used + GAP + width > limit && table.len() > 1 {
                let moved = self.unfinished_group(&table, column);
                let next = std::iter::once(0).chain(moved.iter().copied()).collect();
                table.truncate(table.len() - moved.len());
                tables.push(std::mem::replace(&mut table, next));
                let widths = moved.iter().filter_map(|column| widths.get(*column));
                used = first + widths.map(|width| GAP + width).sum::<usize>();
            }
            table.push(column);
            used += GAP + width;
        }
        tables.push(table);
        tables
    }

    /// Returns the columns at the end of `table` that belong to the group of `column` and should
    /// move with it. Empty if moving them would leave the table empty.
    fn unfinished_group(&self, table: &[usize], column: usize) -> Vec<usize> {
        let group = |column: usize| self.columns.get(column).map_or("", |column| column.group);
        if group(column).is_empty() {
            return Vec::new();
        }
        let kept = table
            .iter()
            .rposition(|other| group(*other) != group(column));
        let moved = table
            .get(kept.map_or(0, |last| last + 1)..)
            .unwrap_or_default();
        if moved.len() + 1 < table.len() {
            moved.to_vec()
        } else {
            Vec::new()
        }
    }

    /// Formats the table as text.
    pub(super) fn render(&self, look: TableStyle) -> String {
        let widths: Vec<usize> = (0..self.columns.len()).map(|c| self.width(c)).collect();
        let tables = self.split(&widths, look.width);
        let texts: Vec<String> = tables
            .iter()
            .map(|columns| self.one(columns, &widths, look))
            .collect();
        texts.join("\n")
    }

    fn one(&self, columns: &[usize], widths: &[usize], look: TableStyle) -> String {
        let mut out = String::new();
        let picked: Vec<(usize, Column, usize)> = columns
            .iter()
            .filter_map(|&c| Some((c, *self.columns.get(c)?, *widths.get(c)?)))
            .collect();
        if picked.iter().any(|(_, column, _)| !column.group.is_empty()) {
            let groups = group_line(&picked);
            push(&mut out, &groups, CellStyle::Faint, look);
            out.push('\n');
        }
        let names = picked
            .iter()
            .map(|(_, column, width)| pad(column.name, *width, column.left))
            .collect::<Vec<_>>()
            .join("  ");
        push(&mut out, names.trim_end(), CellStyle::Strong, look);
        out.push('\n');
        for row in &self.rows {
            let mut line = String::new();
            let mut blanks = 0;
            for (index, (c, column, width)) in picked.iter().enumerate() {
                let cell = row.get(*c).cloned().unwrap_or_default();
                let fill = width.saturating_sub(cell.text.width());
                let (before, after) = if column.left { (0, fill) } else { (fill, 0) };
                blanks += before + if index > 0 { GAP } else { 0 };
                if !cell.text.is_empty() {
                    line.push_str(&" ".repeat(blanks));
                    blanks = 0;
                    push(&mut line, &cell.text, cell.tone, look);
                }
                blanks += after;
            }
            out.push_str(&line);
            out.push('\n');
        }
        out
    }
}

/// Formats the group names above their columns, each with a rule as wide as the group.
fn group_line(picked: &[(usize, Column, usize)]) -> String {
    let mut line = String::new();
    let mut at = 0;
    let mut index = 0;
    while let Some((_, column, width)) = picked.get(index) {
        let mut span = *width;
        let mut next = index + 1;
        while let Some((_, other, width)) = picked.get(next) {
            if column.group.is_empty() || other.group != column.group {
                break;
            }
            span += GAP + width;
            next += 1;
        }
        if !column.group.is_empty() {
            let name = format!(" {} ", column.group);
            let rule = span.saturating_sub(name.width());
            let text = format!(
                "{}{name}{}",
                "─".repeat(rule / 2),
                "─".repeat(rule - rule / 2)
            );
            line.push_str(&" ".repeat(at - line.width().min(at)));
            line.push_str(&text);
        }
        at += span + GAP;
        index = next;
    }
    line
}

fn pad(text: &str, width: usize, left: bool) -> String {
    let fill = " ".repeat(width.saturating_sub(text.width()));
    if left {
        format!("{text}{fill}")
    } else {
        format!("{fill}{text}")
    }
}

fn push(out: &mut String, text: &str, tone: CellStyle, look: TableStyle) {
    match tone.codes() {
        Some(codes) if look.colour => {
            out.push_str("\x1b[");
            out.push_str(codes);
            out.push('m');
            out.push_str(text);
            out.push_str("\x1b[0m");
        }
        _ => out.push_str(text),
    }
}

/// Breaks text at blanks so that no line exceeds the width of the style. Indents all lines except
/// the first by `indent`. Removes terminal control characters.
pub(super) fn wrap(text: &str, look: TableStyle, indent: usize) -> String {
    let text = printable_line(text);
    let limit = look.width.unwrap_or(usize::MAX).max(20);
    let mut out = String::new();
    let mut used = 0;
    for word in text.split(' ') {
        if used > indent && used + 1 + word.width() > limit {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            used = indent;
        } else if used > 0 {
            out.push(' ');
            used += 1;
        }
        out.push_str(word);
        used += word.width();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        let mut grid = Grid::new(&[
            Column::left("mode"),
            Column::right("map", "alloc"),
            Column::right("map", "table"),
            Column::right("", "sum"),
        ]);
        grid.rows.push(vec![
            Cell::new("strict+"),
            Cell::new("1"),
            Cell::toned("23", CellStyle::Bad),
            Cell::new("24"),
        ]);
        grid
    }

    #[test]
    fn columns_are_aligned_under_their_groups() {
        let expected = concat!(
            "         ─── map ────\n",
            "mode     alloc  table  sum\n",
            "strict+      1     23   24\n",
        );
        assert_eq!(grid().render(TableStyle::PLAIN), expected);
    }

    #[test]
    fn narrow_terminals_get_several_tables_that_all_name_their_rows() {
        let look = TableStyle {
            width: Some(18),
            colour: false,
        };
        let text = grid().render(look);
        assert_eq!(text.matches("strict+").count(), 3, "{text}");
        assert!(text.lines().all(|line| line.width() <= 18), "{text}");
    }

    #[test]
    fn groups_stay_together_where_they_fit() {
        let mut grid = grid();
        grid.columns.insert(1, Column::right("", "safety"));
        grid.rows[0].insert(1, Cell::new("strict"));
        let look = TableStyle {
            width: Some(24),
            colour: false,
        };
        let text = grid.render(look);
        let tables: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(tables[0], "mode     safety\nstrict+  strict");
        assert!(tables[1].contains("alloc  table"), "{text}");
    }

    #[test]
    fn only_a_terminal_gets_colours() {
        assert!(!grid().render(TableStyle::PLAIN).contains('\x1b'));
        let look = TableStyle {
            width: None,
            colour: true,
        };
        assert!(grid().render(look).contains("\x1b[31;1m23\x1b[0m"));
    }

    #[test]
    fn text_wraps_at_blanks() {
        let look = TableStyle {
            width: Some(20),
            colour: false,
        };
        assert_eq!(
            wrap("one two three four five six", look, 2),
            "one two three four\n  five six"
        );
    }
}
