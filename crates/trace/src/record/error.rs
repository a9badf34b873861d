//! Errors of recording.

use std::io;
use std::path::{Path, PathBuf};

/// An error of recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// tracefs is not mounted at this path.
    #[error(
        "no tracefs at {}; mount it with `mount -t tracefs tracefs /sys/kernel/tracing`",
        .path.display()
    )]
    NoTracefs {
        /// Directory in which tracefs was expected.
        path: PathBuf,
    },
    /// The process lacks permission; recording needs root.
    #[error("no permission to use {}; record as root", .path.display())]
    NotPermitted {
        /// The file that could not be opened.
        path: PathBuf,
    },
    /// The kernel has no `dma:*` events: it is older than 6.12, or built without event tracing.
    #[error(
        "the kernel has no dma events ({} is missing); they need Linux 6.12 or later",
        .path.display()
    )]
    NoDmaEvents {
        /// Expected path of the events.
        path: PathBuf,
    },
    /// An instance of this name exists: another recording runs, or one was killed.
    #[error("{} exists; if no other recording runs, remove it with rmdir", .path.display())]
    InstanceExists {
        /// The instance; remove it with `rmdir` if no recording uses it.
        path: PathBuf,
    },
    /// The command cannot be started.
    #[error("cannot start the command")]
    Command {
        /// Error of the operating system.
        source: io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write the output; the recording is not kept")]
    Output {
        /// Error of the operating system.
        source: io::Error,
    },
    /// The kernel cannot allocate the buffers.
    #[error("no memory for buffers of {buffer_kib} KiB per CPU; lower `--buffer`")]
    NoMemory {
        /// Size of the buffer per CPU, in KiB.
        buffer_kib: u32,
    },
    /// A file of tracefs cannot be read or written.
    #[error("cannot use {}", .path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
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
