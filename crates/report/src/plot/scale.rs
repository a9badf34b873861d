//! Scales that convert values to positions.

use crate::number::cycles;

/// Converts a value to one that can be drawn: finite and not negative.
pub(super) fn drawable(value: f64) -> f64 {
    if value.is_finite() {
        value.max(0.0)
    } else {
        0.0
    }
}

/// A linear scale from 0 to `top`, drawn from `from` over `length`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linear {
    pub(super) from: f64,
    pub(super) length: f64,
    pub(super) top: f64,
    pub(super) step: f64,
}

impl Linear {
    /// Creates a scale that reaches `largest` in about four round steps.
    pub(super) fn reaching(largest: f64, from: f64, length: f64) -> Self {
        let largest = if largest > 0.0 { largest } else { 1.0 };
        let power = 10f64.powf((largest / 4.0).log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .map(|round| round * power)
            .into_iter()
            .find(|step| step * 4.5 >= largest)
            .unwrap_or(10.0 * power);
        Self {
            from,
            length,
            top: (largest / step).ceil() * step,
            step,
        }
    }

    /// Returns the position of `value`: the end of the scale for a larger number, and its beginning
    /// for a value that cannot be drawn, such as infinity.
    pub(super) fn at(&self, value: f64) -> f64 {
        self.from + (drawable(value) / self.top).min(1.0) * self.length
    }

    /// Returns the values that get a line and a number.
    pub(super) fn ticks(&self) -> impl Iterator<Item = f64> {
        let (step, top) = (self.step, self.top);
        (0..=20)
            .map(move |n| f64::from(n) * step)
            .take_while(move |tick| *tick <= top * 1.001)
    }
}

/// Formats the value of a tick with the decimals that `step` needs.
pub(super) fn tick_text(tick: f64, step: f64) -> String {
    let is_whole = |decimals: &i32| {
        let scaled = step * 10f64.powi(*decimals);
        (scaled - scaled.round()).abs() < 1e-6 * scaled
    };
    match (0..12).find(is_whole) {
        Some(decimals @ 1..) => format!("{tick:.*}", decimals as usize)
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned(),
        _ => cycles(tick).trim_end_matches(".0").to_owned(),
    }
}

/// Returns the end of a scale for bars: the largest value, unless a few long bars would flatten all
/// others. Then it is a quarter more than the longest of the others, and the long bars have a break
/// mark.
pub(super) fn end_of_bars(values: &[f64]) -> f64 {
    let mut sorted: Vec<f64> = values.iter().map(|value| drawable(*value)).collect();
    sorted.sort_by(f64::total_cmp);
    let largest = sorted.last().copied().unwrap_or(0.0);
    // At least two thirds of the bars are at most as long as this one.
    let at = (sorted.len() * 2).div_ceil(3).saturating_sub(1);
    let middle = sorted.get(at).copied().unwrap_or(0.0);
    let usual = sorted
        .iter()
        .copied()
        .filter(|value| *value <= 3.0 * middle);
    let usual = usual.fold(0.0, f64::max);
    if usual > 0.0 && largest > 2.0 * usual {
        usual * 1.25
    } else {
        largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_at_round_numbers() {
        for (largest, top) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (873.0, 1000.0),
            (3280.0, 4000.0),
            (4100.0, 5000.0),
        ] {
            let scale = Linear::reaching(largest, 0.0, 100.0);
            assert_eq!(scale.top, top, "{largest}");
            assert!((2..=6).contains(&scale.ticks().count()), "{largest}");
            assert_eq!(scale.at(f64::INFINITY), 0.0);
            assert_eq!(scale.at(scale.top * 2.0), 100.0);
        }
    }

    /// No two ticks have one text, and a text is the value of its tick.
    #[test]
    fn ticks_have_the_decimals_of_their_step() {
        for (largest, texts) in [
            (0.1, "0 0.025 0.05 0.075 0.1"),
            (0.02, "0 0.005 0.01 0.015 0.02"),
            (1.0, "0 0.25 0.5 0.75 1"),
            (10.5, "0 2.5 5 7.5 10 12.5"),
            (100.0, "0 25 50 75 100"),
            (42_000.0, "0 10,000 20,000 30,000 40,000 50,000"),
        ] {
            let scale = Linear::reaching(largest, 0.0, 100.0);
            let found: Vec<String> = scale
                .ticks()
                .map(|tick| tick_text(tick, scale.step))
                .collect();
            assert_eq!(found.join(" "), texts, "{largest}");
        }
    }

    #[test]
    fn few_long_bars_do_not_flatten_the_others() {
        assert_eq!(end_of_bars(&[100.0, 200.0, 300.0, 350.0]), 350.0);
        assert_eq!(end_of_bars(&[100.0, 120.0, 90.0, 80.0, 9000.0]), 150.0);
        assert_eq!(end_of_bars(&[100.0, 120.0, 9000.0]), 150.0);
        // Neither of two bars is one of a few.
        assert_eq!(end_of_bars(&[100.0, 9000.0]), 9000.0);
        assert_eq!(end_of_bars(&[100.0]), 100.0);
        assert_eq!(end_of_bars(&[]), 0.0);
    }
}
