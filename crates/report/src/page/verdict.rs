//! The decision: the mode to use, the reason, its cost, and what it leaves exposed.

use ringfence_attack::{Matrix, Status};
use ringfence_lab::row::Row;

use super::html::Html;
use crate::data::Report;
use crate::number::{byte_seconds, count, cycles, percent, span};
use crate::recommend::{advice, recommended, verified};

/// Writes the verdict on one trace.
pub(super) fn verdict(html: &mut Html, report: &Report, matrix: Option<&Matrix>, rows: &[&Row]) {
    let row = match report.repetitions {
        0 => None,
        _ => recommended(rows, &report.profile),
    };
    let class = match row {
        Some(_) => "verdict",
        None => "verdict undecided",
    };
    html.open("div", &[("class", class)]);
    match row {
        Some(row) => {
            html.element("h3", &[], &format!("Use {}", row.mode));
            html.element("p", &[("class", "lead")], &advice(rows, &report.profile));
            html.markup("<dl class=\"facts\">\n");
            fact(html, "What to do", &action(row, rows));
            fact(html, "What it costs", &cost(row));
            fact(html, "What remains exposed", &exposure(row, matrix));
            fact(html, "What this rests on", &basis(report));
            html.markup("</dl>\n");
        }
        None => {
            html.element("h3", &[], "No mode is recommended");
            let reason = match report.repetitions {
                0 => "No cycles were measured (--repeat 0), so cost cannot decide.".to_owned(),
                _ => advice(rows, &report.profile),
            };
            html.element("p", &[("class", "lead")], &reason);
            let safe: Vec<&str> = rows
                .iter()
                .filter(|row| verified(row))
                .map(|row| row.mode.as_str())
                .collect();
            html.markup("<dl class=\"facts\">\n");
            let safe = match safe.as_slice() {
                _ if !report.attack => "Without the attack pass, exposure is unknown.".to_owned(),
                [] => "No replayed mode promises strict protection and kept its promise under \
                    attack."
                    .to_owned(),
                modes => format!("No attack passed in these modes: {}.", modes.join(", ")),
            };
            fact(html, "What is known", &safe);
            fact(html, "What this rests on", &basis(report));
            html.markup("</dl>\n");
        }
    }
    html.close("div");
}

fn fact(html: &mut Html, name: &'static str, text: &str) {
    html.markup("<div>");
    html.element("dt", &[], name).element("dd", &[], text);
    html.close("div");
}

/// Returns how a person gets the mode.
fn action(row: &Row, rows: &[&Row]) -> String {
    if row.mode == "linux-strict" {
        return "Boot Linux with iommu.strict=1 and without iommu=pt.".to_owned();
    }
    let mut text = format!(
        "Mainline Linux does not have {}: docs/MODES.md describes it, and docs/EMBEDDING-KERNEL.md \
        how a kernel adopts it.",
        row.mode
    );
    let strict = rows.iter().find(|row| row.mode == "linux-strict");
    if let Some((strict, throughput)) =
        strict.and_then(|strict| Some((strict, strict.relative_throughput?)))
        && verified(strict)
    {
        text.push_str(&format!(
            " Until then, iommu.strict=1 protects as strictly, at relative throughput \
            {throughput:.2}."
        ));
    }
    text
}

fn cost(row: &Row) -> String {
    let mut text = format!(
        "{} cycles for a map and an unmap, {} of them modelled. Relative throughput is {:.2}, \
        where 1 is a machine without protection.",
        cycles(row.cycles().unwrap_or_default()),
        percent(row.modelled_share.unwrap_or_default()),
        row.relative_throughput.unwrap_or_default(),
    );
    if row.release_delay_max_ns > 0 {
        text.push_str(&format!(
            " Drivers get their buffers back up to {} after the unmap.",
            span(row.release_delay_max_ns)
        ));
    }
    if row.pool_bytes > 0 {
        text.push_str(&format!(
            " Pools take {} of memory.",
            crate::number::bytes(row.pool_bytes)
        ));
    }
    text
}

fn exposure(row: &Row, matrix: Option<&Matrix>) -> String {
    let mut out = Vec::new();
    match row.violations {
        None => out.push("Without the attack pass, exposure is unknown.".to_owned()),
        Some(violations) => out.push(format!(
            "{} of {} attack accesses reached memory outside a live mapping.",
            count(violations.total),
            count(row.attack_accesses.unwrap_or_default())
        )),
    }
    out.push(match row.stale_window_max_ns {
        0 => "The device loses access before a driver gets its buffer back.".to_owned(),
        longest => format!(
            "A released buffer stays accessible for up to {} ({} byte-seconds in all).",
            span(longest),
            byte_seconds(row.stale_byte_seconds)
        ),
    });
    match row.colocated {
        Some(0) => out.push("Data beside a buffer on its page is protected.".to_owned()),
        Some(beside) => out.push(format!(
            "Data beside a buffer on its page is not protected: {} accesses reached it. A \
            byte-granular mode such as copy protects it.",
            count(beside)
        )),
        None => {}
    }
    if let Some(matrix) = matrix {
        let of_mode = |status| {
            let cells = matrix.cells.iter();
            let cells = cells.filter(|cell| cell.mode == row.mode && cell.status == status);
            cells.map(|cell| cell.class).collect::<Vec<_>>()
        };
        let (passed, stopped) = (of_mode(Status::Succeeded), of_mode(Status::Stopped));
        let executed = passed.len() + stopped.len();
        out.push(match passed.as_slice() {
            _ if executed == 0 => "No attack class was executed on it.".to_owned(),
            [] => format!("It stops all {executed} attack classes that were executed."),
            some => format!(
                "It stops {} of {executed} attack classes; {} succeed.",
                stopped.len(),
                some.join(", ")
            ),
        });
    }
    out.join(" ")
}

fn basis(report: &Report) -> String {
    let measured = &report.measured_on;
    let mut text = match report.repetitions {
        0 => String::new(),
        repetitions => format!(
            "Cycles were measured on {} ({}), repetitions: {repetitions}; what a program cannot \
            execute is modelled by profile {}. ",
            measured.cpu, measured.arch, report.profile.name
        ),
    };
    text.push_str(match report.attack {
        true => "Exposure was measured under attack.",
        false => "No attack was replayed (--no-attack).",
    });
    if measured.build == "debug" && report.repetitions > 0 {
        text.push_str(" This is a debug build: its costs are meaningless.");
    }
    text
}
