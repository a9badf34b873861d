//! Errors that name a missing part and its remedy.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// Reason why a guest did not boot, or did not end properly.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A program is missing on the host.
    #[error("{program} is missing: install {package}")]
    Missing {
        /// Name of the program.
        program: &'static str,
        /// Debian package of the program.
        package: &'static str,
    },
    /// A download failed.
    #[error(
        "cannot download {what}; see {} (set DEBIAN_MIRROR to another archive, or --cache to a \
        directory with the files)",
        .log.display()
    )]
    Fetch {
        /// The item to download.
        what: String,
        /// Log file with the details.
        log: PathBuf,
    },
    /// The archive has no kernel of this version.
    #[error(
        "Debian's archive has no kernel {version}; it has {}. It keeps a few of each suite: \
        name one of these or `latest`, or unpack the kernel's packages and name the directory \
        (`--kernel ./DIR`); DEBIAN_MIRROR names another archive",
        versions(.known)
    )]
    NoKernel {
        /// Version that the user requested.
        version: String,
        /// Names of the kernel packages in the archive.
        known: Vec<String>,
    },
    /// The cache has no debug kernel.
    #[error("the cache has no debug kernel: build it with `cargo xtask guest --debug-kernel`")]
    NoDebugKernel,
    /// The configuration of the debug kernel names options that the kernel does not have, or whose
    /// dependencies are off.
    #[error("the debug kernel does not take {}", .missing.join(", "))]
    Configuration {
        /// Lines of the configuration.
        missing: Vec<String>,
    },
    /// The guest's kernel reported a defect.
    #[error(
        "the guest's kernel reported {}; its console is {}",
        .reports.join("; "),
        .console.display()
    )]
    Reported {
        /// First lines of the reports.
        reports: Vec<String>,
        /// Console log of the guest.
        console: PathBuf,
    },
    /// The kernel's package lacks a module that the guest needs.
    #[error("the kernel's package has no {module}")]
    NoModule {
        /// Name of the module.
        module: String,
    },
    /// The path has no sources of a module.
    #[error(
        "{} has no module sources (Kbuild): name their directory with --module-source",
        .path.display()
    )]
    NoSources {
        /// Path that was searched.
        path: PathBuf,
    },
    /// The archive has no headers for a kernel.
    #[error(
        "Debian's archive has no {package}: unpack it, its linux-headers-*-common and its \
        linux-kbuild-* into {} (`dpkg-deb -x`), or use a kernel of the archive",
        .root.display()
    )]
    NoHeaders {
        /// Package of the headers.
        package: String,
        /// Directory into which the user can unpack packages.
        root: PathBuf,
    },
    /// Building a module failed.
    #[error(
        "cannot build the module; see {} (the build needs a user namespace: `unshare \
        --map-root-user --mount`)",
        .log.display()
    )]
    Build {
        /// Log file of the build.
        log: PathBuf,
    },
    /// busybox is dynamically linked, but the guest has no libraries.
    #[error("{} is linked dynamically: install busybox-static", .path.display())]
    DynamicBusybox {
        /// Path of busybox.
        path: PathBuf,
    },
    /// Accessing a file failed.
    #[error("{}", .path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file operation.
        source: io::Error,
    },
    /// The guest ended without reporting the command's exit code.
    #[error(
        "the guest {} ({ended}); its console is {}: {last}",
        how_it_ended(*.out_of_time),
        .console.display()
    )]
    NoStatus {
        /// Console log of the guest.
        console: PathBuf,
        /// Last line of the console.
        last: String,
        /// Exit status of QEMU, or of `timeout` if that ended it.
        ended: ExitStatus,
        /// True if the guest was still running when its time was over.
        out_of_time: bool,
    },
}

impl GuestError {
    /// Adds the path of a file to an error; for `map_err`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

fn how_it_ended(out_of_time: bool) -> &'static str {
    if out_of_time {
        "exceeded its time limit (--timeout)"
    } else {
        "ended without the command's exit code"
    }
}

/// Returns the version in a kernel package's name.
pub(super) fn kernel_version(package: &str) -> &str {
    let name = package.strip_prefix("linux-image-").unwrap_or(package);
    name.rsplit_once('-').map_or(name, |(version, _)| version)
}

fn versions(packages: &[String]) -> String {
    if packages.is_empty() {
        return "none".into();
    }
    let versions: Vec<&str> = packages.iter().map(|name| kernel_version(name)).collect();
    versions.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_kernel_lists_the_known_ones() {
        let error = GuestError::NoKernel {
            version: "7.2".into(),
            known: ["6.12.107+deb13", "7.3.4+deb13"]
                .map(|version| format!("linux-image-{version}-amd64"))
                .to_vec(),
        };
        let text = error.to_string();
        for part in [
            "no kernel 7.2; it has 6.12.107+deb13, 7.3.4+deb13.",
            "`latest`",
            "--kernel ./DIR",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
