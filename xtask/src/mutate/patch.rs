//! A committed patch: the promise that it breaks, and the test command that must fail.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::repo::Repo;

/// A patch and its header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mutation {
    /// Path relative to the root.
    pub(super) path: PathBuf,
    pub(super) breaks: String,
    pub(super) kill: TestCommand,
    /// The first file that it modifies; empty if none.
    pub(super) file: String,
}

/// Arguments of `cargo test`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TestCommand(Vec<String>);

impl Mutation {
    pub(super) fn read(repo: &Repo, path: &Path) -> anyhow::Result<Self> {
        Self::parse(path, &repo.read(path)?).with_context(|| path.display().to_string())
    }

    pub(super) fn parse(path: &Path, text: &str) -> anyhow::Result<Self> {
        let header = |name: &str| {
            text.lines()
                .take_while(|line| line.starts_with('#'))
                .find_map(|line| {
                    line.strip_prefix("# ")?
                        .strip_prefix(name)?
                        .strip_prefix(':')
                })
                .map(str::trim)
                .with_context(|| format!("no line `# {name}: ...` at the start"))
        };
        Ok(Self {
            path: path.to_owned(),
            breaks: header("breaks")?.to_owned(),
            kill: TestCommand::parse(header("kill")?)?,
            file: text
                .lines()
                .find_map(|line| line.strip_prefix("+++ b/"))
                .unwrap_or_default()
                .to_owned(),
        })
    }

    pub(super) fn name(&self) -> String {
        self.path
            .file_stem()
            .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }
}

impl TestCommand {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match words.as_slice() {
            [cargo, test, arguments @ ..] if cargo == "cargo" && test == "test" => {
                Ok(Self(arguments.to_vec()))
            }
            _ => bail!("`{text}` does not begin with `cargo test`"),
        }
    }

    pub(super) fn arguments(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }

    /// Returns the package whose tests run.
    pub(super) fn package(&self) -> Option<&str> {
        let at = self.0.iter().position(|word| word == "-p")?;
        self.0.get(at + 1).map(String::as_str)
    }

    /// Returns the arguments that build the same tests without running them.
    pub(super) fn build_only(&self) -> Vec<&str> {
        std::iter::once("--no-run")
            .chain(
                self.0
                    .iter()
                    .map(String::as_str)
                    .take_while(|word| *word != "--")
                    // Documentation tests are built when they run; this builds their library.
                    .filter(|word| *word != "--doc"),
            )
            .collect()
    }
}

impl std::fmt::Display for TestCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cargo test {}", self.0.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str =
        "# breaks: a promise\n# kill: cargo test -p a --doc -- b --exact\n--- a/x\n+++ b/x/y\n";

    #[test]
    fn headers_are_read() {
        let mutation = Mutation::parse(Path::new("tests/mutations/x.patch"), PATCH).unwrap();
        assert_eq!(mutation.name(), "x");
        assert_eq!(mutation.file, "x/y");
        assert_eq!(mutation.breaks, "a promise");
        assert_eq!(
            mutation.kill.to_string(),
            "cargo test -p a --doc -- b --exact"
        );
        assert_eq!(mutation.kill.build_only(), ["--no-run", "-p", "a"]);
    }

    #[test]
    fn defective_headers_are_refused() {
        for text in [
            "--- a/x\n",
            "# breaks: a\n",
            "# kill: cargo test\n",
            "# breaks: a\n# kill: true\n",
            "--- a/x\n# breaks: a\n# kill: cargo test\n",
        ] {
            assert!(Mutation::parse(Path::new("x"), text).is_err(), "{text}");
        }
    }
}
