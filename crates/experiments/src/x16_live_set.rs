//! X16: number of live IOVAs, and of freed IOVAs that wait for reuse (EIOVAR section 6).

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Apache, Memcached, NetperfStream, RequestResponse, Workload};
use ringfence_iova::Capacity;

use super::allocators::{DrivenAllocator, W};
use super::capture::Capture;
use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Requirement};
use super::published::Sheet;
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

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = setting.runs.clamp(1, 4);
    let mut found = Findings::with_method(format!(
        "{runs} runs of each benchmark on mlx, strict and deferred, with unbounded freelists: \
        allocated addresses, and addresses that were allocated before and are free."
    ));
    let facts = Sheet::named("eiovar_k_threshold_facts")?;
    let fact = |fact: &str| facts.printed(&[("subject", "workload"), ("fact", fact)], "value");
    let (mut most, mut largest, mut means) = (0, 0, Vec::new());
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
            let (unused, mean) = driven.unused();
            most = most.max(driven.most());
            largest = largest.max(unused);
            means.push(mean);
            for (what, value) in [
                (
                    "maximum number of addresses allocated",
                    driven.most() as f64,
                ),
                ("maximum number freed and waiting", unused as f64),
                ("mean number freed and waiting", mean),
            ] {
                let what = format!("{name}, {protection}: {what}");
                found.push(FindingRow::counted(what, "IOVAs", value));
            }
        }
    }
    let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
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
        let row = row.beside(fact(cell)?).require(Requirement::Near);
        // The profile's rings bound the addresses that are allocated: an input.
        found.push(if allocated { row.fitted() } else { row });
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_benchmark_has_its_rows() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        assert_eq!(found.rows.len(), 5 * 2 * 3 + 3);
        let judged = found.rows.iter().filter(|row| row.holds.is_some());
        let judged: Vec<_> = judged.map(|row| row.quantity.as_str()).collect();
        let waiting = ["maximum", "mean"].map(|of| format!("all: {of} number freed and waiting"));
        assert_eq!(judged, waiting);
    }
}
