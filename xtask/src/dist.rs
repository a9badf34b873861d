//! The release archive and the Debian package: `cargo xtask dist`.
//!
//! Both have the same files. Equal inputs give equal bytes: names are sorted, files belong to root,
//! and every time is that of the commit or `SOURCE_DATE_EPOCH`.

mod debian;
mod graph;
mod notices;
mod sbom;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::repo::Repo;
use crate::{output, process, product};
use graph::Graph;
use tree::Tree;

/// Options of the task.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Packs this command instead of building it.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Directory of the results; default: dist in the target directory.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Properties of a release that its files state.
struct Release {
    version: String,
    /// Name of this machine's architecture for Rust.
    arch: &'static str,
    /// Name of this machine's architecture for Debian.
    debian_arch: &'static str,
    /// Seconds since 1970.
    epoch: u64,
}

/// Names of the results.
struct Made {
    archive: String,
    package: String,
}

/// Documents of a release, relative to the root.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "docs/VERSIONING.md",
];

/// Shells, and the files that they read completions from, below `share`.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "share/bash-completion/completions/ringfence"),
    ("zsh", "share/zsh/vendor-completions/_ringfence"),
    ("fish", "share/fish/vendor_completions.d/ringfence.fish"),
];

/// Builds the command, unless it is given, and packs it.
pub(crate) fn run(repo: &Repo, options: &Options) -> anyhow::Result<bool> {
    let binary = match &options.binary {
        Some(binary) => binary.clone(),
        None => product::build(repo)?,
    };
    let out = match &options.out {
        Some(out) => out.clone(),
        None => repo.target_directory()?.join("dist"),
    };
    let made = pack(repo, &binary, &out)?;
    verify(&out, &made)?;
    output::line(&fs::read_to_string(out.join("SHA256SUMS"))?);
    Ok(true)
}

/// Packs the command twice, compares the results, and installs the package into a directory.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let binary = product::build(repo)?;
    let directory = repo.target_directory()?.join("dist");
    let (first, second) = (directory.join("first"), directory.join("second"));
    let made = pack(repo, &binary, &first)?;
    pack(repo, &binary, &second)?;
    for name in [&made.archive, &made.package] {
        ensure!(
            fs::read(first.join(name))? == fs::read(second.join(name))?,
            "two runs give different bytes of {name}"
        );
    }
    verify(&first, &made)?;
    fs::remove_dir_all(&second)?;
    Ok(format!("{}, {}", made.archive, made.package))
}

/// Writes the archive, the package and their digests to `out`.
fn pack(repo: &Repo, binary: &Path, out: &Path) -> anyhow::Result<Made> {
    let release = Release::of(repo)?;
    let stage = out.join("stage");
    if stage.exists() {
        fs::remove_dir_all(&stage)?;
    }
    let name = format!("ringfence-{}-{}-linux", release.version, release.arch);
    let files = gather(repo, binary, &release, &stage.join("made"))?;
    let archive = format!("{name}.tar.gz");
    files.write(&stage.join(&name))?;
    tree::archive(&stage, &name, &out.join(&archive), release.epoch)?;
    let package = format!("ringfence_{}_{}.deb", release.version, release.debian_arch);
    debian::package(repo, files, &release, &stage, &out.join(&package))?;
    let sums = process::capture(process::command(out, "sha256sum").args([&archive, &package]))?;
    fs::write(out.join("SHA256SUMS"), sums)?;
    fs::remove_dir_all(&stage)?;
    Ok(Made { archive, package })
}

/// Returns the files of a release, by their paths below /usr.
fn gather(repo: &Repo, binary: &Path, release: &Release, made: &Path) -> anyhow::Result<Tree> {
    let mut tree = Tree::default();
    fs::create_dir_all(made)?;
    let made = made.canonicalize()?;
    let binary = binary
        .canonicalize()
        .with_context(|| binary.display().to_string())?;
    tree.add_program("bin/ringfence", stripped(&binary, &made)?);
    for (shell, path) in COMPLETIONS {
        let script = process::capture(command(&made, &binary).args(["completions", shell]))?;
        tree.add(*path, script);
    }
    let pages = made.join("man");
    process::capture(command(&made, &binary).arg("man").arg(&pages))?;
    for page in fs::read_dir(&pages)? {
        let page = page?;
        let name = page.file_name();
        let path = format!("share/man/man1/{}", name.to_string_lossy());
        tree.add(path, fs::read(page.path())?);
    }
    for document in DOCUMENTS {
        let name = document.rsplit('/').next().unwrap_or(document);
        tree.add(format!("share/doc/ringfence/{name}"), repo.read(document)?);
    }
    let graph = Graph::read(repo, "ringfence-cli")?;
    let sbom = sbom::write(&graph, &release.timestamp()?);
    tree.add("share/doc/ringfence/ringfence.cdx.json", sbom);
    tree.add(
        "share/doc/ringfence/THIRD-PARTY",
        notices::write(&graph.packages)?,
    );
    modules(repo, release, &mut tree)?;
    Ok(tree)
}

