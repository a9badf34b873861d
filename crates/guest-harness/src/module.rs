//! Builds this project's kernel modules for a Debian kernel. The kernel's headers and the compiler
//! that they need are in a root directory below the cache.
//!
//! The headers' makefiles and tools come from the kernel's suite and need its C library and
//! absolute paths. make therefore runs in that root, in its own namespace. Nothing is installed,
//! and no root privileges are needed.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use super::apt::Apt;
use super::kernel::{Kernel, SUITES};
use super::{GuestError, initramfs::save};

/// Packages that make needs besides the compiler and its dependencies.
const TOOLS: &[&str] = &[
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

/// Script that runs make in the root: $0 is the root, $1 the kernel's release, $2 the source
/// directory. It removes debug information.
const MAKE: &str = concat!(
    r#"mkdir -p "$0/dev" "$0/proc" && mount --rbind /dev "$0/dev" && "#,
    r#"mount --rbind /proc "$0/proc" &&
exec chroot "$0" /usr/bin/env -i PATH=/usr/bin LC_ALL=C sh -c '
    make -C "/usr/src/linux-headers-$0" M="$1" AWK=mawk CONFIG_DEBUG_INFO_BTF_MODULES= modules "#,
    r#"&& strip --strip-debug "$1"/*.ko
' "$1" "$2""#
);

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
    let base = cache.join("modules");
    let root = base.join("root");
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
        prepare(&release, cache, &root, say)?;
        say(&format!("building modules for {release}"));
        fs::remove_dir_all(&dir).map_err(GuestError::io(&dir))?;
        fs::create_dir_all(&dir).map_err(GuestError::io(&dir))?;
        for (file, bytes) in &sources.files {
            save(&dir.join(file), bytes)?;
        }
        make(&root, &release, &format!("/{inside}"), &base.join("log"))?;
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

/// Downloads headers and tools that are missing.
fn prepare(
    release: &str,
    cache: &Path,
    root: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<(), GuestError> {
    let headers = root
        .join("usr/src")
        .join(format!("linux-headers-{release}"));
    let complete = root.join(format!("headers-{release}"));
    if complete.is_file() {
        return Ok(());
    }
    // A user who unpacked the packages of a kernel that the archive has dropped provides its
    // headers too.
    let by_hand = headers.is_dir();
    say(&format!(
        "fetching what modules for {release} are built with (90 MB)"
    ));
    let package = format!("linux-headers-{release}");
    for suites in SUITES {
        let apt = Apt::new(cache, suites)?;
        let needs = apt.depends(&package);
        let compiler = needs
            .iter()
            .filter_map(|need| need.strip_suffix("-for-host").or(Some(need)))
            .find(|need| need.starts_with("gcc-"));
        let compiler = match compiler {
            Some(compiler) => compiler,
            None if by_hand => "gcc-14",
            None => continue,
        };
        let mut tools = vec![compiler];
        tools.extend(TOOLS);
        let suite = suites.last().copied().unwrap_or("trixie");
        apt.unpack_with_dependencies(suite, &tools, root)?;
        if !by_hand {
            let parts = needs.iter().filter(|need| {
                need.starts_with("linux-headers-") || need.starts_with("linux-kbuild-")
            });
            let packages: Vec<String> = std::iter::once(&package).chain(parts).cloned().collect();
            apt.unpack(&packages, root)?;
        }
        return fs::write(&complete, "").map_err(GuestError::io(&complete));
    }
    Err(GuestError::NoHeaders {
        package,
        root: root.to_owned(),
    })
}

fn make(root: &Path, release: &str, inside: &str, log: &Path) -> Result<(), GuestError> {
    let out = File::create(log).map_err(GuestError::io(log))?;
    let copy = out.try_clone().map_err(GuestError::io(log))?;
    let status = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", MAKE])
        .arg(root)
        .args([release, inside])
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
