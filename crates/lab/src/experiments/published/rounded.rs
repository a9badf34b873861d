//! Printed numbers are rounded: what is derived from them is an interval.

use std::ops::{Add, Div, Mul, Sub};

use serde::Serialize;

/// A number known up to an interval, ends included, with the value that the printed digits give.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rounded {
    /// Lower end.
    pub lo: f64,
    /// What the digits give.
    pub value: f64,
    /// Upper end.
    pub hi: f64,
}

impl Rounded {
    /// A number without an error.
    pub const fn exact(value: f64) -> Self {
        Self {
            lo: value,
            value,
            hi: value,
        }
    }

    /// A number printed with two decimals: off by half a hundredth at most.
    pub const fn hundredths(value: f64) -> Self {
        Self {
            lo: value - 0.005,
            value,
            hi: value + 0.005,
        }
    }

    /// Whether the intervals share a number: whether one truth can have been rounded to both.
    pub fn agrees(&self, other: &Self) -> bool {
        self.lo <= other.hi && other.lo <= self.hi
    }

    /// Whether `value` lies in the interval.
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

/// Of numbers that are not negative; all that is printed is positive.
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

/// Of a number that is not negative by a positive one.
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
