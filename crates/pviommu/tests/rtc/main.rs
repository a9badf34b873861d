//! The reverse translation cache: every implementor against a brute-force model, and what each part promises.

mod conformance;
mod model;
