//! The laboratory on hand-made traces whose counts can be worked out on paper. One binary: building
//! the layers of every mode takes long.

mod comparison;
mod composed;
mod failures;
mod hostile;
mod plans;
mod replays;
mod rings;
mod script;
mod sizes;
mod stubs;
