//! The search plot: mean and longest search lengths, on a logarithmic scale.

use super::scale::drawable;
use super::svg::{Anchor, Svg};
use crate::number::count;
use ringfence_lab::row::Row;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 128.0;
/// Room for the numbers of the longest search.
const RIGHT: f64 = 110.0;
const TOP: f64 = 84.0;
const ROW: f64 = 24.0;

pub(super) fn plot(trace: &str, rows: &[&Row]) -> String {
    let bottom = TOP + ROW * rows.len() as f64;
    let mut svg = Svg::new(WIDTH, bottom + 24.0);
    let title = format!("{trace}: steps to find an IOVA");
    svg.text(14.0, 26.0, Anchor::Start, "title", &title);
    svg.circle(20.0, 45.0, 5.0, "measured");
    svg.text(30.0, 49.0, Anchor::Start, "", "mean");
    svg.circle(88.0, 45.0, 4.5, "hollow");
    svg.text(98.0, 49.0, Anchor::Start, "", "longest");

    let longest = rows
        .iter()
        .map(|row| row.search_steps_max)
        .max()
        .unwrap_or(0)
        .max(9);
    // log(1 + steps), because 0 needs a position.
    let log = |steps: f64| (1.0 + drawable(steps)).log10();
    let top = log(f64::from(longest));
    let x_of = |steps: f64| LEFT + (log(steps) / top).min(1.0) * (WIDTH - LEFT - RIGHT);
    for tick in [
        0u32, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 100_000, 1_000_000,
    ] {
        if tick <= longest {
            let x = x_of(tick.into());
            svg.line(
                (x, TOP - 4.0),
                (x, bottom),
                if tick == 0 { "axis" } else { "grid" },
            );
            svg.text(x, TOP - 8.0, Anchor::Middle, "faint", &count(tick.into()));
        }
    }
    for (index, row) in rows.iter().enumerate() {
        let y = TOP + ROW * (index as f64 + 0.5);
        svg.text(LEFT - 10.0, y + 4.0, Anchor::End, "strong", &row.mode);
        let Some(mean_len) = row.search_steps_mean else {
            continue;
        };
        let (mean, max) = (x_of(mean_len), x_of(row.search_steps_max.into()));
        svg.line((mean, y), (max, y), "join");
        svg.circle(max, y, 4.5, "ground");
        svg.circle(max, y, 4.5, "hollow");
        svg.circle(mean, y, 5.0, "measured");
        if row.search_steps_max > 0 {
            let text = format!("{:.1} / {}", drawable(mean_len), row.search_steps_max);
            svg.text(max + 10.0, y + 4.0, Anchor::Start, "faint", &text);
        }
    }
    svg.finish(&title)
}
