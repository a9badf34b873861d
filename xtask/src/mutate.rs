//! Mutations: committed patches that each break one promise, and the test command that must notice.
//!
//! A patch in tests/mutations begins with two lines before its diff:
//! ```text
//! # breaks: an IOVA is freed before its invalidation has completed
//! # kill: cargo test -p ringfence-dma --test order
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::process;
use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;

const PATCHES: &str = "tests/mutations";

/// Longest time that a build, or the unchanged suite, may take.
const LIMIT: Duration = Duration::from_secs(600);

/// A mutant may loop for ever; that is a kill too. It gets this many times what the unchanged suite took, and `GRACE`.
const PATIENCE: u32 = 5;
const GRACE: Duration = Duration::from_secs(20);

/// What `timeout` exits with when it had to end the command.
const TIMED_OUT: i32 = 124;

/// A patch and its header.
#[derive(Debug, PartialEq, Eq)]
struct Mutation {
    /// Relative to the root.
    path: PathBuf,
    breaks: String,
    kill: TestCommand,
}

/// Arguments of `cargo test`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct TestCommand(Vec<String>);

/// How a mutant fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Killed,
    TimedOut,
    Survived,
    DoesNotApply,
    DoesNotBuild,
}

/// Every patch has its header and applies to the tree as it is.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let mut found = Vec::new();
    let paths = patches(repo)?;
    for path in &paths {
        let applies = Mutation::read(repo, path).and_then(|_| {
            process::capture(
                process::command(&repo.root, "git")
                    .args(["apply", "--check"])
                    .arg(path),
            )
        });
        if let Err(error) = applies {
            found.push(Violation::error(path, 0, format!("{error:#}")));
        }
    }
    rules::verdict(&found)?;
    Ok(format!("{} mutations", paths.len()))
}

/// Runs the mutations whose names contain one of `names` (all, if there are none) and prints how each fared.
pub(crate) fn run(repo: &Repo, names: &[String]) -> anyhow::Result<bool> {
    let mut mutations = Vec::new();
    for path in patches(repo)? {
        let name = path.to_string_lossy();
        if names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str())) {
            mutations.push(Mutation::read(repo, &path)?);
        }
    }
    ensure!(!mutations.is_empty(), "no mutation of that name");

    let scratch = Scratch::prepare(repo)?;
    // A suite that fails anyway notices nothing. How long the others take bounds their mutants.
    let mut pristine: BTreeMap<TestCommand, Option<Duration>> = BTreeMap::new();
    for mutation in &mutations {
        if !pristine.contains_key(&mutation.kill) {
            println!("pristine: {}", mutation.kill);
            pristine.insert(mutation.kill.clone(), scratch.pristine(&mutation.kill)?);
        }
    }

    let mut rows = Vec::new();
    let mut sound = true;
    for mutation in &mutations {
        let start = Instant::now();
        let verdict = if let Some(time) = pristine[&mutation.kill] {
            let fate = scratch.fate(repo, mutation, time * PATIENCE + GRACE)?;
            sound &= fate.is_kill();
            fate.shown()
        } else {
            sound = false;
            "FAILS UNMUTATED"
        };
        let row = format!(
            "{verdict:15}  {:6.1} s  {}: {}",
            start.elapsed().as_secs_f64(),
            mutation.name(),
            mutation.breaks,
        );
        println!("{row}");
        rows.push(row);
    }
    println!("\n{}", rows.join("\n"));
    Ok(sound)
}

fn patches(repo: &Repo) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = repo.files()?;
    found.retain(|path| {
        path.starts_with(PATCHES)
            && path
                .extension()
                .is_some_and(|extension| extension == "patch")
    });
    ensure!(!found.is_empty(), "{PATCHES} holds no patch");
    Ok(found)
}

impl Mutation {
    fn read(repo: &Repo, path: &Path) -> anyhow::Result<Self> {
        Self::parse(path, &repo.read(path)?).with_context(|| path.display().to_string())
    }

