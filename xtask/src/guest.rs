//! Guests with real kernels (docs/GUEST.md): `trace record` in one, or devices that live here. Scripts do the work.

use crate::process;
use crate::repo::Repo;

const RECORD: &str = "tests/guest/record.sh";
const LIVE: &str = "tests/guest/live.sh";

/// Which kernel, and how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The Debian suite whose kernel is booted.
    #[arg(long, default_value = "trixie")]
    suite: String,
    /// Try the devices that live in `ringfence` instead of recording.
    #[arg(long, conflicts_with = "suite")]
    live: bool,
    /// The guest's longest life in seconds; it takes one to three minutes.
    #[arg(long, default_value_t = 600)]
    limit: u32,
}

/// Builds, boots, records and judges. What is missing is installed, which needs root or sudo, and the network.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    if options.live {
        println!(
            "guests whose disk lives here, each for at most {} s",
            options.limit
        );
        let limit = options.limit.to_string();
        let mut command = process::command(&repo.root, LIVE);
        process::show(command.env("GUEST_LIMIT", limit), |_| {})?;
        return Ok(true);
    }
    println!(
        "the kernel of {} in a guest for at most {} s; on Debian, as root or with sudo; QEMU and kernel are fetched once",
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
