//! The attack matrix: one row for each class, one column for each mode.

use ringfence_attack::{Cell, Matrix, Status};

use super::html::Html;
use super::sections::details;
use crate::attacks::{remarks, summary, word};

/// Writes the matrix.
pub(super) fn matrix(html: &mut Html, matrix: &Matrix) {
    html.markup("<section aria-labelledby=\"attacks\">\n<h2 id=\"attacks\">Attack matrix</h2>\n");
    html.element("p", &[], &format!("{}.", summary(matrix)));
    html.markup(
        "<p class=\"filters\" data-for=\"matrix\" hidden>\
         <label for=\"matrix-text\">Rows that contain</label>\
         <input id=\"matrix-text\" type=\"search\" autocomplete=\"off\">\
         <label for=\"matrix-class\">outcome</label>\
         <select id=\"matrix-class\" data-outcome><option value=\"\">all</option>\
         <option value=\"yes\">succeeded in a mode</option>\
         <option value=\"no\">stopped in every mode</option></select>\
         <output for=\"matrix-text\"></output></p>\n",
    );
    html.markup(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" \
         aria-label=\"Attacks by class and mode\"><table id=\"matrix\" class=\"sortable matrix\">",
    );
    html.element(
        "caption",
        &[],
        "Attack classes by mode: yes, the attack succeeded; no, the mode stopped it; -, it cannot \
        occur; ?, not executed; !, not as expected",
    );
    html.markup(
        "<thead><tr><th scope=\"col\">class</th><th scope=\"col\">attack</th>\
         <th scope=\"col\" class=\"number\">succeeded in</th>",
    );
    for (mode, safety) in &matrix.modes {
        html.element("th", &[("scope", "col"), ("title", safety)], mode);
    }
    html.markup("</tr></thead>\n<tbody>\n");
    for (id, name) in &matrix.classes {
        let succeeded = |cell: &&Cell| cell.status == Status::Succeeded;
        let modes = matrix.row(id).filter(succeeded).count();
        let stopped = matrix.row(id).any(|cell| cell.status == Status::Stopped);
        let outcome = match (modes, stopped) {
            (0, true) => "no",
            (0, false) => "",
            _ => "yes",
        };
        html.open("tr", &[("data-outcome", outcome)]);
        html.element("th", &[("scope", "row")], id);
        html.element("td", &[], name);
        let modes = modes.to_string();
        let number = [("class", "number"), ("data-value", modes.as_str())];
        html.element("td", &number, &modes);
        for cell in matrix.row(id) {
            let class = match cell.status {
                Status::Succeeded => "bad",
                Status::Stopped => "good",
                _ => "faint",
            };
            html.element(
                "td",
                &[("class", class), ("title", word(cell))],
                symbol(cell),
            );
        }
        html.close("tr");
    }
    html.markup("</tbody></table></div>\n");
    for (title, lines) in remarks(matrix) {
        details(html, title, |html| html.list(&lines));
    }
    html.markup("</section>\n");
}

/// Returns the outcome of a cell in one short word.
fn symbol(cell: &Cell) -> &'static str {
    match (cell.status, cell.unexpected) {
        (Status::Succeeded, false) => "yes",
        (Status::Succeeded, true) => "yes!",
        (Status::Stopped, false) => "no",
        (Status::Stopped, true) => "no!",
        (Status::NotApplicable, false) => "-",
        (Status::NotApplicable, true) => "-!",
        (Status::NotExecuted, _) => "?",
    }
}
