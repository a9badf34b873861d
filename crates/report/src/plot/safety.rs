//! The safety plot: relative throughput against exposure in byte-seconds.

use super::scale::drawable;
use super::svg::{Anchor, InlineSvg, Svg, text_width};
use crate::number::count;
use ringfence_lab::row::Row;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 96.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 106.0;
/// Height of the part with a logarithmic scale.
const LOG: f64 = 260.0;
/// Height of the part for zero exposure, which has no logarithm.
const ZERO: f64 = 110.0;
const LINE: f64 = 15.0;

#[derive(Debug, Clone, Copy)]
struct Rect {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

impl Rect {
    fn overlaps(&self, other: &Self) -> bool {
        self.x < other.x + other.width
            && other.x < self.x + self.width
            && self.y < other.y + other.height
            && other.y < self.y + self.height
    }
}

/// Returns powers of ten that enclose all values above 0.
fn decades(rows: &[&Row]) -> (i32, i32) {
    let logs = rows
        .iter()
        .map(|row| drawable(row.stale_byte_seconds))
        .filter(|value| *value > 0.0)
        .map(f64::log10);
    let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| {
        (low.min(log), high.max(log))
    });
    if low > high {
        return (0, 3);
    }
    let (low, high) = (
        low.floor().clamp(-30.0, 30.0) as i32,
        high.ceil().clamp(-30.0, 30.0) as i32,
    );
    (low, high.max(low + 2))
}

pub(super) fn plot(trace: &str, rows: &[&Row]) -> String {
    let title = format!("{trace}: cost and exposure of each mode");
    draw(&title, rows).finish(&title)
}

/// Draws the plot for a page, which names the trace itself.
pub(crate) fn inline_safety(rows: &[&Row]) -> InlineSvg {
    const TITLE: &str = "Cost and exposure of each mode";
    draw(TITLE, rows).finish_inline(TITLE)
}

fn draw(title: &str, rows: &[&Row]) -> Svg {
    let bottom = TOP + LOG + ZERO;
    let mut svg = Svg::new(WIDTH, bottom + 62.0);
    svg.text(14.0, 26.0, Anchor::Start, "title", title);
    let note = "Right is cheaper, down is safer. Exposure: bytes times seconds from an unmap's \
        return to its invalidation.";
    svg.text(14.0, 46.0, Anchor::Start, "faint", note);
    legend(&mut svg);

    let x_of = |value: f64| LEFT + drawable(value).min(1.0) * (WIDTH - LEFT - RIGHT);
    let (low, high) = decades(rows);
    let y_of = |value: f64| {
        let share = (value.log10() - f64::from(low)) / f64::from(high - low);
        TOP + LOG - share.clamp(0.0, 1.0) * (LOG - 14.0)
    };
    svg.bar(LEFT, TOP + LOG, WIDTH - LEFT - RIGHT, ZERO, "band");
    svg.text(
        LEFT - 8.0,
        TOP + LOG + 32.0,
        Anchor::End,
        "strong",
        "nothing",
    );
    svg.text(
        LEFT - 8.0,
        TOP + LOG + 47.0,
        Anchor::End,
        "strong",
        "exposed",
    );
    let every = (high - low) / 6 + 1;
    for power in (low..=high).filter(|power| (power - low) % every == 0) {
        let y = y_of(10f64.powi(power));
        svg.line((LEFT, y), (WIDTH - RIGHT, y), "grid");
        svg.text(
            LEFT - 8.0,
            y + 4.0,
            Anchor::End,
            "faint",
            &power_of_ten(power),
        );
    }
    svg.text(14.0, TOP - 8.0, Anchor::Start, "faint", "byte-seconds");
    for tenth in (0..=10).step_by(2) {
        let x = x_of(f64::from(tenth) / 10.0);
        svg.line(
            (x, TOP),
            (x, bottom),
            if tenth == 0 { "axis" } else { "grid" },
        );
        let text = format!("{:.1}", f64::from(tenth) / 10.0);
        svg.text(x, bottom + 18.0, Anchor::Middle, "faint", &text);
    }
    svg.text(
        (LEFT + WIDTH - RIGHT) / 2.0,
        bottom + 40.0,
        Anchor::Middle,
        "faint",
        "relative throughput (1: as without protection)",
    );
    points(&mut svg, rows, x_of, |row| {
        let exposed = drawable(row.stale_byte_seconds);
        if exposed > 0.0 {
            y_of(exposed)
        } else {
            TOP + LOG + 40.0
        }
    });
    svg
}

fn power_of_ten(power: i32) -> String {
    match power {
        0..=5 => count(10u64.pow(power.unsigned_abs())),
        _ => format!("1e{power}"),
    }
}

/// Draws the legend. Returns its right end.
fn legend(svg: &mut Svg) -> f64 {
    let mut x = 14.0;
    for (safety, name) in [
        ("strict", "strict: live mappings only"),
        ("own-pool", "own-pool: and its own pool"),
        ("bounded", "bounded: and for a stated time"),
        ("none", "none"),
    ] {
        marker(svg, x + 6.0, 64.0, safety);
        svg.text(x + 18.0, 68.0, Anchor::Start, "", name);
        x += 40.0 + text_width(name);
    }
    x
}

