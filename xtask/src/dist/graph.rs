//! The packages that a program links.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::Context;
use serde_json::Value;

use crate::process;
use crate::repo::Repo;

/// A package of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    /// In the manifest's form, which for old crates is not that of SPDX.
    pub(super) licence: Option<String>,
    /// Digest of its archive in the registry; none for a package of the workspace.
    pub(super) checksum: Option<String>,
    pub(super) directory: PathBuf,
    /// Places in [`Graph::packages`] of the packages that it links.
    pub(super) links: Vec<usize>,
}

/// A program and all packages that it links. Macros and build scripts run when it is built, so they
/// and their dependencies are not among these.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) root: usize,
    /// Sorted by name and version.
    pub(super) packages: Vec<Package>,
}

impl Graph {
    pub(super) fn read(repo: &Repo, root: &str) -> anyhow::Result<Self> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let json = process::capture(process::command(&repo.root, "cargo").args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--filter-platform",
            &target,
        ]))?;
        let metadata = serde_json::from_str(&json).context("cargo metadata")?;
        Self::of(&metadata, &repo.read("Cargo.lock")?, root)
    }

    /// Builds the graph from the output of `cargo metadata` and from Cargo.lock.
    pub(super) fn of(metadata: &Value, lock: &str, root: &str) -> anyhow::Result<Self> {
        let by_id = index(&metadata["packages"]);
        let nodes = index(&metadata["resolve"]["nodes"]);
        let root = by_id
            .iter()
            .find(|(_, package)| package["name"] == root)
            .map(|(id, _)| *id)
            .with_context(|| format!("no package {root}"))?;
        let linked = |id: &str| -> Vec<&str> {
            array(&nodes[id]["deps"])
                .filter(|dependency| {
                    array(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null())
                })
                .filter_map(|dependency| dependency["pkg"].as_str())
                .filter(|id| by_id.get(id).is_some_and(|package| !is_macro(package)))
                .collect()
        };
        let mut found = BTreeSet::from([root]);
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            open.extend(linked(id).into_iter().filter(|id| found.insert(id)));
        }
        let text = |id: &str, field: &str| by_id[id][field].as_str().map(str::to_owned);
        let mut ids: Vec<&str> = found.into_iter().collect();
        ids.sort_by_key(|id| (text(id, "name"), text(id, "version")));
        let index_of = |id: &str| ids.iter().position(|known| *known == id);
        let checksums = checksums(lock);
        let packages = ids
            .iter()
            .map(|id| {
                let name = text(id, "name").context("a package has no name")?;
                let version = text(id, "version").context("a package has no version")?;
                let mut links: Vec<usize> = linked(id).into_iter().filter_map(index_of).collect();
                links.sort_unstable();
                let manifest = text(id, "manifest_path").unwrap_or_default();
                Ok(Package {
                    checksum: checksums.get(&(name.as_str(), version.as_str())).cloned(),
                    licence: text(id, "license"),
                    directory: PathBuf::from(manifest).with_file_name(""),
                    name,
                    version,
                    links,
                })
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            root: index_of(root).context("the root is in the graph")?,
            packages,
        })
    }
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn index(list: &Value) -> BTreeMap<&str, &Value> {
    array(list)
        .filter_map(|entry| Some((entry["id"].as_str()?, entry)))
        .collect()
}

fn is_macro(package: &Value) -> bool {
    array(&package["targets"]).any(|target| array(&target["kind"]).any(|k| k == "proc-macro"))
}

/// Returns the digests in Cargo.lock by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), String> {
    let mut found = BTreeMap::new();
    for entry in lock.split("[[package]]") {
        let field = |name: &str| {
            entry.lines().find_map(|line| {
                let value = line.strip_prefix(name)?.strip_prefix(" = \"")?;
                value.strip_suffix('"')
            })
        };
        if let (Some(name), Some(version), Some(sum)) =
            (field("name"), field("version"), field("checksum"))
        {
            found.insert((name, version), sum.to_owned());
        }
    }
    found
}
