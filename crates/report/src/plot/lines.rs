//! Plots of lines and crosses over two scales, the form of most figures in the papers.

use super::scale::{Linear, drawable, tick_text};
use super::svg::{Anchor, COLOURS, InlineSvg, Svg, text_width};
use ringfence_experiments::Figure;

/// Narrow enough that letters stay readable when a phone shrinks the drawing to its screen.
const WIDTH: f64 = 400.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 26.0;
const PLOT: f64 = 210.0;
const LEGEND_LINE: f64 = 18.0;
/// Dashes of the series in each pass through [`COLOURS`], so that two series with one colour
/// differ. The first pass has solid lines.
const DASHES: [Option<&str>; 3] = [None, Some("6 3"), Some("2 2")];

/// The horizontal scale.
struct XAxis {
    low: f64,
    high: f64,
    log: bool,
}

impl XAxis {
    fn of(figure: &Figure) -> Self {
        let all = figure.series.iter().flat_map(|series| &series.points);
        let log = figure.log_x;
        let xs = all
            .map(|(x, _)| *x)
            .filter(|x| x.is_finite() && (!log || *x > 0.0));
        let (low, high) = xs.fold((f64::MAX, f64::MIN), |(low, high), x| {
            (low.min(x), high.max(x))
        });
        match low < high {
            true => Self { low, high, log },
            false if low == high => Self {
                low,
                high: low + 1.0,
                log,
            },
            false => Self {
                low: 1.0,
                high: 2.0,
                log,
            },
        }
    }

