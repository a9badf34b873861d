//! Tables of the page. The script adds sorting and filters; without it they are plain tables.

use super::html::Html;
use crate::grid::{CellStyle, Grid};

/// Most rows of a table. A further row counts the others.
pub(super) const MAX_ROWS: usize = 100;

/// A cell with the value by which the script sorts it.
#[derive(Debug, Clone, Default)]
pub(super) struct TableCell {
    text: String,
    value: Option<f64>,
    class: &'static str,
}

impl TableCell {
    /// A cell that sorts as text.
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }

    /// A cell that sorts as a number; a dash sorts after all numbers.
    pub(super) fn number(value: Option<f64>, text: impl FnOnce(f64) -> String) -> Self {
        let value = value.filter(|value| value.is_finite());
        Self {
            text: value.map_or_else(|| "-".to_owned(), text),
            value,
            class: "",
        }
    }

    /// A cell that sorts as a whole number.
    pub(super) fn count(value: Option<u64>, text: impl FnOnce(u64) -> String) -> Self {
        let shown = value.map(text);
        Self {
            text: shown.unwrap_or_else(|| "-".to_owned()),
            value: value.map(|value| value as f64),
            class: "",
        }
    }

    /// Returns the number by which the cell sorts; 0 for a text.
    pub(super) fn value(&self) -> f64 {
        self.value.unwrap_or_default()
    }

    /// Colours the cell: `good` or `bad`.
    pub(super) fn class(mut self, class: &'static str) -> Self {
        self.class = class;
        self
    }
}

/// A heading; numbers are aligned to the right.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heading {
    pub(super) name: &'static str,
    pub(super) number: bool,
}

impl Heading {
    pub(super) const fn text(name: &'static str) -> Self {
        Self {
            name,
            number: false,
        }
    }

    pub(super) const fn number(name: &'static str) -> Self {
        Self { name, number: true }
    }
}

/// A table that can be sorted. The first cell of each row is its heading.
pub(super) struct SortableTable<'a> {
    /// Identifier in the page: letters, digits and dashes.
    pub(super) id: String,
    pub(super) caption: &'a str,
    pub(super) headings: &'a [Heading],
    /// Column with the classes that a filter offers.
    pub(super) classes: Option<usize>,
    pub(super) rows: Vec<Vec<TableCell>>,
    /// The row to emphasise.
    pub(super) chosen: Option<usize>,
}

impl SortableTable<'_> {
    pub(super) fn write(&self, html: &mut Html) {
        self.filters(html);
        html.open(
            "div",
            &[
                ("class", "scroll"),
                ("tabindex", "0"),
                ("role", "region"),
                ("aria-label", self.caption),
            ],
        );
        html.open("table", &[("id", &self.id), ("class", "sortable")]);
        html.element("caption", &[], self.caption);
        html.markup("<thead><tr>");
        for heading in self.headings {
            let class = if heading.number { "number" } else { "" };
            html.element("th", &[("scope", "col"), ("class", class)], heading.name);
        }
        html.markup("</tr></thead>\n<tbody>\n");
        for (index, row) in self.rows.iter().take(MAX_ROWS).enumerate() {
            let chosen = self.chosen == Some(index);
            html.open("tr", &[("class", if chosen { "chosen" } else { "" })]);
            for (column, cell) in row.iter().enumerate() {
                self.cell(html, column, cell);
            }
            html.close("tr");
        }
        html.markup("</tbody>");
        let left_out = self.rows.len().saturating_sub(MAX_ROWS);
        if left_out > 0 {
            let columns = self.headings.len().to_string();
            html.markup("<tfoot><tr>");
            html.element(
                "td",
                &[("colspan", &columns)],
                &format!("{left_out} more rows are left out."),
            );
            html.markup("</tr></tfoot>");
        }
        html.close("table").close("div");
    }

    fn cell(&self, html: &mut Html, column: usize, cell: &TableCell) {
        let number = self.headings.get(column).is_some_and(|it| it.number);
        let class = match (number, cell.class) {
            (true, "") => "number".to_owned(),
            (true, class) => format!("number {class}"),
            (false, class) => class.to_owned(),
        };
        let value = cell.value.map(|value| value.to_string());
        let mut attributes = vec![("class", class.as_str())];
        if let Some(value) = &value {
            attributes.push(("data-value", value));
        }
        if column == 0 {
            attributes.push(("scope", "row"));
            html.element("th", &attributes, &cell.text);
        } else {
            html.element("td", &attributes, &cell.text);
        }
    }

    /// The controls are hidden until the script shows them.
    fn filters(&self, html: &mut Html) {
        let text = format!("{}-text", self.id);
        let class = format!("{}-class", self.id);
        html.open(
            "p",
            &[("class", "filters"), ("data-for", &self.id), ("hidden", "")],
        );
        html.element("label", &[("for", &text)], "Rows that contain");
        html.open(
            "input",
            &[("id", &text), ("type", "search"), ("autocomplete", "off")],
        );
        if let Some(column) = self.classes {
            let column_text = column.to_string();
            let name = self.headings.get(column).map_or("", |it| it.name);
            html.element("label", &[("for", &class)], name);
            html.open("select", &[("id", &class), ("data-column", &column_text)]);
            html.element("option", &[("value", "")], "all");
            let mut offered: Vec<&str> = Vec::new();
            for row in self.rows.iter().take(MAX_ROWS) {
                if let Some(cell) = row.get(column)
                    && !offered.contains(&cell.text.as_str())
                {
                    offered.push(&cell.text);
                    html.element("option", &[], &cell.text);
                }
            }
            html.close("select");
        }
        html.element("output", &[("for", &text)], "");
        html.close("p");
    }
}

/// Writes a table of a terminal report.
pub(super) fn grid_table(html: &mut Html, caption: &str, grid: &Grid) {
    html.open(
        "div",
        &[
            ("class", "scroll"),
            ("tabindex", "0"),
            ("role", "region"),
            ("aria-label", caption),
        ],
    );
    html.markup("<table>");
    html.element("caption", &[], caption);
    html.markup("<thead><tr>");
    for column in &grid.columns {
        let name = match column.group {
            "" => column.name.to_owned(),
            group => format!("{group}: {}", column.name),
        };
        let class = if column.left { "" } else { "number" };
        html.element("th", &[("scope", "col"), ("class", class)], &name);
    }
    html.markup("</tr></thead>\n<tbody>\n");
    for row in grid.rows.iter().take(MAX_ROWS) {
        html.markup("<tr>");
        for (index, cell) in row.iter().enumerate() {
            let left = grid.columns.get(index).is_some_and(|column| column.left);
            let class = match (left, cell.tone) {
                (true, CellStyle::Good) => "good",
                (true, CellStyle::Bad) => "bad",
                (true, _) => "",
                (false, CellStyle::Good) => "number good",
                (false, CellStyle::Bad) => "number bad",
                (false, _) => "number",
            };
            if index == 0 && !cell.text.is_empty() {
                html.element("th", &[("scope", "row"), ("class", class)], &cell.text);
            } else {
                html.element("td", &[("class", class)], &cell.text);
            }
        }
        html.close("tr");
    }
    html.markup("</tbody>");
    let left_out = grid.rows.len().saturating_sub(MAX_ROWS);
    if left_out > 0 {
        let columns = grid.columns.len().to_string();
        html.markup("<tfoot><tr>");
        html.element(
            "td",
            &[("colspan", &columns)],
            &format!("{left_out} more rows are left out."),
        );
        html.markup("</tr></tfoot>");
    }
    html.close("table").close("div");
}
