//! What can be missing, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why no guest could be booted, or why it did not end well.
#[derive(Debug)]
pub enum GuestError {
    /// A program of the host's is missing.
    Missing {
        /// Which.
        program: &'static str,
        /// The Debian package it is in.
        package: &'static str,
    },
    /// Something cannot be fetched.
    Fetch {
        /// What.
        what: String,
        /// What was said about it.
        log: PathBuf,
    },
    /// No kernel of this version is to be had.
    NoKernel {
        /// The version that was asked for.
        version: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// A module that the guest needs is not in its kernel's package.
    NoModule {
        /// Which.
        module: String,
    },
    /// There is no module to build at this path.
    NoSources {
        /// Which.
        path: PathBuf,
    },
    /// No headers of a kernel are to be had.
    NoHeaders {
        /// Their package.
        package: String,
        /// Where packages can be unpacked by hand.
        root: PathBuf,
    },
    /// A module was not built.
    Build {
        /// What was said about it.
        log: PathBuf,
    },
    /// busybox needs libraries, which the guest has not.
    DynamicBusybox {
        /// Where it is.
        path: PathBuf,
    },
    /// A file.
    Io {
        /// Which.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// The guest ended without saying what became of the command.
    NoStatus {
        /// Its console.
        console: PathBuf,
        /// The console's last line.
        last: String,
        /// It was still running when its time was over.
        out_of_time: bool,
    },
}

impl GuestError {
    /// For `map_err` on what concerns the file at `path`.
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
                "{what} cannot be fetched; see {} (DEBIAN_MIRROR names another archive, --cache a directory that has it)",
                log.display()
            ),
            Self::NoKernel { version, known } => {
                write!(
                    f,
                    "Debian's archive has no kernel {version}; it has {}. It keeps a few of each suite: take one of these, or \
                     `latest`, or unpack the kernel's packages yourself and name the directory (`--kernel ./DIR`); DEBIAN_MIRROR names \
                     another archive",
                    versions(known)
                )
            }
            Self::NoModule { module } => write!(f, "the kernel's package lacks {module}"),
            Self::NoSources { path } => write!(
                f,
                "{} is no directory with a module's sources (its Kbuild); --module-source names another",
                path.display()
            ),
            Self::NoHeaders { package, root } => write!(
                f,
                "Debian's archive has no {package}; unpack it, its linux-headers-*-common and its linux-kbuild-* into {} \
                 (`dpkg-deb -x`), or take a kernel that the archive has",
                root.display()
            ),
            Self::Build { log } => write!(
                f,
                "the module was not built; see {} (it takes `unshare --map-root-user --mount`: a user namespace)",
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
                    "did not end in time (--limit)"
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

/// The version in a kernel package's name.
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
