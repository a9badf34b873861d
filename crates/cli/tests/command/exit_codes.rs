//! 0 done, 1 error, 2 wrong usage, 3 a condition holds.

use std::process::Command;

use crate::{failed, program, ringfence, stderr, stdout, succeeded};

fn fail_if(conditions: &[&str]) -> std::process::Output {
    let mut args = vec![
        "compare",
        "--repeat",
        "0",
        "--modes",
        "defer,fence",
        "--csv",
    ];
    for condition in conditions {
        args.extend(["--fail-if", condition]);
    }
    ringfence(&args)
}

#[test]
fn conditions_that_hold_end_with_3_and_name_their_rows() {
    let output = fail_if(&["violations>0"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        stdout(&output).lines().count(),
        3,
        "the rows are printed all the same"
    );
    let text = stderr(&output);
    assert!(
        text.starts_with("ringfence: --fail-if holds in 1 case:\n"),
        "{text}"
    );
    assert!(
        text.contains("sample, defer: violations>0 (it is "),
        "{text}"
    );
    assert!(!text.contains("sample, fence"), "{text}");
}

/// Standard error is a pipe that nobody reads (`2>&1 | head -1`).
#[test]
fn a_closed_standard_error_does_not_change_the_exit_code() {
    let held: &[&str] = &[
        "compare",
        "--repeat",
        "0",
        "--modes",
        "defer",
        "--fail-if",
        "violations>0",
    ];
    for (args, wanted) in [
        (&["compare", "no-such-file"][..], 1),
        (
            &["compare", "--modes", "none", "--fail-if", "violations"],
            2,
        ),
        (held, 3),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(program())
            .args(args)
            .stderr(writer)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(wanted), "{args:?}");
    }
}

#[test]
fn conditions_that_do_not_hold_end_with_0() {
    succeeded(&fail_if(&[
        "fence:violations>0,false_faults>0",
        "iotlb_hit_rate<0",
    ]));
}

#[test]
fn conditions_about_nothing_are_wrong_usage() {
    for (condition, expected) in [
        (
            "violation>0",
            "no numeric field is named \"violation\"; did you mean violations?",
        ),
        ("speed>0", "the fields are maps, "),
        ("strict:violations>0", "mode \"strict\" was not replayed"),
    ] {
        let text = failed(&fail_if(&[condition]), 2);
        assert!(text.contains(expected), "{text}");
    }
    let output = fail_if(&["violations"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("is not a condition"));
}

#[test]
fn wrong_usage_exits_with_2_and_a_hint() {
    let cases: [(&[&str], &str); 15] = [
        (&["compare", "--modes", "fense"], "did you mean fence?"),
        (&["compare", "--mode", "alloc=magazine"], "table is missing"),
        (
            &[
                "compare",
                "--mode",
                "alloc=magazine,table=radix,flush=per-wrap",
            ],
            "only a bitmap",
        ),
        (
            &["compare", "--mode", "alloc=slab,table=radix,flush=burst"],
            "cached-rbtree",
        ),
        (&["compare", "-", "-"], "name it once"),
        (&["trace", "info", "-", "-"], "name it once"),
        (&["trace", "judge", "-", "-"], "name it once"),
        (&["trace", "anonymise", "-"], "name a regular file, not -"),
        (&["compare", "--mode", "fence"], "--modes fence"),
        (&["compare", "--baseline-cycles", "-1"], "above 0"),
        (&["compare", "--iotlb", "16"], "SETSxWAYS"),
        (&["compare", "--iotlb", "15x4"], "powers of two"),
        (&["compare", "--walk-cache", "1,2"], "three numbers"),
        (&["compare", "--json", "--csv"], "cannot be used with"),
        (&["trace", "record", "-o", "x"], "--seconds"),
    ];
    for (args, expected) in cases {
        let output = ringfence(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            stderr(&output).contains(expected),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn errors_end_with_1() {
    let cases: [(&[&str], &str); 4] = [
        (
            &["compare", "--profile", "no-such"],
            "no profile and no file is named no-such",
        ),
        (
            &["compare", "--repeat", "0", "--device", "0000:99:00.0"],
            "did you mean 0000:00:03.0? it names 0000:00:03.0",
        ),
        (
            &["diff", "/nonexistent/a", "/nonexistent/b"],
            "/nonexistent/a: No such file",
        ),
        (
            &[
                "trace",
                "record",
                "--seconds",
                "1",
                "-o",
                "-",
                "--tracefs",
                "/nonexistent",
            ],
            "/nonexistent",
        ),
    ];
    for (args, expected) in cases {
        let text = failed(&ringfence(args), 1);
        assert!(text.contains(expected), "{args:?}: {text}");
    }
}