    fn share(&self, x: f64) -> f64 {
        let share = if self.log {
            (x.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (x - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    fn at(&self, x: f64) -> f64 {
        LEFT + self.share(x) * (WIDTH - LEFT - RIGHT)
    }

    /// Returns the values that get a number, and the numbers.
    fn ticks(&self) -> Vec<(f64, String)> {
        if self.log {
            let powers = (-3..12).flat_map(|power| {
                let one = 10f64.powi(power);
                [one, 2.0 * one, 5.0 * one]
            });
            return powers
                .filter(|x| (self.low..=self.high).contains(x))
                .map(|x| (x, tick_text(x, x)))
                .collect();
        }
        let step = Linear::reaching(self.high - self.low, 0.0, 1.0).step;
        let first = (self.low / step).ceil() as i64;
        (first..first + 20)
            .map(|n| n as f64 * step)
            .take_while(|x| *x <= self.high)
            .map(|x| (x, tick_text(x, step)))
            .collect()
    }
}

/// Draws the figure without its title, which the page prints above it as breakable text. Omits
/// values that cannot be drawn.
pub(crate) fn lines(figure: &Figure) -> String {
    draw(figure).finish(&figure.title)
}

/// Draws the same figure for a page whose style sheet has the classes.
pub(crate) fn inline_lines(figure: &Figure) -> InlineSvg {
    draw(figure).finish_inline(&figure.title)
}

fn draw(figure: &Figure) -> Svg {
    // Lay out the legend first: its number of lines determines the top of the plot.
    let mut positions = Vec::new();
    let (mut x, mut line) = (LEFT, 0.0);
    for series in &figure.series {
        let width = 34.0 + text_width(&series.name);
        if x + width > WIDTH - RIGHT && x > LEFT {
            (x, line) = (LEFT, line + 1.0);
        }
        positions.push((x, LEGEND_LINE + line * LEGEND_LINE));
        x += width;
    }
    let top = (line + 2.0) * LEGEND_LINE + 20.0;
    let bottom = top + PLOT;
    let mut svg = Svg::new(WIDTH, bottom + 46.0);

    let across = XAxis::of(figure);
    let ys = figure.series.iter().flat_map(|series| &series.points);
    let largest = ys.map(|(_, y)| drawable(*y)).fold(0.0, f64::max);
    let up = Linear::reaching(largest, 0.0, PLOT);
    for tick in up.ticks() {
        let y = bottom - up.at(tick);
        let class = if tick == 0.0 { "axis" } else { "grid" };
        svg.line((LEFT, y), (WIDTH - RIGHT, y), class);
        svg.text(
            LEFT - 8.0,
            y + 4.0,
            Anchor::End,
            "faint",
            &tick_text(tick, up.step),
        );
    }
    for (tick, text) in across.ticks() {
        let x = across.at(tick);
        svg.line((x, bottom), (x, bottom + 4.0), "axis");
        svg.text(x, bottom + 17.0, Anchor::Middle, "faint", &text);
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    svg.text(middle, bottom + 36.0, Anchor::Middle, "faint", figure.x);
    svg.text(14.0, top - 12.0, Anchor::Start, "faint", figure.y);

    for (index, (series, (x, y))) in figure.series.iter().zip(positions).enumerate() {
        let class = format!("series s{}", index % COLOURS.len());
        let dashes = DASHES[index / COLOURS.len() % DASHES.len()];
        if let Some(dashes) = dashes {
            svg.begin_dashes(dashes);
        }
        let points: Vec<(f64, f64)> = series
            .points
            .iter()
            .filter(|(x, y)| x.is_finite() && y.is_finite())
            .map(|(x, y)| (across.at(*x), bottom - up.at(*y)))
            .collect();
        if series.crosses {
            for (x, y) in &points {
                svg.line((x - 4.0, y - 4.0), (x + 4.0, y + 4.0), &class);
                svg.line((x - 4.0, y + 4.0), (x + 4.0, y - 4.0), &class);
            }
            svg.line((x, y - 8.0), (x + 8.0, y), &class);
            svg.line((x, y), (x + 8.0, y - 8.0), &class);
        } else {
            svg.polyline(&points, &class);
            svg.line((x, y - 4.0), (x + 16.0, y - 4.0), &class);
        }
        if dashes.is_some() {
            svg.end_dashes();
        }
        svg.text(x + 20.0, y, Anchor::Start, "", &series.name);
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_experiments::Series;

    #[test]
    fn figures_are_whole_whatever_they_hold() {
        let values = [0.0, 1.0, -3.0, 1e12, f64::NAN, f64::INFINITY];
        for log_x in [false, true] {
            for count in 0..=values.len() {
                let points: Vec<(f64, f64)> = values.iter().take(count).map(|v| (*v, *v)).collect();
                let figure = Figure {
                    title: "a < b & c".into(),
                    x: "x",
                    y: "y",
                    log_x,
                    series: vec![
                        Series::line(
                            "lines of a very long name that fills the legend quite soon",
                            points.clone(),
                        ),
                        Series::crosses(
                            "crosses of another very long name that goes to the next line",
                            points,
                        ),
                    ],
                };
                let drawn = lines(&figure);
                assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
                assert!(drawn.contains("a &lt; b &amp; c"));
                assert!(drawn.ends_with("</svg>\n"));
            }
        }
    }

    #[test]
    fn numbers_below_an_axis_have_the_decimals_of_their_ticks() {
        for (log_x, from, to, numbers) in [
            (false, 0.0, 1.0, ["0.25", "0.75"]),
            (false, 0.0, 10.5, ["2.5", "7.5"]),
            (true, 0.02, 0.5, ["0.02", "0.05"]),
        ] {
            let figure = Figure {
                title: String::new(),
                x: "x",
                y: "y",
                log_x,
                series: vec![Series::line("line", vec![(from, 100.0), (to, 100.0)])],
            };
            let drawn = lines(&figure);
            for number in numbers {
                assert!(drawn.contains(&format!(">{number}<")), "{number}: {drawn}");
            }
        }
    }

    /// The line and its legend have a colour, and dashes from the eighth series on.
    #[test]
    fn series_of_one_colour_have_other_dashes() {
        let points = || vec![(0.0, 1.0), (1.0, 2.0)];
        let figure = Figure {
            title: String::new(),
            x: "x",
            y: "y",
            log_x: false,
            series: (0..21)
                .map(|index| Series::line(format!("line {index}"), points()))
                .collect(),
        };
        let drawn = lines(&figure);
        let mut dashes = "";
        let mut seen = std::collections::BTreeMap::new();
        for line in drawn.lines() {
            if let Some((_, pattern)) = line.split_once("<g stroke-dasharray=\"") {
                dashes = pattern.trim_end_matches("\">");
            } else if line == "</g>" {
                dashes = "";
            } else if let Some((_, class)) = line.split_once("class=\"series ") {
                *seen.entry((class, dashes)).or_insert(0) += 1;
            }
        }
        // A line in the plot and one in the legend.
        assert_eq!(seen.len(), 21, "{seen:?}");
        assert!(seen.values().all(|count| *count == 2), "{seen:?}");
    }
}
