//! Plans: errors name their line, and the expansion is complete, unique and in a fixed order.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{Scratch, trace};
use proptest::prelude::*;
use ringfence_lab::modes::Mode;
use ringfence_sweep::{CacheCycles, Plan, Shard, Task, TaskContent, read_list, task_of_line};

#[test]
fn a_wrong_line_is_named() {
    let scratch = Scratch::new();
    scratch.write("empty.toml", b"name = 1\n");
    std::fs::create_dir(scratch.path().join("none")).unwrap();
    let cases = [
        (
            "attack = true\nmode = [\"fence\"]\n",
            2,
            "unknown field `mode`",
        ),
        (
            "\n\nmodes = [\"fence\",\n\"fense\"]\n",
            4,
            "did you mean fence?",
        ),
        (
            "modes = [\"alloc=x,table=radix,flush=strict\"]\n",
            1,
            "alloc",
        ),
        ("attack = 1\n", 1, "boolean"),
        ("traces = [\"gone.txt\"]\n", 1, "gone.txt: No such file"),
        ("traces = [\n  \"none\"]\n", 2, "contains no file"),
        ("traces = [\"/dev/null\"]\n", 1, "regular files only"),
        ("repetitions = 10001\n", 1, "expected 0 to 10000"),
        (
            "[parameters]\nring_entries = [0]\n",
            2,
            "expected 1 to 262143 slots",
        ),
        ("[parameters]\nring_entries = [1,\n262144]\n", 3, "262144"),
        ("[parameters]\niotlb = [\"16\"]\n", 2, "SETSxWAYS"),
        (
            "[parameters]\niotlb = [\"3x4\"]\n",
            2,
            "profile r210-2015: ",
        ),
        ("[parameters]\nrtc_period = [0.0]\n", 2, "seconds"),
        ("[parameters]\nrtc_period = [nan]\n", 2, "seconds"),
        ("[parameters]\nrtc_periods_kept = [255]\n", 2, "cycles"),
        (
            "[parameters]\nprofile = [\"vax\"]\n",
            2,
            "no profile and no file is named vax",
        ),
        (
            "[parameters]\nprofile = [\"empty.toml\"]\n",
            2,
            "empty.toml: line 1",
        ),
        (
            "repetitions = 1\nsplit = \"device\"\n",
            2,
            "requires repetitions = 0",
        ),
        ("split = \"cpu\"\n", 1, "cpu"),
        ("a = \n", 1, ""),
    ];
    for (text, line, message) in cases {
        let path = scratch.path().join("plan.toml");
        let error = Plan::parse(&path, text).unwrap_err().to_string();
        let prefix = format!("{}:{line}: ", path.display());
        assert!(error.starts_with(&prefix), "{text}: {error}");
        assert!(error.contains(message), "{text}: {error}");
    }
}

#[test]
fn an_empty_plan_is_the_sample_in_the_default_modes() {
    let tasks = Scratch::new().tasks("");
    let modes: Vec<&str> = tasks
        .iter()
        .map(|task| task.content.mode.as_str())
        .collect();
    let wanted = Mode::default_selection();
    let wanted: Vec<&str> = wanted.iter().map(|mode| mode.name.as_str()).collect();
    assert_eq!(modes, wanted);
    assert!(
        tasks
            .iter()
            .all(|task| task.trace == "sample" && task.path.is_none())
    );
}

#[test]
fn a_directory_is_its_files_and_equal_traces_are_one() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path().join("traces")).unwrap();
    scratch.write("traces/b.txt", trace(1, 10, 1).as_bytes());
    scratch.write("traces/a.trace.txt", trace(1, 10, 2).as_bytes());
    scratch.write("traces/c.txt", trace(1, 10, 1).as_bytes());
    scratch.write("traces/.hidden", b"x");
    let tasks = scratch.tasks("traces = [\"traces\"]\nmodes = [\"fence\"]\n");
    let names: Vec<&str> = tasks.iter().map(|task| task.trace.as_str()).collect();
    assert_eq!(names, ["a", "b"], "c has the bytes of b");
}

