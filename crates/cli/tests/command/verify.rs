//! `trace verify`, and the line of `compare` on recorded addresses.

use serde_json::Value;

use crate::{Scratch, failed, ringfence, ringfence_with, root, stderr, stdout, succeeded};

fn data(name: &str) -> String {
    let path = root().join("crates/trace/tests/data").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_trace_from_boot_agrees() {
    let boot = data("boot-7.2.trace.zst");
    let text = succeeded(&ringfence(&["trace", "verify", "--from-boot", &boot]));
    assert!(text.starts_with("boot-7.2: 4128 of 4128 "), "{text}");
    assert!(text.contains("0000:00:07.0: 54 of 54 agree"), "{text}");
    assert!(text.contains("2 allocations not compared"), "{text}");
    let args = ["trace", "verify", "--from-boot", "--json", &boot];
    let found: Value = serde_json::from_str(&succeeded(&ringfence(&args))).unwrap();
    assert_eq!(found["trace"], "boot-7.2");
    assert_eq!(found["model"], "linux-strict");
    assert_eq!(found["verdict"], "agrees");
    assert_eq!(found["reason"], Value::Null);
    assert_eq!(found["agreeing"], 4128);
    assert_eq!(found["first_difference"], Value::Null);
}

/// The sample begins at a later load of its driver. Only `--from-boot` makes that a difference.
#[test]
fn a_difference_is_code_3_with_from_boot() {
    let sample = root().join("crates/trace/data/sample.trace.zst");
    let sample = sample.to_str().unwrap();
    let text = succeeded(&ringfence(&["trace", "verify", sample]));
    assert!(text.contains("without a conclusion"), "{text}");
    let output = ringfence(&["trace", "verify", "--from-boot", sample]);
    let error = failed(&output, 3);
    assert!(error.contains("not all addresses agree"), "{error}");
    let text = stdout(&output);
    assert!(text.starts_with("sample: addresses differ: "), "{text}");
    assert!(
        text.contains("First difference: line 14, allocation 1, 1 pages of 0000:00:03.0"),
        "{text}"
    );
    assert!(
        text.contains("recorded 0xffef9000, the model returns 0xfffff000"),
        "{text}"
    );
}

/// No conclusion is no agreement either.
#[test]
fn a_trace_without_addresses_is_code_3_with_from_boot() {
    let direct = data("direct-7.2.trace.zst");
    let text = succeeded(&ringfence(&["trace", "verify", &direct]));
    assert!(text.contains("no iommu:map events"), "{text}");
    let error = failed(&ringfence(&["trace", "verify", "--from-boot", &direct]), 3);
    assert!(error.contains("no conclusion: "), "{error}");
    let scratch = Scratch::new("verify");
    let parquet = scratch.path("boot.parquet");
    let boot = data("boot-7.2.trace.zst");
    succeeded(&ringfence(&["trace", "convert", &boot, "-o", &parquet]));
    let text = succeeded(&ringfence(&["trace", "verify", &parquet]));
    assert!(text.contains("Parquet"), "{text}");
}

#[test]
fn options_and_standard_input() {
    let boot = std::fs::read(data("boot-7.2.trace.zst")).unwrap();
    let args = ["trace", "verify", "-", "--reserved", "c0000000-febfffff"];
    let text = succeeded(&ringfence_with(&args, &boot));
    assert!(text.starts_with("stdin: 4128 of 4128 "), "{text}");
    for range in ["c0000000", "2000-1000", "x-y", ""] {
        let output = ringfence(&["trace", "verify", "-", "--reserved", range]);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{range}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn limits_are_errors() {
    let boot = data("boot-7.2.trace.zst");
    let sample = root().join("crates/trace/data/sample.trace.zst");
    let sample = sample.to_str().unwrap();
    for (option, limit, trace) in [
        ("--max-devices", "5", boot.as_str()),
        ("--max-device-cpus", "5", &boot),
        ("--max-search", "0", sample),
    ] {
        let output = ringfence(&["trace", "verify", option, limit, trace]);
        let error = failed(&output, 1);
        assert!(error.contains(option), "{error}");
    }
}

/// The model returns no address of a reserved range, which the recording has.
#[test]
fn reserved_addresses_are_not_allocated() {
    let boot = data("boot-7.2.trace.zst");
    let args = [
        "trace",
        "verify",
        "--from-boot",
        "--reserved",
        "fffff000-ffffffff",
    ];
    let output = ringfence(&[&args[..], &[&boot]].concat());
    let error = failed(&output, 3);
    assert!(error.contains("not all addresses agree"), "{error}");
    let text = stdout(&output);
    assert!(text.contains("addresses differ"), "{text}");
}

/// In lazy mode, the recording of strict mode is compared until its first reuse.
#[test]
fn lazy_is_compared_until_the_first_reuse() {
    let recorded = data("recorded-6.12.trace.zst");
    let args = ["trace", "verify", "--lazy", "--json", &recorded];
    let found: Value = serde_json::from_str(&succeeded(&ringfence(&args))).unwrap();
    assert_eq!(found["model"], "linux-lazy");
    assert_eq!(found["verdict"], "agrees");
    assert_eq!(found["allocations"], 1295);
    assert!(found["compared"].as_u64().unwrap() < 1295, "{found}");
    assert_eq!(found["devices"][0]["stop"]["reason"], "lazy-flush");
}

/// `compare` prints the agreement where there is one.
#[test]
fn compare_prints_an_agreement() {
    let boot = data("boot-7.2.trace.zst");
    let run = |trace: &str, form: &[&str]| {
        let mut args = vec!["compare", "--repeat", "0", "--modes", "linux-strict", trace];
        args.extend(form);
        succeeded(&ringfence(&args))
    };
    let line = "Addresses: 4128 of 4128 compared addresses are those of linux-strict.";
    let text = run(&boot, &[]).replace("\n", " ");
    assert!(text.contains(line), "{text}");
    let report: Value = serde_json::from_str(&run(&boot, &["--json"])).unwrap();
    let addresses = &report["traces"][0]["addresses"];
    assert_eq!(addresses["verdict"], "agrees");
    assert_eq!(addresses["agreeing"], 4128);
    assert_eq!(addresses["unattributed"], 2);
    let recorded = run(&data("nvme-6.12.trace.zst"), &[]);
    assert!(!recorded.contains("Addresses:"), "{recorded}");
}
