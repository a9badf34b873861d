//! Files of tasks: complete under their name, or absent.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::NamedTempFile;

use crate::seal::{self, Sealed};

/// Maximum number of bytes of the file of a task. One row has about 12 KiB.
const MAX_BYTES: u64 = 1 << 20;
/// Number of random letters and digits in the name of a temporary file.
const RANDOM: usize = 12;
/// Permissions before the umask.
const MODE: u32 = 0o666;

/// The state of the file of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// No file has the name.
    Missing,
    /// The file is not what a sweep wrote for this task.
    Damaged,
    /// The file is intact. `failed` is true if its row says that the task failed.
    Intact {
        /// True if the task failed.
        failed: bool,
    },
}

/// Returns the name of the file of the task `name`.
pub fn file_name(name: &str) -> String {
    format!("{name}.parquet")
}

/// Returns the state of the file of the task `name` in `dir`. Compares a digest of the whole file;
/// decodes nothing.
///
/// # Errors
/// The file cannot be read.
pub fn stored(dir: &Path, name: &str) -> io::Result<Stored> {
    let path = dir.join(file_name(name));
    match fs::symlink_metadata(&path) {
        Ok(about) if about.is_file() && about.len() <= MAX_BYTES => {}
        Ok(_) => return Ok(Stored::Damaged),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Stored::Missing),
        Err(error) => return Err(error),
    }
    let mut bytes = Vec::new();
    File::open(&path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(match seal::check(name, &bytes) {
        None => Stored::Damaged,
        Some(Sealed { failed }) => Stored::Intact { failed },
    })
}

/// A file under a temporary, hidden name.
#[derive(Debug)]
pub struct PartFile(NamedTempFile);

impl PartFile {
    /// Creates an empty file in `dir`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(dir: &Path) -> io::Result<Self> {
        let file = tempfile::Builder::new()
            .prefix(".ringfence-")
            .suffix(".part")
            .rand_bytes(RANDOM)
            .permissions(Permissions::from_mode(MODE))
            .tempfile_in(dir)?;
        Ok(Self(file))
    }

    /// Returns the temporary path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes the file of the task `name` and renames it into `dir`. Syncs the bytes before the
    /// rename, and the directory after it.
    ///
    /// # Errors
    /// The file cannot be written; the temporary file is removed.
    pub fn finish(mut self, dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)?;
        self.0.as_file().sync_all()?;
        let renamed = self.0.persist(dir.join(file_name(name)));
        renamed.map_err(|error| error.error)?;
        File::open(dir)?.sync_all()
    }
}

/// Stores the file of the task `name` in `dir`.
///
/// # Errors
/// The file cannot be written.
pub fn store(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    PartFile::create(dir)?.finish(dir, name, bytes)
}
