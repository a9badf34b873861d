//! Mutations: committed patches that each break one promise, and the test command that must fail.
//!
//! A patch in tests/mutations begins with two lines before its diff:
//! ```text
//! # breaks: an IOVA is freed before its invalidation has completed
//! # kill: cargo test -p ringfence-dma --test order
//! ```

mod inputs;
mod journal;
mod known;
mod outcome;
mod patch;
mod scratch;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::process;
use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;
use inputs::Inputs;
use journal::Journal;
use known::KnownTests;
use outcome::MutantOutcome;
use patch::{Mutation, TestCommand};
use scratch::Scratch;

const PATCHES: &str = "tests/mutations";

/// A mutant may loop for ever, which counts as a kill. Its time limit is the time of the unmodified
/// suite times `PATIENCE`, plus `GRACE`.
const PATIENCE: u32 = 5;
const GRACE: Duration = Duration::from_secs(20);

/// Maximum number of mutations between two builds of the unmodified tree. A run that is ended loses
/// the times of the suites of one batch.
const BATCH: usize = 40;

/// Options of a run.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Runs only mutations whose name contains PATTERN; may be given more than once.
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// Runs only mutations that tests of PACKAGE must kill; may be given more than once.
    #[arg(long, short, value_name = "PACKAGE")]
    package: Vec<String>,
    /// Runs a part of them: every Nth name, from the Kth on. K begins at 0.
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Reuses the kills of earlier runs that nothing has changed since: neither the patch nor what
    /// its tests are built from or read.
    #[arg(long)]
    resume: bool,
    /// Prints one JSON object to standard output, and the progress to standard error.
    #[arg(long)]
    json: bool,
}

/// One of `count` parts of the mutations. The names are in order, so each part has its share of
/// every crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    fn of<T>(self, items: Vec<T>) -> Vec<T> {
        let part = items.into_iter().skip(self.index).step_by(self.count);
        part.collect()
    }
}

impl FromStr for Shard {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (index, count) = text.split_once('/').context("expected K/N")?;
        let (index, count) = (index.parse()?, count.parse()?);
        ensure!(index < count, "K must be less than N");
        Ok(Self { index, count })
    }
}

/// Result of one mutation.
struct Row<'a> {
    mutation: &'a Mutation,
    fate: MutantOutcome,
    time: Duration,
}

/// Checks that every patch has its header, names tests that exist, and applies to the current tree.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let mut found = Vec::new();
    let paths = patches(repo)?;
    let known = KnownTests::read(repo)?;
    for path in &paths {
        let applies = Mutation::read(repo, path).and_then(|mutation| {
            known.check(&mutation.kill)?;
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

/// Runs the mutations and prints their results. `Ok(true)` if the tests killed all of them.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    let say = |line: &str| {
        if options.json {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
    };
    let mutations = chosen(repo, options)?;
    let directory = repo.target_directory()?.join("mutants");
    let scratch = Scratch::prepare(repo, &directory)?;
    let mut inputs = Inputs::read(repo)?;
    let mut journal = Journal::open(&directory, options.resume)?;

    let mut rows: Vec<Row<'_>> = Vec::new();
    for batch in batches(&mutations) {
        let inputs: Vec<u64> = batch.iter().map(|mutation| inputs.of(mutation)).collect();
        // A suite that fails on the unmodified tree detects nothing. The time of a passing suite
        // limits its mutants. All suites of the batch run before the first mutant, because each
        // return to the unmodified tree is a build.
        let mut time_unmodified: BTreeMap<&TestCommand, Option<Duration>> = BTreeMap::new();
        for (mutation, &inputs) in batch.iter().zip(&inputs) {
            let is_known = journal.known(&mutation.name(), inputs).is_some();
            if !is_known && !time_unmodified.contains_key(&mutation.kill) {
                say(&format!("unchanged: {}", mutation.kill));
                time_unmodified.insert(&mutation.kill, scratch.time_unmodified(&mutation.kill)?);
            }
        }
        for (mutation, &inputs) in batch.iter().zip(&inputs) {
            let name = mutation.name();
            let (fate, time) = if let Some(known) = journal.known(&name, inputs) {
                known
            } else {
                let start = Instant::now();
                let fate = match time_unmodified.get(&mutation.kill) {
                    Some(Some(time)) => scratch.fate(repo, mutation, *time * PATIENCE + GRACE)?,
                    _ => MutantOutcome::FailsUnmutated,
                };
                let time = start.elapsed();
                journal.add(&name, inputs, &fate, time)?;
                (fate, time)
            };
            let row = Row {
                mutation,
                fate,
                time,
            };
            let progress = format!("[{:>2}/{}]", rows.len() + 1, mutations.len());
            say(&format!("{progress} {}", row.line()));
            rows.push(row);
        }
    }
    say(&format!("\n{}", closing(&rows)));
    if options.json {
        println!("{:#}", report(&rows));
    }
    Ok(rows.iter().all(|row| row.fate.is_kill()))
}

/// Returns the requested mutations by the package whose tests run, and then by the modified file:
/// a mutant is built from what the one before it has built.
fn chosen(repo: &Repo, options: &Options) -> anyhow::Result<Vec<Mutation>> {
    let (only, packages) = (&options.only, &options.package);
    let mut mutations = Vec::new();
    for path in patches(repo)? {
        let mutation = Mutation::read(repo, &path)?;
        let name = mutation.name();
        let is_named = only.iter().any(|pattern| name.contains(pattern.as_str()));
        let is_tested = packages
            .iter()
            .any(|package| mutation.kill.package() == Some(package));
        if (only.is_empty() || is_named) && (packages.is_empty() || is_tested) {
            mutations.push(mutation);
        }
    }
    if let Some(shard) = options.shard {
        mutations = shard.of(mutations);
    }
    ensure!(!mutations.is_empty(), "no mutation is selected");
    mutations.sort_by(|a, b| {
        let (package, other) = (a.kill.package(), b.kill.package());
        (package, &a.file, &a.path).cmp(&(other, &b.file, &b.path))
    });
    Ok(mutations)
}

/// Splits sorted mutations into batches of one package.
fn batches(mutations: &[Mutation]) -> impl Iterator<Item = &[Mutation]> {
    mutations
        .chunk_by(|a, b| a.kill.package() == b.kill.package())
        .flat_map(|package| package.chunks(BATCH))
}

fn patches(repo: &Repo) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = repo.files()?;
    found.retain(|path| {
        path.starts_with(PATCHES)
            && path
                .extension()
                .is_some_and(|extension| extension == "patch")
    });
    ensure!(!found.is_empty(), "{PATCHES} has no patch");
    Ok(found)
}

impl Row<'_> {
    fn line(&self) -> String {
        format!(
            "{:15}  {:6.1} s  {}: {}",
            self.fate.shown(),
            self.time.as_secs_f64(),
            self.mutation.name(),
            self.mutation.breaks,
        )
    }

    fn to_json(&self) -> Value {
        let mut value = self.fate.to_json();
        value["name"] = self.mutation.name().into();
        value["breaks"] = self.mutation.breaks.clone().into();
        value["kill"] = self.mutation.kill.to_string().into();
        value["seconds"] = self.time.as_secs_f64().into();
        value
    }
}

