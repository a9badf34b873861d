//! Tests across crates: the walk through the layers, every mode against a model under attack, the
//! attack classes, and the golden table.

mod bench;
mod conformance;
mod golden;
mod oracle;
mod ring;
mod walk;
