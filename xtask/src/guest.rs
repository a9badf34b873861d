//! `trace record` on a real kernel in a guest (docs/GUEST.md): a script does the work.

use crate::process;
use crate::repo::Repo;

const SCRIPT: &str = "tests/guest/record.sh";

/// Which kernel, and how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The Debian suite whose kernel is booted.
    #[arg(long, default_value = "trixie")]
    suite: String,
    /// The guest's longest life in seconds; it takes one to three minutes.
    #[arg(long, default_value_t = 600)]
    limit: u32,
}

/// Builds, boots, records and judges. What is missing is installed, which needs root or sudo, and the network.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    println!(
        "the kernel of {} in a guest for at most {} s; on Debian, as root or with sudo; QEMU and kernel are fetched once",
        options.suite, options.limit
    );
    process::show(
        process::command(&repo.root, SCRIPT)
            .env("GUEST_SUITE", &options.suite)
            .env("GUEST_LIMIT", options.limit.to_string()),
        |_| {},
    )?;
    Ok(true)
}