/// Returns the counts by outcome, and repeats the lines of mutations that were not killed.
fn closing(rows: &[Row<'_>]) -> String {
    let kills = rows.iter().filter(|row| row.fate.is_kill()).count();
    let by_time = rows
        .iter()
        .filter(|row| row.fate == MutantOutcome::TimedOut)
        .count();
    let total: Duration = rows.iter().map(|row| row.time).sum();
    let mut text = String::new();
    for row in rows.iter().filter(|row| !row.fate.is_kill()) {
        let _ = writeln!(text, "{}", row.line());
    }
    let _ = write!(
        text,
        "{} mutations in {:.0} s: {kills} killed ({by_time} by time), {} not",
        rows.len(),
        total.as_secs_f64(),
        rows.len() - kills,
    );
    text
}

/// Returns the same results as JSON.
fn report(rows: &[Row<'_>]) -> Value {
    let kills = rows.iter().filter(|row| row.fate.is_kill()).count();
    json!({
        "mutations": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
        "killed": kills,
        "not_killed": rows.len() - kills,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn shards_are_disjoint_and_complete() {
        let items: Vec<u32> = (0..11).collect();
        let shard = |text: &str| text.parse::<Shard>();
        let mut all = Vec::new();
        for text in ["0/3", "1/3", "2/3"] {
            let part = shard(text).unwrap().of(items.clone());
            assert!(matches!(part.len(), 3 | 4), "{text}: {part:?}");
            all.extend(part);
        }
        all.sort_unstable();
        assert_eq!(all, items);
        for text in ["3/3", "1/0", "0/0", "1", "/", "-1/3", "a/3"] {
            assert!(shard(text).is_err(), "{text}");
        }
    }

    #[test]
    fn batches_have_one_package_and_all_mutations() {
        let mutation = |package: &str, number: usize| {
            let text = format!("# breaks: a promise\n# kill: cargo test -p {package}\n");
            Mutation::parse(Path::new(&number.to_string()), &text).unwrap()
        };
        let mut mutations: Vec<_> = (0..2 * BATCH + 1).map(|n| mutation("a", n)).collect();
        mutations.push(mutation("b", 0));
        let sizes: Vec<usize> = batches(&mutations).map(<[_]>::len).collect();
        assert_eq!(sizes, [BATCH, BATCH, 1, 1]);
        let all: Vec<_> = batches(&mutations).flatten().map(Mutation::name).collect();
        let expected: Vec<_> = mutations.iter().map(Mutation::name).collect();
        assert_eq!(all, expected);
    }

    #[test]
    fn summary_names_survivors() {
        let text = "# breaks: a promise\n# kill: cargo test -p a\n";
        let mutation = |name: &str| Mutation::parse(Path::new(name), text).unwrap();
        let (first, second) = (mutation("first.patch"), mutation("second.patch"));
        let rows = [
            (&first, MutantOutcome::TimedOut),
            (&second, MutantOutcome::Survived),
        ]
        .map(|(mutation, fate)| Row {
            mutation,
            fate,
            time: Duration::from_secs(2),
        });
        assert_eq!(
            closing(&rows),
            "SURVIVED            2.0 s  second: a promise\n\
             2 mutations in 4 s: 1 killed (1 by time), 1 not"
        );
        let report = report(&rows);
        assert_eq!(report["not_killed"], 1);
        assert_eq!(report["mutations"][1]["verdict"], "SURVIVED");
        assert_eq!(report["mutations"][1]["kill"], "cargo test -p a");
    }
}
