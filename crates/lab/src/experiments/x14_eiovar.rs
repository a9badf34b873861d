//! X14: five benchmarks on two adapters, with the freelists and without (EIOVAR Fig. 10 and Table 2).

use ringfence_devices::nic::Profile as Adapter;
use ringfence_devices::workload::{Apache, Memcached, RequestResponse, Stream, Workload};
use ringfence_iova::Capacity;

use super::allocators::W;
use super::capture::Capture;
use super::catalogue::{Experiment, Setting};
use super::finding::{Demand, FindingRow, Findings, Measured};
use super::printed::Sheet;
use super::stream::{counted, last};
use super::x01_breakdown::components;
use crate::error::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X14",
    title: "The allocator's cost with the freelists and without, five benchmarks, two adapters",
    source: "EIOVAR Fig. 10, Table 2",
    measure,
};

fn workload(benchmark: &str) -> Box<dyn Workload> {
    match benchmark {
        "rr" => Box::new(RequestResponse::default()),
        "apache1M" => Box::new(Apache::new(Apache::BIG, Apache::CLIENTS_EIOVAR, 1)),
        "apache1K" => Box::new(Apache::new(Apache::SMALL, Apache::CLIENTS_EIOVAR, 1)),
        "memcached" => Box::new(Memcached::new(Memcached::CLIENTS_EIOVAR, 1)),
        _ => Box::new(Stream::default()),
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut setting = setting.clone();
    setting.repetitions = 1;
    let mut found = Findings::by(
        "Two runs of each benchmark as EIOVAR ran it, strict and deferred: searches are counted in the last run, cycles of an allocation and \
         of a deallocation are the meter's over both.",
    );
    let sheet = Sheet::named("eiovar_table2")?;
    for (nic, adapter) in [("mlx", Adapter::MLX), ("brcm", Adapter::BRCM)] {
        for benchmark in ["stream", "rr", "apache1M", "apache1K", "memcached"] {
            let mut capture = Capture::new(adapter, workload(benchmark))?;
            let runs = [capture.run()?, capture.run()?];
            for (protection, batch) in [("strict", 1), ("defer", W)] {
                for (column, lists, mode) in [
                    ("baseline", None, protection.to_owned()),
                    (
                        "eiovar",
                        Some(Capacity::Unbounded),
                        format!("{protection}+"),
                    ),
                ] {
                    let count = last(&counted(&runs, lists, batch)?)?;
                    let parts = components(&setting, &mode, &runs)?;
                    let spread = parts.order_spread;
                    let dealloc = parts.cycles.unmap_iova_free;
                    for (metric, unit, measured) in [
                        (
                            "search_len",
                            "rb_prev",
                            Measured::counted(count.mean_steps().round()),
                        ),
                        (
                            "alloc_cycles",
                            "cycles",
                            Measured::cost(parts.cycles.map_iova_alloc, 0.0, spread),
                        ),
                        (
                            "dealloc_cycles",
                            "cycles",
                            Measured::cost(dealloc, 0.0, spread),
                        ),
                    ] {
                        let wanted = [
                            ("nic", nic),
                            ("metric", metric),
                            ("protection", protection),
                            ("benchmark", benchmark),
                        ];
                        let what = format!("{nic} {benchmark}, {mode}: {metric}");
                        let row = FindingRow::new(what, unit, measured)
                            .beside(sheet.printed(&wanted, column)?);
                        // Cycles are those of another processor.
                        found.push(match metric {
                            "search_len" => row.held_to(Demand::Near),
                            _ => row,
                        });
                    }
                }
            }
        }
    }
    found.explain(
        "The searches of the document have developed over 150 runs of 20 s; two runs here are a ten-thousandth of that. What is held is \
         that the freelists take the search away, and how long it was.",
    );
    found.note("Erratum 3: brcm stream, strict, prints 100 -> 53 and \"-49%\"; it should be -47%. Erratum 20: 75-85% is 73-86% in the table.");
    found.note("Throughput and processor use of the same table are not here: X03 has them for the rIOMMU document's modes.");
    Ok(found)
}