/// Adds the sources of the kernel modules, where DKMS looks for them.
fn modules(repo: &Repo, release: &Release, tree: &mut Tree) -> anyhow::Result<()> {
    let configuration = repo.read("kmod/dkms.conf")?;
    let version = format!("PACKAGE_VERSION=\"{}\"", release.version);
    ensure!(
        configuration.lines().any(|line| line == version),
        "kmod/dkms.conf has another version than {}",
        release.version
    );
    for path in repo.files()? {
        let Ok(file) = path.strip_prefix("kmod") else {
            continue;
        };
        if !file.starts_with("tests") {
            let to = format!("src/ringfence-{}/{}", release.version, file.display());
            tree.add(to, fs::read(repo.root.join(&path))?);
        }
    }
    Ok(())
}

/// Returns the command, which does not depend on the user who runs it.
fn command(directory: &Path, binary: &Path) -> std::process::Command {
    let mut command = process::command(directory, &binary.to_string_lossy());
    command.env_clear();
    command
}

/// Returns a binary without its symbols; a script as is.
fn stripped(binary: &Path, made: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = fs::read(binary)?;
    if !bytes.starts_with(b"\x7fELF") {
        return Ok(bytes);
    }
    let to = made.join("ringfence");
    process::capture(
        process::command(made, "strip")
            .args(["--strip-all", "-o"])
            .arg(&to)
            .arg(binary),
    )?;
    Ok(fs::read(to)?)
}

impl Release {
    fn of(repo: &Repo) -> anyhow::Result<Self> {
        let packages = repo.packages()?;
        let version = packages
            .iter()
            .find(|package| package["name"] == "ringfence-cli")
            .and_then(|package| package["version"].as_str())
            .context("ringfence-cli has no version")?
            .to_owned();
        let (arch, debian_arch) = match std::env::consts::ARCH {
            arch @ "x86_64" => (arch, "amd64"),
            arch @ "aarch64" => (arch, "arm64"),
            arch @ "riscv64" => (arch, "riscv64"),
            arch => bail!("no release for {arch}"),
        };
        Ok(Self {
            version,
            arch,
            debian_arch,
            epoch: epoch(repo)?,
        })
    }

    /// Returns the time in the form of RFC 3339.
    fn timestamp(&self) -> anyhow::Result<String> {
        self.date("+%Y-%m-%dT%H:%M:%SZ")
    }

    /// Returns the time in a form of date(1).
    fn date(&self, form: &str) -> anyhow::Result<String> {
        let at = format!("--date=@{}", self.epoch);
        let date = process::capture(
            process::command(Path::new("/"), "date")
                .args(["--utc", &at, form])
                .env("LC_ALL", "C"),
        )?;
        Ok(date.trim().to_owned())
    }
}

/// Returns the time of every file of a release.
fn epoch(repo: &Repo) -> anyhow::Result<u64> {
    let time = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(time) => time,
        Err(_) => process::capture(process::command(&repo.root, "git").args([
            "log",
            "-1",
            "--format=%ct",
        ]))?,
    };
    time.trim()
        .parse()
        .with_context(|| format!("{time:?} is no time in seconds"))
}

/// Checks what a user gets: the package unpacks, scripts parse, and the manual page renders.
fn verify(out: &Path, made: &Made) -> anyhow::Result<()> {
    let root = out.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    process::capture(
        process::command(out, "dpkg-deb")
            .args(["--extract", &made.package])
            .arg("root"),
    )?;
    let root = root.canonicalize()?;
    let version = process::capture(command(&root, &root.join("usr/bin/ringfence")).arg("-V"))?;
    ensure!(version.starts_with("ringfence "), "-V prints {version}");
    for (shell, path) in COMPLETIONS {
        if process::available(shell, "--version") {
            let script = root.join("usr").join(path);
            process::capture(process::command(&root, shell).arg("-n").arg(script))?;
        }
    }
    let page = root.join("usr/share/man/man1/ringfence.1.gz");
    if process::available("man", "--version") {
        let shown = process::capture(
            process::command(&root, "man")
                .args(["--warnings", "--local-file"])
                .arg(page),
        )?;
        ensure!(
            shown.contains("SYNOPSIS"),
            "the manual page renders no synopsis"
        );
    }
    fs::remove_dir_all(&root)?;
    Ok(())
}

#[cfg(test)]
mod tests;
