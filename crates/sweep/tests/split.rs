//! Rows of the devices of a trace have only columns that combine, and these combine.

mod common;

use std::collections::BTreeMap;

use common::{Scratch, row, trace};
use parquet::record::Field;
use ringfence_sweep::{ADDITIVE, MAXIMA, Machine, Task, columns, encode, run};

/// Columns of a task and descriptions that a row of one device has as well.
const OTHERS: [&str; 27] = [
    "task",
    "outcome",
    "error",
    "trace",
    "digest",
    "device",
    "mode",
    "profile",
    "iotlb_sets",
    "iotlb_ways",
    "ring_entries",
    "rtc_period_ns",
    "rtc_periods_kept",
    "attack",
    "repetitions",
    "output",
    "engine",
    "machine",
    "cpu",
    "arch",
    "build",
    "task_seconds",
    "iommu",
    "safety",
    "bound",
    "status",
    "status_code",
];

fn row_of(task: &Task) -> BTreeMap<String, Field> {
    row(encode(task, &run(task), &Machine::this()).unwrap())
}

fn count(field: &Field) -> u64 {
    match field {
        Field::ULong(count) => *count,
        other => panic!("{other:?}"),
    }
}

#[test]
fn columns_of_devices_combine_in_every_mode_and_no_others_are_there() {
    const SEED: u64 = 20;
    let scratch = Scratch::new();
    scratch.write("t.txt", trace(3, 150, SEED).as_bytes());
    let plan = "traces = [\"t.txt\"]\nmodes = [\"all\"]\n";
    let whole = scratch.tasks(plan);
    let parts = scratch.tasks(&format!("split = \"device\"\n{plan}"));
    assert_eq!(parts.len(), 3 * whole.len());
    for task in &whole {
        let mode = &task.content.mode;
        let whole = row_of(task);
        let parts = parts.iter().filter(|part| part.content.mode == *mode);
        let parts: Vec<_> = parts.map(row_of).collect();
        let values =
            |name: &str| -> Vec<u64> { parts.iter().map(|part| count(&part[name])).collect() };
        for name in ADDITIVE {
            let sum: u64 = values(name).iter().sum();
            assert_eq!(sum, count(&whole[*name]), "{mode} {name} (seed {SEED})");
        }
        for name in MAXIMA {
            let max = values(name).into_iter().max();
            assert_eq!(
                max,
                Some(count(&whole[*name])),
                "{mode} {name} (seed {SEED})"
            );
        }
        for part in &parts {
            assert!(matches!(part["device"], Field::Str(_)));
            for column in columns() {
                let name = column.name.as_str();
                if [ADDITIVE, MAXIMA, &OTHERS]
                    .iter()
                    .all(|list| !list.contains(&name))
                {
                    assert_eq!(part[name], Field::Null, "{mode} {name}");
                }
            }
        }
    }
}
