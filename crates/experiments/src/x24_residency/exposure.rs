//! Exposure by caches, measured by the oracle: modes of `compare` with the page reuse of
//! TCP_STREAM, followed by an idle period.

use ringfence_trace::Devices;

use crate::finding::{FindingRow, Findings, Published};
use crate::page_reuse_workload::{DURATION, stream};
use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, OracleReplay, runner};
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::replay::Outcomes;

const FIXED: &str = "pviommu+rtc";
const AS_PUBLISHED: &str = "rtc-paper";
const MODES: [&str; 3] = [FIXED, "pviommu+rtc-adaptive", AS_PUBLISHED];

/// Runs the metered and the attack pass of a mode, until everything that they expose has expired.
fn passes(name: &str, creates: u64, pages: u64) -> Result<[Outcomes; 2], LabError> {
    let options = CompareOptions {
        modes: Vec::new(),
        repetitions: 0,
        attack: true,
        ..CompareOptions::new()
    };
    let mode = Mode::find(name).ok_or(LabError::Internal("a mode"))?;
    let runner = runner(&mode, &options)?;
    let mut planner = Planner::new().with_cycles(options.cache_cycles.for_mode(&mode));
    let mut plan = Plan::default();
    // Cycles end at multiples of 10 s, so this stream ends in the middle of a cycle.
    planner.plan(&stream(creates, pages, DURATION / 2)?, &mut plan)?;
    planner.finish(&mut plan);
    let pass = |judge: Option<Box<dyn OracleReplay>>| {
        let mut judge = judge.ok_or(LabError::Internal("a pass"))?;
        judge.run(&plan, &Devices::new())?;
        Ok::<_, LabError>(judge.finish(&planner.live_mappings()))
    };
    Ok([pass(Some(runner.metered))?, pass(runner.attack)?])
}

/// Adds the exposure of `creates` mappings of `pages` pages. `stay` is the bound on the residency
/// in the paper's cache.
pub(super) fn exposed(
    found: &mut Findings,
    creates: u64,
    pages: u64,
    stay: &Published,
) -> Result<(), LabError> {
    for name in MODES {
        let [metered, attacked] = passes(name, creates, pages)?;
        let missed = metered.refused_maps + metered.tally.false_faults;
        if name != AS_PUBLISHED && missed + metered.exposure.overdue > 0 {
            return Err(LabError::Internal("a cache exceeded its bound"));
        }
        let row = |what: &str, unit, value| {
            let what = format!("{creates} mappings of {pages} pages, then idle, in {name}: {what}");
            FindingRow::counted(what, unit, value)
        };
        let exposure = metered.exposure;
        found.push(row("exposed", "page s", exposure.byte_seconds / 4096.0));
        let until_end = metered.stale_byte_seconds / 4096.0;
        found.push(row(
            "exposed before the end of the last unmap",
            "page s",
            until_end,
        ));
        let longest = row("longest stay", "s", exposure.max_ns as f64 / 1e9);
        found.push(if name == FIXED {
            longest.at_most(stay.clone())
        } else {
            longest
        });
        let reached = attacked.exposure.reached_after_end as f64;
        found.push(row(
            "attack accesses permitted after the end",
            "accesses",
            reached,
        ));
        found.push(row(
            "cached beyond its bound",
            "mappings",
            exposure.overdue as f64,
        ));
        found.push(row("requests", "", metered.traffic.requests as f64));
    }
    Ok(())
}
