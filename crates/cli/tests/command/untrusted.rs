//! Bytes of an input do not reach a terminal as they are.

use crate::{Scratch, ringfence};

/// A device of this name sets the window's title, turns red, and switches to a C1 sequence.
const NAME: &str = "\x1b]0;owned\x07\x1b[31mdev\u{9b}1m";

fn line(name: &str) -> String {
    format!(
        "t-1 [000] ..... 1.0: dma_map_phys: {name} dir=TO_DEVICE dma_addr=1000 size=4096 \
        phys_addr=1000 attrs=\n"
    )
}

/// Neither stream holds what a terminal obeys.
#[track_caller]
fn is_tame(args: &[&str]) {
    let output = ringfence(args);
    for stream in [&output.stdout, &output.stderr] {
        let text = String::from_utf8_lossy(stream);
        let obeyed = |c: char| c.is_control() && c != '\n' && c != '\r';
        assert!(!text.contains(obeyed), "{args:?}: {text:?}");
    }
    assert!(output.stdout.len() + output.stderr.len() > 20, "{args:?}");
}

#[test]
fn names_of_devices_files_and_rows_are_escaped() {
    let scratch = Scratch::new("escape");
    let plain = scratch.file("plain.trace", line(NAME).as_bytes());
    // A file of such a name, too.
    let file = format!("a{NAME}.trace").replace('/', "");
    let file = scratch.file(&file, line(NAME).as_bytes());
    let bad = scratch.file("bad.trace", format!("{NAME} is no event\n").as_bytes());
    for trace in [&plain, &file, &bad] {
        let quick = ["--repeat", "0", "--modes", "fence,defer"];
        let compare = |more: &'static [&'static str]| {
            let args = ["compare", trace].into_iter().chain(quick);
            args.chain(more.iter().copied()).collect::<Vec<&str>>()
        };
        for form in [&[][..], &["--json"], &["--csv"], &["--markdown"]] {
            is_tame(&compare(form));
        }
        is_tame(&compare(&["--device", "none"]));
        is_tame(&compare(&["--fail-if", "maps>0"]));
        is_tame(&["trace", "info", trace]);
        is_tame(&["trace", "info", trace, "--json"]);
    }
    for form in ["--markdown", "--csv"] {
        is_tame(&[
            "size",
            "--modes",
            "fence",
            "--ring-entries",
            "1",
            form,
            &plain,
        ]);
    }
    is_tame(&["size", "--modes", "fence", "--ring-entries", "1", &plain]);
    let missing = scratch.path(&format!("none{NAME}").replace('/', ""));
    is_tame(&["compare", &missing]);
    is_tame(&["compare", "--profile", &missing]);
}

#[test]
fn reports_and_profiles_are_escaped() {
    let scratch = Scratch::new("escape-report");
    let report = |mode: &str| {
        let rows = serde_json::json!([{
            "trace": NAME, "mode": mode, "map_cycles": 1, "unmap_cycles": 1, "colocated": 0,
            "violations": {"total": 1}, "false_faults": 0, NAME: 1,
        }]);
        serde_json::json!({ "schema": 3, "results": rows }).to_string()
    };
    let a = scratch.file("a.json", report(NAME).as_bytes());
    let b = scratch.file("b.json", report("fence").as_bytes());
    let more = report(NAME).replace("\"total\":1", "\"total\":2");
    let c = scratch.file("c.json", more.as_bytes());
    for (first, second) in [(&a, &b), (&a, &c), (&a, &a)] {
        is_tame(&["diff", first, second]);
        is_tame(&["diff", first, second, "--max-regression", "1"]);
        is_tame(&["diff", first, second, "--json"]);
    }
    let profile = String::from_utf8(ringfence(&["calibrate"]).stdout).unwrap();
    let named = profile.replace("name = \"", "name = \"\\u001b]0;owned\\u0007");
    assert_ne!(named, profile);
    let profile = scratch.file("named.toml", named.as_bytes());
    for form in [&[][..], &["--json"], &["--markdown"]] {
        let args = [
            "compare",
            "--repeat",
            "1",
            "--modes",
            "fence",
            "--profile",
            &profile,
        ];
        let args: Vec<&str> = args.into_iter().chain(form.iter().copied()).collect();
        is_tame(&args);
    }
    let broken = scratch.file("broken.toml", format!("{NAME} = 1\n").as_bytes());
    is_tame(&["compare", "--profile", &broken]);
}
