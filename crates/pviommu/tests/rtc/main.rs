//! The reverse translation cache: every implementor against a brute-force model, and what each part
//! promises.

mod attacks;
mod cases;
mod conformance;
mod model;
mod tree;
mod vectors;
