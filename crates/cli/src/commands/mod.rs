//! One module per subcommand.

mod attack;
mod calibrate;
mod compare;
mod device_options;
mod diff;
mod generate;
mod guest;
mod judge;
mod modes;
mod report;
mod reproduce;
mod serve;
mod size;
mod sweep;
mod top;
mod trace;

pub(crate) use attack::attack;
pub(crate) use calibrate::calibrate;
pub(crate) use compare::compare;
pub(crate) use diff::diff;
pub(crate) use generate::{completions, man};
pub(crate) use guest::guest;
pub(crate) use modes::modes;
pub(crate) use report::report;
pub(crate) use reproduce::reproduce;
pub(crate) use serve::{device, serve};
pub(crate) use size::size;
pub(crate) use sweep::sweep;
pub(crate) use top::top;
pub(crate) use trace::trace;

use ringfence_report::json;