#[test]
fn parameters_that_do_not_apply_do_not_multiply() {
    let tasks = Scratch::new().tasks(
        "modes = [\"none\", \"fence\", \"riommu\", \"rtc-paper\"]\n[parameters]\n\
        iotlb = [\"16x4\", \"32x4\"]\nring_entries = [256, 512, 1024]\n\
        rtc_period = [1.0, 10.0]\nrtc_periods_kept = [1, 2, 3]\n\
        profile = [\"r210-2015\", \"cascade-lake-2024\"]\n",
    );
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for task in &tasks {
        *counts.entry(&task.content.mode).or_default() += 1;
    }
    let wanted = [("fence", 4), ("none", 2), ("riommu", 6), ("rtc-paper", 24)];
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), wanted);
}

#[test]
fn the_name_of_the_trace_and_the_sources_of_a_profile_do_not_count() {
    let scratch = Scratch::new();
    scratch.write("a.txt", trace(1, 10, 1).as_bytes());
    scratch.write("b.txt", trace(1, 10, 1).as_bytes());
    let name = |text: &str| scratch.tasks(text)[0].name.clone();
    let a = name("traces = [\"a.txt\"]\nmodes = [\"fence\"]\n");
    assert_eq!(a, name("traces = [\"b.txt\"]\nmodes = [\"fence\"]\n"));
    scratch.write("p.toml", b"name = \"p\"\nsource = \"x\"\nclock_ghz = 2.0\n");
    let with_profile = "modes = [\"fence\"]\n[parameters]\nprofile = [\"p.toml\"]\n";
    let before = name(with_profile);
    scratch.write("p.toml", b"name = \"p\"\nsource = \"y\"\nclock_ghz = 2.0\n");
    assert_eq!(before, name(with_profile));
    scratch.write("p.toml", b"name = \"p\"\nsource = \"y\"\nclock_ghz = 2.5\n");
    assert_ne!(before, name(with_profile));
}

/// Every content with one field changed. No plan of [`plan_text`] has the new values.
fn changed(content: &TaskContent) -> Vec<TaskContent> {
    let mut all: Vec<TaskContent> = Vec::new();
    let mut with = |change: &dyn Fn(&mut TaskContent)| {
        let mut other = content.clone();
        change(&mut other);
        all.push(other);
    };
    with(&|content| content.output += 1);
    with(&|content| content.engine.push('x'));
    with(&|content| content.digest.replace_range(..1, "x"));
    with(&|content| content.device = Some("x".into()));
    with(&|content| content.mode.push('x'));
    with(&|content| content.profile.iotlb_ways = Some(77));
    with(&|content| content.profile.invalidation_cycles = Some(77));
    with(&|content| content.ring_entries = Some(77));
    with(&|content| {
        content.cache_cycles = Some(CacheCycles {
            period_ns: 77,
            kept: 1,
        });
    });
    with(&|content| content.attack = !content.attack);
    with(&|content| content.repetitions += 1);
    all
}

/// A plan and the parameters that it names.
fn plan_text() -> impl Strategy<Value = String> {
    let some = |values: &'static [&'static str]| {
        prop::sample::subsequence(values, 0..=values.len()).prop_map(|list| list.join(", "))
    };
    (
        some(&[
            "\"none\"",
            "\"fence\"",
            "\"riommu\"",
            "\"rtc-paper\"",
            "\"linux-lazy\"",
        ]),
        some(&["\"16x4\"", "\"32x4\"", "\"64x1\""]),
        some(&["1", "256", "4096"]),
        some(&["0.5", "10.0"]),
        some(&["1", "3"]),
        some(&["\"r210-2015\"", "\"ice-lake-2024\""]),
        any::<bool>(),
    )
        .prop_map(|(modes, iotlb, rings, period, kept, profile, attack)| {
            format!(
                "modes = [{modes}]\nattack = {attack}\n[parameters]\niotlb = [{iotlb}]\n\
                ring_entries = [{rings}]\nrtc_period = [{period}]\nrtc_periods_kept = [{kept}]\n\
                profile = [{profile}]\n"
            )
        })
}

