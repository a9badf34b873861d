//! Builds this project's kernel modules for a Debian kernel. The kernel's headers and the compiler
//! that they need are in a root directory below the cache.
//!
//! The headers' makefiles and tools come from the kernel's suite and need its C library and
//! absolute paths. make therefore runs in that root, in its own namespace. Nothing is installed,
//! and no root privileges are needed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use super::apt::Apt;
use super::architecture::Architecture;
use super::kernel::{DEBUG_MARK, Kernel, SUITES};
use super::{GuestError, initramfs::save};

/// Packages that make needs besides the compiler and its dependencies.
pub(super) const TOOLS: &[&str] = &[
    // Creates the links /bin and /lib64.
    "base-files",
    "make",
    "dash",
    "coreutils",
    "sed",
    "grep",
    "mawk",
    "findutils",
    "perl-base",
    "libelf1t64",
    "libssl3t64",
    "zlib1g",
];

/// Name of the root directory of the debug kernel.
pub(super) const DEBUG_ROOT: &str = "root-debug";

/// Script that runs another script in the root: $0 is the root, $1 the script, and its arguments
/// follow. Some makefiles call `awk` by this name.
const ENTER: &str = concat!(
    r#"mkdir -p "$0/dev" "$0/proc" && mount --rbind /dev "$0/dev" && "#,
    r#"mount --rbind /proc "$0/proc" && ln -sf mawk "$0/usr/bin/awk" &&
script=$1 && shift &&
exec chroot "$0" /usr/bin/env -i PATH=/usr/bin LC_ALL=C sh -c "$script" sh "$@""#
);

/// Script that builds modules in the root: $1 is the kernel's release, $2 the source directory, $3
/// the program that removes debug information. Guests also use the modules that are for tests only.
const MAKE: &str = r#"
make -C "/usr/src/linux-headers-$1" M="$2" CONFIG_DEBUG_INFO_BTF_MODULES= \
    RINGFENCE_TEST_MODULES=m modules &&
