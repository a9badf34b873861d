//! The recommendation for one trace, from its rows.

use super::number::{byte_seconds, count, cycles, percent, span};
use super::round_trips::too_slow;
use ringfence_lab::MachineProfile;
use ringfence_lab::ReplayStatus;
use ringfence_lab::compose::Axis as _;
use ringfence_lab::modes::{Mode, Safety, TableKind};
use ringfence_lab::row::Row;

/// Smallest number of maps for a recommendation. The first maps of a trace meet cold caches and an
/// empty allocator, and differences between modes of fewer maps are noise.
pub const MIN_MAPS: u64 = 1000;

/// Longest time for which a recommended mode may withhold 99% of the buffers that the device may
/// write: a driver waits for their contents.
pub const RECEIVE_LIMIT_NS: u64 = 100_000;
/// The same for buffers that the device may only read, which can wait for a batch.
pub const TRANSMIT_LIMIT_NS: u64 = 1_000_000;

/// Returns two sentences on existing hardware: the best strict mode, and the gain and exposure of a
/// mode with a stale window. If modes with rings ran, a third sentence gives their benefit.
///
/// # Errors
/// No mode is recommended. The error gives the reason and the benefit of rings, if any.
pub fn recommend(rows: &[&Row], profile: &MachineProfile) -> Result<String, String> {
    let maps = rows.iter().map(|row| row.maps).max().unwrap_or(0);
    if (1..MIN_MAPS).contains(&maps) {
        return Err(format!(
            "No mode is recommended: the trace has {maps} maps, and below {MIN_MAPS} the measured \
            differences between modes are noise. Record a longer trace."
        ));
    }
    let (rings, rows): (Vec<&Row>, Vec<&Row>) =
        rows.iter().copied().partition(|row| has_rings(&row.mode));
    let text = match rows.as_slice() {
        [] => Err("No mode for existing hardware was replayed.".to_owned()),
        rows => existing(rows, profile),
    };
    let with_rings = |text: String| match ring_sentence(&rings) {
        Some(ring) => format!("{text} {ring}"),
        None => text,
    };
    text.map(with_rings).map_err(with_rings)
}

/// Returns the row that [`recommend`] tells to use; `None` if it recommends no mode.
pub(super) fn recommended<'a>(rows: &[&'a Row], profile: &MachineProfile) -> Option<&'a Row> {
    recommend(rows, profile).ok()?;
    let existing = rows.iter().copied().filter(|row| !has_rings(&row.mode));
    best_strict(&existing.collect::<Vec<_>>())
}

/// Returns true if the row is valid, promises strict protection, and kept its promise.
pub(super) fn verified(row: &Row) -> bool {
    row.status.is_ok() && is_safe(row)
}

/// Returns the text of a recommendation or the reason for recommending no mode.
pub(super) fn advice(rows: &[&Row], profile: &MachineProfile) -> String {
    recommend(rows, profile).unwrap_or_else(|reason| reason)
}

/// Returns true if the named mode needs a unit that looks up rings. The name of a composed mode
/// consists of its choices.
fn has_rings(mode: &str) -> bool {
    match Mode::find(mode) {
        Some(mode) => mode.has_rings(),
        None => {
            let table = mode.split('/').nth(1).map(TableKind::parse);
            matches!(table, Some(Ok(table)) if table.is_ring())
        }
    }
}

/// Returns a sentence on a unit with rings. It recommends the best mode without violations,
/// preferably one that refuses no map for lack of a slot.
fn ring_sentence(rows: &[&Row]) -> Option<String> {
    let complete = best(rows, |row| {
        row.status.is_ok() && is_safe(row) && row.maps_without_slot == 0
    });
    let Some(row) = complete.or(best(rows, |row| row.status.is_ok() && is_safe(row))) else {
        let broken = rows.iter().find(|row| {
            through(row) > 0
                && Mode::find(&row.mode).is_some_and(|mode| mode.safety() > Safety::None)
        })?;
        return Some(format!(
            "{} has violations, which is a defect.",
            broken.mode
        ));
    };
    let mut text = format!(
        "With a ring IOMMU, for which no hardware exists, {} would be byte-granular at {} cycles \
        per mapping, relative throughput {:.2}",
        row.mode,
        cycles(row.cycles().unwrap_or_default()),
        throughput(row)
    );
    if row.maps_without_slot > 0 {
        text.push_str(&format!(
            ", but {} of {} maps never got a slot, because the driver unmaps out of order; use \
            riommu-ooo",
            count(row.maps_without_slot),
            count(row.maps + row.maps_without_slot)
        ));
    }
    text.push('.');
    Some(text)
}

