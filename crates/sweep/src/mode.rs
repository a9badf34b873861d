//! Modes by their names in a plan.

use ringfence_lab::LabError;
use ringfence_lab::compose::compose;
use ringfence_lab::modes::{FlushKind, Mode};

use crate::error::Problem;

/// Returns the mode of a name: a named mode, `alloc=..,table=..,flush=..`, or the name that a
/// composed mode has, `alloc/table/flush`.
///
/// # Errors
/// No mode has the name, or the choices exclude each other.
pub(crate) fn find(name: &str) -> Result<Mode, Problem> {
    if let Some(mode) = Mode::find(name) {
        return Ok(mode);
    }
    if name.contains('=') {
        return Ok(compose(name)?);
    }
    let parts: Vec<&str> = name.split('/').collect();
    let axes = match parts.as_slice() {
        [alloc, table, flush] => format!("alloc={alloc},table={table},flush={flush}"),
        [alloc, table, flush, owner] => {
            format!("alloc={alloc},table={table},flush={flush},owner={owner}")
        }
        _ => return Err(LabError::NoSuchMode(name.to_owned()).into()),
    };
    Ok(compose(&axes)?)
}

/// Returns true if T and C apply to the mode. `optimistic` has a fixed T and C.
pub(crate) fn has_cycles(mode: &Mode) -> bool {
    matches!(
        mode.flush,
        FlushKind::PerCycle | FlushKind::PerCycleAsPublished | FlushKind::PerCycleAdaptive
    )
}

/// Returns true if the geometry of an IOTLB applies to the mode.
pub(crate) fn has_iotlb(mode: &Mode) -> bool {
    mode.translates() && !mode.has_rings()
}