"$3" --strip-debug "$2"/*.ko
"#;

/// Builds the module `name` from the sources in `from` for `kernel`, unless `cache` has a build of
/// the same sources. Returns the module's bytes.
///
/// # Errors
/// [`GuestError`] names the missing part; [`GuestError::Build`] if the compiler reports an error.
pub fn build_module(
    kernel: &Kernel,
    name: &str,
    from: &Path,
    cache: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<u8>, GuestError> {
    let sources = sources(from)?;
    let release = kernel.release()?;
    let architecture = kernel.architecture();
    let base = cache.join("modules");
    let root = base.join(match architecture {
        Architecture::Amd64 if release.contains(DEBUG_MARK) => DEBUG_ROOT.to_owned(),
        Architecture::Amd64 => "root".to_owned(),
        // Compilers of several suites share no root.
        cross => format!("root-{cross}"),
    });
    // One directory can hold several modules, which are built together.
    let inside = format!("build/{release}");
    let dir = root.join(&inside);
    fs::create_dir_all(&dir).map_err(GuestError::io(&dir))?;
    // The lock lets guests that start at the same time build once.
    let lock = base.join("lock");
    let held = File::create(&lock).map_err(GuestError::io(&lock))?;
    flock(&held, FlockOperation::LockExclusive).map_err(|e| GuestError::io(&lock)(e.into()))?;

    let module = dir.join(format!("{name}.ko"));
    let done = dir.join("built");
    let fresh = fs::read(&done).is_ok_and(|built| built == sources.digest());
    if !fresh {
        prepare(architecture, &release, cache, &root, say)?;
        say(&format!("building modules for {release}"));
        fs::remove_dir_all(&dir).map_err(GuestError::io(&dir))?;
        fs::create_dir_all(&dir).map_err(GuestError::io(&dir))?;
        for (file, bytes) in &sources.files {
            save(&dir.join(file), bytes)?;
        }
        let strip = format!("{}strip", prefix(architecture));
        let inside = format!("/{inside}");
        run_in(&root, MAKE, &[&release, &inside, &strip], &base.join("log"))?;
        save(&done, &sources.digest())?;
    }
    fs::read(&module).map_err(GuestError::io(&module))
}

/// Source files of a module's directory.
struct Sources {
    files: Vec<(String, Vec<u8>)>,
}

impl Sources {
    /// Concatenates all files, to detect changes.
    fn digest(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (name, bytes) in &self.files {
            all.extend(format!("{name} {}\n", bytes.len()).into_bytes());
            all.extend(bytes);
        }
        all
    }
}

fn sources(from: &Path) -> Result<Sources, GuestError> {
    let mut files = Vec::new();
    let entries = fs::read_dir(from).map_err(|_| GuestError::NoSources {
        path: from.to_owned(),
    })?;
    for entry in entries {
        let path = entry.map_err(GuestError::io(from))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name else { continue };
        if name == "Kbuild" || name.ends_with(".c") || name.ends_with(".h") {
            files.push((
                name.to_owned(),
                fs::read(&path).map_err(GuestError::io(&path))?,
            ));
        }
    }
    files.sort();
    if files.iter().any(|(name, _)| name == "Kbuild") {
        return Ok(Sources { files });
    }
    Err(GuestError::NoSources {
        path: from.to_owned(),
    })
}

/// Returns what precedes the names of a compiler's programs that run on amd64 for `architecture`.
const fn prefix(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Amd64 => "",
        Architecture::Arm64 => "aarch64-linux-gnu-",
        Architecture::I386 => "i686-linux-gnu-",
        Architecture::S390x => "s390x-linux-gnu-",
        Architecture::Riscv64 => "riscv64-linux-gnu-",
    }
}

/// Returns the package with the compiler `gcc-N` for `architecture`.
fn compiler(gcc: &str, architecture: Architecture) -> String {
    match prefix(architecture).strip_suffix('-') {
        Some(target) => format!("{gcc}-{target}"),
        None => gcc.to_owned(),
    }
}

/// Downloads headers and tools that are missing.
fn prepare(
    architecture: Architecture,
    release: &str,
    cache: &Path,
    root: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<(), GuestError> {
    let complete = marker(root, release);
    if complete.is_file() {
        return Ok(());
    }
    if release.contains(DEBUG_MARK) {
        return Err(GuestError::NoDebugKernel);
    }
    say(&format!(
        "fetching what modules for {release} are built with (90 to 105 MB)"
    ));
    let package = format!("linux-headers-{release}");
    let mut last = GuestError::NoHeaders {
        package: package.clone(),
        root: root.to_owned(),
    };
    for suites in SUITES {
        match fetch(architecture, &package, cache, suites, root) {
            Ok(true) => return fs::write(&complete, "").map_err(GuestError::io(&complete)),
            Ok(false) => {}
            // A mirror that is being updated can lack the lists of one suite.
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Downloads the headers `package` from `suites`, and the tools to build with them. Returns false
/// if the suites lack the headers.
fn fetch(
    architecture: Architecture,
    package: &str,
    cache: &Path,
    suites: &[&str],
    root: &Path,
) -> Result<bool, GuestError> {
    // A user who unpacked the packages of a kernel that the archive has dropped provides its
    // headers too.
    let by_hand = root.join("usr/src").join(package).is_dir();
    let apt = Apt::of(architecture, cache, suites)?;
    let needs = apt.depends(package);
    let gcc = needs
        .iter()
        .filter_map(|need| need.strip_suffix("-for-host").or(Some(need)))
        .find(|need| need.starts_with("gcc-"));
    let gcc = match gcc {
        Some(gcc) => gcc,
        None if by_hand => "gcc-14",
        None => return Ok(false),
    };
    if !by_hand {
        let common = needs
            .iter()
            .filter(|need| need.starts_with("linux-headers-"));
        let packages = std::iter::once(package).chain(common.map(String::as_str));
        apt.unpack(&packages.map(str::to_owned).collect::<Vec<_>>(), root)?;
    }
    // The programs that build run on amd64, whatever the kernel's architecture is.
    let apt = match architecture {
        Architecture::Amd64 => apt,
        _ => {
            drop(apt);
            Apt::new(cache, suites)?
        }
    };
    let compiler = compiler(gcc, architecture);
    let mut tools = vec![compiler.as_str()];
    tools.extend(TOOLS);
    let suite = suites.last().copied().unwrap_or("trixie");
    apt.unpack_with_dependencies(suite, &tools, root)?;
    let kbuild = needs
        .iter()
        .filter(|need| need.starts_with("linux-kbuild-"));
    if !by_hand {
        apt.unpack(&kbuild.cloned().collect::<Vec<_>>(), root)?;
    }
    Ok(true)
}

/// Returns the path of the file that exists if `root` has the headers of the kernel `release`.
pub(super) fn marker(root: &Path, release: &str) -> PathBuf {
    root.join(format!("headers-{release}"))
}

/// Runs a script of the shell in `root`. Its output is in `log`.
pub(super) fn run_in(
    root: &Path,
    script: &str,
    arguments: &[&str],
    log: &Path,
) -> Result<(), GuestError> {
    let out = File::create(log).map_err(GuestError::io(log))?;
    let copy = out.try_clone().map_err(GuestError::io(log))?;
    let status = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", ENTER])
        .arg(root)
        .arg(script)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(copy)
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(GuestError::Build {
            log: log.to_owned(),
        }),
        Err(_) => Err(GuestError::Missing {
            program: "unshare",
            package: "util-linux",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_run_on_amd64() {
        assert_eq!(compiler("gcc-14", Architecture::Amd64), "gcc-14");
        let cross = compiler("gcc-16", Architecture::Riscv64);
        assert_eq!(cross, "gcc-16-riscv64-linux-gnu");
    }

    #[test]
    fn a_directory_without_makefile_is_no_module() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path();
        fs::write(dir.join("a.c"), "int a;").unwrap();
        let missing = |path: &Path| matches!(sources(path), Err(GuestError::NoSources { .. }));
        assert!(missing(dir));
        assert!(missing(&dir.join("nowhere")));
        fs::write(dir.join("Kbuild"), "").unwrap();
        fs::write(dir.join("README.md"), "").unwrap();
        let first = sources(dir).unwrap();
        assert_eq!(first.files.len(), 2);
        fs::write(dir.join("a.c"), "int b;").unwrap();
        assert_ne!(sources(dir).unwrap().digest(), first.digest());
    }
}