/// Draws a separate shape for each safety class, so that colours are not essential.
fn marker(svg: &mut Svg, x: f64, y: f64, safety: &str) {
    match safety {
        "strict" | "byte-granular" => svg.circle(x, y, 5.5, "strict"),
        "own-pool" => {
            let points = [(x, y - 7.0), (x + 7.0, y), (x, y + 7.0), (x - 7.0, y)];
            svg.polygon(&points, "own-pool");
        }
        "bounded" => {
            let points = [(x, y - 6.5), (x + 6.5, y + 5.0), (x - 6.5, y + 5.0)];
            svg.polygon(&points, "bounded");
        }
        _ => svg.bar(x - 5.0, y - 5.0, 10.0, 10.0, "none"),
    }
}

/// Modes whose markers share a position.
struct Cluster<'a> {
    x: f64,
    y: f64,
    rows: Vec<&'a Row>,
}

/// Distance at which markers would cover each other.
const NEAR: f64 = 8.0;

/// Draws the markers, then their names beside them. A thin line connects a name that had to move.
fn points(svg: &mut Svg, rows: &[&Row], x_of: impl Fn(f64) -> f64, y_of: impl Fn(&Row) -> f64) {
    let mut placed: Vec<(f64, f64, &Row)> = rows
        .iter()
        .filter_map(|row| Some((x_of(row.relative_throughput?), y_of(row), *row)))
        .collect();
    placed.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut clusters: Vec<Cluster<'_>> = Vec::new();
    for (x, y, row) in &placed {
        let near = |cluster: &&mut Cluster<'_>| {
            (cluster.x - x).abs() < NEAR && (cluster.y - y).abs() < NEAR
        };
        match clusters.iter_mut().find(near) {
            Some(cluster) => cluster.rows.push(row),
            None => clusters.push(Cluster {
                x: *x,
                y: *y,
                rows: vec![row],
            }),
        }
    }
    let mut taken: Vec<Rect> = clusters
        .iter()
        .map(|cluster| Rect {
            x: cluster.x - NEAR,
            y: cluster.y - NEAR,
            width: 2.0 * NEAR,
            height: 2.0 * NEAR,
        })
        .collect();
    for cluster in &clusters {
        let names: Vec<&str> = cluster.rows.iter().map(|row| row.mode.as_str()).collect();
        let name = names.join(", ");
        let label = free_label_position(cluster.x, cluster.y, text_width(&name) + 4.0, &taken);
        taken.push(label);
        let middle = label.y + LINE / 2.0;
        if (middle - cluster.y).abs() >= 1.0 {
            let right = label.x > cluster.x;
            let edge = if right {
                label.x
            } else {
                label.x + label.width
            };
            svg.line((cluster.x, cluster.y), (edge, middle), "thin");
        }
        svg.text(
            label.x + 2.0,
            label.y + LINE - 4.0,
            Anchor::Start,
            "",
            &name,
        );
    }
    for (x, y, row) in &placed {
        marker(svg, *x, *y, &row.safety);
    }
}

/// Returns the nearest free position for a name.
fn free_label_position(x: f64, y: f64, width: f64, taken: &[Rect]) -> Rect {
    let at = |side: f64, shift: f64| Rect {
        x: if side > 0.0 {
            x + 10.0
        } else {
            x - 10.0 - width
        },
        y: y - LINE / 2.0 + shift * LINE,
        width,
        height: LINE,
    };
    let limits = (LEFT + 1.0, WIDTH - 4.0, TOP - 6.0, TOP + LOG + ZERO);
    let fits = |rect: &Rect| {
        rect.x >= limits.0
            && rect.x + rect.width <= limits.1
            && rect.y >= limits.2
            && rect.y + rect.height <= limits.3
            && !taken.iter().any(|other| other.overlaps(rect))
    };
    // Prefer to move names of exposed modes up and those of others down, so that they stay in their
    // band.
    let down = if y > TOP + LOG { 1.0 } else { -1.0 };
    let shifts = (0..12).flat_map(|n| [f64::from(n) * down, f64::from(-n) * down]);
    let mut positions = shifts.flat_map(|shift| [at(1.0, shift), at(-1.0, shift)]);
    positions.find(fits).unwrap_or_else(|| at(1.0, 0.0))
}

#[cfg(test)]
mod tests {
    use ringfence_lab::modes::Safety;

    use super::*;

    #[test]
    fn each_class_below_strict_has_a_marker_of_its_own_in_the_legend() {
        let mut legend = Svg::new(WIDTH, 100.0);
        assert!(super::legend(&mut legend) < WIDTH);
        let legend = legend.finish("");
        let shape = |safety: Safety| {
            let mut svg = Svg::new(100.0, 100.0);
            marker(&mut svg, 20.0, 20.0, &safety.to_string());
            svg.finish("")
        };
        let classes = [
            Safety::None,
            Safety::Bounded,
            Safety::OwnPool,
            Safety::Strict,
        ];
        for (index, safety) in classes.into_iter().enumerate() {
            assert!(legend.contains(&format!("class=\"{safety}\"")), "{safety}");
            let others = classes[..index].iter();
            assert!(others.clone().all(|other| shape(*other) != shape(safety)));
        }
        assert_eq!(shape(Safety::ByteGranular), shape(Safety::Strict));
    }
}
