//! Errors that name a missing part and its remedy.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why a guest did not boot, or did not end properly.
#[derive(Debug)]
pub enum GuestError {
    /// A program is missing on the host.
    Missing {
        /// Name of the program.
        program: &'static str,
        /// Debian package of the program.
        package: &'static str,
    },
    /// A download failed.
    Fetch {
        /// The item to download.
        what: String,
        /// Log file with the details.
        log: PathBuf,
    },
    /// The archive has no kernel of this version.
    NoKernel {
        /// Version that the user requested.
        version: String,
        /// Names of the kernel packages in the archive.
        known: Vec<String>,
    },
    /// The kernel's package lacks a module that the guest needs.
    NoModule {
        /// Name of the module.
        module: String,
    },
    /// The path has no sources of a module.
    NoSources {
        /// Path that was searched.
        path: PathBuf,
    },
    /// The archive has no headers for a kernel.
    NoHeaders {
        /// Package of the headers.
        package: String,
        /// Directory into which the user can unpack packages.
        root: PathBuf,
    },
    /// Building a module failed.
    Build {
        /// Log file of the build.
        log: PathBuf,
    },
    /// busybox is dynamically linked, but the guest has no libraries.
    DynamicBusybox {
        /// Path of busybox.
        path: PathBuf,
    },
    /// Accessing a file failed.
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file operation.
        source: io::Error,
    },
    /// The guest ended without reporting the command's exit code.
    NoStatus {
        /// Console log of the guest.
        console: PathBuf,
        /// Last line of the console.
        last: String,
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

impl std::fmt::Display for GuestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { program, package } => {
                write!(f, "{program} is missing: install {package}")
            }
            Self::Fetch { what, log } => write!(
                f,
                "{what} cannot be fetched; see {} (DEBIAN_MIRROR names another archive, --cache a \
                directory that has it)",
                log.display()
            ),
            Self::NoKernel { version, known } => {
                write!(
                    f,
                    "Debian's archive has no kernel {version}; it has {}. It keeps a few of each \
                    suite: take one of these, or \
                     `latest`, or unpack the kernel's packages yourself and name the directory \
                     (`--kernel ./DIR`); DEBIAN_MIRROR names \
                     another archive",
                    versions(known)
                )
            }
            Self::NoModule { module } => write!(f, "the kernel's package lacks {module}"),
            Self::NoSources { path } => write!(
                f,
                "{} is no directory with a module's sources (its Kbuild); --module-source names \
                another",
                path.display()
            ),
            Self::NoHeaders { package, root } => write!(
                f,
                "Debian's archive has no {package}; unpack it, its linux-headers-*-common and its \
                linux-kbuild-* into {} (`dpkg-deb -x`), or take a kernel that the archive has",
                root.display()
            ),
            Self::Build { log } => write!(
                f,
                "the module was not built; see {} (it takes `unshare --map-root-user --mount`: a \
                user namespace)",
                log.display()
            ),
            Self::DynamicBusybox { path } => write!(
                f,
                "{} is linked dynamically: install busybox-static",
                path.display()
            ),
            Self::Io { path, .. } => write!(f, "{}", path.display()),
            Self::NoStatus {
                console,
                last,
                out_of_time,
            } => {
                let how = if *out_of_time {
                    "did not end in time (--timeout)"
                } else {
                    "ended without a word about the command"
                };
                write!(
                    f,
                    "the guest {how}; its console is {}: {last}",
                    console.display()
                )
            }
        }
    }
}

/// Returns the version in a kernel package's name.
pub(super) fn kernel_version(package: &str) -> &str {
    let name = package.strip_prefix("linux-image-").unwrap_or(package);
    name.strip_suffix("-amd64").unwrap_or(name)
}

fn versions(packages: &[String]) -> String {
    if packages.is_empty() {
        return "none".into();
    }
    let versions: Vec<&str> = packages.iter().map(|name| kernel_version(name)).collect();
    versions.join(", ")
}

impl std::error::Error for GuestError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kernel_is_answered_with_those_there_are() {
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
