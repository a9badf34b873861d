//! `compare --iommu`: families of IOMMUs beside VT-d.

use serde_json::Value;

use crate::{failed, ringfence, stderr, succeeded};

fn report(more: &[&str]) -> Value {
    let args = ["compare", "--json", "--repeat", "0"];
    let args: Vec<&str> = args.iter().chain(more).copied().collect();
    serde_json::from_str(&succeeded(&ringfence(&args))).unwrap()
}

fn texts<'a>(report: &'a Value, key: &str) -> Vec<&'a str> {
    let rows = report["results"].as_array().unwrap();
    rows.iter().map(|row| row[key].as_str().unwrap()).collect()
}

#[test]
fn each_row_has_its_family() {
    for family in ["vtd", "amd", "smmuv3", "riscv"] {
        let report = report(&["--iommu", family]);
        assert_eq!(report["iommu"], family);
        let others = ["none", "riommu"];
        for (mode, iommu) in texts(&report, "mode")
            .into_iter()
            .zip(texts(&report, "iommu"))
        {
            let expected = if others.contains(&mode) { mode } else { family };
            assert_eq!(iommu, expected, "{mode}");
        }
        let strict = texts(&report, "status");
        assert!(strict.iter().all(|status| *status == "ok"), "{strict:?}");
        if family != "vtd" {
            let modes = [
                "none",
                "linux-strict",
                "linux-lazy",
                "fence",
                "fence-burst",
                "copy",
            ];
            assert_eq!(texts(&report, "mode"), modes);
            assert_eq!(report["modes_omitted"], serde_json::json!([]));
        }
        let reads = |mode: &str| {
            let rows = report["results"].as_array().unwrap();
            let row = rows.iter().find(|row| row["mode"] == mode).unwrap();
            row["reads_against_direction"].as_u64().unwrap()
        };
        let readable = ["smmuv3", "riscv"].contains(&family);
        assert_eq!(reads("fence") > 0, readable, "{family}");
    }
}

#[test]
fn costs_of_another_family_are_refused() {
    let refused = |args: &[&str]| {
        let args: Vec<&str> = ["compare"].iter().chain(args).copied().collect();
        failed(&ringfence(&args), 2)
    };
    let text = refused(&["--iommu", "amd", "--profile", "grace-2025"]);
    assert!(
        text.contains(
            "profile grace-2025 is of a machine with smmuv3, and its costs are not those of amd"
        ),
        "{text}"
    );
    let text = refused(&["--iommu", "smmuv3", "--modes", "fence,calgary"]);
    assert!(
        text.contains("--iommu is not applicable to calgary: its table is Calgary's"),
        "{text}"
    );
    let composed = "alloc=magazine,table=radix,flush=per-unmap";
    let text = refused(&["--iommu", "riscv", "--mode", composed]);
    assert!(text.contains("modelled for VT-d only"), "{text}");
    let output = ringfence(&["compare", "--iommu", "sun"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("vtd, amd, smmuv3, riscv"), "{text}");
}

#[test]
fn costs_without_a_profile_are_unknown_or_given() {
    let profile = |more: &[&str]| report(&[&["--modes", "fence"], more].concat());
    let unknown = profile(&["--iommu", "riscv"]);
    assert_eq!(unknown["profile"]["iommu"], "riscv");
    assert!(unknown["profile"]["invalidation_cycles"].is_null());
    assert!(unknown["results"][0]["modelled_cycles"].is_null());
    let given = profile(&["--iommu", "riscv", "--invalidation-cycles", "1000"]);
    assert_eq!(given["profile"]["invalidation_cycles"], 1000);
    assert!(given["results"][0]["modelled_cycles"].as_f64().unwrap() >= 1000.0);
    let epyc = profile(&["--iommu", "amd", "--profile", "epyc-2023"]);
    assert_eq!(epyc["profile"]["name"], "epyc-2023");
    // A profile alone selects no family.
    let args = [
        "compare",
        "--repeat",
        "0",
        "--modes",
        "fence",
        "--profile",
        "grace-2025",
    ];
    let text = succeeded(&ringfence(&args));
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        text.contains("of a machine with smmuv3, and the replay models vtd"),
        "{text}"
    );
}
