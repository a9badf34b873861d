//! Shared by the tests and the fuzz target: a reference model, a sink that checks its calls and can
//! fail, and sessions decoded from bytes.

pub(crate) mod input;
pub(crate) mod model;
pub(crate) mod outcomes;
pub(crate) mod recorder;
pub(crate) mod session;
