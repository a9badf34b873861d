//! Runs the fuzz targets: under libFuzzer if a nightly toolchain is installed, and on every machine
//! as a plain random run of the same functions over the same corpora.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, anyhow, bail};

use crate::install;
use crate::process;
use crate::repo::Repo;
use crate::summary::Summary;
use crate::usage;

const PACKAGE: &str = "ringfence-fuzz";
const CORPUS: &str = "fuzz/corpus";
/// Number of lines shown of a failed run. They include the input, as libFuzzer and cargo-fuzz print
/// it.
const LAST_WORDS: usize = 100;

/// Returns the names of all targets, from their files.
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
        bail!("fuzz has no target");
    }
    Ok(names)
}

/// Builds the parts that run under libFuzzer, if it is available.
pub(crate) fn build_libfuzzer(repo: &Repo) -> anyhow::Result<String> {
    if !install::has_nightly() {
        return Ok("no nightly".to_owned());
    }
    let mut command = cargo_fuzz(repo, "build", &repo.target_directory()?);
    process::show(&mut command, |_| {})?;
    Ok(String::new())
}

/// Replays every corpus through its target and checks that it reaches all of the target's outcomes.
pub(crate) fn corpora(repo: &Repo) -> anyhow::Result<String> {
    let mut summary = Summary::default();
    let mut command = process::command(&repo.root, "cargo");
    command.args(["test", "--quiet", "--package", PACKAGE]);
    process::show(&mut command, |line| summary.add_line(line))?;
    summary.ensure_some_ran()?;
    Ok(summary.to_string())
}

/// Driver of a target.
#[derive(Clone, Copy)]
enum Driver {
    /// libFuzzer, guided by coverage. Inputs that it keeps stay in the target directory; inputs for
    /// the committed corpus are chosen by hand (docs/FUZZ.md).
    LibFuzzer,
    /// Random mutation of the corpus, on the stable toolchain.
    Random,
}

/// Runs each of `targets` at random for `random` seconds, and under libFuzzer for `libfuzzer`
/// seconds unless that is `None`. Returns a note, or the error, of each run.
pub(crate) fn run(
    repo: &Repo,
    targets: &[String],
    random: u64,
    libfuzzer: Option<u64>,
) -> anyhow::Result<Vec<anyhow::Result<Option<String>>>> {
    let directory = repo.target_directory()?;
    if libfuzzer.is_some() {
        // Build all targets first, so that no run waits for another's build.
        process::show(&mut cargo_fuzz(repo, "build", &directory), |_| {})?;
    }
    // Where libFuzzer does the long runs, the tests' profile suffices.
    let random_program = build_random(
        repo,
        &directory,
        if libfuzzer.is_some() { "dev" } else { "fuzz" },
    )?;
    // Start long runs first. At the end, short runs fill the idle CPUs.
    let long = libfuzzer.map(|seconds| (Driver::LibFuzzer, seconds));
    let drivers = long.into_iter().chain([(Driver::Random, random)]);
    let runs: Vec<_> = drivers
        .flat_map(|driver| targets.iter().map(move |target| (driver, target)))
        .collect();
    side_by_side(&runs, |((driver, seconds), target)| match driver {
        Driver::LibFuzzer => libfuzzer_one(repo, &directory, target, *seconds).map(|()| None),
        Driver::Random => random_one(repo, &random_program, target, *seconds).map(Some),
    })
}

/// Builds the program of the random runs and returns its path. It selects what the tests select,
/// because another selection has other features, and cargo would build the libraries again.
fn build_random(repo: &Repo, directory: &Path, profile: &str) -> anyhow::Result<PathBuf> {
    process::show(
        process::command(&repo.root, "cargo")
            .args(["build", "--quiet", "--workspace", "--all-features"])
            .args(["--profile", profile, "--example", "random"]),
        |_| {},
    )?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(directory.join(folder).join("examples/random"))
}

/// Runs a target on random inputs.
fn random_one(repo: &Repo, program: &Path, target: &str, seconds: u64) -> anyhow::Result<String> {
    let mut last = String::new();
    let program = program.to_string_lossy();
    process::show(
        process::command(&repo.root, &program)
            .arg(target)
            .arg(seconds.to_string()),
        |line| line.clone_into(&mut last),
    )?;
    Ok(last)
}

/// Runs each of `runs`, as many in parallel as there are CPUs, and returns their results.
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
        // The cargo that started this program set it; it would override `+nightly`.
        .env_remove("RUSTUP_TOOLCHAIN")
        // The fuzzed code has no unsafe code, so the address sanitizer would find nothing and make
        // it ten times slower.
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
        // A busy host may give a target no CPU for seconds.
        .args(["-timeout=60", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    // Several targets run in parallel. Print the output of each as one block, and only a summary
    // unless it failed.
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
