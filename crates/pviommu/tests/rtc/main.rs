//! Tests of the reverse translation cache: each implementation against a brute-force model, and
//! each part alone.

mod attacks;
mod cases;
mod conformance;
mod model;
mod tree;
mod vectors;
