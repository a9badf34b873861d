//! Histograms: one bar for each range.

use super::scale::Linear;
use super::svg::{Anchor, InlineSvg, Svg};
use crate::number::count;

const WIDTH: f64 = 400.0;
const LEFT: f64 = 16.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 24.0;
const PLOT: f64 = 180.0;

/// Draws a bar for each label, with its number above it.
pub(crate) fn histogram(title: &str, x: &'static str, bars: &[(String, u64)]) -> InlineSvg {
    let bottom = TOP + PLOT;
    let mut svg = Svg::new(WIDTH, bottom + 46.0);
    let most = bars.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let up = Linear::reaching(most as f64, 0.0, PLOT - 18.0);
    let each = (WIDTH - LEFT - RIGHT) / bars.len().max(1) as f64;
    for (index, (label, number)) in bars.iter().enumerate() {
        let from = LEFT + index as f64 * each;
        let height = up.at(*number as f64);
        let width = (each * 0.8).min(60.0);
        let middle = from + each / 2.0;
        svg.bar(middle - width / 2.0, bottom - height, width, height, "c0");
        if *number > 0 {
            let text = short(*number);
            svg.text(middle, bottom - height - 5.0, Anchor::Middle, "", &text);
        }
        // Labels of many bars alternate between two lines.
        let line = if bars.len() > 6 { index % 2 } else { 0 };
        let y = bottom + 15.0 + 12.0 * line as f64;
        svg.text(middle, y, Anchor::Middle, "faint", label);
    }
    svg.line((LEFT, bottom), (WIDTH - RIGHT, bottom), "axis");
    svg.text(WIDTH / 2.0, bottom + 42.0, Anchor::Middle, "faint", x);
    svg.finish_inline(title)
}

fn short(number: u64) -> String {
    match number {
        0..100_000 => count(number),
        100_000..10_000_000 => format!("{:.0}k", number as f64 / 1e3),
        _ => format!("{:.0}M", number as f64 / 1e6),
    }
}