fn existing(rows: &[&Row], profile: &MachineProfile) -> Result<String, String> {
    if let Some(row) = rows.iter().find(|row| !row.status.is_ok()) {
        let advice = match row.status {
            ReplayStatus::LostEvents(_) | ReplayStatus::SkipsUnmaps => {
                "Record it again with every unmap before you compare safety."
            }
            _ => "Select the modes whose status is ok with --modes.",
        };
        return Err(format!(
            "No mode is recommended on this trace: {}. {advice}",
            row.status
        ));
    }
    if rows.iter().any(|row| row.violations.is_none()) {
        return Err(
            "No mode is recommended: without the attack pass (--no-attack) safety is unknown."
                .to_owned(),
        );
    }
    if rows.iter().all(|row| row.maps == 0 || row.unmaps == 0) {
        return Err(
            "No mode is recommended: the trace has no map and unmap to measure.".to_owned(),
        );
    }
    if let Some(unknown) = unknown_cost(rows, profile) {
        return Err(unknown);
    }
    let Some(strict) = best_strict(rows) else {
        return Err(no_strict(rows));
    };
    Ok(format!(
        "{} {}",
        strict_sentence(strict, rows, profile),
        other_sentence(strict, rows)
    ))
}

/// Returns the reason why timed rows have no throughput, if the profile does not state a cost that
/// they need.
fn unknown_cost(rows: &[&Row], profile: &MachineProfile) -> Option<String> {
    let timed = |row: &&&Row| row.components.is_some() && row.unmaps > 0;
    let row = rows.iter().filter(timed).find(|row| {
        // A cost is unknown, or c is.
        row.modelled_cycles.is_none() || row.processor_throughput.is_none()
    })?;
    let (cost, option) = if row.modelled_cycles.is_some() {
        ("c, the cost without protection", "--baseline-cycles")
    } else if profile.invalidation_cycles.is_none() && row.invalidations > 0 {
        ("the cost of an invalidation", "--invalidation-cycles")
    } else {
        return Some(format!(
            "No mode is recommended: profile {} does not state the cost of notifying a host, which \
            {} needs. Write a profile file that does.",
            profile.name, row.mode
        ));
    };
    Some(format!(
        "No mode is recommended: profile {} does not state {cost}. Give {option}.",
        profile.name
    ))
}

/// Returns true if a row promises strict protection and the oracle confirmed it, beside buffers as
/// well if the row promises bytes.
fn is_safe(row: &Row) -> bool {
    let promised = match row.safety.as_str() {
        "strict" => true,
        "byte-granular" => row.colocated == Some(0),
        _ => false,
    };
    promised
        && row
            .violations
            .is_some_and(|violations| violations.total == 0)
        && row.false_faults == 0
}

/// Returns the words for the buffers that a row withholds beyond the limit of their direction, or
/// for the time that it adds to a round trip; `None` if it keeps all limits.
fn late(row: &Row) -> Option<String> {
    let limits = [
        ("received", row.receive_delay_p99_ns, RECEIVE_LIMIT_NS),
        ("transmitted", row.transmit_delay_p99_ns, TRANSMIT_LIMIT_NS),
    ];
    let withheld = limits.into_iter().find_map(|(buffers, p99, limit)| {
        let p99 = p99.filter(|p99| *p99 > limit)?;
        Some(format!(
            "withholds {buffers} buffers for {} at the 99th percentile, beyond the limit of {}",
            span(p99),
            span(limit)
        ))
    });
    withheld.or_else(|| too_slow(row))
}

/// Returns the number of violations; 0 if not measured.
fn through(row: &Row) -> u64 {
    row.violations.map_or(0, |violations| violations.total)
}

/// Returns the relative throughput of a row that [`best`] has chosen.
fn throughput(row: &Row) -> f64 {
    row.relative_throughput.unwrap_or_default()
}

fn best<'a>(rows: &[&'a Row], mut wanted: impl FnMut(&Row) -> bool) -> Option<&'a Row> {
    let timed = |row: &&Row| row.cycles().is_some() && row.relative_throughput.is_some();
    let rows = rows.iter().copied().filter(timed);
    let rows = rows.filter(|row| wanted(row));
    rows.max_by(|a, b| throughput(a).total_cmp(&throughput(b)))
}

/// Returns the fastest row that is safe and returns buffers in time.
fn best_strict<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    best(rows, |row| is_safe(row) && late(row).is_none())
}

fn no_strict(rows: &[&Row]) -> String {
    if let Some(row) = best(rows, is_safe)
        && let Some(late) = late(row)
    {
        return format!(
            "No mode is recommended: {} {late}. Add fence and copy to see the cost of returning \
            buffers at once.",
            row.mode
        );
    }
    let leaking = rows
        .iter()
        .find(|row| matches!(row.safety.as_str(), "strict" | "byte-granular"));
    match leaking {
        Some(row) if through(row) == 0 && row.false_faults == 0 => format!(
            "{} promises to be {} but let {} accesses beside buffers through, which is a defect. \
            Report it with the trace.",
            row.mode,
            row.safety,
            count(row.colocated.unwrap_or_default())
        ),
        Some(row) => format!(
            "{} promises to be {} but has {} violations and {} false faults, which is a defect. \
            Report it with the trace.",
            row.mode,
            row.safety,
            count(through(row)),
            count(row.false_faults)
        ),
        None => {
            "No replayed mode closes the window between an unmap and its invalidation. Add fence \
                and fence-burst to see the cost of closing it on this trace."
                .to_owned()
        }
    }
}

