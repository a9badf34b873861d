//! The cost plot: on the left measured cycles by component, on the right measured and modelled
//! cycles.
//!
//! The panels have separate scales, because a modelled invalidation is fifty times the measured
//! cost of a good layer. On a common scale one would hide the other.

use super::scale::{Linear, drawable, end_of_bars, tick_text};
use super::svg::{Anchor, COLOURS, InlineSvg, Svg, text_width};
use crate::number::cycles;
use ringfence_lab::MachineProfile;
use ringfence_lab::row::Row;

const LEFT: f64 = 128.0;
const TOP: f64 = 104.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const MEASURED_WIDTH: f64 = 380.0;
/// Gap between the panels, with room for the number after a bar.
const BETWEEN: f64 = 90.0;
const TOTAL: f64 = 240.0;
const RIGHT: f64 = 140.0;

/// Names in the legend, in stacking order; the class is `c` and the index.
const PARTS: [&str; COLOURS.len()] = [
    "map: IOVA",
    "map: table",
    "unmap: find IOVA",
    "unmap: free IOVA",
    "unmap: table",
    "unmap: invalidation",
    "other",
];

/// Returns the measured cycles as parts that can be stacked. Noise can make a part negative, and
/// then the sum of the others exceeds the whole. The parts are scaled to the length of the whole,
/// which the number beside the bar gives.
fn parts(row: &Row) -> [f64; PARTS.len()] {
    let Some(components) = &row.components else {
        return [0.0; PARTS.len()];
    };
    let cycles = &components.cycles;
    let positive = [
        cycles.map_iova_alloc,
        cycles.map_table,
        cycles.unmap_iova_find,
        cycles.unmap_iova_free,
        cycles.unmap_table,
        cycles.unmap_invalidation,
        cycles.map_other + cycles.unmap_other,
    ]
    .map(drawable);
    let whole = drawable(cycles.measured());
    let sum: f64 = positive.iter().sum();
    if sum > 0.0 {
        positive.map(|part| part * whole / sum)
    } else {
        positive
    }
}

pub(super) fn plot(trace: &str, rows: &[&Row], profile: &MachineProfile) -> String {
    let title = format!("{trace}: cycles of a map and an unmap");
    draw(&title, rows, profile).finish(&title)
}

/// Draws the plot for a page, which names the trace itself.
pub(crate) fn inline_cost(rows: &[&Row], profile: &MachineProfile) -> InlineSvg {
    const TITLE: &str = "Cycles of a map and an unmap";
    draw(TITLE, rows, profile).finish_inline(TITLE)
}

fn draw(title: &str, rows: &[&Row], profile: &MachineProfile) -> Svg {
    let bottom = TOP + ROW * rows.len() as f64;
    let width = LEFT + MEASURED_WIDTH + BETWEEN + TOTAL + RIGHT;
    let mut svg = Svg::new(width, bottom + 44.0);
    svg.text(14.0, 26.0, Anchor::Start, "title", title);
    legend(&mut svg);

    let measured: Vec<f64> = rows.iter().map(|row| parts(row).iter().sum()).collect();
    let left = Linear::reaching(end_of_bars(&measured), LEFT, MEASURED_WIDTH);
    let totals: Vec<f64> = rows
        .iter()
        .zip(&measured)
        .map(|(row, measured)| measured + modelled(row))
        .collect();
    let right = Linear::reaching(end_of_bars(&totals), LEFT + MEASURED_WIDTH + BETWEEN, TOTAL);
    frame(
        &mut svg,
        &left,
        bottom,
        "measured on this machine, by component",
    );
    let note = format!("with the cycles modelled by profile {}", profile.name);
    frame(&mut svg, &right, bottom, &note);

    for (index, (row, (measured, total))) in
        rows.iter().zip(measured.iter().zip(&totals)).enumerate()
    {
        let y = TOP + ROW * index as f64 + (ROW - BAR) / 2.0;
        let base = y + BAR - 3.5;
        svg.text(LEFT - 8.0, base, Anchor::End, "strong", &row.mode);
        let segments: Vec<(f64, String)> = parts(row)
            .into_iter()
            .enumerate()
            .map(|(part, value)| (value, format!("c{part}")))
            .collect();
        bar(&mut svg, &left, y, &segments);
        number(&mut svg, &left, base, *measured, &cycles(*measured));
        let segments = [
            (*measured, "measured".to_owned()),
            (modelled(row), "modelled".to_owned()),
        ];
        bar(&mut svg, &right, y, &segments);
        let text = match row.relative_throughput.filter(|share| share.is_finite()) {
            Some(share) => format!("{} ({share:.2})", cycles(*total)),
            None if row.components.is_none() => "not measured".to_owned(),
            None if row.modelled_cycles.is_none() => "unknown".to_owned(),
            None => cycles(*total),
        };
        number(&mut svg, &right, base, *total, &text);
    }
    let note = "In brackets: relative throughput, c / (c + map + unmap).";
    svg.text(width - 14.0, bottom + 36.0, Anchor::End, "faint", note);
    svg
}

