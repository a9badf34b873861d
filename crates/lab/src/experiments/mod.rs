//! The documents' experiments, each as a function that returns what it measured.

pub mod model;
pub mod prefetch;
pub mod printed;
