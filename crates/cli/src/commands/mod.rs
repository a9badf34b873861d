//! One module per subcommand.

mod attack;
mod calibrate;
mod compare;
mod device_options;
mod diff;
mod generate;
mod guest;
mod modes;
mod reproduce;
mod serve;
mod size;
mod top;
mod trace;

pub(crate) use attack::attack;
pub(crate) use calibrate::calibrate;
pub(crate) use compare::compare;
pub(crate) use diff::diff;
pub(crate) use generate::{completions, man};
pub(crate) use guest::guest;
pub(crate) use modes::modes;
pub(crate) use reproduce::reproduce;
pub(crate) use serve::{device, serve};
pub(crate) use size::size;
pub(crate) use top::top;
pub(crate) use trace::trace;

use ringfence_report::printable_json;
use serde::Serialize;

/// Returns indented JSON with a final newline.
fn json(value: &impl Serialize) -> String {
    // Our own types always serialise: keys are strings, and non-finite floats become null.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    printable_json(&text).into_owned()
}
