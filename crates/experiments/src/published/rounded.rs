//! Interval arithmetic on rounded numbers: values derived from printed numbers are intervals.

use std::ops::{Add, Div, Mul, Sub};

use serde::Serialize;

/// A number known up to a closed interval, and the value of its printed digits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rounded {
    /// Lower end of the interval, inclusive.
    pub lo: f64,
    /// Value of the printed digits.
    pub value: f64,
    /// Upper end of the interval, inclusive.
    pub hi: f64,
}

impl Rounded {
    /// A number without rounding error.
    pub const fn exact(value: f64) -> Self {
        Self {
            lo: value,
            value,
            hi: value,
        }
    }

    /// A number printed with two decimals: its error is at most 0.005.
    pub const fn hundredths(value: f64) -> Self {
        Self {
            lo: value - 0.005,
            value,
            hi: value + 0.005,
        }
    }

    /// Returns half of the interval's length.
    pub fn rounding(&self) -> f64 {
        (self.hi - self.lo) / 2.0
    }

    /// Returns true if the intervals overlap, so that both can be roundings of the same number.
    pub fn agrees(&self, other: &Self) -> bool {
        self.lo <= other.hi && other.lo <= self.hi
    }

    /// Returns true if `value` lies in the interval.
    pub fn contains(&self, value: f64) -> bool {
        self.lo <= value && value <= self.hi
    }
}

impl Add for Rounded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            lo: self.lo + other.lo,
            value: self.value + other.value,
            hi: self.hi + other.hi,
        }
    }
}

impl Sub for Rounded {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            lo: self.lo - other.hi,
            value: self.value - other.value,
            hi: self.hi - other.lo,
        }
    }
}

/// Product of non-negative intervals. All printed numbers are positive.
impl Mul for Rounded {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self {
            lo: self.lo * other.lo,
            value: self.value * other.value,
            hi: self.hi * other.hi,
        }
    }
}

/// Quotient of a non-negative interval and a positive one.
impl Div for Rounded {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        Self {
            lo: self.lo / other.hi,
            value: self.value / other.value,
            hi: self.hi / other.lo,
        }
    }
}
