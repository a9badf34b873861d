//! The steps of each task, in order.

use anyhow::{bail, ensure};

use crate::guest::Effort;
use crate::process::Priority;
use crate::repo::Repo;
use crate::steps::Step;
use crate::suites::Kind;
use crate::summary::Summary;
use crate::{
    check, commits, console, dist, documents, fuzz, guest, ids, install, limits, links, mutate,
    nostd, page, process, product, python, registry, rules, suites, targets,
};

/// Names of the steps that others need.
const TOOLS: &str = "tools";
const RELEASE: &str = "build: the command, optimised";
const FETCHED: &str = "fetch: kernels, QEMU; build: modules";
const LIBFUZZER: &str = "build: fuzz targets for libFuzzer";

/// Run time of each fuzz target in `test`.
const FUZZ_SECONDS: u64 = 5;

/// Seconds of each of the soak's three cases in `test`; the script by itself takes 60.
const SOAK_SECONDS: u32 = 10;

/// Run time of the random run on stable if libFuzzer runs too.
const BRIEF_SECONDS: u64 = 2;

/// Returns all steps.
///
/// Guests wait for their devices and for clocks, so tests that compute run in the background beside
/// them. They have the guests' priority, because some wait for a process for a limited time.
pub(crate) fn test() -> Vec<Step> {
    let mut steps = vec![
        Step::new(TOOLS, install::run),
        Step::new(RELEASE, product::build_all).beside(Priority::Lowest),
        Step::new(FETCHED, guest::fetch).beside(Priority::Lowest),
    ];
    steps.extend(check());
    steps.extend([
        Step::new("no_std", nostd::run),
        Step::new("core crates, 32-bit and big-endian", targets::core).beside(Priority::Normal),
        Step::new(
            "fetch: QEMU that judges drivers, Linux guests",
            guest::fetch_judge,
        ),
        Step::new("build: tests", suites::build),
        Step::new("unit tests", |repo| suites::run(repo, Kind::Unit)),
        Step::new("property, conformance, concurrency, golden tests", |repo| {
            suites::run(repo, Kind::Outside)
        })
        .beside(Priority::Normal),
        Step::new("attacks and experiments, optimised", suites::run_replays)
            .beside(Priority::Normal),
        Step::new("doc tests", |repo| {
            cargo_test(repo, &["--workspace", "--all-features", "--doc"])
        })
        .beside(Priority::Normal),
        Step::new("exact instruction counts", instruction_counts).beside(Priority::Normal),
        Step::new("memory bounds of hostile traces", limits::run).beside(Priority::Normal),
        Step::new("documents that run", console::run).beside(Priority::Normal),
        Step::new("checkpatch", guest::checkpatch).beside(Priority::Lowest),
        Step::new("sparse", guest::sparse).beside(Priority::Lowest),
        Step::new("modules installed", guest::install_modules).beside(Priority::Lowest),
        Step::new(LIBFUZZER, fuzz::build_libfuzzer).beside(Priority::Lowest),
        guests("guests", guest::live).after(FETCHED),
        guests("guests behind the para-virtual IOMMU", guest::pviommu),
        guests("guests behind the ring IOMMU", guest::riommu),
        guests("guests with an NVMe disk", guest::nvme),
        guests("guests with shadow buffers", guest::pooldma),
        guests("guests that measure their IOMMU", guest::calibrate),
        // The tests in the background take longer than the guests.
        Step::new("python: wheel, tests, notebook", python::run),
        Step::new("page in a browser", page::run),
        Step::new("release archive and package", dist::check),
        Step::new("dry run of publishing", registry::dry_run),
        // Its processes wait for each other for a limited time.
        guests("guests with hand-over of devices", guest::handover).alone(),
        // It measures throughput and waits for device processes.
        Step::new("guests with malicious clients", |repo| {
            guest::soak(repo, SOAK_SECONDS)
        })
        .alone(),
        Step::new("fuzzing", |repo| fuzz_all(repo, None, FUZZ_SECONDS)).after(LIBFUZZER),
    ]);
    steps
}

/// Returns a step with guests, as brief as `test` has it.
fn guests(name: &'static str, suite: fn(&Repo, Effort) -> anyhow::Result<String>) -> Step {
    Step::new(name, move |repo| suite(repo, Effort::BRIEF))
}

/// Returns all steps of [`test()`], or those whose names contain one of `patterns`. All but the
/// quick ones need the tools, and come after their step.
pub(crate) fn chosen(patterns: &[String]) -> anyhow::Result<Vec<Step>> {
    let mut steps = test();
    if patterns.is_empty() {
        return Ok(steps);
    }
    let fits = |step: &Step| patterns.iter().any(|pattern| step.name().contains(pattern));
    ensure!(steps.iter().any(fits), "no step has such a name");
    let quick: Vec<_> = check().iter().map(Step::name).collect();
    let needs_tools = |step: &Step| fits(step) && !quick.contains(&step.name());
    let are_tools_needed = steps.iter().any(needs_tools);
    steps.retain(|step| fits(step) || (are_tools_needed && step.name() == TOOLS));
    Ok(steps)
}

