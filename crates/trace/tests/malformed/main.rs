//! Malformed input: checks the exact error for each kind of damage.

mod lines;
mod operations;
mod payloads;
mod sources;
