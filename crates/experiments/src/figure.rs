//! Plot data, independent of rendering.

use serde::Serialize;

/// A line, or a set of crosses for unconnected points.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points (x, y), in the order in which the line connects them.
    pub points: Vec<(f64, f64)>,
    /// True to draw a cross at each point instead of a line.
    pub crosses: bool,
}

impl Series {
    /// A series whose points are connected.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            crosses: false,
        }
    }

    /// A series of crosses.
    pub fn crosses(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            crosses: true,
        }
    }
}

/// A plot that accompanies the finding of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Subject, and the paper's figure that it corresponds to.
    pub title: String,
    /// Label of the horizontal axis.
    pub x: &'static str,
    /// Label of the vertical axis.
    pub y: &'static str,
    /// True if the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Lines and crosses of the plot.
    pub series: Vec<Series>,
}

impl Figure {
    /// A plot with a linear horizontal axis.
    pub(super) fn linear(
        title: impl Into<String>,
        x: &'static str,
        y: &'static str,
        series: Vec<Series>,
    ) -> Self {
        Self {
            title: title.into(),
            x,
            y,
            log_x: false,
            series,
        }
    }

    /// A plot with a logarithmic horizontal axis.
    pub(super) fn logarithmic(
        title: impl Into<String>,
        x: &'static str,
        y: &'static str,
        series: Vec<Series>,
    ) -> Self {
        Self {
            log_x: true,
            ..Self::linear(title, x, y, series)
        }
    }
}

/// Reduces `points` to at most `wanted` points and keeps spikes: divides them into parts of equal
/// length and keeps the highest point of each.
pub(super) fn thinned(points: &[(f64, f64)], wanted: usize) -> Vec<(f64, f64)> {
    let part = points.len().div_ceil(wanted.max(1)).max(1);
    let largest = |part: &[(f64, f64)]| part.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
    points.chunks(part).filter_map(largest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_spikes() {
        let mut points: Vec<(f64, f64)> = (0..1000).map(|x| (f64::from(x), 0.0)).collect();
        points[517].1 = 9.0;
        let thin = thinned(&points, 100);
        assert_eq!(thin.len(), 100);
        assert!(thin.contains(&(517.0, 9.0)));
        assert_eq!(thinned(&points[..3], 100).len(), 3);
        assert!(thinned(&[], 0).is_empty());
    }
}
