//! Tests of X15.

use super::*;

#[test]
fn text_has_the_directions_of_the_rows() {
    assert_eq!(trend(&[1.0, 2.0, 3.0]), "grows");
    assert_eq!(trend(&[3.0, 2.0, 1.0]), "falls");
    for mixed in [[1.0, 3.0, 2.0], [1.0, 1.0, 2.0], [f64::NAN, 1.0, 2.0]] {
        assert_eq!(trend(&mixed), "neither grows nor falls throughout");
    }
    let different = by_turn("falls", "grows");
    assert!(different.contains("determines") && different.contains("falls with turns of one"));
    assert!(by_turn("falls", "falls").contains("does not change"));
}

#[test]
fn packet_rate_limits_small_packets_core_limits_large() {
    let (slow, by_core) = throughput(64, 10.0);
    assert!(!by_core && (slow - PORT_PPS * 512.0 / 1e9).abs() < 1e-9);
    let (fast, by_core) = throughput(16_384, 9050.0);
    assert!(by_core && (fast - 4.0).abs() < 0.01, "{fast}");
    let (wire, by_core) = throughput(16_384, 1.0);
    assert!(!by_core && wire < WIRE);
}

#[test]
fn cheaper_protection_raises_throughput() {
    assert_eq!(factor(1000.0, 10_000.0, 1000.0), 5.5);
    assert_eq!(factor(1000.0, 1000.0, 1000.0), 1.0);
}

#[test]
fn a_frame_without_protection_has_the_ratio_that_it_is_fitted_to() {
    let c_none = none_cycles(500.0, 1.25);
    assert_eq!((c_none, factor(c_none, 500.0, 0.0)), (2000.0, 1.25));
}

/// Runs have as many packets for any size of messages. Their bytes differ: a large message
/// fills its packets.
#[test]
fn packets_have_the_bytes_of_their_messages() {
    let bytes = |message| {
        let traffic = stream(message, 600).unwrap().run().unwrap().traffic;
        traffic.bytes as f64 / traffic.received as f64
    };
    // A few control messages begin each run.
    let (small, large) = (bytes(64), bytes(16_384));
    assert!((64.0..66.0).contains(&small), "{small}");
    assert!((1450.0..1460.0).contains(&large), "{large}");
}

#[test]
fn gathered_messages_hit_their_anchors_and_predict_the_rest() {
    let fit = Gathering::fit(4000.0, (64, 1.46), (16_384, 4.0));
    let of = |bytes| fit.throughput(bytes, 4000.0);
    assert!((of(64) - 1.46).abs() < 1e-9 && (of(16_384) - 4.0).abs() < 1e-9);
    // A packet of 1460 bytes has 22.8, 5.7 and 0.1 messages of 64 bytes, 256 bytes and 16 KB.
    // 24800 and 9052 cycles differ by 22.7 messages of 693 cycles.
    assert!((fit.message - 693.0).abs() < 2.0, "{fit:?}");
    assert!((of(256) - 2.79).abs() < 0.02, "{}", of(256));
    // Protection that costs more lowers every size, and the fit takes it into account.
    assert!(fit.throughput(256, 8000.0) < of(256));
    // Half of the adapter's rate is an upper bound, so these are bounds, too.
    let slower = Gathering::fit(4000.0, (64, 1.2), (16_384, 4.0));
    assert!(slower.message > fit.message && slower.throughput(256, 4000.0) < of(256));
    let whole = fit.packet + 4000.0;
    let other = Gathering::fit(8000.0, (64, 1.46), (16_384, 4.0));
    assert!((other.packet + 8000.0 - whole).abs() < 1e-6);
}

#[test]
fn both_sweeps_have_their_rows_and_lines() {
    let found = found(&Setting::smoke(), 600).unwrap();
    let gathered = 2 + MESSAGES.len();
    assert_eq!(
        found.rows.len(),
        1 + 9 * 4 + 1 + gathered + 1 + 6 * 4 + 2 * (4 + 1)
    );
    assert_eq!(found.figures.len(), 4);
    assert_eq!(found.figures[0].series.len(), 4);
    let fitted = found.rows.iter().filter(|row| row.fitted);
    // The four modes at 64 bytes, and what C is fitted to; two constants and their anchors.
    assert_eq!(fitted.count(), 4 + 3 + 4);
    let of = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity.starts_with(what));
        let row = row.unwrap();
        (row.requirement, row.null_model)
    };
    let gain = of("32 clients: throughput");
    assert_eq!(gain, (Requirement::Overhead, Some(NullModel::RATIO)));
    let value = |what: &str| {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap().median
    };
    // At 32 clients, none over strict+ is 1.19 / 0.83 (rIOMMU Table 2, Memcached on mlx).
    let c_none = value("Memcached on mlx: cycles per frame without protection");
    let added = |clients: u32, mode: &str| {
        value(&format!(
            "{clients} clients: {mode}, additional cycles per frame"
        ))
    };
    let ratio = (c_none + added(32, "strict+")) / c_none;
    assert!((ratio - 1.19 / 0.83).abs() < 1e-9, "{ratio}");
    for clients in CLIENTS {
        let gain = value(&format!(
            "{clients} clients: throughput, strict EIOVAR / baseline"
        ));
        let [strict, plus] = ["strict", "strict+"].map(|mode| c_none + added(clients, mode));
        assert!((gain - strict / plus).abs() < 1e-9, "{clients}: {gain}");
    }
    let steps = |clients: u32| {
        let what = format!("{clients} clients: strict, search steps");
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured).unwrap().median
    };
    let steps = CLIENTS.map(steps);
    for (place, of) in steps.iter().enumerate() {
        assert!(!steps[..place].contains(of), "{steps:?}");
    }
    let growth = of(&format!("bursts of at most {RX_FRAMES}, 32 clients over 1"));
    assert_eq!(growth.0, Requirement::Above);
}
