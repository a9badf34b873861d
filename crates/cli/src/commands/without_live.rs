//! What `serve`, `top` and `guest` say in a build without them.

use std::process::ExitCode;

use crate::args::{GuestCommand, ServeArgs, TopArgs};
use crate::failure::Failure;

/// Says what to build.
pub(crate) fn serve(_: &ServeArgs) -> Result<ExitCode, Failure> {
    Err(Failure::NotBuilt)
}

/// Says what to build.
pub(crate) fn device() -> Result<(), Failure> {
    Err(Failure::NotBuilt)
}

/// Says what to build.
pub(crate) fn guest(_: &GuestCommand) -> Result<ExitCode, Failure> {
    Err(Failure::NotBuilt)
}

/// Says what to build.
pub(crate) fn top(_: &TopArgs) -> Result<(), Failure> {
    Err(Failure::NotBuilt)
}
