//! Private directories, for sockets and for files that are executed: no other user can change them.
//!
//! A check resolves links in the path and covers every parent directory. A user who may rename
//! entries of a parent could replace the directory after the check.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::process::{getegid, geteuid};

use super::SocketAccess;

/// Mode of a directory that only its owner can use.
const MODE: u32 = 0o700;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
/// In a sticky directory, users cannot rename files of other users.
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;

/// Reason why a directory is not safe from other users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPrivate {
    /// The directory belongs to another user.
    #[error("user {user} owns the directory and could replace its files: use your own directory")]
    Owner {
        /// User ID of the owner.
        user: u32,
    },
    /// Other users can write to the directory.
    #[error(
        "other users can write to the directory (mode {mode:o}) and replace its files: chmod \
        go-w"
    )]
    Writable {
        /// Mode of the directory.
        mode: u32,
    },
    /// Other users can replace a parent directory.
    #[error("parent directory {}: {why}", .directory.display())]
    Above {
        /// Path of that parent.
        directory: PathBuf,
        /// Reason why the parent is not safe.
        why: Box<Self>,
    },
}

/// Users and groups who may change a directory.
#[derive(Debug)]
struct Trusted {
    /// User IDs of permitted owners.
    users: Vec<u32>,
    /// Group IDs that may have write permission.
    groups: Vec<u32>,
}

impl Trusted {
    /// Trusts this user, and the group that may connect.
    fn with_sockets(access: SocketAccess) -> Self {
        Self {
            users: vec![geteuid().as_raw()],
            groups: access.group().into_iter().collect(),
        }
    }

    /// Trusts this user and group, and root. Under sudo it also trusts the calling user, whose
    /// files root trusts already. Many systems give each user a group with write permission.
    fn with_files() -> Self {
        let mut trusted = Self {
            users: vec![geteuid().as_raw(), ROOT],
            groups: vec![getegid().as_raw(), ROOT],
        };
        if geteuid().is_root() {
            let number = |name| -> Option<u32> { std::env::var(name).ok()?.parse().ok() };
            trusted.users.extend(number("SUDO_UID"));
            trusted.groups.extend(number("SUDO_GID"));
        }
        trusted
    }

    fn judge(&self, about: &Metadata) -> Result<(), NotPrivate> {
        let (user, mode) = (about.uid(), about.mode() & 0o7777);
        if !self.users.contains(&user) {
            return Err(NotPrivate::Owner { user });
        }
        let group_writes = mode & GROUP_WRITES != 0 && !self.groups.contains(&about.gid());
        if mode & OTHERS_WRITE != 0 || group_writes {
            return Err(NotPrivate::Writable { mode });
        }
        Ok(())
    }

    /// Checks a parent directory.
    fn check_parent(&self, about: &Metadata) -> Result<(), NotPrivate> {
        match self.judge(about) {
            Err(NotPrivate::Writable { .. }) if about.mode() & STICKY != 0 => Ok(()),
            judged => judged,
        }
    }

    /// Checks the directory at `path`; returns its path without links.
    fn check(&self, path: &Path, above: &Self) -> io::Result<PathBuf> {
        let path = fs::canonicalize(path)?;
        let about = fs::symlink_metadata(&path)?;
        if !about.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        self.judge(&about).map_err(refused)?;
        above.check_above(&path)?;
        Ok(path)
    }

    fn check_above(&self, path: &Path) -> io::Result<()> {
        for directory in path.ancestors().skip(1) {
            let judged = self.check_parent(&fs::symlink_metadata(directory)?);
            judged.map_err(|why| {
                refused(NotPrivate::Above {
                    directory: directory.to_owned(),
                    why: Box::new(why),
                })
            })?;
        }
        Ok(())
    }

    /// Creates the directory if it does not exist, and checks it. Calls `made` with the path of a
    /// new directory.
    fn make(
        &self,
        path: &Path,
        above: &Self,
        made: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<PathBuf> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return self.check(path, above);
        };
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        fs::create_dir_all(parent)?;
        let new = fs::canonicalize(parent)?.join(name);
        // Check the parents before creating anything or changing a group below them.
        above.check_above(&new)?;
        match DirBuilder::new().mode(MODE).create(&new) {
            Ok(()) => made(&new)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        self.check(&new, above)
    }
}

fn refused(why: NotPrivate) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

impl SocketAccess {
    /// Creates the sockets' directory if it does not exist, and checks it. Returns its path without
    /// links.
    ///
    /// # Errors
    /// Creating the directory failed, or [`NotPrivate`].
    pub fn make_directory(self, path: &Path) -> io::Result<PathBuf> {
        // Group members can open sockets whose names they know, but cannot list the directory.
        let made = |path: &Path| self.open_up(path, Mode::RWXU | Mode::XGRP);
        Trusted::with_sockets(self).make(path, &Trusted::with_files(), made)
    }

