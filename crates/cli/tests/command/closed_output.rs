//! Standard output is a pipe that nobody reads (`| true`): verdicts and files are the same.

use std::process::{Command, Output};

use crate::{Scratch, program, ringfence, root, stderr, succeeded};

fn ringfence_unread(args: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(program());
    command.args(args).stdout(writer).output().unwrap()
}

#[track_caller]
fn ends_with(code: i32, args: &[&str]) {
    let output = ringfence_unread(args);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
}

#[test]
fn a_closed_standard_output_changes_no_exit_code() {
    let data = root().join("crates/trace");
    let sample = data.join("data/sample.trace.zst");
    let lazy = data.join("tests/data/judge/lazy.txt");
    let (sample, lazy) = (sample.to_str().unwrap(), lazy.to_str().unwrap());
    let compare = ["compare", "--repeat", "0", "--modes", "defer"];
    ends_with(0, &["modes"]);
    ends_with(0, &compare);
    ends_with(1, &["compare", "no-such-file"]);
    ends_with(3, &[&compare[..], &["--fail-if", "violations>0"]].concat());
    let attack = ["attack", "--modes", "none", "--classes", "A01"];
    ends_with(0, &attack);
    ends_with(3, &[&attack[..], &["--fail-on-success"]].concat());
    ends_with(0, &["trace", "verify", sample]);
    ends_with(3, &["trace", "verify", "--from-boot", sample]);
    ends_with(3, &["trace", "judge", lazy]);
}

#[test]
fn a_closed_standard_output_does_not_hide_a_regression() {
    let scratch = Scratch::new("unread");
    let report = |name: &str, modes: &str| {
        let args = ["compare", "--json", "--repeat", "1", "--modes", modes];
        scratch.file(name, succeeded(&ringfence(&args)).as_bytes())
    };
    let (both, one) = (report("both", "none,fence"), report("one", "none"));
    ends_with(0, &["diff", &both, &one]);
    ends_with(3, &["diff", &both, &one, "--max-regression", "1000000"]);
}

#[test]
fn a_closed_standard_output_does_not_hide_a_failed_task() {
    let scratch = Scratch::new("unread");
    let nonsense = "x-1 [000] ..... 1.000000: dma_map_phys: nonsense\n";
    scratch.file("bad.txt", nonsense.as_bytes());
    let plan = "traces = [\"bad.txt\"]\nmodes = [\"fence\"]\n";
    let plan = scratch.file("plan.toml", plan.as_bytes());
    let dir = scratch.path("out");
    ends_with(1, &["sweep", &plan, "-o", &dir, "--json"]);
    ends_with(0, &["sweep", &plan, "--list"]);
}

#[test]
fn files_are_written_despite_a_closed_standard_output() {
    let scratch = Scratch::new("unread");
    let compare = ["compare", "--repeat", "0", "--modes", "none", "--plot"];
    let commands: [(&[&str], _); 3] = [
        (&compare, ".svg"),
        (&["size", "--plot"], ".svg"),
        (&["reproduce", "X23", "X10", "--out"], "X10.md"),
    ];
    for (args, suffix) in commands {
        let dir = scratch.path(args[0]);
        ends_with(0, &[args, &[&dir]].concat());
        let names = std::fs::read_dir(&dir).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(names.any(|name| name.ends_with(suffix)), "{args:?}");
    }
}
