//! The fuzz targets: under libFuzzer where a nightly toolchain is installed, and everywhere as a
//! plain random run of the same functions over the same corpora.

use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, anyhow, bail};

use crate::install;
use crate::process;
use crate::repo::Repo;
use crate::summary::Summary;
use crate::usage;

const MANIFEST: &str = "fuzz/Cargo.toml";
const CORPUS: &str = "fuzz/corpus";
/// Lines that are shown of a failed run: they hold the input, as libFuzzer and cargo-fuzz print it.
const LAST_WORDS: usize = 100;

/// The names of all targets, from the files that hold them.
pub(crate) fn targets(repo: &Repo) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(repo.root.join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        names.push(
            stem.context("a fuzz target's name is not UTF-8")?
                .to_owned(),
        );
    }
    names.sort();
    if names.is_empty() {
        bail!("there is no fuzz target");
    }
    Ok(names)
}

/// Builds what runs on any toolchain.
pub(crate) fn build(repo: &Repo) -> anyhow::Result<String> {
    process::show(stable(repo, "test")?.arg("--no-run"), |_| {})?;
    Ok(String::new())
}

/// Builds what runs under libFuzzer, if that can run at all.
pub(crate) fn build_libfuzzer(repo: &Repo) -> anyhow::Result<String> {
    if !install::has_nightly() {
        return Ok("no nightly".to_owned());
    }
    let mut command = cargo_fuzz(repo, "build", &repo.target_directory()?);
    process::show(&mut command, |_| {})?;
    Ok(String::new())
}

/// Replays every corpus through its target and checks that it reaches what it is meant to reach.
pub(crate) fn corpora(repo: &Repo) -> anyhow::Result<String> {
    let mut summary = Summary::default();
    process::show(&mut stable(repo, "test")?, |line| summary.add_line(line))?;
    summary.ensure_some_ran()?;
    Ok(summary.to_string())
}

/// A task of cargo's on the stable toolchain.
fn stable(repo: &Repo, task: &str) -> anyhow::Result<Command> {
    let mut command = process::command(&repo.root, "cargo");
    command
        .arg(task)
        .args(["--quiet", "--release", "--no-default-features"])
        .args(["--manifest-path", MANIFEST, "--target-dir"])
        .arg(repo.target_directory()?.join("fuzz"));
    Ok(command)
}

/// What drives a target.
#[derive(Clone, Copy)]
enum Driver {
    /// Finds out what its inputs reach. Those it keeps stay in the target directory: what belongs
    /// in the committed corpus is chosen by hand (docs/FUZZ.md).
    LibFuzzer,
    /// Mutates the corpus at random, on the stable toolchain.
    Random,
}

/// Runs each of `targets` for so many seconds at random, and for so many under libFuzzer if it is
/// to run at all. What there is to say of each run, or why it failed.
pub(crate) fn run(
    repo: &Repo,
    targets: &[String],
    random: u64,
    libfuzzer: Option<u64>,
) -> anyhow::Result<Vec<anyhow::Result<Option<String>>>> {
    let directory = repo.target_directory()?;
    if libfuzzer.is_some() {
        // All of them first: none waits for another's build in its seconds.
        process::show(&mut cargo_fuzz(repo, "build", &directory), |_| {})?;
    }
    // The long ones first: the brief ones fill up what is left to one processor at the end.
    let long = libfuzzer.map(|seconds| (Driver::LibFuzzer, seconds));
    let drivers = long.into_iter().chain([(Driver::Random, random)]);
    let runs: Vec<_> = drivers
        .flat_map(|driver| targets.iter().map(move |target| (driver, target)))
        .collect();
    side_by_side(&runs, |((driver, seconds), target)| match driver {
        Driver::LibFuzzer => libfuzzer_one(repo, &directory, target, *seconds).map(|()| None),
        Driver::Random => random_one(repo, target, *seconds).map(Some),
    })
}

fn random_one(repo: &Repo, target: &str, seconds: u64) -> anyhow::Result<String> {
    let mut last = String::new();
    process::show(
        stable(repo, "run")?
            .args(["--example", "random", "--", target])
            .arg(seconds.to_string()),
        |line| line.clone_into(&mut last),
    )?;
    Ok(last)
}

/// What becomes of each of `runs`, as many at once as there are processors.
fn side_by_side<R: Sync, T: Send>(
    runs: &[R],
    run: impl Fn(&R) -> T + Sync,
) -> anyhow::Result<Vec<T>> {
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    let next = Mutex::new(runs.iter());
    let outcomes = Mutex::new(Vec::new());
    let take = || next.lock().ok().and_then(|mut next| next.next());
    thread::scope(|scope| {
        let work = || {
            while let Some(next) = take() {
                let outcome = run(next);
                if let Ok(mut outcomes) = outcomes.lock() {
                    outcomes.push(outcome);
                }
            }
            usage::so_far()
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            usage::add(worker.join().map_err(|_| anyhow!("a worker panicked"))?);
        }
        anyhow::Ok(())
    })?;
    outcomes
        .into_inner()
        .map_err(|_| anyhow!("a worker panicked"))
}

fn cargo_fuzz(repo: &Repo, task: &str, directory: &Path) -> Command {
    let mut command = process::command(&repo.root, "cargo");
    command
        // Set by the cargo that started this program; it would override `+nightly`.
        .env_remove("RUSTUP_TOOLCHAIN")
        // What is fuzzed holds no unsafe code, so the address sanitizer would find nothing and cost
        // ten times the speed.
        .args(["+nightly", "fuzz", task, "--sanitizer=none", "--target-dir"])
        .arg(directory.join("libfuzzer"));
    command
}

fn libfuzzer_one(repo: &Repo, directory: &Path, target: &str, seconds: u64) -> anyhow::Result<()> {
    let found = directory.join("fuzz-corpus").join(target);
    std::fs::create_dir_all(&found)?;
    let mut command = cargo_fuzz(repo, "run", directory);
    command
        .arg(target)
        .arg(&found)
        .arg(repo.root.join(CORPUS).join(target))
        .arg("--")
        .arg(format!("-max_total_time={seconds}"))
        .args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    // Several run at once: each one's words come out together, and few of them unless it failed.
    let output = process::collect(&mut command)?;
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    let wanted: Vec<&str> = if output.status.success() {
        let is_result = |line: &&&str| line.starts_with("stat::") || line.contains("DONE");
        lines.iter().filter(is_result).copied().collect()
    } else {
        lines[lines.len().saturating_sub(LAST_WORDS)..].to_vec()
    };
    println!("$ {}\n{}", process::shown(&command), wanted.join("\n"));
    if !output.status.success() {
        bail!("{target}: {}", output.status);
    }
    Ok(())
}
