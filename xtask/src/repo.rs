//! The repository: its location and its files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::process;
use crate::source::Source;

/// The working tree that tasks work on.
#[derive(Debug)]
pub(crate) struct Repo {
    pub(crate) root: PathBuf,
    sources: OnceLock<Vec<Source>>,
}

impl Repo {
    /// Returns the tree below `root`.
    pub(crate) fn at(root: PathBuf) -> Self {
        Self {
            root,
            sources: OnceLock::new(),
        }
    }

    /// Returns the tree that this program was built from.
    pub(crate) fn find() -> anyhow::Result<Self> {
        // Cargo sets the variable for `cargo run`; otherwise the compiled-in value applies.
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest
            .parent()
            .context("xtask lies directly below the root")?
            .to_owned();
        ensure!(
            root.join("Cargo.toml").is_file(),
            "{} is not a repository",
            root.display()
        );
        Ok(Self::at(root))
    }

    /// Reads a file, named relative to the root.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> anyhow::Result<String> {
        let path = path.as_ref();
        fs::read_to_string(self.root.join(path)).with_context(|| path.display().to_string())
    }

    /// Returns the files that git tracks or would track, relative to the root, sorted.
    pub(crate) fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let listing = process::capture(process::command(&self.root, "git").args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let files: BTreeSet<PathBuf> = listing
            .split('\0')
            .filter(|name| !name.is_empty())
            .map(PathBuf::from)
            // The index also lists files that were deleted from the working tree.
            .filter(|path| self.root.join(path).is_file())
            .collect();
        Ok(files.into_iter().collect())
    }

    /// Returns all Rust sources, as of the first call. Out-of-line test modules are marked as
    /// tests.
    pub(crate) fn sources(&self) -> anyhow::Result<&[Source]> {
        if let Some(sources) = self.sources.get() {
            return Ok(sources);
        }
        let mut sources = Vec::new();
        for path in self.files()? {
            if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push(Source::parse(&path, self.read(&path)?)?);
            }
        }
        mark_test_modules(&mut sources);
        Ok(self.sources.get_or_init(|| sources))
    }

    /// Returns the packages of the workspace as `cargo metadata` prints them.
    pub(crate) fn packages(&self) -> anyhow::Result<Vec<Value>> {
        let metadata = self.metadata()?;
        let packages = metadata["packages"].as_array().cloned();
        packages.context("cargo metadata names no packages")
    }

    /// Returns the target directory of cargo.
    pub(crate) fn target_directory(&self) -> anyhow::Result<PathBuf> {
        let metadata = self.metadata()?;
        let directory = metadata["target_directory"].as_str().map(PathBuf::from);
        directory.context("cargo metadata names no target directory")
    }

    fn metadata(&self) -> anyhow::Result<Value> {
        let json = process::capture(process::command(&self.root, "cargo").args([
            "metadata",
            "--format-version=1",
            "--no-deps",
        ]))?;
        serde_json::from_str(&json).context("cargo metadata")
    }
}

/// Returns true if the path marks the whole file as a test.
fn is_test_path(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests")
}

fn mark_test_modules(sources: &mut [Source]) {
    let mut roots = Vec::new();
    for source in sources.iter() {
        let directory = module_directory(&source.path);
        roots.extend(source.test_modules.iter().map(|name| directory.join(name)));
    }
    for source in sources {
        let without_extension = source.path.with_extension("");
        if is_test_path(&source.path)
            || roots.iter().any(|root| without_extension.starts_with(root))
        {
            source.mark_as_test();
        }
    }
}

/// Returns the directory of the modules that `path` declares.
fn module_directory(path: &Path) -> PathBuf {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    match (stem, path.parent()) {
        (Some("lib" | "main" | "mod"), Some(parent)) => parent.to_owned(),
        _ => path.with_extension(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_test_modules_are_tests() {
        let parse = |path: &str, text: &str| Source::parse(Path::new(path), text.into()).unwrap();
        let mut sources = [
            parse(
                "crates/a/src/lib.rs",
                "#[cfg(test)] mod reference; mod live;",
            ),
            parse("crates/a/src/reference.rs", "fn x() {}"),
            parse("crates/a/src/reference/deep.rs", "fn x() {}"),
            parse("crates/a/src/live.rs", "#[cfg(test)] mod inner; fn x() {}"),
            parse("crates/a/src/live/inner.rs", "fn x() {}"),
            parse("crates/a/tests/b.rs", "fn x() {}"),
        ];
        mark_test_modules(&mut sources);
        let lines: Vec<usize> = sources.iter().map(Source::lines_of_code).collect();
        assert_eq!(lines, [1, 0, 0, 1, 0, 0]);
    }
}
