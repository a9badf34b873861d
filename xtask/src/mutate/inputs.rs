//! Inputs of a mutation's result: its patch, and the files that its tests are built from or read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::PATCHES;
use super::patch::Mutation;
use crate::repo::Repo;

/// Folder of most packages, one folder each.
const CRATES: &str = "crates";
/// Folders outside `crates` that decide results only where a source names them. The tests of most
/// packages include modules of the others.
const NAMED: [&str; 8] = [
    ".ci",
    "examples",
    "fuzz",
    "kmod",
    "tests/fuzz",
    "tests/guest",
    "tests/page",
    "tests/qemu",
];
/// The package of this program. Its tests read the whole tree.
const XTASK: &str = "xtask";

/// Fingerprints of the tree's files, and who reads them.
pub(super) struct Inputs {
    files: BTreeMap<PathBuf, u64>,
    packages: BTreeMap<String, Package>,
    /// Fingerprints of packages, kept because each is used by many mutations.
    tested: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Package {
    directory: PathBuf,
    dependencies: BTreeSet<String>,
    /// Dependencies of the tests alone.
    test_dependencies: BTreeSet<String>,
    /// Text of all Rust sources, which names other packages' files and documents that are read.
    text: String,
}

impl Inputs {
    pub(super) fn read(repo: &Repo) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        let mut texts: BTreeMap<PathBuf, String> = BTreeMap::new();
        for path in repo.files()? {
            let bytes = fs::read(repo.root.join(&path)).context(path.display().to_string())?;
            if path.extension().is_some_and(|extension| extension == "rs") {
                let text = texts.entry(owner(&path).to_owned()).or_default();
                text.push_str(&String::from_utf8_lossy(&bytes));
            }
            files.insert(path, fingerprint(&bytes));
        }
        let mut packages = BTreeMap::new();
        for metadata in &repo.packages()? {
            let name = metadata["name"].as_str().context("a package has no name")?;
            let manifest = metadata["manifest_path"].as_str().unwrap_or_default();
            let directory = Path::new(manifest).parent().unwrap_or(Path::new(""));
            let directory = directory.strip_prefix(&repo.root).unwrap_or(directory);
            let mut package = Package::from_metadata(metadata);
            package.text = texts.get(directory).cloned().unwrap_or_default();
            package.directory = directory.to_owned();
            packages.insert(name.to_owned(), package);
        }
        Ok(Self {
            files,
            packages,
            tested: BTreeMap::new(),
        })
    }

    /// Returns a fingerprint of what decides the mutation's result. A change elsewhere keeps it.
    pub(super) fn of(&mut self, mutation: &Mutation) -> u64 {
        let package = mutation.kill.package().unwrap_or_default();
        let tested = match self.tested.get(package) {
            Some(tested) => *tested,
            None => {
                let tested = self.tested(package);
                self.tested.insert(package.to_owned(), tested);
                tested
            }
        };
        let mut hasher = DefaultHasher::new();
        (tested, self.files.get(&mutation.path)).hash(&mut hasher);
        hasher.finish()
    }

