//! `--fail-if` and `--max-regression`: what was not measured does not pass.

use serde_json::Value;

use crate::{Scratch, failed, ringfence, ringfence_with, stderr, succeeded};

#[test]
fn condition_on_unmeasured_field_is_wrong_usage() {
    let cases: [(&[&str], &str, &str); 6] = [
        (
            &["--no-attack", "--repeat", "0"],
            "violations>0",
            "--no-attack",
        ),
        (
            &["--no-attack", "--repeat", "0"],
            "violations>=0",
            "--no-attack",
        ),
        (
            &["--no-attack", "--repeat", "0"],
            "none:colocated>0",
            "--no-attack",
        ),
        (&["--repeat", "0"], "map_cycles>0", "--repeat"),
        (
            &["--repeat", "0"],
            "components.measured_cycles<0",
            "--repeat",
        ),
        (&["--repeat", "0"], "relative_throughput<2", "--repeat"),
    ];
    for (options, condition, advice) in cases {
        let mut args = vec!["compare", "--modes", "none", "--fail-if", condition];
        args.extend(options);
        let output = ringfence(&args);
        let text = failed(&output, 2);
        assert!(text.contains("not measured"), "{condition}: {text}");
        assert!(text.contains(advice), "{condition}: {text}");
        assert!(output.stdout.is_empty(), "before any work");
    }
    // Where it was measured, it counts.
    for (repeat, condition) in [("0", "violations>0"), ("1", "relative_throughput<2")] {
        let args = [
            "compare",
            "--modes",
            "none",
            "--repeat",
            repeat,
            "--fail-if",
            condition,
        ];
        assert_eq!(ringfence(&args).status.code(), Some(3), "{condition}");
    }
}

#[test]
fn a_rate_of_nothing_is_wrong_usage() {
    let args = |condition| {
        [
            "compare",
            "--modes",
            "none,fence",
            "--repeat",
            "0",
            "--csv",
            "--fail-if",
            condition,
        ]
    };
    // Mode none looks nothing up.
    let output = ringfence(&args("iotlb_hit_rate<0"));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("sample, none"),
        "{}",
        stderr(&output)
    );
    succeeded(&ringfence(&args("fence:iotlb_hit_rate<0")));
}

#[test]
fn a_trace_without_a_map_passes_no_gate() {
    for trace in [&b""[..], b"# tracer: nop\n"] {
        let args = ["compare", "-", "--repeat", "0", "--modes", "fence", "--csv"];
        let plain = ringfence_with(&args, trace);
        succeeded(&plain);
        let gated: Vec<&str> = args
            .into_iter()
            .chain(["--fail-if", "violations>0"])
            .collect();
        let output = ringfence_with(&gated, trace);
        let text = failed(&output, 2);
        assert!(text.contains("maps nothing in stdin"), "{text}");
    }
}

#[test]
fn unmeasured_fields_are_null_in_every_format() {
    let args = ["compare", "--modes", "none", "--repeat", "0", "--no-attack"];
    let with = |form: &str| {
        let args: Vec<&str> = args.into_iter().chain([form]).collect();
        succeeded(&ringfence(&args))
    };
    let report: Value = serde_json::from_str(&with("--json")).unwrap();
    assert_eq!(report["schema"], 3);
    let row = &report["results"][0];
    for field in [
        "map_cycles",
        "unmap_cycles",
        "components",
        "modelled_share",
        "relative_throughput",
        "attack_accesses",
        "violations",
        "colocated",
        "violations_after_end",
        "iotlb_hit_rate",
        "words_per_walk",
    ] {
        assert!(row.get(field).is_some_and(Value::is_null), "{field}: {row}");
    }
    assert!(row["maps"].as_u64().unwrap() > 0);
    let csv = with("--csv");
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let (header, cells) = (lines.next().unwrap(), lines.next().unwrap());
    assert_eq!(header.len(), cells.len());
    for field in [
        "map_cycles",
        "components.map_table_cycles",
        "violations.total",
        "attack_accesses",
    ] {
        let column = header.iter().position(|name| *name == field).unwrap();
        assert_eq!(cells[column], "", "{field}");
    }
    let text = with("--markdown");
    assert!(
        text.contains("| none | none |") && text.contains("| - |"),
        "{text}"
    );
}

#[test]
fn a_diff_that_cannot_tell_does_not_pass() {
    let scratch = Scratch::new("incomparable");
    let report = |name: &str, options: &[&str]| {
        let mut args = vec!["compare", "--json"];
        args.extend(options);
        scratch.file(name, succeeded(&ringfence(&args)).as_bytes())
    };
    let both = report("both.json", &["--repeat", "1", "--modes", "defer,fence"]);
    let one = report("one.json", &["--repeat", "1", "--modes", "fence"]);
    let untimed = report("untimed.json", &["--repeat", "0", "--modes", "defer,fence"]);
    let kind = report(
        "kind.json",
        &["--repeat", "1", "--modes", "defer,fence", "--no-attack"],
    );
    let other = report("other.json", &["--repeat", "1", "--modes", "none"]);
    let judge = |a: &str, b: &str| ringfence(&["diff", a, b, "--max-regression", "1000000"]);
    succeeded(&judge(&both, &both));
    succeeded(&judge(&one, &both));
    let lost = judge(&both, &one);
    assert_eq!(lost.status.code(), Some(3), "{}", stderr(&lost));
    assert!(
        stderr(&lost).contains("sample defer: the second"),
        "{}",
        stderr(&lost)
    );
    for (a, b, field) in [
        (&both, &untimed, "map_cycles"),
        (&untimed, &both, "map_cycles"),
        (&untimed, &untimed, "map_cycles"),
        (&both, &kind, "violations"),
        (&both, &other, "no row in common"),
    ] {
        let text = failed(&judge(a, b), 2);
        assert!(text.contains(field), "{a} {b}: {text}");
        // Without a gate there is a table.
        succeeded(&ringfence(&["diff", a, b]));
    }
    let args = ["diff", &both, &untimed, "--json"];
    let diff: Value = serde_json::from_str(&succeeded(&ringfence(&args))).unwrap();
    let row = &diff["rows"][0];
    assert!(row["cycles_before"].is_number(), "{row}");
    assert!(
        row["cycles_after"].is_null() && row["cycles_ratio"].is_null(),
        "{row}"
    );
}

#[test]
fn number_out_of_range_names_the_range() {
    for (args, range) in [
        (
            &["compare", "--rtc-period", "-1"][..],
            "0.000001 to 1000000",
        ),
        (&["compare", "--rtc-periods-kept", "-1"], "1 to 254"),
        (&["compare", "--repeat", "-1"], "0 to 10000"),
        (&["compare", "--ring-entries", "-1"], "1 to 262143"),
        (&["diff", "a", "b", "--max-regression", "-1"], "per cent"),
        (
            &["trace", "record", "-o", "x", "--seconds", "-1"],
            "above 0",
        ),
    ] {
        let output = ringfence(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let text = stderr(&output);
        assert!(text.contains(range), "{args:?}: {text}");
    }
}
