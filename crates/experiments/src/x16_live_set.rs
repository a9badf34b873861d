//! X16: number of live IOVAs, and of freed IOVAs that wait for reuse (EIOVAR section 6).

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{
    Apache, BURST, Memcached, NetperfStream, RequestResponse, Workload,
};
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
        let mut capture = Capture::with(NicProfile::MLX, workload, BURST, setting.packets)?;
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
    for (what, value, cell, group) in [
        (
            "all: maximum number of addresses allocated",
            most as f64,
            "max per-device distinct IOVAs ever observed",
            Requirement::Near,
        ),
        (
            "all: maximum number freed and waiting",
            largest as f64,
            "max previously-allocated-but-now-free IOVAs",
            Requirement::Near,
        ),
        (
            "all: mean number freed and waiting",
            mean,
            "avg previously-allocated-but-now-free IOVAs",
            Requirement::Near,
        ),
    ] {
        let row = FindingRow::counted(what, "IOVAs", value);
        found.push(
            row.beside(fact(cell)?)
                .require(group)
                .ordered_in("live set"),
        );
    }
    found.explain(
        "Addresses wait when a burst of transmitted packets is unmapped and nothing maps until \
        there is more to send. Their number depends on how far a server fills its transmit rings, \
        which the paper does not print; decision 0011 gives the occupancy used here.",
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
    }
}
