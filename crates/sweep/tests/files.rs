//! Files of tasks: their rows are those of a comparison, and no damage passes for a result.

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::{Scratch, row, trace};
use parquet::record::Field;
use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::modes::Mode;
use ringfence_lab::ring::count_ring_usage;
use ringfence_lab::{MachineProfile, Operation, ReplayLimits};
use ringfence_sweep::{
    ColumnType, Machine, Outcome, Stored, Task, columns, encode, file_name, run, store, stored,
};
use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource};
use serde_json::Value;

fn file_of(task: &Task) -> Vec<u8> {
    encode(task, &run(task), &Machine::this()).unwrap()
}

fn sample() -> Operations<TraceSource> {
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    Operations::from_source("sample", source, TraceOptions::default())
}

fn leaves(value: &Value, path: &str, out: &mut BTreeMap<String, Value>) {
    let join = |key: &str| [path, key].join(if path.is_empty() { "" } else { "." });
    match value {
        Value::Object(fields) => fields.iter().for_each(|(k, v)| leaves(v, &join(k), out)),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                leaves(item, &join(&index.to_string()), out);
            }
        }
        leaf => {
            out.insert(path.to_owned(), leaf.clone());
        }
    }
}

#[test]
fn every_row_of_a_comparison_is_in_the_file_of_its_task() {
    let mut options = CompareOptions::new();
    options.repetitions = 0;
    options.modes = Mode::default_selection();
    options.prices = Some(MachineProfile::r210_2015().prices(Operation::Packet, 4));
    options.rings = count_ring_usage(sample(), None, ReplayLimits::default())
        .unwrap()
        .sizes();
    let rows = compare("sample", sample(), &options, |_| {}).unwrap().rows;
    let tasks = Scratch::new().tasks("");
    assert_eq!(rows.len(), tasks.len());
    for (wanted, task) in rows.iter().zip(&tasks) {
        let fields = row(file_of(task));
        let mut values = BTreeMap::new();
        leaves(&serde_json::to_value(wanted).unwrap(), "", &mut values);
        for (name, value) in values {
            // A mode without a timed replay has no components.
            let Some(field) = fields.get(&name) else {
                assert!(value.is_null(), "{name}");
                continue;
            };
            let same = match (&value, field) {
                (Value::Null, Field::Null) => true,
                (Value::Number(number), Field::ULong(field)) => number.as_u64() == Some(*field),
                (Value::Number(number), Field::Double(field)) => number.as_f64() == Some(*field),
                (Value::String(text), Field::Str(field)) => text == field,
                _ => false,
            };
            assert!(
                same,
                "{} {name}: {value} in the row, {field:?} in the file",
                wanted.mode
            );
        }
    }
}

#[test]
fn columns_have_the_types_of_the_fields() {
    let kind = |name: &str| {
        let column = columns().iter().find(|column| column.name == name);
        column.map(|column| column.kind)
    };
    for (name, wanted) in [
        ("task", ColumnType::Text),
        ("machine", ColumnType::Text),
        ("attack", ColumnType::Flag),
        ("maps", ColumnType::Count),
        ("violations.total", ColumnType::Count),
        ("ways.pooled.bytes", ColumnType::Count),
        ("map_cycles", ColumnType::Float),
        ("walk_cache_hit_rate.2", ColumnType::Float),
        ("stale_byte_seconds", ColumnType::Float),
        ("limited_by", ColumnType::Text),
        ("status_code", ColumnType::Text),
    ] {
        assert_eq!(kind(name), Some(wanted), "{name}");
    }
    let mut names: Vec<&str> = columns()
        .iter()
        .map(|column| column.name.as_str())
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn a_failed_task_is_a_row_with_its_error() {
    let scratch = Scratch::new();
    let path = scratch.write(
        "bad.txt",
        b"x-1 [000] ..... 1.000000: dma_map_phys: nonsense\n",
    );
    let tasks = scratch.tasks("traces = [\"bad.txt\"]\nmodes = [\"fence\"]\n");
    let fields = row(file_of(&tasks[0]));
    assert_eq!(fields["outcome"], Field::Str("failed".into()));
    assert_eq!(fields["mode"], Field::Str("fence".into()));
    assert_eq!(fields["maps"], Field::Null);
    let Field::Str(error) = &fields["error"] else {
        panic!("{:?}", fields["error"]);
    };
    assert!(error.contains("bad.txt:1"), "{error}");

    fs::write(path, trace(1, 10, 1)).unwrap();
    let error = run(&tasks[0]).result.unwrap_err();
    assert!(error.contains("not the one of the plan"), "{error}");
}

#[test]
fn a_file_is_intact_only_with_all_its_bytes_and_its_name() {
    let scratch = Scratch::new();
    let task = &scratch.tasks("modes = [\"none\"]\n")[0];
    let outcome = Outcome {
        result: Err("no trace".into()),
        seconds: 1.0,
    };
    let bytes = encode(task, &outcome, &Machine::this()).unwrap();
    let state = |name: &str, bytes: &[u8]| {
        fs::write(scratch.path().join(file_name(name)), bytes).unwrap();
        stored(scratch.path(), name).unwrap()
    };
    let missing = stored(scratch.path(), &task.name).unwrap();
    assert_eq!(missing, Stored::Missing);
    store(scratch.path(), &task.name, &bytes).unwrap();
    let intact = Stored::Intact { failed: true };
    assert_eq!(stored(scratch.path(), &task.name).unwrap(), intact);
    // A random name of a part is never left.
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    assert_eq!(
        state("0123", &bytes),
        Stored::Damaged,
        "the file of another task"
    );
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        assert_eq!(state(&task.name, &damaged), Stored::Damaged, "byte {at}");
    }
    for length in [0, 1, 8, bytes.len() / 2, bytes.len() - 1] {
        assert_eq!(
            state(&task.name, &bytes[..length]),
            Stored::Damaged,
            "{length}"
        );
    }
    assert_eq!(
        state(&task.name, &[&bytes[..], b"x"].concat()),
        Stored::Damaged
    );
    assert_eq!(state(&task.name, &vec![0; 2 << 20]), Stored::Damaged);
    assert_eq!(state(&task.name, &bytes), intact);
    assert!(stored(scratch.path(), "x/y").is_ok_and(|state| state == Stored::Missing));
}

#[test]
fn a_machine_has_an_id_that_reveals_nothing() {
    let machine = Machine::this();
    assert_eq!(machine, Machine::this());
    assert_eq!(machine.id.len(), 16);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert!(!machine.id.contains(host.trim()) || host.trim().is_empty());
}

#[test]
fn a_path_without_an_end_is_not_read() {
    let mut task = Scratch::new().tasks("modes = [\"none\"]\n").remove(0);
    for path in ["/dev/zero", "/proc/self"] {
        task.path = Some(path.into());
        let error = run(&task).result.unwrap_err();
        assert!(error.contains("regular files only"), "{error}");
    }
}
