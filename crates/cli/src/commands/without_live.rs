//! Errors of `serve`, `top` and `guest` in a build without them.

use std::process::ExitCode;

use crate::args::{GuestCommand, ServeArgs, TopArgs};
use crate::failure::Failure;

/// Fails with the feature to build with.
pub(crate) fn serve(_: &ServeArgs) -> Result<ExitCode, Failure> {
    Err(Failure::NotBuilt)
}

/// Fails with the feature to build with.
pub(crate) fn device() -> Result<(), Failure> {
    Err(Failure::NotBuilt)
}

/// Fails with the feature to build with.
pub(crate) fn guest(_: &GuestCommand) -> Result<ExitCode, Failure> {
    Err(Failure::NotBuilt)
}

/// Fails with the feature to build with.
pub(crate) fn top(_: &TopArgs) -> Result<(), Failure> {
    Err(Failure::NotBuilt)
}
