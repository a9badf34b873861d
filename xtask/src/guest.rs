//! Guests with real kernels (tests/guest/README.md): `trace record` and `trace judge` in a guest,
//! or guests with devices of `ringfence`. Scripts do the work.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::process;
use crate::product;
use crate::repo::Repo;

const RECORD: &str = "tests/guest/record.sh";
const PAGES: &str = "tests/guest/pages.sh";
const FETCH: &str = "tests/guest/fetch.sh";
const LIVE: &str = "tests/guest/live.sh";
const PVIOMMU: &str = "tests/guest/pviommu.sh";
const RIOMMU: &str = "tests/guest/riommu.sh";
const NVME: &str = "tests/guest/nvme.sh";
const POOLDMA: &str = "tests/guest/pooldma.sh";
const CALIBRATE: &str = "tests/guest/calibrate.sh";
const HANDOVER: &str = "tests/guest/handover.sh";
const SOAK: &str = "tests/guest/soak.sh";
const REPORTS: &str = "tests/guest/reports.sh";
/// Configuration of the debug kernel.
const DEBUG_CONFIGURATION: &str = "tests/guest/debug.config";
const CHECKPATCH: &str = "kmod/tests/checkpatch.sh";
const INSTALL: &str = "kmod/tests/install.sh";
const SPARSE: &str = "kmod/tests/sparse.sh";

/// Work that a run of the scripts does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Each case runs on one kernel, and the kernels alternate; otherwise on every kernel.
    alternate: bool,
    /// Number of kills of the process that serves the devices, behind each IOMMU.
    kills: u32,
    /// Number of consecutive hand-overs.
    handovers: u32,
}

impl Effort {
    /// The effort of `cargo xtask test`.
    pub(crate) const BRIEF: Self = Self {
        alternate: true,
        kills: 3,
        handovers: 3,
    };
    /// The effort of `cargo xtask guest --live`.
    const FULL: Self = Self {
        alternate: false,
        kills: 20,
        handovers: 20,
    };

    /// Returns the variables of the scripts.
    fn variables(self) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("GUEST_KILLS", self.kills.to_string()),
            ("GUEST_HANDOVERS", self.handovers.to_string()),
        ];
        if self.alternate {
            variables.push(("GUEST_ALTERNATE", "1".to_owned()));
        }
        variables
    }
}

/// Options of `guest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Debian suite whose kernel boots.
    #[arg(long, default_value = "trixie")]
    suite: String,
    /// Tests guests with devices of `ringfence` instead of recording.
    #[arg(long, conflicts_with = "suite")]
    live: bool,
    /// Builds the debug kernel instead of recording, which takes minutes once; with --live, runs
    /// the tests of the modules under it.
    #[arg(long, conflicts_with = "suite")]
    debug_kernel: bool,
    /// Maximum run time of the guest in seconds; it takes one to three minutes.
    #[arg(long, default_value_t = 600)]
    limit: u32,
}

/// Fetches the components of guests and builds their modules.
pub(crate) fn fetch(repo: &Repo) -> anyhow::Result<String> {
    cases(repo, FETCH, &[])
}

/// Builds the debug kernel, unless the cache has one of the same configuration.
fn build_debug_kernel(repo: &Repo) -> anyhow::Result<()> {
    let mut command = process::command(&repo.root, "cargo");
    command.args(["run", "--quiet", "--package", "ringfence-guest-harness"]);
    command.args(["--example", "debug_kernel", "--", DEBUG_CONFIGURATION]);
    command.arg(cache(repo)?);
    process::show(&mut command, |_| {})
}

/// Runs the tests of the modules under the debug kernel, after those that show that a report fails
/// a test.
fn debug(repo: &Repo) -> anyhow::Result<()> {
    for test in [REPORTS, RIOMMU, PVIOMMU, POOLDMA, NVME] {
        cases(repo, test, &[("GUEST_KERNELS", "debug".to_owned())])?;
    }
    Ok(())
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

/// Installs the modules as a user does, below a directory.
pub(crate) fn install_modules(repo: &Repo) -> anyhow::Result<String> {
    script(repo, INSTALL, |_| {})
}

/// Runs sparse on the modules.
pub(crate) fn sparse(repo: &Repo) -> anyhow::Result<String> {
    script(repo, SPARSE, |_| {})
}

/// Runs the cases of standard guests with devices of `ringfence`. Fetches QEMU and kernels that are
/// not cached.
pub(crate) fn live(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, LIVE, &effort.variables())
}

