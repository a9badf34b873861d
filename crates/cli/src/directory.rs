//! Private directories for sockets and guests.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::failure::Failure;
use crate::interrupt::{self, RemoveOnSignal};

/// Access for the user alone.
const MODE: u32 = 0o700;
/// Number of random letters and digits in a name: more than 64 bits.
const RANDOM: usize = 12;

/// A new directory below the system's directory for temporary files that no other user can enter.
/// Dropping it, or a signal, removes it with its contents.
#[derive(Debug)]
pub(crate) struct PrivateDir {
    dir: TempDir,
    _remove_on_signal: RemoveOnSignal,
}

impl PrivateDir {
    /// Creates a directory as `mkdtemp` does: it never reuses an existing name.
    pub(crate) fn new() -> Result<Self, Failure> {
        Self::below(&std::env::temp_dir())
    }

    fn below(parent: &Path) -> Result<Self, Failure> {
        let make = || {
            tempfile::Builder::new()
                .prefix("ringfence-")
                .rand_bytes(RANDOM)
                .permissions(Permissions::from_mode(MODE))
                .tempdir_in(parent)
        };
        let made = interrupt::make(make, TempDir::path);
        let (dir, under_way) = made.map_err(Failure::io(parent))?;
        Ok(Self {
            dir,
            _remove_on_signal: under_way,
        })
    }

    /// Returns the absolute path.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Keeps the directory on disk.
    pub(crate) fn keep(self) -> PathBuf {
        self.dir.keep()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_private_directory_is_new_the_users_alone_and_goes() {
        let scratch = tempfile::tempdir().unwrap();
        let one = PrivateDir::below(scratch.path()).unwrap();
        let other = PrivateDir::below(scratch.path()).unwrap();
        assert_ne!(one.path(), other.path());
        let (path, kept) = (one.path().to_owned(), other.path().to_owned());
        assert_eq!(mode(&path), 0o700);
        // The removal does not follow links in the directory.
        fs::write(scratch.path().join("precious"), "").unwrap();
        symlink(scratch.path().join("precious"), path.join("link")).unwrap();
        fs::create_dir(path.join("sub")).unwrap();
        drop(one);
        assert!(!path.exists());
        assert!(scratch.path().join("precious").exists());
        assert_eq!(other.keep(), kept);
        assert!(kept.is_dir());
        let missing = scratch.path().join("missing");
        assert!(PrivateDir::below(&missing).is_err());
    }
}
