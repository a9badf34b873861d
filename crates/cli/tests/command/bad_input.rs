//! Traces that are none: one line that says which file, which line and why; never a panic.

use ringfence_trace::SAMPLE;

use crate::{Scratch, failed, ringfence, ringfence_with, succeeded};

const LINE: &str = "     swapper/0-0       [000] d.h2.    12.345678: ";

#[test]
fn every_kind_of_damage_is_one_clear_line() {
    let scratch = Scratch::new("bad");
    let half = &SAMPLE[..SAMPLE.len() / 2];
    let long = [LINE.as_bytes(), &vec![b'x'; 1 << 20], b"\n"].concat();
    let malformed = format!("{LINE}dma_unmap_phys: what is this\n");
    let second = format!("# tracer: nop\n{malformed}");
    let cases: [(&str, &[u8], &str); 6] = [
        ("cut.zst", half, "damaged or cut"),
        ("binary", &[0, 159, 146, 150, 10, 0, 1, 2, 3], "binary:1"),
        ("long", &long, "long:1: "),
        ("malformed", malformed.as_bytes(), "malformed:1: "),
        ("second", second.as_bytes(), "second:2: "),
        (
            "noise.zst",
            &[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3, 4, 5],
            "damaged or cut",
        ),
    ];
    for (name, content, expected) in cases {
        let path = scratch.file(name, content);
        for command in [
            &["compare", "--repeat", "0", "--modes", "fence"][..],
            &["trace", "info"],
        ] {
            let args: Vec<&str> = command.iter().copied().chain([path.as_str()]).collect();
            let text = failed(&ringfence(&args), 1);
            assert!(
                text.contains(&path) && text.contains(expected),
                "{name}: {text}"
            );
        }
    }
}

#[test]
fn missing_files_and_directories_are_named() {
    let scratch = Scratch::new("missing");
    let plots = "/proc/no/plots";
    for path in [scratch.path("nothing"), scratch.path("")] {
        let text = failed(&ringfence(&["compare", &path]), 1);
        assert!(text.contains(&format!("{path}: cannot be read")), "{text}");
        // Before the first trace is replayed, so that nothing is printed.
        let second = scratch.file("first", SAMPLE);
        let output = ringfence(&["compare", "--repeat", "0", &second, &path]);
        assert!(failed(&output, 1).contains(&path) && output.stdout.is_empty());
    }
    let output = ringfence(&["compare", "--repeat", "0", "--plot", plots]);
    assert!(failed(&output, 1).contains(plots) && output.stdout.is_empty());
}

#[test]
fn lenient_reading_counts_instead() {
    let bad = format!("{LINE}dma_unmap_phys: what is this\n");
    let text = succeeded(&ringfence_with(
        &[
            "compare",
            "-",
            "--lenient",
            "--repeat",
            "0",
            "--modes",
            "fence",
        ],
        bad.as_bytes(),
    ));
    assert!(text.contains("1 malformed line was skipped"), "{text}");
}

#[test]
fn an_empty_trace_gives_rows_of_nothing() {
    let text = succeeded(&ringfence_with(
        &["compare", "-", "--json", "--repeat", "1"],
        b"",
    ));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    for row in report["results"].as_array().unwrap() {
        assert_eq!(row["maps"], 0);
        // Nothing was mapped, so nothing was measured.
        assert!(row["relative_throughput"].is_null(), "{row}");
    }
}

#[test]
fn profiles_are_checked() {
    let scratch = Scratch::new("profiles");
    let good = succeeded(&ringfence(&["calibrate"]));
    let cases = [
        ("nonsense", "not toml at all [".to_owned(), ""),
        ("unknown", format!("{good}\nspeed = 3\n"), "unknown field"),
        (
            "slip",
            good.replace("iotlb_sets = 16", "iotlb_sets = 17"),
            "powers of two",
        ),
        (
            "zero",
            good.replace("baseline_cycles = 908.0", "baseline_cycles = 0.0"),
            "above 0",
        ),
    ];
    for (name, text, expected) in cases {
        let path = scratch.file(name, text.as_bytes());
        let text = failed(&ringfence(&["compare", "--profile", &path]), 1);
        assert!(
            text.contains(&path) && text.contains(expected),
            "{name}: {text}"
        );
    }
}