/// Like [`live`], behind the para-virtual IOMMU; builds modules for the guests' kernels.
pub(crate) fn pviommu(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, PVIOMMU, &effort.variables())
}

/// Like [`live`], behind the ring IOMMU.
pub(crate) fn riommu(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, RIOMMU, &effort.variables())
}

/// Like [`live`], with an NVMe disk behind each IOMMU.
pub(crate) fn nvme(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, NVME, &effort.variables())
}

/// Tests shadow buffers for devices that QEMU emulates, behind its own IOMMUs.
pub(crate) fn pooldma(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, POOLDMA, &effort.variables())
}

/// Measures the guests' IOMMUs with `ringfence calibrate --host`.
pub(crate) fn calibrate(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, CALIBRATE, &effort.variables())
}

/// Hands devices over from one process to the next.
pub(crate) fn handover(repo: &Repo, effort: Effort) -> anyhow::Result<String> {
    cases(repo, HANDOVER, &effort.variables())
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

/// Returns the directory of the guests' components.
fn cache(repo: &Repo) -> anyhow::Result<PathBuf> {
    Ok(repo.target_directory()?.join("guest"))
}

/// Runs a script and returns its last line.
fn script(repo: &Repo, name: &str, set: impl FnOnce(&mut Command)) -> anyhow::Result<String> {
    let mut last = String::new();
    let mut command = process::command(&repo.root, name);
    command.env("GUEST_CACHE", cache(repo)?);
    set(&mut command);
    process::show(&mut command, |line| last = line.to_owned()).with_context(|| last.clone())?;
    Ok(last)
}

/// Builds, boots, records and checks. Installs missing packages, which needs root or sudo, and the
/// network.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    if options.debug_kernel {
        build_debug_kernel(repo)?;
        if options.live {
            debug(repo)?;
        }
        return Ok(true);
    }
    if options.live {
        for suite in [live, pviommu, riommu, nvme, pooldma, calibrate, handover] {
            suite(repo, Effort::FULL)?;
        }
        return Ok(true);
    }
    println!(
        "the kernel of {} in a guest for at most {} s; on Debian, as root or with sudo; QEMU and \
        kernel are fetched once",
        options.suite, options.limit
    );
    for test in [RECORD, PAGES] {
        process::show(
            process::command(&repo.root, test)
                .env("GUEST_SUITE", &options.suite)
                .env("GUEST_LIMIT", options.limit.to_string()),
            |_| {},
        )?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checks that documents promise. The build requires that the kernel takes each option.
    #[test]
    fn the_debug_kernel_has_its_checks() {
        let repo = Repo::find().unwrap();
        let text = std::fs::read_to_string(repo.root.join(DEBUG_CONFIGURATION)).unwrap();
        for check in [
            "PROVE_LOCKING",
            "PROVE_RCU",
            "DEBUG_ATOMIC_SLEEP",
            "DEBUG_PREEMPT",
            "KASAN_GENERIC",
            "SLUB_DEBUG",
            "DEBUG_LIST",
            "DEBUG_SG",
            "UBSAN_BOUNDS",
            "DMA_API_DEBUG",
            "DMA_API_DEBUG_SG",
            "DEBUG_OBJECTS_TIMERS",
            "DEBUG_OBJECTS_WORK",
            "DETECT_HUNG_TASK",
        ] {
            let line = format!("CONFIG_{check}=y");
            assert!(text.lines().any(|option| option == line), "{line}");
        }
    }

    #[test]
    fn scripts_exist() {
        let repo = Repo::find().unwrap();
        for name in [REPORTS, RIOMMU, PVIOMMU, RECORD, PAGES, DEBUG_CONFIGURATION] {
            assert!(repo.root.join(name).is_file(), "{name}");
        }
    }
}
