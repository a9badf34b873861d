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
    let Some(strict) = best(rows, |row| is_safe(row) && late(row).is_none()) else {
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
mod tests {
    use super::*;
    use ringfence_lab::replay::{Buffers, Ways};
    use ringfence_lab::round_trips::RoundTripCost;
    use ringfence_lab::row::Violations;

    fn row(mode: &str, safety: &str, invalidations: u64, throughput: f64, violations: u64) -> Row {
        Row {
            mode: mode.into(),
            safety: safety.into(),
            maps: MIN_MAPS,
            unmaps: 1000,
            invalidations,
            baseline_cycles: Some(908.0),
            relative_throughput: Some(throughput),
            violations: Some(Violations {
                stale: violations,
                total: violations,
                ..Violations::default()
            }),
            attack_accesses: Some(5000),
            stale_window_max_ns: 10_000_000,
            bound: None,
            ..Row::of_run(true, true)
        }
    }

    fn two_sentences(text: &str) -> bool {
        text.ends_with('.') && text.matches(". ").count() == 1
    }

    #[test]
    fn best_strict_mode_is_compared_with_others() {
        let rows = [
            row("none", "none", 0, 0.99, 900),
            row("strict", "strict", 1000, 0.2, 0),
            row("fence", "strict", 1000, 0.29, 0),
            row("fence-burst", "strict", 100, 0.7, 0),
            row("strict-bitmap", "strict", 1000, 0.291, 0),
            row("linux-lazy", "bounded", 4, 0.9, 700),
            row("bitmap", "bounded", 0, 0.95, 900),
        ];
        let rows: Vec<&Row> = rows.iter().collect();
        let text = advice(&rows, &MachineProfile::r210_2015());
        assert!(two_sentences(&text), "{text}");
        assert!(text.starts_with("Use fence-burst: "), "{text}");
        assert!(text.contains("10 times per 100 unmaps"), "{text}");
        assert!(
            text.contains("fence invalidates at each unmap, which limits any software to 0.30"),
            "{text}"
        );
        assert!(text.contains("linux-lazy reaches 0.90"), "{text}");
        assert!(text.contains("700 of 5000 attack accesses"), "{text}");
    }

    #[test]
    fn a_mode_that_copies_and_withholds_is_chosen_with_its_ways() {
        let mixed = Row {
            copied_per_byte: Some(0.1),
            ways: Ways {
                pooled: Buffers {
                    buffers: 490,
                    bytes: 1,
                },
                mapped: Buffers {
                    buffers: 10,
                    bytes: 1,
                },
                withheld: Buffers {
                    buffers: 500,
                    bytes: 1,
                },
            },
            ..delayed("fence-copy", 0.5, Some(0), Some(TRANSMIT_LIMIT_NS))
        };
        let late = Row {
            transmit_delay_p99_ns: Some(TRANSMIT_LIMIT_NS + 1),
            ..mixed.clone()
        };
        let fence = row("fence", "strict", 1000, 0.29, 0);
        let profile = MachineProfile::r210_2015();
        let text = advice(&[&fence, &mixed], &profile);
        assert!(text.starts_with("Use fence-copy: "), "{text}");
        assert!(
            text.contains("it copies 49% of the buffers and withholds 50% for up to 1.00 ms"),
            "{text}"
        );
        let text = advice(&[&fence, &late], &profile);
        assert!(text.starts_with("Use fence: "), "{text}");
    }

    fn delayed(mode: &str, throughput: f64, receive: Option<u64>, transmit: Option<u64>) -> Row {
        Row {
            receive_delay_p99_ns: receive,
            transmit_delay_p99_ns: transmit,
            release_delay_max_ns: receive.max(transmit).unwrap_or(0),
            ..row(mode, "strict", 100, throughput, 0)
        }
    }

    #[test]
    fn recommended_modes_return_buffers_within_the_limits() {
        let profile = MachineProfile::r210_2015();
        let fence = row("fence", "strict", 1000, 0.29, 0);
        for (receive, transmit, chosen) in [
            (Some(0), Some(0), "fence-burst"),
            (
                Some(RECEIVE_LIMIT_NS),
                Some(TRANSMIT_LIMIT_NS),
                "fence-burst",
            ),
            (None, Some(TRANSMIT_LIMIT_NS), "fence-burst"),
            (Some(RECEIVE_LIMIT_NS), None, "fence-burst"),
            // Transmitted buffers may wait longer than received ones.
            (Some(0), Some(RECEIVE_LIMIT_NS + 1), "fence-burst"),
            (Some(RECEIVE_LIMIT_NS + 1), Some(0), "fence"),
            (Some(0), Some(TRANSMIT_LIMIT_NS + 1), "fence"),
        ] {
            let burst = delayed("fence-burst", 0.7, receive, transmit);
            let text = advice(&[&fence, &burst], &profile);
            let case = format!("{receive:?} {transmit:?}: {text}");
            assert!(text.starts_with(&format!("Use {chosen}: ")), "{case}");
            assert!(two_sentences(&text), "{case}");
            assert_eq!(
                text.contains("beyond the limit of"),
                chosen == "fence",
                "{case}"
            );
        }
        let burst = delayed("fence-burst", 0.7, Some(2_000_000), Some(0));
        let text = advice(&[&fence, &burst], &profile);
        assert!(
            text.contains(
                "fence-burst reaches 0.70, but withholds received buffers for 2.00 ms at the 99th \
                percentile, beyond the limit of 100 us"
            ),
            "{text}"
        );
        // A slower one is not worth a word.
        let slow = delayed("fence-burst", 0.2, Some(2_000_000), Some(0));
        let text = advice(&[&fence, &slow], &profile);
        assert!(!text.contains("beyond the limit"), "{text}");
        // Without another mode there is none.
        let text = recommend(&[&burst], &profile).unwrap_err();
        assert!(
            text.starts_with("No mode is recommended: fence-burst withholds"),
            "{text}"
        );
    }

    #[test]
    fn recommended_modes_keep_the_round_trip() {
        let profile = MachineProfile::r210_2015();
        let of = |mode, throughput, added: f64| Row {
            round_trip: Some(RoundTripCost {
                count: 5000,
                median_ns: 100_000,
                added_ns: Some(added),
                loss: Some(added / 100_000.0),
            }),
            ..row(mode, "strict", 100, throughput, 0)
        };
        let fence = of("fence", 0.29, 1900.0);
        for (added, chosen) in [(2000.0, "fence-burst"), (2001.0, "fence")] {
            let burst = of("fence-burst", 0.7, added);
            let text = advice(&[&fence, &burst], &profile);
            assert!(text.starts_with(&format!("Use {chosen}: ")), "{text}");
            let named = "fence-burst reaches 0.70, but adds 2.00 us to a round trip of 100 us, \
                beyond the limit of 2%";
            assert_eq!(text.contains(named), chosen == "fence", "{text}");
        }
        let text = recommend(&[&of("fence", 0.29, 2500.0)], &profile).unwrap_err();
        assert!(
            text.starts_with("No mode is recommended: fence adds 2.50 us"),
            "{text}"
        );
    }

    #[test]
    fn copies_are_recommended_if_they_are_cheapest() {
        let profile = MachineProfile::r210_2015();
        let copy = Row {
            colocated: Some(0),
            copied_per_byte: Some(1.0),
            ..row("copy", "byte-granular", 0, 0.75, 0)
        };
        let fence = row("fence", "strict", 1000, 0.29, 0);
        let burst = row("fence-burst", "strict", 100, 0.7, 0);
        let text = advice(&[&fence, &burst, &copy], &profile);
        assert!(two_sentences(&text), "{text}");
        assert!(text.starts_with("Use copy: "), "{text}");
        assert!(
            text.contains(
                "0.75, because it copies buffers to memory that stays mapped; fence invalidates"
            ),
            "{text}"
        );
        let dear = Row {
            relative_throughput: Some(0.5),
            ..copy.clone()
        };
        let text = advice(&[&fence, &burst, &dear], &profile);
        assert!(text.starts_with("Use fence-burst: "), "{text}");
        // Accesses beside a buffer break the promise of bytes.
        let broken = Row {
            colocated: Some(3),
            ..copy
        };
        let text = advice(&[&fence, &burst, &broken], &profile);
        assert!(text.starts_with("Use fence-burst: "), "{text}");
        let text = recommend(&[&broken], &profile).unwrap_err();
        assert!(
            text.contains("let 3 accesses beside buffers through"),
            "{text}"
        );
    }

    #[test]
    fn rings_rank_after_existing_hardware() {
        let mut tail = row("riommu", "byte-granular", 100, 0.95, 0);
        tail.maps_without_slot = 70;
        tail.maps = 930;
        let ooo = row("riommu-ooo", "byte-granular", 100, 0.91, 0);
        let composed = row("ring-tail/ring/per-unmap", "byte-granular", 100, 0.99, 0);
        let as_published = row("riommu-paper", "none", 100, 0.99, 9);
        let fence = row("fence", "strict", 1000, 0.29, 0);
        let profile = MachineProfile::r210_2015();
        let text = advice(&[&tail, &ooo, &as_published, &fence], &profile);
        assert!(text.starts_with("Use fence: "), "{text}");
        let ring = "With a ring IOMMU, for which no hardware exists, riommu-ooo would";
        assert!(text.contains(ring) && text.contains("0.91."), "{text}");
        let text = advice(&[&fence, &tail], &profile);
        assert!(text.contains("70 of 1000 maps never got a slot"), "{text}");
        let text = advice(&[&composed], &profile);
        assert!(text.starts_with("No mode for existing hardware"), "{text}");
        assert!(text.contains("per-unmap would"), "{text}");
    }

    #[test]
    fn few_maps_give_no_recommendation() {
        let profile = MachineProfile::r210_2015();
        let of = |maps| {
            let rows = [("strict", 0.2), ("fence", 0.29)].map(|(mode, throughput)| Row {
                maps,
                ..row(mode, "strict", 1000, throughput, 0)
            });
            recommend(&rows.iter().collect::<Vec<_>>(), &profile)
        };
        assert!(of(1000).unwrap().starts_with("Use fence: "));
        let reason = of(999).unwrap_err();
        assert!(
            reason.contains("the trace has 999 maps, and below 1000 "),
            "{reason}"
        );
        // Without any map there is nothing to measure.
        let reason = of(1).unwrap_err();
        assert!(reason.contains("the trace has 1 maps"), "{reason}");
    }

    #[test]
    fn a_window_that_gains_nothing_is_reported_as_such() {
        let rows = [
            row("fence-burst", "strict", 10, 0.9, 0),
            row("defer", "bounded", 4, 0.91, 7),
        ];
        let rows: Vec<&Row> = rows.iter().collect();
        let text = advice(&rows, &MachineProfile::r210_2015());
        assert!(
            text.contains("Deferred invalidation gains nothing here"),
            "{text}"
        );
        assert!(two_sentences(&text), "{text}");
    }

    #[test]
    fn unmeasured_modes_are_not_recommended() {
        let unmeasured = |timed, attack| Row {
            mode: "fence".into(),
            safety: "strict".into(),
            ..Row::of_run(timed, attack)
        };
        let profile = MachineProfile::r210_2015();
        for (row, why) in [
            (unmeasured(true, false), "--no-attack"),
            (unmeasured(false, true), "no map and unmap"),
        ] {
            let text = advice(&[&row], &profile);
            assert!(text.starts_with("No mode is recommended"), "{text}");
            assert!(text.contains(why), "{text}");
        }
    }

    #[test]
    fn leaking_modes_are_not_recommended() {
        let leaking = [row("fence", "strict", 1000, 0.9, 1)];
        let text = advice(&[&leaking[0]], &MachineProfile::r210_2015());
        assert!(text.contains("which is a defect"), "{text}");
        let mut broken = row("fence", "strict", 1000, 0.9, 0);
        broken.status = ringfence_lab::ReplayStatus::LostEvents(3);
        let text = advice(&[&broken], &MachineProfile::r210_2015());
        assert!(text.starts_with("No mode is recommended"), "{text}");
        let only = [row("defer", "bounded", 4, 0.9, 1)];
        let text = advice(&[&only[0]], &MachineProfile::r210_2015());
        assert!(text.starts_with("No replayed mode"), "{text}");
        assert!(two_sentences(&text), "{text}");
    }
}
