//! Directories for sockets, guests and caches: of this user alone.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::failure::Failure;
use crate::interrupt::{self, UnderWay};

/// Of the user alone.
const MODE: u32 = 0o700;
/// Random letters and digits in a name: more than 64 bits.
const RANDOM: usize = 12;
/// Write permission for everyone.
const OTHERS_WRITE: u32 = 0o002;

/// A new directory that no other user can enter, below the system's directory for temporary files. It is
/// removed with all that is in it when it is dropped, and on a signal.
#[derive(Debug)]
pub(crate) struct PrivateDir {
    dir: TempDir,
    _under_way: UnderWay,
}

impl PrivateDir {
    /// Makes one as `mkdtemp` does: what has the name already is never taken.
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
            _under_way: under_way,
        })
    }

    /// Where it is: absolute.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Leaves it in place.
    pub(crate) fn keep(self) -> PathBuf {
        self.dir.keep()
    }
}

/// The directory that the user names: made with mode 0700 if it does not exist; its path, absolute.
///
/// # Errors
/// It cannot be made, or another user can put files there: it belongs to a user other than this one, the
/// caller of sudo and root, or everyone may write to it.
pub(crate) fn own(path: &Path) -> Result<PathBuf, Failure> {
    if let Some(parent) = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    {
        fs::create_dir_all(parent).map_err(Failure::io(path))?;
    }
    match DirBuilder::new().mode(MODE).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::io(path)(error));
        }
        _ => {}
    }
    let path = fs::canonicalize(path).map_err(Failure::io(path))?;
    let about = fs::metadata(&path).map_err(Failure::io(&path))?;
    if !about.is_dir() {
        return Err(Failure::io(&path)(io::ErrorKind::NotADirectory.into()));
    }
    let user = rustix::process::geteuid().as_raw();
    let is_ours = [Some(user), Some(0), caller(user)].contains(&Some(about.uid()));
    if !is_ours || about.mode() & OTHERS_WRITE != 0 {
        return Err(Failure::Shared(path));
    }
    Ok(path)
}

/// Under sudo, the user who called it: root trusts that user's files already.
fn caller(user: u32) -> Option<u32> {
    let caller = std::env::var("SUDO_UID").ok().filter(|_| user == 0)?;
    caller.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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
        // What links in it point to stays.
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

    #[test]
    fn a_named_directory_is_made_for_the_user_and_refused_where_others_write() {
        let scratch = tempfile::tempdir().unwrap();
        let made = own(&scratch.path().join("a/b")).unwrap();
        assert_eq!(mode(&made), 0o700);
        // An existing one keeps its mode.
        let set = |mode| fs::set_permissions(&made, Permissions::from_mode(mode)).unwrap();
        set(0o755);
        assert_eq!(own(&made).unwrap(), made);
        assert_eq!(mode(&made), 0o755);
        for shared in [0o777, 0o1777] {
            set(shared);
            assert!(matches!(own(&made), Err(Failure::Shared(_))), "{shared:o}");
        }
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(own(&file).is_err());
    }
}
