//! Installs the tools that the tests need and a fresh machine lacks.

use anyhow::{Context, bail};

use crate::process;
use crate::repo::Repo;

/// Programs in Debian packages: name, argument that tests their presence, package.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("python3", "--version", "python3"),
    ("zstd", "--version", "zstd"),
    ("valgrind", "--version", "valgrind"),
    // Its --version prints the version and fails.
    ("trace-cmd", "options", "trace-cmd"),
    // Components of guests.
    ("busybox", "--help", "busybox-static"),
    ("xz", "--version", "xz-utils"),
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
    let packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, argument, _)| !process::available(program, argument))
        .map(|(_, _, package)| *package)
        .collect();
    if !packages.is_empty() {
        apt(repo, &packages).with_context(|| format!("install {} by hand", packages.join(", ")))?;
        installed.extend(&packages);
    }
    for (program, argument, package) in PROGRAMS {
        if !process::available(program, argument) {
            bail!("{program} (package {package}) still does not run");
        }
    }
    if has_nightly() && !has_cargo_fuzz() {
        process::show(
            process::command(&repo.root, "cargo").args(["install", "--locked", "cargo-fuzz"]),
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
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive");
        process::show(&mut command, |_| {})
    };
    apt(&["update", "--quiet"])?;
    apt(&[
        &["install", "--yes", "--quiet", "--no-install-recommends"],
        packages,
    ]
    .concat())
}