fn strict_sentence(strict: &Row, rows: &[&Row], profile: &MachineProfile) -> String {
    let pair = strict.cycles().unwrap_or_default();
    let mut text = format!(
        "Use {}: it is the cheapest mode without violations, at {} cycles per mapping ({} \
        modelled), relative throughput {:.2}",
        strict.mode,
        cycles(pair),
        percent(strict.modelled_share.unwrap_or_default()),
        throughput(strict)
    );
    let per_unmap = strict.invalidations as f64 / strict.unmaps.max(1) as f64;
    let invalidation = profile.invalidation_cycles.unwrap_or(0) as f64;
    let c = strict.baseline_cycles.unwrap_or_default();
    let cap = c / (c + invalidation);
    let at_each = |row: &Row| is_safe(row) && row.invalidations >= row.unmaps && row.unmaps > 0;
    let fence = best(rows, |row| row.mode == "fence" && at_each(row));
    let other = fence.or(best(rows, at_each));
    if let Some(other) = other.filter(|other| other.mode != strict.mode && per_unmap < 0.99) {
        let ways = strict.ways;
        let reason = if ways.pooled.buffers > 0 && ways.withheld.buffers > 0 {
            let of_all = |buffers: u64| percent(buffers as f64 / strict.unmaps.max(1) as f64);
            format!(
                "it copies {} of the buffers and withholds {} for up to {}",
                of_all(ways.pooled.buffers),
                of_all(ways.withheld.buffers),
                span(strict.release_delay_max_ns)
            )
        } else if strict.copied_per_byte > Some(0.0) {
            "it copies buffers to memory that stays mapped".to_owned()
        } else {
            format!(
                "it invalidates {:.0} times per 100 unmaps and withholds buffers for up to {}",
                per_unmap * 100.0,
                span(strict.release_delay_max_ns)
            )
        };
        text.push_str(&format!(
            ", because {reason}; {} invalidates at each unmap, which limits any software to \
            {cap:.2} (it reaches {:.2})",
            other.mode,
            throughput(other)
        ));
    } else if per_unmap >= 0.99 && invalidation > 0.0 {
        text.push_str(&format!(
            "; the modelled invalidation per unmap limits every such mode to {cap:.2}"
        ));
    }
    // A faster mode that only the limits on the release delay rule out.
    if let Some(faster) = best(rows, |row| is_safe(row) && late(row).is_some())
        && throughput(faster) > throughput(strict)
        && let Some(late) = late(faster)
    {
        text.push_str(&format!(
            "; {} reaches {:.2}, but {late}",
            faster.mode,
            throughput(faster)
        ));
    }
    text.push('.');
    text
}

fn other_sentence(strict: &Row, rows: &[&Row]) -> String {
    // Prefer the default of today's Linux. Otherwise take the fastest mode that does not
    // demonstrate a defect.
    let deferred = |row: &Row| row.safety == "bounded" && !row.mode.ends_with("-paper");
    let usual = best(rows, |row| row.mode == "linux-lazy" && deferred(row));
    let Some(bounded) = usual.or(best(rows, deferred)) else {
        return "No deferred mode was replayed.".to_owned();
    };
    let exposure = if through(bounded) > 0 {
        format!(
            "left buffers accessible to the device for up to {} after their unmap ({} \
            byte-seconds; {} of {} attack accesses succeeded)",
            span(bounded.stale_window_max_ns),
            byte_seconds(bounded.stale_byte_seconds),
            count(through(bounded)),
            count(bounded.attack_accesses.unwrap_or_default())
        )
    } else {
        format!(
            "may leave a buffer accessible to the device for {}",
            bounded.bound.as_deref().unwrap_or("an unknown time")
        )
    };
    let gain = throughput(bounded) - throughput(strict);
    if gain > 0.02 {
        format!(
            "Deferred invalidation gains {}: {} reaches {:.2}, but {exposure}.",
            percent(gain / throughput(strict).max(f64::MIN_POSITIVE)),
            bounded.mode,
            throughput(bounded)
        )
    } else {
        format!(
            "Deferred invalidation gains nothing here: {} reaches {:.2} and {exposure}.",
            bounded.mode,
            throughput(bounded)
        )
    }
}

#[cfg(test)]
mod tests;
