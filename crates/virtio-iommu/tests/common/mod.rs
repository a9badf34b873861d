//! What the tests of this crate share, and the fuzz target with them: a reference, a sink that
//! watches and fails, sessions made of bytes.

pub(crate) mod input;
pub(crate) mod model;
pub(crate) mod outcomes;
pub(crate) mod recorder;
pub(crate) mod session;
