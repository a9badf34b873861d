//! Packages, test programs and features of the workspace: what a mutation's test command may name.
//!
//! A renamed test or a removed feature otherwise shows only when the mutations run, hours later.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::patch::TestCommand;
use crate::repo::Repo;

/// One package of the workspace.
#[derive(Debug, Default)]
struct Package {
    tests: BTreeSet<String>,
    features: BTreeSet<String>,
    /// Text of all Rust sources, which contains the names of all tests.
    text: String,
}

/// All packages of the workspace by name.
#[derive(Debug)]
pub(super) struct KnownTests(BTreeMap<String, Package>);

impl KnownTests {
    /// Reads the packages and their sources.
    pub(super) fn read(repo: &Repo) -> anyhow::Result<Self> {
        let mut packages = BTreeMap::new();
        let mut directories: Vec<(PathBuf, String)> = Vec::new();
        for package in &repo.packages()? {
            let name = package["name"].as_str().context("a package has no name")?;
            let manifest = package["manifest_path"].as_str().unwrap_or_default();
            let directory = Path::new(manifest).parent().unwrap_or(Path::new(""));
            let directory = directory.strip_prefix(&repo.root).unwrap_or(directory);
            directories.push((directory.to_owned(), name.to_owned()));
            packages.insert(name.to_owned(), Package::from_metadata(package));
        }
        // The longest directory that contains a source is its package's.
        directories.sort_by_key(|(directory, _)| std::cmp::Reverse(directory.components().count()));
        for source in repo.sources()? {
            let owner = directories
                .iter()
                .find(|(directory, _)| source.path.starts_with(directory));
            if let Some(package) = owner.and_then(|(_, name)| packages.get_mut(name)) {
                package.text.push_str(&repo.read(&source.path)?);
            }
        }
        Ok(Self(packages))
    }

    /// Checks that the package, the test program, the features and the names that `command` selects
    /// exist.
    pub(super) fn check(&self, command: &TestCommand) -> anyhow::Result<()> {
        let words = command.arguments();
        let value = |option: &str| {
            let at = words.iter().position(|word| *word == option)?;
            words.get(at + 1).copied()
        };
        let name = value("-p").context("the test command has no `-p PACKAGE`")?;
        let package = self.0.get(name);
        let package = package.with_context(|| format!("the workspace has no package `{name}`"))?;
        if let Some(test) = value("--test") {
            let exists = package.tests.contains(test);
            ensure!(exists, "`{name}` has no test program `{test}`");
        }
        for feature in value("--features").into_iter().flat_map(|f| f.split(',')) {
            let exists = package.features.contains(feature);
            ensure!(exists, "`{name}` has no feature `{feature}`");
        }
        for filter in filters(&words) {
            for part in filter.split("::").filter(|part| !part.is_empty()) {
                let exists = package.text.contains(part);
                ensure!(exists, "no test of `{name}` can match `{filter}`");
            }
        }
        Ok(())
    }
}

impl Package {
    fn from_metadata(package: &Value) -> Self {
        let targets = package["targets"].as_array().into_iter().flatten();
        let features = package["features"].as_object().into_iter().flatten();
        Self {
            tests: targets
                .filter(|target| target["kind"][0] == "test")
                .filter_map(|target| target["name"].as_str().map(str::to_owned))
                .collect(),
            features: features.map(|(name, _)| name.clone()).collect(),
            text: String::new(),
        }
    }
}

/// Returns the words that select tests by name: neither options nor their values.
fn filters<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let mut filters = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        match *word {
            "-p" | "--test" | "--features" | "--skip" | "--test-threads" => {
                rest.next();
            }
            option if option.starts_with('-') => {}
            filter => filters.push(filter),
        }
    }
    filters
}

#[cfg(test)]
mod tests {
    use super::super::patch::Mutation;
    use super::*;

    fn known() -> KnownTests {
        let package = Package {
            tests: BTreeSet::from(["order".to_owned()]),
            features: BTreeSet::from(["parquet".to_owned()]),
            text: "mod flush { fn frees_early() {} }".to_owned(),
        };
        KnownTests(BTreeMap::from([("a".to_owned(), package)]))
    }

    fn check(arguments: &str) -> Result<(), String> {
        let text = format!("# breaks: a\n# kill: cargo test {arguments}\n--- a/x\n");
        let mutation = Mutation::parse(Path::new("x.patch"), &text).unwrap();
        known()
            .check(&mutation.kill)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn names_that_exist_pass() {
        for arguments in [
            "-p a",
            "-p a --test order",
            "-p a --features parquet --test order flush::frees",
            "-p a --lib -- frees_early --exact",
            "-p a --doc",
        ] {
            assert_eq!(check(arguments), Ok(()), "{arguments}");
        }
    }

    #[test]
    fn names_that_do_not_exist_are_refused() {
        for (arguments, error) in [
            ("--lib", "the test command has no `-p PACKAGE`"),
            ("-p b", "the workspace has no package `b`"),
            ("-p a --test layer", "`a` has no test program `layer`"),
            ("-p a --features zstd", "`a` has no feature `zstd`"),
            ("-p a frees_late", "no test of `a` can match `frees_late`"),
            (
                "-p a -- flush::late",
                "no test of `a` can match `flush::late`",
            ),
        ] {
            assert_eq!(check(arguments), Err(error.to_owned()));
        }
    }

    #[test]
    fn this_workspace_is_read() {
        let known = KnownTests::read(&Repo::find().unwrap()).unwrap();
        let dma = &known.0["ringfence-dma"];
        assert!(dma.tests.contains("layer"));
        assert!(dma.text.contains("fn "));
        assert!(known.0["ringfence-trace"].features.contains("parquet"));
    }
}