    fn parse(path: &Path, text: &str) -> anyhow::Result<Self> {
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
        })
    }

    fn name(&self) -> String {
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

    /// The arguments that build the same tests without running them.
    fn build_only(&self) -> Vec<&str> {
        std::iter::once("--no-run")
            .chain(
                self.0
                    .iter()
                    .map(String::as_str)
                    .take_while(|word| *word != "--")
                    // Documentation tests are built when they run; their library is built here.
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

impl Fate {
    fn is_kill(self) -> bool {
        matches!(self, Self::Killed | Self::TimedOut)
    }

    fn shown(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::TimedOut => "killed (time)",
            Self::Survived => "SURVIVED",
            Self::DoesNotApply => "DOES NOT APPLY",
            Self::DoesNotBuild => "DOES NOT BUILD",
        }
    }
}

/// A copy of the tree with a target directory of its own. Both stay for the next run, which builds only what changed.
struct Scratch {
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn prepare(repo: &Repo) -> anyhow::Result<Self> {
        let directory = repo.target_directory()?.join("mutants");
        let scratch = Self {
            tree: directory.join("tree"),
            target: directory.join("target"),
        };
        fs::create_dir_all(&scratch.tree)?;
        // Without a boundary, git would look for a repository further up and apply patches there.
        if !scratch.tree.join(".git").exists() {
            process::capture(process::command(&scratch.tree, "git").args(["init", "--quiet"]))?;
        }
        let files = repo.files()?;
        for old in (Repo {
            root: scratch.tree.clone(),
        })
        .files()?
        {
            if files.binary_search(&old).is_err() {
                fs::remove_file(scratch.tree.join(old))?;
            }
        }
        for path in &files {
            scratch.restore(repo, path)?;
        }
        Ok(scratch)
    }

    /// Makes a file as it is in the repository, leaving it untouched if it is already.
    fn restore(&self, repo: &Repo, path: &Path) -> anyhow::Result<()> {
        let copy = self.tree.join(path);
        let wanted = match fs::read(repo.root.join(path)) {
            Ok(wanted) => wanted,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // The patch had created it.
                return fs::remove_file(copy).map_err(Into::into);
            }
            Err(error) => return Err(error.into()),
        };
        if fs::read(&copy).is_ok_and(|present| present == wanted) {
            return Ok(());
        }
        if let Some(directory) = copy.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(copy, wanted)?;
        Ok(())
    }

    fn fate(&self, repo: &Repo, mutation: &Mutation, limit: Duration) -> anyhow::Result<Fate> {
        let patch = repo.root.join(&mutation.path);
        let touched = process::capture(
            process::command(&self.tree, "git")
                .args(["apply", "--numstat", "-z"])
                .arg(&patch),
        );
        let applied =
            process::capture(process::command(&self.tree, "git").arg("apply").arg(&patch));
        let (Ok(touched), Ok(_)) = (touched, applied) else {
            return Ok(Fate::DoesNotApply);
        };
        let fate = self.run_mutant(&mutation.kill, limit);
        for entry in touched.split('\0').filter(|entry| !entry.is_empty()) {
            // Added lines, removed lines, path.
            let path = entry
                .splitn(3, '\t')
                .nth(2)
                .context("git apply --numstat")?;
            self.restore(repo, Path::new(path))?;
        }
        fate
    }

    fn run_mutant(&self, kill: &TestCommand, limit: Duration) -> anyhow::Result<Fate> {
        // A mutant that the compiler refuses says nothing about the tests.
        if self.build(kill)? != Some(0) {
            return Ok(Fate::DoesNotBuild);
        }
        Ok(match self.test(kill, limit)? {
            Some(0) => Fate::Survived,
            Some(TIMED_OUT) => Fate::TimedOut,
            _ => Fate::Killed,
        })
    }

    /// How long the tests take on the unchanged copy; `None` if they fail.
    fn pristine(&self, command: &TestCommand) -> anyhow::Result<Option<Duration>> {
        if self.build(command)? != Some(0) {
            return Ok(None);
        }
        let start = Instant::now();
        let passes = self.test(command, LIMIT)? == Some(0);
        Ok(passes.then(|| start.elapsed()))
    }

    fn test(&self, command: &TestCommand, limit: Duration) -> anyhow::Result<Option<i32>> {
        let words: Vec<&str> = command.0.iter().map(String::as_str).collect();
        Ok(self.cargo_test(&words, limit)?.status.code())
    }

    /// Builds the tests. A failure is shown: it needs attention.
    fn build(&self, command: &TestCommand) -> anyhow::Result<Option<i32>> {
        let output = self.cargo_test(&command.build_only(), LIMIT)?;
        if !output.status.success() {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.status.code())
    }

    fn cargo_test(&self, arguments: &[&str], limit: Duration) -> anyhow::Result<Output> {
        process::command(&self.tree, "timeout")
            .args(["--kill-after=10", &limit.as_secs().to_string()])
            .args(["cargo", "test", "--quiet"])
            .args(arguments)
            .env("CARGO_TARGET_DIR", &self.target)
            // What a failing property test remembers would be a change to the copy.
            .env("PROPTEST_FAILURE_PERSISTENCE", "off")
            .stdin(Stdio::null())
            .output()
            .context("timeout cargo test")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str =
        "# breaks: a promise\n# kill: cargo test -p a --doc -- b --exact\n--- a/x\n";

    #[test]
    fn headers_are_read() {
        let mutation = Mutation::parse(Path::new("tests/mutations/x.patch"), PATCH).unwrap();
        assert_eq!(mutation.name(), "x");
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

    #[test]
    fn only_a_failing_test_counts_as_a_kill() {
        let kills: Vec<bool> = [
            Fate::Killed,
            Fate::TimedOut,
            Fate::Survived,
            Fate::DoesNotApply,
            Fate::DoesNotBuild,
        ]
        .into_iter()
        .map(Fate::is_kill)
        .collect();
        assert_eq!(kills, [true, true, false, false, false]);
    }
}
