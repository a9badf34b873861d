//! `sweep`: shards, resumption, failed tasks and signals.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{Scratch, failed, program, ringfence, stderr, stdout, succeeded};

const PLAN: &str = "modes = [\"none\", \"linux-strict\", \"fence\", \"riommu\"]\n\
    [parameters]\nring_entries = [256, 512]\niotlb = [\"16x4\", \"32x4\"]\n";
/// `none`, and two of each other mode.
const TASKS: u64 = 7;

/// Runs `sweep` with `--json` and returns the counts.
fn sweep(plan: &str, dir: &str, more: &[&str]) -> Value {
    let output = ringfence(&[&["sweep", plan, "-o", dir, "--json"], more].concat());
    let failed = output.status.code() == Some(1);
    let counts: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| {
        panic!("{}", stderr(&output));
    });
    assert_eq!(failed, counts["failed"] != 0, "{}", stderr(&output));
    counts
}

/// The inode and the time of modification of each file of a directory. A file that is written again
/// has another time, and may have the inode of a removed one.
fn files(dir: &str) -> BTreeMap<String, (u64, i64, i64)> {
    let files = fs::read_dir(dir).unwrap().map(|file| {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        let about = file.metadata().unwrap();
        (name, (about.ino(), about.mtime(), about.mtime_nsec()))
    });
    files.collect()
}

fn names(dir: &str) -> Vec<String> {
    files(dir).into_keys().collect()
}

#[test]
fn a_resumed_sweep_runs_what_is_missing_or_damaged_alone() {
    let scratch = Scratch::new("sweep");
    let plan = scratch.file("plan.toml", PLAN.as_bytes());
    let dir = scratch.path("out");
    let first = sweep(&plan, &dir, &[]);
    assert_eq!(
        (&first["tasks"], &first["run"]),
        (&TASKS.into(), &TASKS.into())
    );
    let before = files(&dir);
    assert_eq!(before.len() as u64, TASKS);

    let again = sweep(&plan, &dir, &[]);
    assert_eq!(
        (&again["run"], &again["present"]),
        (&0.into(), &TASKS.into())
    );
    assert_eq!(files(&dir), before);

    let mut names = before.keys();
    let (gone, cut) = (names.next().unwrap(), names.next().unwrap());
    fs::remove_file(Path::new(&dir).join(gone)).unwrap();
    let path = Path::new(&dir).join(cut);
    let mut bytes = fs::read(&path).unwrap();
    bytes[100] ^= 1;
    fs::write(&path, bytes).unwrap();
    let third = sweep(&plan, &dir, &[]);
    assert_eq!((&third["run"], &third["damaged"]), (&2.into(), &1.into()));
    let after = files(&dir);
    assert_eq!(names_of(&after), names_of(&before));
    let kept = |name: &String| after[name] == before[name];
    assert_eq!(
        before.keys().filter(|name| kept(name)).count() as u64,
        TASKS - 2
    );
}

fn names_of(files: &BTreeMap<String, (u64, i64, i64)>) -> Vec<&String> {
    files.keys().collect()
}

#[test]
fn shards_together_are_the_whole() {
    let scratch = Scratch::new("sweep");
    let plan = scratch.file("plan.toml", PLAN.as_bytes());
    let list = succeeded(&ringfence(&["sweep", &plan, "--list"]));
    let listed = scratch.file("tasks.jsonl", list.as_bytes());
    let mut wanted: Vec<String> = list
        .lines()
        .map(|line| {
            let task: Value = serde_json::from_str(line).unwrap();
            format!("{}.parquet", task["name"].as_str().unwrap())
        })
        .collect();
    wanted.sort();
    let (one, two) = (scratch.path("one"), scratch.path("two"));
    sweep(&plan, &one, &["--shard", "1/2", "--jobs", "1"]);
    sweep(&listed, &two, &["--shard", "2/2"]);
    let mut both = [names(&one), names(&two)].concat();
    both.sort();
    assert_eq!(both, wanted);
    // Without the other's files, a second shard has nothing that the first has.
    let single = wanted[0].strip_suffix(".parquet").unwrap();
    let dir = scratch.path("single");
    assert_eq!(sweep(&plan, &dir, &["--task", single])["tasks"], 1);
    assert_eq!(names(&dir), wanted[..1]);
}

#[test]
fn a_failed_task_is_a_row_and_runs_again_on_request_alone() {
    let scratch = Scratch::new("sweep");
    scratch.file(
        "bad.txt",
        b"x-1 [000] ..... 1.000000: dma_map_phys: nonsense\n",
    );
    let plan = "traces = [\"bad.txt\"]\nmodes = [\"fence\"]\n";
    let plan = scratch.file("plan.toml", plan.as_bytes());
    let dir = scratch.path("out");
    let output = ringfence(&["sweep", &plan, "-o", &dir]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("bad.txt:1"), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("--retry-failed"),
        "{}",
        stderr(&output)
    );
    let before = files(&dir);
    assert_eq!(sweep(&plan, &dir, &[])["run"], 0);
    assert_eq!(files(&dir), before);
    assert_eq!(sweep(&plan, &dir, &["--retry-failed"])["run"], 1);
}

#[test]
fn errors_are_one_line_with_a_place() {
    let scratch = Scratch::new("sweep");
    let plan = scratch.file("plan.toml", b"modes = [\n\"fense\"]\n");
    let dir = scratch.path("out");
    let text = failed(&ringfence(&["sweep", &plan, "-o", &dir]), 1);
    assert!(
        text.contains("plan.toml:2: ") && text.contains("did you mean fence?"),
        "{text}"
    );
    let text = failed(&ringfence(&["sweep", "/none.toml", "-o", &dir]), 1);
    assert!(text.contains("/none.toml: No such file"), "{text}");
    let plan = scratch.file("plan.toml", b"");
    let text = failed(&ringfence(&["sweep", &plan, "-o", &dir, "--task", "x"]), 2);
    assert!(text.contains("has no task x"), "{text}");
    let text = failed(&ringfence(&["sweep", &plan, "-o", &plan]), 1);
    assert!(text.contains("plan.toml"), "{text}");
    let list = scratch.file("tasks.jsonl", b"{}\n");
    let text = failed(&ringfence(&["sweep", &list, "-o", &dir]), 1);
    assert!(text.contains("tasks.jsonl:1: not a task"), "{text}");
    for wrong in [
        &["sweep", &plan][..],
        &["sweep", &plan, "-o", &dir, "--shard", "3/2"],
    ] {
        assert_eq!(ringfence(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

/// A signal may come between the creation and the renaming of a file. The test reads the
/// directory until the first file is there, so the signal comes while tasks run.
#[test]
fn a_signal_leaves_complete_files_alone() {
    let scratch = Scratch::new("sweep");
    let sizes: Vec<String> = (1..=400).map(|size| size.to_string()).collect();
    let plan = format!(
        "modes = [\"riommu\"]\n[parameters]\nring_entries = [{}]\n",
        sizes.join(", ")
    );
    let plan = scratch.file("plan.toml", plan.as_bytes());
    let dir = scratch.path("out");
    fs::create_dir(&dir).unwrap();
    let mut child = Command::new(program())
        .args(["sweep", &plan, "-o", &dir, "--jobs", "2"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let complete = || names(&dir).iter().any(|name| name.ends_with(".parquet"));
    while !complete() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let left = names(&dir);
    assert!(
        left.iter().all(|name| name.ends_with(".parquet")),
        "{left:?}"
    );
    let counts = sweep(&plan, &dir, &["--shard", "1/400"]);
    assert_eq!(counts["damaged"], 0);
}
