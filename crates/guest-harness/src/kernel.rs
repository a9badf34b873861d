//! Debian's kernels: the image, and modules with their dependencies.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::GuestError;
use super::apt::Apt;
use super::architecture::Architecture;

/// An unpacked kernel package.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Path of the compressed image.
    pub image: PathBuf,
    root: PathBuf,
    architecture: Architecture,
}

/// A decompressed module.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

/// Selects the newest kernel in trixie and its backports.
pub const LATEST: &str = "latest";

/// Selects the debug kernel, which [`prepare_debug_kernel`](crate::prepare_debug_kernel) builds.
pub const DEBUG_KERNEL: &str = "debug";

/// Precedes the digest in the release name of a debug kernel.
pub(super) const DEBUG_MARK: &str = "-debug-";

/// Suites in order of preference; the second list is used only if the first has no matching kernel.
pub(super) const SUITES: [&[&str]; 2] = [&["trixie", "trixie-backports"], &["sid"]];

impl Kernel {
    /// Finds the newest kernel whose version begins with `version` (6.12), or the newest of all
    /// ([`LATEST`]), and downloads it if `cache` lacks it. If `version` contains a slash, it is a
    /// directory with unpacked kernel packages.
    ///
    /// # Errors
    /// [`GuestError`] names the missing part.
    pub fn prepare(
        version: &str,
        cache: &Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<Self, GuestError> {
        if version.contains('/') {
            return Self::unpacked(Path::new(version).to_owned(), Architecture::Amd64);
        }
        let root = cache.join("kernels").join(version);
        let complete = root.join("complete");
        if !complete.is_file() {
            if version == DEBUG_KERNEL {
                return Err(GuestError::NoDebugKernel);
            }
            say(&format!("fetching Debian's kernel {version} (110 MB)"));
            let _ = fs::remove_dir_all(&root);
            fetch(version, cache, &root)?;
            fs::write(&complete, "").map_err(GuestError::io(&complete))?;
        }
        Self::unpacked(root, Architecture::Amd64)
    }

    /// Returns the newest kernel of `architecture` in trixie's backports, or in sid, and Debian's
    /// busybox for it. Downloads them into `root` if it lacks them.
    pub(super) fn with_busybox(
        architecture: Architecture,
        cache: &Path,
        root: &Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<Self, GuestError> {
        let complete = root.join("complete");
        if !complete.is_file() {
            say(&format!(
                "fetching Debian's kernel for {architecture} (100 to 130 MB)"
            ));
            let _ = fs::remove_dir_all(root);
            // A mirror that is being updated can lack the lists of one suite.
            let fetched = SUITES.iter().map(|suites| {
                let apt = Apt::of(architecture, cache, suites)?;
                let mut packages = packages(&apt, architecture, LATEST)
                    .ok_or_else(|| missing(&apt, architecture, LATEST))?;
                packages.push("busybox-static".into());
                apt.unpack(&packages, root)
            });
            first_success(fetched)?;
            fs::write(&complete, "").map_err(GuestError::io(&complete))?;
        }
        Self::unpacked(root.to_owned(), architecture)
    }

    /// Makes the next [`with_busybox`](Self::with_busybox) download into `root` again.
    pub(super) fn forget(root: &Path) {
        let _ = fs::remove_file(root.join("complete"));
    }

    /// Returns the directory of the unpacked packages.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the architecture that the kernel runs on.
    pub(super) const fn architecture(&self) -> Architecture {
        self.architecture
    }

    fn unpacked(root: PathBuf, architecture: Architecture) -> Result<Self, GuestError> {
        let image = find(&root, &|name| name.starts_with("vmlinuz")).ok_or_else(|| {
            GuestError::NoModule {
                module: format!("vmlinuz (in {})", root.display()),
            }
        })?;
        Ok(Self {
            image,
            root,
            architecture,
        })
    }

    /// Returns the kernel's release name, which is the name of its module directory.
    pub(super) fn release(&self) -> Result<String, GuestError> {
        let modules = ["usr/lib/modules", "lib/modules"].map(|dir| self.root.join(dir));
        let entries = modules.iter().filter_map(|dir| fs::read_dir(dir).ok());
        entries
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .next()
            .ok_or_else(|| GuestError::NoModule {
                module: format!("a directory of modules (in {})", self.root.display()),
            })
    }

    /// Returns the modules `names` and their dependencies in load order. A name without a file is
    /// built into the kernel.
    pub(super) fn modules(&self, names: &[&str]) -> Result<Vec<Module>, GuestError> {
        let mut found = BTreeSet::new();
        let mut loaded = Vec::new();
        for name in names {
            self.load(name, &mut found, &mut loaded)?;
        }
        Ok(loaded)
    }

    /// Adds a module after its dependencies. `found` has the names so far, so that modules that
    /// depend on each other end.
    fn load(
        &self,
        name: &str,
        found: &mut BTreeSet<String>,
        loaded: &mut Vec<Module>,
    ) -> Result<(), GuestError> {
        let name = name.replace('-', "_");
        if !found.insert(name.clone()) {
            return Ok(());
        }
        let is = |found: &str| {
            let found = found.strip_suffix(".xz").unwrap_or(found);
            found.strip_suffix(".ko").map(|stem| stem.replace('-', "_")) == Some(name.clone())
        };
        let Some(path) = find(&self.root, &is) else {
            return Ok(());
        };
        let bytes = match path.extension() {
            Some(end) if end == "xz" => decompress(&path)?,
            _ => fs::read(&path).map_err(GuestError::io(&path))?,
        };
        for need in needs(&bytes) {
            self.load(&need, found, loaded)?;
        }
        loaded.push(Module { name, bytes });
        Ok(())
    }
}

fn fetch(version: &str, cache: &Path, root: &Path) -> Result<(), GuestError> {
    let mut known = Vec::new();
    for suites in SUITES {
        let apt = Apt::new(cache, suites)?;
        if let Some(packages) = packages(&apt, Architecture::Amd64, version) {
            return apt.unpack(&packages, root);
        }
        known.extend(kernels(&apt, Architecture::Amd64));
    }
    Err(GuestError::NoKernel {
        version: version.to_owned(),
        known,
    })
}

/// Returns the names of the kernels' packages, the oldest first.
fn kernels(apt: &Apt, architecture: Architecture) -> Vec<String> {
    let pattern = format!(r"^linux-image-[0-9.]+(\+[a-z0-9.]+)?-{architecture}$");
    let mut names = apt.names(&pattern);
    names.sort_by_key(|name| numbers(name));
    names
}

/// Returns the packages of the newest kernel whose version begins with `version`.
fn packages(apt: &Apt, architecture: Architecture, version: &str) -> Option<Vec<String>> {
    let names = kernels(apt, architecture);
    let package = names.iter().rev().find(|name| is(name, version))?;
    // Since 7.x the image and the modules have their own packages.
    let parts = apt
        .depends(package)
        .into_iter()
        .filter(|part| part.starts_with("linux-binary-") || part.starts_with("linux-modules-"));
    Some(std::iter::once(package.clone()).chain(parts).collect())
}

fn missing(apt: &Apt, architecture: Architecture, version: &str) -> GuestError {
    GuestError::NoKernel {
        version: format!("{version} for {architecture}"),
        known: kernels(apt, architecture),
    }
}

/// Returns the first success, or the last error.
fn first_success(
    mut results: impl Iterator<Item = Result<(), GuestError>>,
) -> Result<(), GuestError> {
    let mut last = Ok(());
    for result in &mut results {
        last = result;
        if last.is_ok() {
            break;
        }
    }
    last
}

/// Returns true if the package `name` is a kernel whose version begins with `version`, or if
/// `version` is [`LATEST`].
fn is(name: &str, version: &str) -> bool {
    version == LATEST
        || super::error::kernel_version(name)
            .strip_prefix(version)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '+', '-']))
}

