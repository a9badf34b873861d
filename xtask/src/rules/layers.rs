//! The layer rule: crates depend only on lower layers, `hw` and `dma` never depend on each other,
//! and core crates depend only on core crates.

use std::path::Path;

use serde_json::Value;

use super::CORE;
use crate::violation::Violation;

/// Level of every crate (docs/ARCHITECTURE.md, "Layers"), by package name without its prefix.
const LEVELS: &[(&str, u8)] = &[
    ("types", 0),
    ("memory", 1),
    ("iova", 1),
    ("pgtable", 1),
    ("hw", 2),
    ("dma", 2),
    // Below the software IOMMU, which implements one of its sinks.
    ("virtio-iommu", 2),
    ("vtd", 2),
    ("amd-vi", 2),
    ("riscv-iommu", 2),
    ("smmu-v3", 2),
    ("firmware", 2),
    ("nvme-device", 2),
    ("vfio-user", 2),
    // Shares the encodings of the device.
    ("virtio-iommu-driver", 3),
    // Only its program knows the device.
    ("virtio-iommu-conformance", 3),
    ("pviommu", 3),
    ("riommu-device", 3),
    ("softiommu", 3),
    ("devices", 3),
    ("trace", 3),
    ("c", 4),
    ("papers", 4),
    ("live", 4),
    ("lab", 5),
    ("attack", 6),
    ("experiments", 6),
    ("guest-harness", 6),
    ("sweep", 6),
    ("report", 7),
    ("cli", 8),
    ("python", 8),
];

/// Packages that only test the others and may depend on all of them.
const ABOVE_ALL: &[&str] = &["tests", "fuzz", "qemu-judge"];

/// Packages that depend on no crate: tools must build even if the crates do not.
const INDEPENDENT: &[&str] = &["xtask"];

/// Two crates that share only memory; they do not depend on each other, not even in tests.
const SHARE_ONLY_MEMORY: [&str; 2] = ["hw", "dma"];

const PREFIX: &str = "ringfence-";

/// Checks `packages`, as `cargo metadata` prints them.
pub(super) fn check(packages: &[Value]) -> Vec<Violation> {
    packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Value) -> Vec<Violation> {
    let full_name = package["name"].as_str().unwrap_or_default();
    let name = full_name.strip_prefix(PREFIX).unwrap_or(full_name);
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let mut found = Vec::new();
    let mut report = |message: String| found.push(Violation::error(manifest, 0, message));

    if ABOVE_ALL.contains(&name) {
        return found;
    }
    let level = level_of(name);
    if level.is_none() && !INDEPENDENT.contains(&name) {
        report(format!("{full_name} has no level in the layer table"));
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let Some(other) = dependency["name"]
            .as_str()
            .and_then(|name| name.strip_prefix(PREFIX))
        else {
            continue;
        };
        if SHARE_ONLY_MEMORY.contains(&name) && SHARE_ONLY_MEMORY.contains(&other) {
            report(format!(
                "{name} and {other} never depend on each other, not even in tests"
            ));
            continue;
        }
        if dependency["kind"].as_str() == Some("dev") {
            continue;
        }
        match (level, level_of(other)) {
            (Some(level), Some(below)) if below < level => {
                if CORE.contains(&name) && !CORE.contains(&other) {
                    report(format!("{name} is a core crate and {other} is not"));
                }
            }
            (Some(level), Some(other_level)) => report(format!(
                "{name} (level {level}) depends on {other} (level {other_level}): dependencies \
                must go down"
            )),
            _ => report(format!("{name} may not depend on {other}")),
        }
    }
    found
}

fn level_of(name: &str) -> Option<u8> {
    LEVELS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, level)| *level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::shown;
    use serde_json::json;

    fn found(name: &str, dependency: &str, kind: Option<&str>) -> Vec<String> {
        shown(&check(&[json!({
            "name": name,
            "manifest_path": "Cargo.toml",
            "dependencies": [{"name": dependency, "kind": kind}],
        })]))
    }

    #[test]
    fn downward_is_allowed() {
        for (name, dependency, kind) in [
            ("ringfence-dma", "ringfence-iova", None),
            ("ringfence-lab", "ringfence-hw", None),
            ("ringfence-hw", "ringfence-memory", Some("dev")),
            ("ringfence-iova", "hashbrown", None),
            ("ringfence-tests", "ringfence-hw", None),
            ("xtask", "clap", None),
        ] {
            assert_eq!(
                found(name, dependency, kind),
                [""; 0],
                "{name} -> {dependency}"
            );
        }
    }

    #[test]
    fn everything_else_is_found() {
        for (name, dependency, kind, part) in [
            ("ringfence-iova", "ringfence-dma", None, "must go down"),
            ("ringfence-pgtable", "ringfence-iova", None, "must go down"),
            (
                "ringfence-iova",
                "ringfence-dma",
                Some("build"),
                "must go down",
            ),
            ("ringfence-hw", "ringfence-dma", None, "never"),
            ("ringfence-dma", "ringfence-hw", Some("dev"), "never"),
            ("ringfence-dma", "ringfence-memory", None, "core crate"),
            ("ringfence-lab", "ringfence-tests", None, "may not"),
            ("xtask", "ringfence-types", None, "may not"),
            ("ringfence-new", "clap", None, "no level"),
        ] {
            let found = found(name, dependency, kind);
            assert!(
                found.len() == 1 && found[0].contains(part),
                "{name} -> {dependency}: {found:?}"
            );
        }
    }
}