proptest! {
    #[test]
    fn names_are_unique_and_stable(text in plan_text()) {
        let scratch = Scratch::new();
        let tasks = scratch.tasks(&text);
        prop_assert_eq!(&tasks, &scratch.tasks(&text));
        let names: BTreeSet<&str> = tasks.iter().map(|task| task.name.as_str()).collect();
        prop_assert_eq!(names.len(), tasks.len());
        for task in &tasks {
            prop_assert_eq!(task.name.len(), 32);
            for other in changed(&task.content) {
                prop_assert_ne!(&task.content, &other);
                prop_assert_ne!(&task.name, &other.name());
            }
            let line = serde_json::to_string(task).unwrap();
            prop_assert_eq!(task, &task_of_line(&line).unwrap());
        }
    }

    #[test]
    fn shards_are_disjoint_and_complete(tasks in 0_usize..200, count in 1_usize..20) {
        let all: Vec<usize> = (0..tasks).collect();
        let mut seen = Vec::new();
        for index in 1..=count {
            let shard: Shard = format!("{index}/{count}").parse().unwrap();
            let part = shard.of(all.clone());
            prop_assert!(part.len().abs_diff(tasks / count) <= 1);
            seen.extend(part);
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, all);
    }

    #[test]
    fn no_text_is_a_panic(text in "[a-z\\[\\]=\"0-9\\n. ]{0,80}") {
        let _ = Plan::parse("plan.toml".as_ref(), &text);
        let _ = task_of_line(&text);
        let _ = text.parse::<Shard>();
    }
}

#[test]
fn shards_are_named_from_one_on() {
    for wrong in ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b"] {
        assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
    }
    assert_eq!("2/3".parse::<Shard>().unwrap().to_string(), "2/3");
}

#[test]
fn a_list_is_read_back_and_a_changed_one_refused() {
    let scratch = Scratch::new();
    let tasks = scratch.tasks("modes = [\"none\", \"fence\"]\n");
    let lines: Vec<String> = tasks
        .iter()
        .map(|task| serde_json::to_string(task).unwrap())
        .collect();
    let read = |text: &str| read_list(&scratch.write("tasks.jsonl", text.as_bytes()));
    assert_eq!(read(&lines.join("\n")).unwrap(), tasks);
    assert_eq!(read("").unwrap(), Vec::<Task>::new());
    let cases = [
        (
            lines[1].replace("\"repetitions\":0", "\"repetitions\":1"),
            "has the name",
        ),
        (
            lines[1].replace("\"output\":1", "\"output\":99"),
            "list the plan again",
        ),
        (
            lines[1].replace("\"attack\"", "\"attach\""),
            "unknown field",
        ),
        ("{".to_owned(), "not a task"),
        ("x".repeat(100_000), "not a task"),
    ];
    for (line, message) in cases {
        let error = read(&format!("{}\n{line}\n", lines[0]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("tasks.jsonl:2: "), "{error}");
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_list_keeps_the_ranges_of_a_plan() {
    let task = Scratch::new().tasks("modes = [\"fence\"]\n").remove(0);
    let parse = |content| {
        let task = Task::new(task.trace.clone(), None, content);
        task_of_line(&serde_json::to_string(&task).unwrap())
    };
    let period = |period_ns| Some(CacheCycles { period_ns, kept: 1 });
    for (repetitions, ring_entries, cache_cycles, wrong) in [
        (10_000, Some(1), period(1_000), None),
        (0, Some(262_143), period(1_000_000_000_000_000), None),
        (10_001, None, None, Some("repetitions = 10001")),
        (0, Some(0), None, Some("ring_entries = 0")),
        (0, Some(262_144), None, Some("ring_entries = 262144")),
        (0, None, period(999), Some("period_ns = 999")),
        (0, None, period(u64::MAX), Some("period_ns = ")),
    ] {
        let result = parse(TaskContent {
            repetitions,
            ring_entries,
            cache_cycles,
            ..task.content.clone()
        });
        let error = result.err().map(|problem| problem.to_string());
        assert_eq!(error.is_some(), wrong.is_some(), "{error:?}");
        assert!(
            error
                .unwrap_or_default()
                .starts_with(wrong.unwrap_or_default())
        );
    }
}