fn numbers(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect()
}

fn find(dir: &Path, fits: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    let mut below = Vec::new();
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        let kind = entry.file_type().ok()?;
        if kind.is_dir() {
            below.push(path);
        } else if kind.is_file() && entry.file_name().to_str().is_some_and(fits) {
            return Some(path);
        }
    }
    below.sort();
    below.iter().find_map(|dir| find(dir, fits))
}

fn decompress(path: &Path) -> Result<Vec<u8>, GuestError> {
    let output = Command::new("xz").arg("-dc").arg(path).output();
    match output {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(_) => Err(GuestError::NoModule {
            module: path.display().to_string(),
        }),
        Err(_) => Err(GuestError::Missing {
            program: "xz",
            package: "xz-utils",
        }),
    }
}

/// Returns the dependencies of a module, from its section `.modinfo`.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"depends=";
    module
        .split(|byte| *byte == 0)
        .find_map(|text| text.strip_prefix(KEY))
        .map(|list| {
            String::from_utf8_lossy(list)
                .split(',')
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_module() {
        assert_eq!(
            needs(b"ELF\0license=GPL\0depends=jbd2,mbcache\0x"),
            ["jbd2", "mbcache"]
        );
        assert_eq!(needs(b"depends=\0"), [""; 0]);
        assert_eq!(needs(b"nothing"), [""; 0]);
    }

    #[test]
    fn modules_are_found_compressed_or_not() {
        let scratch = tempfile::tempdir().unwrap();
        let modules = scratch.path().join("usr/lib/modules/6.12.0-debug-1/kernel");
        fs::create_dir_all(&modules).unwrap();
        fs::write(scratch.path().join("vmlinuz-6.12.0-debug-1"), "").unwrap();
        fs::write(modules.join("jbd2.ko"), "\0depends=\0").unwrap();
        fs::write(modules.join("virtio-blk.ko"), "\0depends=jbd2\0").unwrap();
        fs::write(modules.join("virtio_net.ko.old"), "").unwrap();
        // No kernel has such modules.
        fs::write(modules.join("a.ko"), "\0depends=b\0").unwrap();
        fs::write(modules.join("b.ko"), "\0depends=a,jbd2\0").unwrap();
        let archive = Command::new("sh")
            .args(["-c", r"printf '\0depends=jbd2\0' | xz >ext4.ko.xz"])
            .current_dir(&modules)
            .status();
        assert!(archive.unwrap().success());
        let kernel = Kernel::unpacked(scratch.path().to_owned(), Architecture::Amd64).unwrap();
        let found = kernel.modules(&["virtio_blk", "virtio_net", "ext4"]);
        let names: Vec<_> = found
            .unwrap()
            .into_iter()
            .map(|module| module.name)
            .collect();
        assert_eq!(names, ["jbd2", "virtio_blk", "ext4"]);
        assert_eq!(kernel.modules(&["a"]).unwrap().len(), 3);
    }

    #[test]
    fn the_debug_kernel_is_not_downloaded() {
        let scratch = tempfile::tempdir().unwrap();
        let say = &mut |text: &str| panic!("{text}");
        let missing = Kernel::prepare(DEBUG_KERNEL, scratch.path(), say);
        assert!(matches!(missing, Err(GuestError::NoDebugKernel)));
    }

    #[test]
    fn a_version_is_named_by_its_beginning() {
        let name = "linux-image-6.12.107+deb13-amd64";
        for version in ["6", "6.12", "6.12.107", "6.12.107+deb13", LATEST] {
            assert!(is(name, version), "{version}");
        }
        for version in ["6.1", "6.12.1", "7.2", "deb13", "6.12.107+deb13-amd64-x"] {
            assert!(!is(name, version), "{version}");
        }
    }

    #[test]
    fn versions_are_compared_by_number() {
        let mut names = ["linux-image-6.12.9-amd64", "linux-image-6.12.107-amd64"];
        names.sort_by_key(|name| numbers(name));
        assert_eq!(names[1], "linux-image-6.12.107-amd64");
    }
}