    /// Returns a fingerprint of what the package's tests are built from or read, without patches.
    fn tested(&self, package: &str) -> u64 {
        let directories = self.directories(package);
        // The tests of a dependency are neither built nor read.
        let whole = self.read_whole(package);
        let is_test = |path: &Path, owner: &Path| {
            let below = path.strip_prefix(owner).unwrap_or(path);
            ["tests", "benches", "examples"]
                .iter()
                .any(|folder| below.starts_with(folder))
        };
        let mut text = String::new();
        for package in self.packages.values() {
            if directories.contains(package.directory.as_path()) {
                text.push_str(&package.text);
            }
        }
        let is_named = |folder: &str| {
            ['/', '"']
                .iter()
                .any(|end| text.contains(&format!("{folder}{end}")))
        };
        let folders = NAMED.map(|folder| {
            let path = Path::new(folder);
            (path, directories.contains(path) || is_named(folder))
        });
        let counts = |path: &Path| {
            if path.starts_with(PATCHES) {
                return false;
            }
            if package == XTASK {
                return true;
            }
            let is_document = path.extension().is_some_and(|extension| extension == "md");
            if path.starts_with("docs") || is_document {
                let name = path.file_name().unwrap_or_default();
                return text.contains(name.to_string_lossy().as_ref());
            }
            let owner = owner(path);
            if path.starts_with(CRATES) {
                let is_read = whole.contains(owner) || !is_test(path, owner);
                return directories.contains(owner) && is_read;
            }
            let folder = folders.iter().find(|(folder, _)| *folder == owner);
            folder.map_or(!path.starts_with(XTASK), |(_, counts)| *counts)
        };
        let mut hasher = DefaultHasher::new();
        for file in self.files.iter().filter(|(path, _)| counts(path)) {
            file.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Returns the directories of the package and of those whose files its sources name.
    fn read_whole(&self, name: &str) -> BTreeSet<&Path> {
        let Some(package) = self.packages.get(name) else {
            return BTreeSet::new();
        };
        let all = self
            .packages
            .values()
            .map(|other| other.directory.as_path());
        all.filter(|directory| {
            let folder = directory.file_name().unwrap_or_default();
            *directory == package.directory
                || package
                    .text
                    .contains(&format!("../{}/", folder.to_string_lossy()))
        })
        .collect()
    }

    /// Returns the directories of the package, of its dependencies, and of those whose files its
    /// tests name.
    fn directories(&self, name: &str) -> BTreeSet<&Path> {
        let mut left = vec![name];
        if let Some(package) = self.packages.get(name) {
            left.extend(package.test_dependencies.iter().map(String::as_str));
        }
        let whole = self.read_whole(name);
        for (other, package) in &self.packages {
            if whole.contains(package.directory.as_path()) {
                left.push(other);
            }
        }
        let mut directories = BTreeSet::new();
        while let Some(name) = left.pop() {
            if let Some(package) = self.packages.get(name)
                && directories.insert(package.directory.as_path())
            {
                left.extend(package.dependencies.iter().map(String::as_str));
            }
        }
        directories
    }
}

impl Package {
    fn from_metadata(metadata: &Value) -> Self {
        let mut package = Self::default();
        for dependency in metadata["dependencies"].as_array().into_iter().flatten() {
            let Some(name) = dependency["name"].as_str() else {
                continue;
            };
            if dependency["kind"] == "dev" {
                package.test_dependencies.insert(name.to_owned());
            } else {
                package.dependencies.insert(name.to_owned());
            }
        }
        package
    }
}

/// Returns the directory in `crates` or the named folder that has this file, or else the first
/// folder.
fn owner(path: &Path) -> &Path {
    if let Some(folder) = NAMED.iter().find(|folder| path.starts_with(folder)) {
        return Path::new(folder);
    }
    let depth = if path.starts_with(CRATES) { 2 } else { 1 };
    path.ancestors()
        .find(|ancestor| ancestor.components().count() == depth)
        .unwrap_or(path)
}

fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutation(package: &str) -> Mutation {
        let text = format!("# breaks: a\n# kill: cargo test -p {package}\n--- a/x\n");
        Mutation::parse(Path::new("tests/mutations/a.patch"), &text).unwrap()
    }

    /// `upper` depends on `middle`, which depends on `lower`. The tests of `lower` depend on
    /// `upper` and include a file of `side`.
    fn inputs() -> Inputs {
        let package =
            |name: &str, dependencies: &[&str], test_dependencies: &[&str], text: &str| {
                let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
                let package = Package {
                    directory: Path::new(CRATES).join(name),
                    dependencies: names(dependencies),
                    test_dependencies: names(test_dependencies),
                    text: text.to_owned(),
                };
                (name.to_owned(), package)
            };
        let files = [
            "Cargo.lock",
            "crates/lower/src/lib.rs",
            "crates/lower/tests/order.rs",
            "crates/middle/src/lib.rs",
            "crates/middle/README.md",
            "crates/side/src/lib.rs",
            "crates/side/tests/case.rs",
            "crates/upper/src/lib.rs",
            "docs/A.md",
            "docs/B.md",
            "kmod/main.c",
            "tests/mutations/a.patch",
            "tests/mutations/b.patch",
            "xtask/src/main.rs",
        ];
        Inputs {
            files: files.map(|path| (PathBuf::from(path), 0)).into(),
            packages: BTreeMap::from([
                package(
                    "lower",
                    &[],
                    &["upper"],
                    "#[path = \"../../side/src/lib.rs\"]",
                ),
                package("middle", &["lower"], &["side"], "read(\"A.md\")"),
                package("side", &[], &[], "read(\"../../kmod\")"),
                package("upper", &["middle"], &[], ""),
            ]),
            tested: BTreeMap::new(),
        }
    }

    #[test]
    fn only_what_the_tests_read_changes_a_result() {
        for (package, counted) in [
            (
                "lower",
                "Cargo.lock lower middle side upper order.rs case.rs A.md main.c a.patch",
            ),
            ("middle", "Cargo.lock lower middle side A.md main.c a.patch"),
            ("side", "Cargo.lock side case.rs main.c a.patch"),
            ("upper", "Cargo.lock lower middle upper A.md a.patch"),
        ] {
            let mutation = mutation(package);
            let before = inputs().of(&mutation);
            for path in inputs().files.keys() {
                let mut changed = inputs();
                changed.files.insert(path.clone(), 1);
                let is_source = path.ends_with("lib.rs");
                let named = if is_source { owner(path) } else { path };
                let name = named.file_name().unwrap().to_str().unwrap();
                assert_eq!(
                    changed.of(&mutation) != before,
                    counted.split(' ').any(|counted| counted == name),
                    "{package}, {}",
                    path.display()
                );
            }
        }
    }

    #[test]
    fn the_tests_of_this_program_read_everything_but_other_patches() {
        let mutation = mutation(XTASK);
        let before = inputs().of(&mutation);
        for path in inputs().files.keys() {
            let mut changed = inputs();
            changed.files.insert(path.clone(), 1);
            let counts = !path.ends_with("b.patch");
            assert_eq!(
                changed.of(&mutation) != before,
                counts,
                "{}",
                path.display()
            );
        }
    }

    #[test]
    fn a_new_file_changes_results() {
        let mut more = inputs();
        more.files.insert("crates/lower/src/new.rs".into(), 0);
        assert_ne!(more.of(&mutation("upper")), inputs().of(&mutation("upper")));
        assert_eq!(more.of(&mutation("side")), inputs().of(&mutation("side")));
    }

    #[test]
    fn this_workspace_is_read() {
        let inputs = Inputs::read(&Repo::find().unwrap()).unwrap();
        let directories = inputs.directories("ringfence-hw");
        // Its tests include files of `papers`.
        for name in ["hw", "types", "papers"] {
            let directory = Path::new(CRATES).join(name);
            assert!(directories.contains(directory.as_path()), "{name}");
        }
        assert!(!directories.contains(Path::new("crates/live")));
        let directories = inputs.directories("ringfence-qemu-judge");
        assert!(directories.contains(Path::new("tests/qemu")));
        let judge = &inputs.packages["ringfence-qemu-judge"];
        assert!(!judge.text.is_empty());
    }
}
