//! Tests of the recommendation.

use super::*;
use ringfence_lab::replay::{BufferCounts, Buffers};
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
        ways: BufferCounts {
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

/// A mode that ends its descriptors in time is never refused for its release delay.
#[test]
fn descriptors_end_within_the_limits() {
    use ringfence_lab::plan::{RECEIVE_DESCRIPTOR_NS, TRANSMIT_DESCRIPTOR_NS};
    let of = |receive, transmit| delayed("fs", 0.7, Some(receive), Some(transmit));
    let longest = of(RECEIVE_DESCRIPTOR_NS, TRANSMIT_DESCRIPTOR_NS);
    assert_eq!(late(&longest), None);
    let longer = of(RECEIVE_DESCRIPTOR_NS + 1, TRANSMIT_DESCRIPTOR_NS);
    assert!(late(&longer).is_some());
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
