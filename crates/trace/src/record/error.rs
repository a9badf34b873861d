//! Errors of recording.

use std::io;
use std::path::{Path, PathBuf};

/// An error of recording.
#[derive(Debug)]
#[non_exhaustive]
pub enum RecordError {
    /// tracefs is not mounted at this path.
    NoTracefs {
        /// Directory in which tracefs was expected.
        path: PathBuf,
    },
    /// The process lacks permission; recording needs root.
    NotPermitted {
        /// The file that could not be opened.
        path: PathBuf,
    },
    /// The kernel has no `dma:*` events: it is older than 6.12, or built without event tracing.
    NoDmaEvents {
        /// Expected path of the events.
        path: PathBuf,
    },
    /// An instance of this name exists: another recording runs, or one was killed.
    InstanceExists {
        /// The instance; remove it with `rmdir` if no recording uses it.
        path: PathBuf,
    },
    /// The command cannot be started.
    Command {
        /// Error of the operating system.
        source: io::Error,
    },
    /// The output cannot be written.
    Output {
        /// Error of the operating system.
        source: io::Error,
    },
    /// The kernel cannot allocate the buffers.
    NoMemory {
        /// Size of the buffer per CPU, in KiB.
        buffer_kib: u32,
    },
    /// A file of tracefs cannot be read or written.
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl std::fmt::Display for RecordError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoTracefs { path } => write!(
                f,
                "no tracefs at {}; mount it with `mount -t tracefs tracefs /sys/kernel/tracing`",
                path.display()
            ),
            Self::NotPermitted { path } => {
                write!(f, "not allowed to use {}; record as root", path.display())
            }
            Self::NoDmaEvents { path } => write!(
                f,
                "this kernel has no dma events ({} is missing); they come with Linux 6.12",
                path.display()
            ),
            Self::InstanceExists { path } => write!(
                f,
                "{} exists; if no other recording runs, remove it with rmdir",
                path.display()
            ),
            Self::Command { .. } => f.write_str("the command cannot be started"),
            Self::Output { .. } => f.write_str("the output cannot be written; nothing is kept"),
            Self::NoMemory { buffer_kib } => write!(
                f,
                "no memory for buffers of {buffer_kib} KiB for each processor; record with smaller \
                ones"
            ),
            Self::Io { path, .. } => write!(f, "cannot use {}", path.display()),
        }
    }
}

impl std::error::Error for RecordError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Command { source } | Self::Output { source } | Self::Io { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}

impl RecordError {
    /// Builds the error for a failure at `path`.
    pub(super) fn at(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { path },
            _ => Self::Io { path, source },
        }
    }
}