fn modelled(row: &Row) -> f64 {
    row.components
        .map_or(0.0, |components| drawable(components.cycles.modelled()))
}

fn legend(svg: &mut Svg) {
    let mut x = 14.0;
    let mut entry = |class: &str, name: &str| {
        svg.bar(x, 44.0, 11.0, 11.0, class);
        svg.text(x + 16.0, 54.0, Anchor::Start, "", name);
        x += 32.0 + text_width(name);
    };
    for (part, name) in PARTS.iter().enumerate() {
        entry(&format!("c{part}"), name);
    }
    let x = LEFT + MEASURED_WIDTH + BETWEEN;
    for (shift, name) in [(0.0, "measured"), (90.0, "modelled")] {
        svg.bar(x + 90.0 + shift, 44.0 - 22.0, 11.0, 11.0, name);
        svg.text(x + 106.0 + shift, 54.0 - 22.0, Anchor::Start, "", name);
    }
}

/// Draws the lines and numbers of a scale and its title.
fn frame(svg: &mut Svg, scale: &Linear, bottom: f64, what: &str) {
    svg.text(scale.from, TOP - 24.0, Anchor::Start, "faint", what);
    for tick in scale.ticks() {
        let x = scale.at(tick);
        let class = if tick == 0.0 { "axis" } else { "grid" };
        svg.line((x, TOP - 4.0), (x, bottom), class);
        let text = tick_text(tick, scale.step);
        svg.text(x, TOP - 8.0, Anchor::Middle, "faint", &text);
    }
}

/// Draws a stack of segments, with a break mark if it exceeds its scale.
fn bar(svg: &mut Svg, scale: &Linear, y: f64, segments: &[(f64, String)]) {
    let mut sum = 0.0;
    for (value, class) in segments {
        let (from, to) = (scale.at(sum), scale.at(sum + value));
        svg.bar(from, y, to - from, BAR, class);
        sum += value;
    }
    if sum > scale.top {
        svg.break_mark(scale.from + scale.length - 18.0, y, BAR);
    }
}

fn number(svg: &mut Svg, scale: &Linear, base: f64, value: f64, text: &str) {
    svg.text(scale.at(value) + 6.0, base, Anchor::Start, "", text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_lab::meter::Components;

    #[test]
    fn bars_with_negative_parts_have_the_total_length() {
        let mut row = Row::of_run(true, true);
        let mut components = Components::default();
        let cycles = &mut components.cycles;
        cycles.map_iova_alloc = 300.0;
        cycles.map_table = 100.0;
        cycles.unmap_table = -200.0;
        cycles.unmap_invalidation_modelled = 2150.0;
        row.components = Some(components);
        assert!((parts(&row).iter().sum::<f64>() - 200.0).abs() < 1e-9);
        assert!((parts(&row)[0] - 150.0).abs() < 1e-9);
        // Doorbells to the host are modelled as well, and no part of what was measured.
        components.cycles.map_kick_modelled = 3000.0;
        components.cycles.unmap_kick_modelled = 4000.0;
        row.components = Some(components);
        assert!((parts(&row).iter().sum::<f64>() - 200.0).abs() < 1e-9);
        assert!((modelled(&row) - 9150.0).abs() < 1e-9);
        components.cycles.unmap_table = -900.0;
        row.components = Some(components);
        assert!(parts(&row).iter().all(|part| *part == 0.0));
        assert!(parts(&Row::default()).iter().all(|part| *part == 0.0));
    }
}