/// Returns the quick steps, which need no test to be built.
pub(crate) fn check() -> Vec<Step> {
    vec![
        Step::new("format", check::format),
        Step::new("layer rule", rules::layers),
        Step::new("module rule", rules::modules),
        Step::new("core rule", rules::core_crates),
        Step::new("example rule", rules::examples),
        Step::new("unsafe rule", rules::unsafe_code),
        Step::new("token rule", rules::tokens),
        Step::new("temporary files rule", rules::temporary),
        Step::new("language rule", rules::language),
        Step::new("file-size rule", rules::sizes),
        Step::new("manifests for the registry", registry::manifests),
        Step::new("licences and sources of dependencies", registry::deny),
        Step::new("ids", ids::check),
        Step::new("links", links::check),
        Step::new("lengths of documents", documents::check),
        Step::new("subjects of commits", commits::check),
        Step::new("mutations apply", mutate::check),
        Step::new("clippy", check::clippy),
        Step::new("rustdoc", check::rustdoc),
    ]
}

/// Returns the steps for fuzzing alone.
pub(crate) fn fuzz(repo: &Repo, target: Option<&str>, seconds: u64) -> anyhow::Result<Vec<Step>> {
    let targets = fuzz::targets(repo)?;
    if let Some(target) = target {
        ensure!(
            targets.iter().any(|known| known == target),
            "no fuzz target {target}: there are {}",
            targets.join(", ")
        );
    }
    let target = target.map(str::to_owned);
    Ok(vec![
        Step::new(TOOLS, install::run),
        Step::new("fuzz corpora", fuzz::corpora),
        Step::new("fuzzing", move |repo| {
            fuzz_all(repo, target.as_deref(), seconds)
        }),
    ])
}

/// Runs the fuzz targets, each for `seconds`.
fn fuzz_all(repo: &Repo, only: Option<&str>, seconds: u64) -> anyhow::Result<String> {
    let nightly = install::has_nightly();
    // With a nightly toolchain, libFuzzer must run.
    ensure!(
        !nightly || install::has_cargo_fuzz(),
        "a nightly toolchain is installed and cargo-fuzz is not"
    );
    let mut targets = fuzz::targets(repo)?;
    targets.retain(|target| only.is_none_or(|only| only == target));
    let mut failures = Vec::new();
    let mut notes = Vec::new();
    let (random, libfuzzer) = match nightly {
        true => (BRIEF_SECONDS, Some(seconds)),
        false => (seconds, None),
    };
    for outcome in fuzz::run(repo, &targets, random, libfuzzer)? {
        match outcome {
            Ok(note) => notes.extend(note),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    notes.push(
        if nightly {
            "libFuzzer ran"
        } else {
            "no nightly: without libFuzzer"
        }
        .to_owned(),
    );
    Ok(notes.join("; "))
}

/// Runs tests of the workspace. A suite without any test that ran has failed.
fn cargo_test(repo: &Repo, arguments: &[&str]) -> anyhow::Result<String> {
    let mut summary = Summary::default();
    let mut command = process::command(&repo.root, "cargo");
    // A failure in one crate does not hide another.
    command.args(["test", "--no-fail-fast"]).args(arguments);
    let outcome = process::show(&mut command, |line| summary.add_line(line));
    outcome.map_err(|error| anyhow::anyhow!("{summary}: {error:#}"))?;
    summary.ensure_some_ran()?;
    Ok(summary.to_string())
}

/// Checks that the meter's components add up exactly when counted in instructions.
fn instruction_counts(repo: &Repo) -> anyhow::Result<String> {
    const TEST: &str = "tests/callgrind.rs";
    ensure!(repo.root.join(TEST).is_file(), "{TEST} does not exist");
    let arguments = [&product::SELECTION[..], &["--", "--include-ignored"]].concat();
    cargo_test(repo, &arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_has_its_steps_and_the_tools_that_they_need() {
        let names = |pattern: &str| {
            let steps = chosen(&[pattern.to_owned()]).unwrap();
            steps.iter().map(Step::name).collect::<Vec<_>>()
        };
        assert_eq!(names("links"), ["links"]);
        assert_eq!(names("doc tests"), [TOOLS, "doc tests"]);
        assert_eq!(names("tools"), [TOOLS]);
        assert!(chosen(&["no such step".to_owned()]).is_err());
        assert_eq!(chosen(&[]).unwrap().len(), test().len());
    }
}
