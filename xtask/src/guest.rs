//! Guests with real kernels (tests/guest/README.md): `trace record` in a guest, or guests with
//! devices of `ringfence`. Scripts do the work.

use std::process::Command;

use anyhow::Context;

use crate::process;
use crate::product;
use crate::repo::Repo;

const RECORD: &str = "tests/guest/record.sh";
const FETCH: &str = "tests/guest/fetch.sh";
const LIVE: &str = "tests/guest/live.sh";
const PVIOMMU: &str = "tests/guest/pviommu.sh";
const RIOMMU: &str = "tests/guest/riommu.sh";
const CALIBRATE: &str = "tests/guest/calibrate.sh";
const HANDOVER: &str = "tests/guest/handover.sh";
const SOAK: &str = "tests/guest/soak.sh";
const CHECKPATCH: &str = "kmod/tests/checkpatch.sh";
/// Number of consecutive hand-overs when a developer runs the task.
const HANDOVERS: u32 = 20;

/// Options of `guest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Debian suite whose kernel boots.
    #[arg(long, default_value = "trixie")]
    suite: String,
    /// Tests guests with devices of `ringfence` instead of recording.
    #[arg(long, conflicts_with = "suite")]
    live: bool,
    /// Maximum run time of the guest in seconds; it takes one to three minutes.
    #[arg(long, default_value_t = 600)]
    limit: u32,
}

/// Fetches the components of guests and builds their modules.
pub(crate) fn fetch(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, FETCH, &[])
}

/// Fetches the QEMUs that judge drivers, and the Linux guests whose page tables are read
/// (tests/qemu), unless they are in the target directory.
pub(crate) fn fetch_judge(repo: &Repo) -> anyhow::Result<String> {
    for example in ["fetch_qemu", "fetch_linux"] {
        let mut command = process::command(&repo.root, "cargo");
        command.args(["run", "--quiet", "--package", "ringfence-guest-harness"]);
        command.args(["--example", example]);
        process::show(&mut command, |_| {})?;
    }
    Ok(String::new())
}

/// Runs the kernel's checkpatch on the modules.
pub(crate) fn checkpatch(repo: &Repo) -> anyhow::Result<String> {
    script(repo, CHECKPATCH, |_| {})
}

/// Runs all cases of standard guests with devices of `ringfence`. Fetches QEMU and kernels that are
/// not cached.
pub(crate) fn live(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, LIVE, &[])
}

/// Like [`live`], behind the para-virtual IOMMU; builds modules for the guests' kernels.
pub(crate) fn pviommu(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, PVIOMMU, &[])
}

/// Like [`live`], behind the ring IOMMU.
pub(crate) fn riommu(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, RIOMMU, &[])
}

/// Measures the guests' IOMMUs with `ringfence calibrate --host`.
pub(crate) fn calibrate(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, CALIBRATE, &[])
}

/// Hands devices over from one process to the next, `times` times in a row.
pub(crate) fn handover(repo: &Repo, times: u32) -> anyhow::Result<String> {
    cases(repo, HANDOVER, &[("GUEST_HANDOVERS", times.to_string())])
}

/// Runs hostile clients next to a working guest, for `seconds` seconds per case.
pub(crate) fn soak(repo: &Repo, seconds: u32) -> anyhow::Result<String> {
    cases(repo, SOAK, &[("SOAK_SECONDS", seconds.to_string())])
}

fn cases(repo: &Repo, name: &str, options: &[(&str, String)]) -> anyhow::Result<String> {
    let ringfence = product::build(repo)?;
    script(repo, name, |command| {
        command.env("RINGFENCE", ringfence);
        command.envs(options.iter().map(|(name, value)| (name, value)));
    })
}

/// Runs a script and returns its last line.
fn script(repo: &Repo, name: &str, set: impl FnOnce(&mut Command)) -> anyhow::Result<String> {
    let mut last = String::new();
    let mut command = process::command(&repo.root, name);
    command.env("GUEST_CACHE", repo.target_directory()?.join("guest"));
    set(&mut command);
    process::show(&mut command, |line| last = line.to_owned()).with_context(|| last.clone())?;
    Ok(last)
}

/// Builds, boots, records and checks. Installs missing packages, which needs root or sudo, and the
/// network.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    if options.live {
        live(repo)?;
        pviommu(repo)?;
        riommu(repo)?;
        calibrate(repo)?;
        handover(repo, HANDOVERS)?;
        return Ok(true);
    }
    println!(
        "the kernel of {} in a guest for at most {} s; on Debian, as root or with sudo; QEMU and \
        kernel are fetched once",
        options.suite, options.limit
    );
    process::show(
        process::command(&repo.root, RECORD)
            .env("GUEST_SUITE", &options.suite)
            .env("GUEST_LIMIT", options.limit.to_string()),
        |_| {},
    )?;
    Ok(true)
}