    /// Checks that no other user can replace the sockets in the directory. Returns its path without
    /// links. The directory must belong to this user; only the group that may connect can have
    /// write permission.
    ///
    /// # Errors
    /// Reading the directory's metadata failed, or [`NotPrivate`].
    pub fn check_directory(self, path: &Path) -> io::Result<PathBuf> {
        Trusted::with_sockets(self).check(path, &Trusted::with_files())
    }
}

/// Creates a directory for files that are executed, if it does not exist, and checks it. Returns
/// its path without links. The directory may belong to root, or under sudo to the calling user.
///
/// # Errors
/// Creating the directory failed, or [`NotPrivate`].
pub fn make_cache(path: &Path) -> io::Result<PathBuf> {
    let trusted = Trusted::with_files();
    trusted.make(path, &trusted, |_| Ok(()))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::process::Gid;

    use super::*;

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn why(error: &io::Error) -> &NotPrivate {
        error.get_ref().and_then(|e| e.downcast_ref()).unwrap()
    }

    #[test]
    fn directories_that_others_change_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = SocketAccess::OwnUser
            .make_directory(&scratch.path().join("a/b"))
            .unwrap();
        let about = fs::metadata(&dir).unwrap();
        assert_eq!(about.mode() & 0o7777, MODE);
        let stranger = Trusted {
            users: vec![about.uid() + 1],
            groups: Vec::new(),
        };
        let user = about.uid();
        assert_eq!(stranger.judge(&about), Err(NotPrivate::Owner { user }));
        // Columns: sockets of the user, sockets of a group, executed files.
        let own = SocketAccess::Group(Gid::from_raw(about.gid()));
        let other = SocketAccess::Group(Gid::from_raw(about.gid() + 1));
        for (mode, sockets, group, files) in [
            (0o700, true, true, true),
            (0o755, true, true, true),
            (0o770, false, true, true),
            (0o775, false, true, true),
            (0o1777, false, false, false),
            (0o702, false, false, false),
        ] {
            set(&dir, mode);
            let is_ok = |made: io::Result<PathBuf>| match made {
                Ok(path) => path == dir,
                Err(error) => {
                    assert_eq!(why(&error), &NotPrivate::Writable { mode });
                    assert!(error.to_string().contains("chmod go-w"), "{error}");
                    false
                }
            };
            for access in [SocketAccess::OwnUser, other] {
                assert_eq!(is_ok(access.make_directory(&dir)), sockets, "{mode:o}");
                assert_eq!(is_ok(access.check_directory(&dir)), sockets, "{mode:o}");
            }
            assert_eq!(is_ok(own.check_directory(&dir)), group, "{mode:o}");
            assert_eq!(is_ok(make_cache(&dir)), files, "{mode:o}");
            assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, mode);
        }
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        for made in [
            make_cache(&file),
            SocketAccess::OwnUser.make_directory(&file),
        ] {
            assert_eq!(made.unwrap_err().kind(), io::ErrorKind::NotADirectory);
        }
    }

    #[test]
    fn directories_that_others_replace_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let above = fs::canonicalize(scratch.path()).unwrap();
        let dir = above.join("dir");
        for (mode, safe) in [(0o777, false), (0o1777, true), (0o755, true)] {
            set(&above, mode);
            for name in ["dir", "new/dir"] {
                let named = above.join(name);
                for made in [
                    SocketAccess::OwnUser.make_directory(&named),
                    make_cache(&named),
                ] {
                    match made {
                        Ok(path) => assert_eq!((path, safe), (named.clone(), true), "{mode:o}"),
                        Err(error) => {
                            let expected = NotPrivate::Above {
                                directory: above.clone(),
                                why: Box::new(NotPrivate::Writable { mode }),
                            };
                            assert_eq!(why(&error), &expected);
                            assert!(!safe, "{mode:o}");
                        }
                    }
                }
            }
        }
        // A refused call creates nothing, and a link resolves to the checked directory.
        let link = scratch.path().join("link");
        symlink(&dir, &link).unwrap();
        assert_eq!(SocketAccess::OwnUser.make_directory(&link).unwrap(), dir);
        set(&above, 0o777);
        let error = SocketAccess::OwnUser.check_directory(&dir).unwrap_err();
        assert!(matches!(why(&error), NotPrivate::Above { .. }), "{error}");
        assert!(make_cache(&above.join("later")).is_err());
        assert!(!above.join("later").exists());
        set(&above, 0o700);
    }

    #[test]
    fn another_users_directory_above_is_refused() {
        let nobody = 65534;
        let scratch = tempfile::tempdir().unwrap();
        let theirs = fs::canonicalize(scratch.path()).unwrap();
        // Only root can change a file's owner.
        if std::os::unix::fs::chown(&theirs, Some(nobody), None).is_err() {
            return;
        }
        for made in [
            SocketAccess::OwnUser.make_directory(&theirs.join("dir")),
            make_cache(&theirs.join("dir")),
        ] {
            let error = made.unwrap_err();
            let expected = NotPrivate::Above {
                directory: theirs.clone(),
                why: Box::new(NotPrivate::Owner { user: nobody }),
            };
            assert_eq!(why(&error), &expected);
        }
        assert!(!theirs.join("dir").exists());
    }
}
