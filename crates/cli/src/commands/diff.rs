//! `ringfence diff`: compares two JSON reports of `compare`.

use std::path::Path;

use ringfence_report::{Diff, read_file};

use super::json;
use crate::args::DiffArgs;
use crate::failure::Failure;
use crate::output::{print_unless_closed, table_style};

/// Maximum size of a report in bytes: some 30,000 rows.
const MAX_BYTES: u64 = 64 << 20;

/// Compares two reports.
pub(crate) fn diff(args: &DiffArgs) -> Result<(), Failure> {
    let read = |path: &Path| read_file(path, MAX_BYTES).map_err(Failure::io(path));
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
        diff.table(table_style())
    };
    print_unless_closed(&text)?;
    let Some(percent) = args.max_regression else {
        return Ok(());
    };
    let worse = diff.worse_by(percent).map_err(Failure::NotComparable)?;
    if worse.is_empty() {
        return Ok(());
    }
    Err(Failure::Worse(worse))
}
