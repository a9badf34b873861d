//! One module per subcommand.

mod calibrate;
mod compare;
mod diff;
mod generate;
#[cfg(feature = "live")]
mod guest;
mod modes;
mod reproduce;
#[cfg(feature = "live")]
mod serve;
mod size;
#[cfg(feature = "live")]
mod top;
mod trace;
#[cfg(not(feature = "live"))]
mod without_live;

pub(crate) use calibrate::calibrate;
pub(crate) use compare::compare;
pub(crate) use diff::diff;
pub(crate) use generate::{completions, man};
#[cfg(feature = "live")]
pub(crate) use guest::guest;
pub(crate) use modes::modes;
pub(crate) use reproduce::reproduce;
#[cfg(feature = "live")]
pub(crate) use serve::{device, serve};
pub(crate) use size::size;
#[cfg(feature = "live")]
pub(crate) use top::top;
pub(crate) use trace::trace;
#[cfg(not(feature = "live"))]
pub(crate) use without_live::{device, guest, serve, top};

use ringfence_report::printable_json;
use serde::Serialize;

/// Returns indented JSON with a final newline.
fn json(value: &impl Serialize) -> String {
    // Our own types always serialise: keys are strings, and non-finite floats become null.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    printable_json(&text).into_owned()
}
