//! `ringfence diff`.

use std::fs;
use std::path::Path;

use ringfence_report::Diff;

use super::json;
use crate::args::DiffArgs;
use crate::failure::Failure;
use crate::output::{look, print};

/// Compares two reports.
pub(crate) fn diff(args: &DiffArgs) -> Result<(), Failure> {
    let read = |path: &Path| fs::read_to_string(path).map_err(Failure::io(path));
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    let diff = Diff::of(&before, &after).map_err(|(which, source)| Failure::Diff {
        path: if which == 0 {
            &args.before
        } else {
            &args.after
        }
        .clone(),
        source,
    })?;
    let text = if args.json {
        json(&diff)
    } else {
        diff.table(look())
    };
    print(&text)?;
    let worse = args
        .fail_over
        .map(|percent| diff.worse_by(percent))
        .unwrap_or_default();
    if worse.is_empty() {
        return Ok(());
    }
    Err(Failure::Worse(
        worse.iter().map(|row| row.to_string()).collect(),
    ))
}
