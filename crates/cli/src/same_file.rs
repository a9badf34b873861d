//! Compares paths by the files that they name.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Returns the identity of a file.
    pub(crate) fn of(about: &Metadata) -> Self {
        Self {
            device: about.dev(),
            inode: about.ino(),
        }
    }
}

/// Returns true if both paths name the same file, also through links. Paths of missing files name
/// the same file if they have one file name in one directory.
pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    match (id(one), id(other)) {
        (Some(one), Some(other)) => one == other,
        (None, None) => {
            let is_same_name = one.file_name() == other.file_name();
            one == other || is_same_name && same_directory(one, other)
        }
        _ => false,
    }
}

/// Returns the identity of the file at `path`; `None` if it cannot be read.
fn id(path: &Path) -> Option<FileId> {
    fs::metadata(path).ok().as_ref().map(FileId::of)
}

/// Returns true if the directories of both paths exist and are the same.
fn same_directory(one: &Path, other: &Path) -> bool {
    let directory = |path: &Path| match path.parent()? {
        empty if empty.as_os_str().is_empty() => id(Path::new(".")),
        parent => id(parent),
    };
    directory(one).is_some_and(|one| directory(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_spellings_name_one_file() {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        fs::write(path("file"), "").unwrap();
        fs::write(path("other"), "").unwrap();
        fs::hard_link(path("file"), path("hard")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("soft")).unwrap();
        std::os::unix::fs::symlink(scratch.path(), path("dir")).unwrap();
        for (one, other, expected) in [
            ("file", "file", true),
            ("file", "./file", true),
            ("file", "hard", true),
            ("file", "soft", true),
            ("file", "dir/file", true),
            ("file", "other", false),
            ("file", "new", false),
            ("new", "new", true),
            ("new", "dir/./new", true),
            ("new", "newer", false),
            ("new", "absent/new", false),
            ("absent/new", "absent/new", true),
            ("absent/new", "missing/new", false),
        ] {
            let found = same_file(&path(one), &path(other));
            assert_eq!(found, expected, "{one} {other}");
        }
        // A name without a directory is in the current one.
        assert!(same_file(Path::new("no-such"), Path::new("./no-such")));
        assert!(!same_file(Path::new("no-such"), &path("no-such")));
    }
}
