//! Host-side counts in the modes of `compare`: a replay of TCP_STREAM's page reuse.

use ringfence_trace::Devices;

use super::count_row;
use crate::finding::Findings;
use crate::page_reuse_workload::{DURATION, stream};
use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};

const MODES: [&str; 4] = ["pviommu", "rtc-paper", "pviommu+rtc", "pviommu+rtc+hopt"];

/// Adds the host's work for `creates` mappings of `pages` pages in each mode.
pub(super) fn in_modes(found: &mut Findings, creates: u64, pages: u64) -> Result<(), LabError> {
    let options = CompareOptions {
        modes: Vec::new(),
        repetitions: 0,
        attack: false,
        ..CompareOptions::new()
    };
    let chunk = stream(creates, pages, DURATION)?;
    for name in MODES {
        let mode = Mode::find(name).ok_or(LabError::Internal("a mode"))?;
        let mut judge = runner(&mode, &options)?.metered;
        let mut planner = Planner::new().with_cycles(options.cache_cycles.for_mode(&mode));
        let mut plan = Plan::default();
        planner.plan(&chunk, &mut plan)?;
        planner.finish(&mut plan);
        judge.run(&plan, &Devices::new())?;
        let outcomes = judge.finish(&planner.live_mappings());
        let tally = outcomes.tally;
        if outcomes.refused_maps > 0 || tally.violations() + tally.false_faults > 0 {
            return Err(LabError::Internal("a device could not access its buffers"));
        }
        let (traffic, lookups) = (outcomes.traffic, outcomes.traffic.lookups);
        for (what, value) in [
            ("requests", traffic.requests),
            ("second-stage walks", lookups.walks),
            ("words read by second-stage walks", lookups.reads),
            ("frames that the guest waits for", lookups.frames_awaited),
        ] {
            let what = format!("{creates} mappings of {pages} pages in {name}: {what}");
            found.push(count_row(what, "", value as f64));
        }
    }
    Ok(())
}
