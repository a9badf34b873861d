//! X16: number of live IOVAs, and of freed IOVAs that wait for reuse (EIOVAR section 6).

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Apache, Memcached, NetperfStream, RequestResponse, Workload};
use ringfence_iova::Capacity;

use super::allocators::{DrivenAllocator, W};
use super::capture::Capture;
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Requirement};
use super::published::Sheet;
use super::setting::Setting;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X16",
    title: "Live addresses, and freed addresses that wait for reuse",
    source: "EIOVAR section 6",
    measure,
};

/// The benchmarks with EIOVAR's parameters.
fn workloads() -> Vec<(&'static str, Box<dyn Workload>)> {
    vec![
        ("stream", Box::new(NetperfStream::default())),
        ("request-response", Box::new(RequestResponse::default())),
        (
            "Apache 1 MB",
            Box::new(Apache::new(Apache::BIG, Apache::CLIENTS_EIOVAR, 1)),
        ),
        (
            "Apache 1 KB",
            Box::new(Apache::new(Apache::SMALL, Apache::CLIENTS_EIOVAR, 1)),
        ),
        (
            "Memcached",
            Box::new(Memcached::new(Memcached::CLIENTS_EIOVAR, 1)),
        ),
    ]
}

/// Addresses of a benchmark under one protection.
#[derive(Debug, Clone, Copy)]
struct LiveSet {
    /// Maximum number allocated.
    most: u64,
    /// Maximum number freed and waiting.
    unused: u64,
    /// Mean number freed and waiting.
    mean: f64,
}

