//! The rows of the remedies: crossings, flushes, cost, exposure, and the slides' promises.

use crate::finding::{FindingRow, Findings, Measured, Published};
use ringfence_lab::{LabError, Profile};

use super::drivers::{self, Driver};
use super::machine::{self, Scenario};
use super::modes::{BATCH, ModeCost, WHOLE_GUEST};
use super::{added, overhead};

/// Interpretation of "minimal runtime overhead", in percent of a frame's native cycles.
const MINIMAL: f64 = 1.0;
/// Interpretation of "save the hypervisor crossing": the crossings of a pair that may remain while
/// a cache fills, and of a pair in a batch.
const SAVED: f64 = 1.0;

/// A remedy: name in the rows, and mode.
pub(super) const REMEDIES: [(&str, &str); 12] = [
    ("straightforward hypercalls", "xen"),
    ("multicalls", "xen-multicall"),
    ("deferred TCE flush", "xen-lazy"),
    (
        "deferred TCE flush, multicalls",
        "alloc=bitmap,table=flat,flush=per-wrap,owner=xen-multicall",
    ),
    ("batched unmaps with multicalls", BATCH),
    (
        "cache of mappings",
        "alloc=linux-rcache,table=flat,flush=map-cache,owner=xen",
    ),
    (
        "cache of mappings, multicalls",
        "alloc=linux-rcache,table=flat,flush=map-cache,owner=xen-multicall",
    ),
    (
        "never free",
        "alloc=linux-rcache,table=flat,flush=never-free,owner=xen",
    ),
    (
        "never free, multicalls",
        "alloc=linux-rcache,table=flat,flush=never-free,owner=xen-multicall",
    ),
    ("grant table integration", "xen-grant"),
    ("whole guest in advance", WHOLE_GUEST),
    ("no IOMMU", "none"),
];

/// Remedies that change the driver: name in the rows, driver, and mode.
const DRIVERS: [(&str, Driver, &str); 3] = [
    ("persistent allocation", Driver::Persistent, "xen"),
    ("map_multi and unmap_multi", Driver::Batches, "xen"),
    (
        "map_multi and unmap_multi, multicalls",
        Driver::Batches,
        "xen-multicall",
    ),
];

fn slide(text: &str, value: f64) -> Published {
    let source = "slides, \"Straight-forward implementation\" to \"Other Optimizations\"";
    Published::new(text, value, source).rounded_by(0.0)
}

/// Adds the crossings of a pair, judged if the slides promise something about them.
fn crossings(name: &str, crossed: f64, straight: f64) -> FindingRow {
    let row = FindingRow::new(
        format!("{name}: crossings per pair"),
        "",
        Measured::counted(crossed),
    );
    match name {
        "multicalls" => row.exact(slide("multicalls don't help", straight)),
        "cache of mappings" | "cache of mappings, multicalls" => {
            row.at_most(slide("save the hypervisor crossing", SAVED))
        }
        "never free" | "never free, multicalls" => {
            row.at_most(slide("the mapping exists until it gets reused", SAVED))
        }
        "persistent allocation" => row.exact(slide("don't use map / unmap", 0.0)),
        "map_multi and unmap_multi, multicalls" => {
            row.at_most(slide("in large batches, rather than per buffer", SAVED))
        }
        _ => row,
    }
}

/// Adds the unmapped buffers that the device reached, judged if the slides say something about it.
fn exposure(name: &str, reached: u64) -> FindingRow {
    let reached = Measured::counted(reached as f64);
    let row = FindingRow::new(
        format!("{name}: attackers' accesses let through"),
        "",
        reached,
    );
    match name {
        "straightforward hypercalls" => row.exact(slide("best isolation properties", 0.0)),
        "whole guest in advance" => row.at_least(slide("no protection inside the guest", 1.0)),
        "deferred TCE flush" | "deferred TCE flush, multicalls" => {
            row.at_least(slide("mapping outlives its unmap", 1.0))
        }
        "never free" | "never free, multicalls" => {
            row.at_least(slide("mapping may exist until it gets reused", 1.0))
        }
        _ => row,
    }
}

/// Adds the rows of drivers that make other calls. Crossings and flushes are counted, their cycles
/// are modelled, and the cycles of the layer are not measured.
pub(super) fn add_drivers(
    found: &mut Findings,
    profile: &Profile,
    frames: u64,
) -> Result<(), LabError> {
    for (name, driver, mode) in DRIVERS {
        let counts = drivers::run(driver, mode, frames)?;
        let crossed = counts.per_pair(counts.crossings);
        let flushed = counts.per_pair(counts.flushes);
        found.push(crossings(name, crossed, f64::NAN));
        let at_open = Measured::counted(counts.at_open as f64);
        found.push(FindingRow::new(
            format!("{name}: crossings at open"),
            "",
            at_open,
        ));
        let flushes = Measured::counted(flushed);
        found.push(FindingRow::new(
            format!("{name}: flushes per pair"),
            "",
            flushes,
        ));
        let cycles = crossed * profile.hypercall_cycles as f64
            + flushed * profile.invalidation_cycles as f64;
        let what = format!("{name}: modelled cycles of a map and an unmap");
        let cycles = Measured::timed(cycles, 0.0);
        found.push(FindingRow::new(what, "cycles", cycles));
        found.push(exposure(name, counts.reached));
    }
    Ok(())
}

/// The remedies' rows: cost in two scenarios, and exposure.
pub(super) fn add(found: &mut Findings, costs: &[(&str, ModeCost)]) {
    let of = |name: &str| costs.iter().find(|(other, _)| *other == name);
    let straight = of(REMEDIES[0].0).map_or(f64::NAN, |(_, cost)| cost.crossed);
    for (name, cost) in costs {
        let row = |what: &str, unit: &'static str, value: Measured| {
            FindingRow::new(format!("{name}: {what}"), unit, value)
        };
        found.push(crossings(name, cost.crossed, straight));
        let flushed = Measured::counted(cost.flushed);
        found.push(row("flushes per pair", "", flushed));
        let share = cost.spread / cost.measured.max(1.0);
        let cycles = Measured::cost(cost.measured, cost.modelled(), share);
        found.push(row("cycles of a map and an unmap", "cycles", cycles));
        for (scenario, message) in [(Scenario::DirectAccess, 64), (Scenario::DriverDomain, 64)] {
            let grants = *name == "grant table integration";
            if grants && scenario == Scenario::DirectAccess {
                // Only driver domains map grants.
                continue;
            }
            let added = added(cost, !grants);
            let small = overhead(scenario, message, added, 1.0).lost;
            let bulk = overhead(scenario, 16384, added, 1.0).more;
            let scenario = scenario.name();
            let what = format!("{scenario}: throughput lost at 64 bytes");
            found.push(row(&what, "%", Measured::timed(small, 0.0)));
            let what = format!("{scenario}: more processor use at 16 KiB");
            found.push(row(&what, "%", Measured::timed(bulk, 0.0)));
        }
        found.push(exposure(name, cost.reached));
        let window = Measured::counted(cost.window_ns as f64 / 1e6);
        found.push(row("longest time reachable after the unmap", "ms", window));
        if *name == "whole guest in advance" {
            let share = 100.0 * added(cost, true) / machine::FRAME_CYCLES;
            let share = row(
                "cycles at run time, of a frame",
                "%",
                Measured::timed(share, 0.0),
            );
            found.push(share.at_most(slide("minimal runtime overhead", MINIMAL)));
        }
    }
}

#[cfg(test)]
mod tests;
