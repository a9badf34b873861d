//! `trace judge`: reallocated pages that a device could reach.

use serde_json::Value;

use crate::{Scratch, failed, ringfence, ringfence_with, root, stderr, stdout, succeeded};

fn data(name: &str) -> String {
    let path = root().join("crates/trace/tests/data/judge").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_find_is_code_3_and_the_verdict_comes_first() {
    let lazy = data("lazy.txt");
    let output = ringfence(&["trace", "judge", &lazy]);
    let error = failed(&output, 3);
    assert!(error.contains("reallocated pages"), "{error}");
    let text = stdout(&output);
    let text = text.replace('\n', " ").replace("  ", " ");
    let verdict = "lazy: 1 page was reallocated and reachable by a device for up to 3.00 ms";
    assert!(text.starts_with(verdict), "{text}");
    let exposure = "0000:00:04.0 could write 0x12345000 for 3.00 ms until its free: single mapping \
        of line 4, freed by fio-100 (line 6), allocated by bash-200 (line 8, order 0) 300 us after \
        the unmap (line 5)";
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(&words(exposure)), "{text}");
    assert!(text.contains("Not seen: objects of kmalloc"), "{text}");

    let output = ringfence(&["trace", "judge", "--json", &lazy, &data("strict.txt")]);
    failed(&output, 3);
    let found: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&found[0]["trace"], &found[0]["found"]),
        (&"lazy".into(), &true.into())
    );
    assert_eq!(found[0]["stale"]["longest_ns"], 3_000_000);
    assert_eq!(found[0]["longest"][0]["allocated"]["task"], "bash");
    assert_eq!(found[0]["longest"][0]["end"], "freed");
    assert_eq!(found[0]["devices"][0]["domain"], "lazy");
    assert_eq!(
        (&found[1]["found"], &found[1]["complete"]),
        (&false.into(), &true.into())
    );
    assert_eq!(found[1]["devices"][0]["domain"], "strict");
}

#[test]
fn nothing_found_is_code_0() {
    let text = succeeded(&ringfence(&["trace", "judge", &data("strict.txt")]));
    assert!(
        text.starts_with("strict: no page was reallocated"),
        "{text}"
    );
    // The window of the user replaces the rule.
    let lazy = data("lazy.txt");
    let text = succeeded(&ringfence(&["trace", "judge", "--window", "200us", &lazy]));
    assert!(
        text.contains("at most 200 us, as given by --window"),
        "{text}"
    );
    // Lost events leave no proof.
    let lost = std::fs::read(data("lost.txt")).unwrap();
    let args = ["trace", "judge", "--window", "0s", "-"];
    let text = succeeded(&ringfence_with(&args, &lost));
    assert!(
        text.contains("proves nothing") && text.contains("7 events are lost"),
        "{text}"
    );
    // A device without translation is named, and not judged.
    let text = succeeded(&ringfence(&["trace", "judge", &data("physical.txt")]));
    assert!(text.contains("identity: reaches all memory"), "{text}");
}

#[test]
fn errors_have_codes_1_and_2() {
    let error = failed(&ringfence(&["trace", "judge", &data("no-pages.txt")]), 1);
    assert!(
        error.contains("record with `ringfence trace record --pages`"),
        "{error}"
    );
    let error = failed(
        &ringfence(&["trace", "judge", "--max-pages", "0", &data("lazy.txt")]),
        1,
    );
    assert!(
        error.contains("lazy.txt:4: ") && error.contains("--max-pages"),
        "{error}"
    );
    for args in [
        &["trace", "judge"][..],
        &["trace", "judge", "--window", "10", "x"],
        &["trace", "judge", "--page-size", "8k", "x"],
        &["trace", "judge", "--record", "1", "x"],
        &["trace", "judge", "--keep", "y", "x"],
    ] {
        assert_eq!(ringfence(args).status.code(), Some(2), "{args:?}");
    }
}

/// The options of a recording have no effect on a trace.
#[test]
fn options_of_a_recording_are_refused_for_traces() {
    let strict = data("strict.txt");
    for option in [["--buffer", "128"], ["--tracefs", "/nowhere"]] {
        let args = [&["trace", "judge", &strict][..], &option].concat();
        let output = ringfence(&args);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(option[0]), "{error}");
    }
}

/// Page frame 0x1234 of a kernel with pages of 64 KiB holds the unmapped page.
#[test]
fn page_frames_have_the_page_size_of_the_kernel() {
    let lazy = std::fs::read_to_string(data("lazy.txt")).unwrap();
    let lazy = lazy.replace("pfn=0x12345", "pfn=0x1234");
    let judge = |size| {
        let args = ["trace", "judge", "--page-size", size, "-"];
        ringfence_with(&args, lazy.as_bytes())
    };
    succeeded(&judge("4k"));
    failed(&judge("64k"), 3);
}

/// Without the kernel's events, nothing is recorded and nothing kept.
#[test]
fn a_failed_recording_keeps_no_file() {
    let scratch = Scratch::new("judge");
    let tracefs = scratch.path("tracefs");
    std::fs::create_dir_all(format!("{tracefs}/instances")).unwrap();
    let keep = scratch.path("kept.trace");
    let args = [
        "trace",
        "judge",
        "--record",
        "1",
        "--tracefs",
        &tracefs,
        "--keep",
        &keep,
    ];
    let output = ringfence(&args);
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("no dma events"), "{error}");
    assert!(std::fs::metadata(&keep).is_err());
    let args = ["trace", "judge", "--record", "1", "--keep", "x.parquet"];
    let error = failed(&ringfence(&args), 2);
    assert!(error.contains("trace convert"), "{error}");
}
