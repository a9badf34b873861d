//! One pass over a trace.

use std::io::Read;

use ringfence_trace::{Chunk, Devices, Operations};

use super::{MAX_STEPS, Plan, Planner};
use crate::error::LabError;

/// Reads a trace to its end and calls `each` with the plan of each chunk, the planner and the
/// devices named so far. With `only`, it plans the operations of the devices in that list alone.
///
/// # Errors
/// The trace is malformed, or `each` fails.
pub fn each_plan<R: Read>(
    operations: &mut Operations<R>,
    planner: &mut Planner,
    only: Option<&[String]>,
    each: impl FnMut(&Planner, &Plan, &Devices) -> Result<(), LabError>,
) -> Result<(), LabError> {
    each_plan_with(operations, planner, only, |_, _| {}, each)
}

/// Like [`each_plan`], and passes each chunk to `tap` before its plans.
///
/// # Errors
/// Those of [`each_plan`].
pub(crate) fn each_plan_with<R: Read>(
    operations: &mut Operations<R>,
    planner: &mut Planner,
    only: Option<&[String]>,
    mut tap: impl FnMut(&Chunk, &Devices),
    mut each: impl FnMut(&Planner, &Plan, &Devices) -> Result<(), LabError>,
) -> Result<(), LabError> {
    let mut chunk = Chunk::default();
    let mut plan = Plan::default();
    let mut more = true;
    while more {
        more = operations.next_chunk(&mut chunk)?;
        tap(&chunk, operations.devices());
        if let Some(names) = only {
            planner.only_devices(operations.devices(), names);
        }
        let mut next = planner.plan_part(&chunk, 0, MAX_STEPS, &mut plan)?;
        while next < chunk.ops.len() {
            each(planner, &plan, operations.devices())?;
            next = planner.plan_part(&chunk, next, MAX_STEPS, &mut plan)?;
        }
        if !more {
            planner.finish(&mut plan);
        }
        each(planner, &plan, operations.devices())?;
    }
    Ok(())
}
