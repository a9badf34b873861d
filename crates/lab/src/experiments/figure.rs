//! Plot data: what a figure shows, without how it is drawn.

use serde::Serialize;

/// A line, or crosses where points do not belong to one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Points, in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// Points are marked one by one instead of joined.
    pub crosses: bool,
}

impl Series {
    /// Points that are joined.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            crosses: false,
        }
    }

    /// Points that are not.
    pub fn crosses(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            crosses: true,
        }
    }
}

/// A figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// What it shows, and which figure of the document it answers.
    pub title: String,
    /// What the horizontal scale counts.
    pub x: &'static str,
    /// What the vertical one counts.
    pub y: &'static str,
    /// Whether the horizontal scale is logarithmic.
    pub log_x: bool,
    /// What is drawn.
    pub series: Vec<Series>,
}

/// Fewer points of the same shape: of each of `wanted` parts the largest, where it stands. Spikes
/// stay.
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
