//! The documents' experiments, each as a function that returns what it measured.

pub mod prefetch;