impl LiveSet {
    fn of(driven: &DrivenAllocator) -> Self {
        let (unused, mean) = driven.unused();
        let most = driven.most();
        Self { most, unused, mean }
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = setting.runs.clamp(1, 4);
    let mut found = Findings::with_method(format!(
        "{runs} runs of each benchmark on mlx, strict and deferred, with unbounded freelists: \
        allocated addresses, and addresses that were allocated before and are free."
    ));
    let mut all = Vec::new();
    for (name, workload) in workloads() {
        let mlx = NicProfile::MLX;
        let mut capture = Capture::with(mlx, workload, mlx.rx_frames, setting.packets)?;
        let mut strict = DrivenAllocator::new(Some(Capacity::Unbounded), 1)?;
        let mut deferred = DrivenAllocator::new(Some(Capacity::Unbounded), W)?;
        for _ in 0..runs {
            let run = capture.run()?;
            strict.run(&run.plan, |_| {})?;
            deferred.run(&run.plan, |_| {})?;
        }
        for (protection, driven) in [("strict", &strict), ("defer", &deferred)] {
            let live = LiveSet::of(driven);
            all.push(live);
            for (what, value) in [
                ("maximum number of addresses allocated", live.most as f64),
                ("maximum number freed and waiting", live.unused as f64),
                ("mean number freed and waiting", live.mean),
            ] {
                let what = format!("{name}, {protection}: {what}");
                found.push(FindingRow::counted(what, "IOVAs", value));
            }
        }
    }
    overall(&all, &mut found)?;
    found.explain(
        "Addresses wait in deferred until W = 250 of them are invalidated, and when transmitted \
        packets are unmapped and nothing maps until there is more to send. The driver of mlx \
        reclaims a transmit ring at every 16th frame, so few of the latter wait (decision 0011). \
        How far the paper's server filled its rings is not printed.",
    );
    found.note(
        "12K is printed without decimals. 12,288 is the number of buffers in all rings of the \
        profile: a parameter, not a result.",
    );
    Ok(found)
}

/// Adds the maxima and the mean over all benchmarks and protections, next to the paper's.
fn overall(all: &[LiveSet], found: &mut Findings) -> Result<(), LabError> {
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let fact = |fact: &str| facts.printed(&[("subject", "workload"), ("fact", fact)], "value");
    let most = all.iter().map(|live| live.most).max().unwrap_or(0);
    let largest = all.iter().map(|live| live.unused).max().unwrap_or(0);
    let mean = all.iter().map(|live| live.mean).sum::<f64>() / all.len().max(1) as f64;
    for (what, value, cell, allocated) in [
        (
            "all: maximum number of addresses allocated",
            most as f64,
            "max per-device distinct IOVAs ever observed",
            true,
        ),
        (
            "all: maximum number freed and waiting",
            largest as f64,
            "max previously-allocated-but-now-free IOVAs",
            false,
        ),
        (
            "all: mean number freed and waiting",
            mean,
            "avg previously-allocated-but-now-free IOVAs",
            false,
        ),
    ] {
        let row = FindingRow::counted(what, "IOVAs", value);
        let row = row.with_published(fact(cell)?).require(Requirement::Near);
        // The profile's rings bound the addresses that are allocated: an input.
        found.push(if allocated { row.fitted() } else { row });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use ringfence_devices::workload::Packet;

    const KINDS: [&str; 3] = [
        "maximum number of addresses allocated",
        "maximum number freed and waiting",
        "mean number freed and waiting",
    ];

    fn value(row: &FindingRow) -> f64 {
        row.measured.unwrap().median
    }

    #[test]
    fn every_benchmark_has_its_rows() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        assert_eq!(found.rows.len(), 5 * 2 * 3 + 3);
        let judged = found.rows.iter().filter(|row| row.holds.is_some());
        let judged: Vec<_> = judged.map(|row| row.quantity.as_str()).collect();
        let waiting = ["maximum", "mean"].map(|of| format!("all: {of} number freed and waiting"));
        assert_eq!(judged, waiting);
        let rows = |protection: &str, kind: &str| {
            let of = format!(", {protection}: {kind}");
            let rows = found.rows.iter().filter(|row| row.quantity.ends_with(&of));
            let rows: Vec<f64> = rows.map(value).collect();
            <[f64; 5]>::try_from(rows).unwrap()
        };
        let total = |kind: &str| {
            let what = format!("all: {kind}");
            let row = found.rows.iter().find(|row| row.quantity == what);
            value(row.unwrap())
        };
        for (kind, mean) in KINDS.into_iter().zip([false, false, true]) {
            let ten = [rows("strict", kind), rows("defer", kind)].concat();
            let wanted = if mean {
                ten.iter().sum::<f64>() / 10.0
            } else {
                ten.iter().copied().fold(0.0, f64::max)
            };
            assert!((total(kind) - wanted).abs() < 1e-9, "{kind}");
        }
        // Addresses of up to 250 unmaps wait in deferred, and none in strict.
        let [strict, defer] = ["strict", "defer"].map(|protection| rows(protection, KINDS[0]));
        for (strict, defer) in strict.into_iter().zip(defer) {
            assert!((strict + 1.0..strict + 250.0).contains(&defer), "{found:?}");
        }
        for protection in ["strict", "defer"] {
            let [most, mean] = [KINDS[1], KINDS[2]].map(|kind| rows(protection, kind));
            let below = most.iter().zip(&mean).all(|(most, mean)| mean < most);
            assert!(below, "{most:?} {mean:?}");
        }
    }

    /// The largest numbers are neither those of the first benchmark nor those of the last.
    #[test]
    fn maxima_and_mean_are_those_of_all_benchmarks() {
        let live = |most, unused, mean| LiveSet { most, unused, mean };
        let all = [live(20, 4, 3.0), live(50, 9, 1.0), live(30, 6, 5.0)];
        let mut found = Findings::default();
        overall(&all, &mut found).unwrap();
        let wanted = [
            (50.0, 12_000.0, true),
            (9.0, 668.0, false),
            (3.0, 155.0, false),
        ];
        assert_eq!(found.rows.len(), wanted.len());
        let rows = found.rows.iter().zip(KINDS).zip(wanted);
        for ((row, kind), (measured, printed, fitted)) in rows {
            assert_eq!(row.quantity, format!("all: {kind}"));
            let found = (
                value(row),
                row.published.as_ref().unwrap().value,
                row.fitted,
            );
            assert_eq!(found, (measured, printed, fitted), "{kind}");
        }
    }

    /// Connections of each benchmark, and bytes of the response to a first packet of 64 bytes. The
    /// first packets of the others are those of their control connections.
    #[test]
    fn benchmarks_have_the_parameters_of_their_names() {
        let parameters = |(name, mut workload): (&'static str, Box<dyn Workload>)| {
            let clients = workload.clients();
            let (client, bytes) = (0, 64);
            workload.received(Packet { client, bytes });
            let sent = std::iter::from_fn(|| workload.send()).take(1000);
            (name, clients, sent.map(|packet| packet.bytes).sum::<u32>())
        };
        let found: Vec<_> = workloads().into_iter().map(parameters).collect();
        let wanted = [
            ("stream", 2, 0),
            ("request-response", 2, 1),
            ("Apache 1 MB", 100, 1 << 20),
            ("Apache 1 KB", 100, 1 << 10),
            ("Memcached", 16, 1 << 10),
        ];
        assert_eq!(found, wanted);
    }
}
