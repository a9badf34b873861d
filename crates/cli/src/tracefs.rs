//! Files of a tracefs directory, which root reads and writes.
//!
//! The directory is opened once: whoever renames it meanwhile leads no file elsewhere. A link
//! with the name of a file is not followed.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use ringfence_report::read_open_file;

/// An open tracefs directory.
#[derive(Debug)]
pub(crate) struct Tracefs {
    path: PathBuf,
    dir: OwnedFd,
}

impl Tracefs {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// It cannot be opened, or is no directory.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            path: path.to_owned(),
            dir: openat(CWD, path, flags, Mode::empty())?,
        })
    }

    /// Returns the path of a file, for messages.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns true if a regular file has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        let about = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW);
        about.is_ok_and(|about| FileType::from_raw_mode(about.st_mode).is_file())
    }

    /// Returns the names in a directory of this one.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn list(&self, name: &str) -> io::Result<impl Iterator<Item = io::Result<String>>> {
        let dir = format!("/proc/self/fd/{}/{name}", self.dir.as_raw_fd());
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        Ok(fs::read_dir(dir)?.map(move |entry| entry.map(name)))
    }

    /// Reads a regular file of at most `limit` bytes.
    ///
    /// # Errors
    /// The file cannot be read, is no regular file, is longer, or is not UTF-8.
    pub(crate) fn read(&self, name: &str, limit: u64) -> io::Result<String> {
        read_open_file(self.file(name, OFlags::RDONLY)?, limit)
    }

    /// Opens a regular file to read a part of it.
    ///
    /// # Errors
    /// The file cannot be opened, or is no regular file.
    pub(crate) fn reader(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::RDONLY)
    }

    /// Writes to an existing regular file. tracefs treats truncation as a reset.
    ///
    /// # Errors
    /// The file cannot be written, or is no regular file.
    pub(crate) fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let mut file = self.file(name, OFlags::WRONLY | OFlags::TRUNC)?;
        file.write_all(text.as_bytes())
    }

    /// Opens a regular file, and does not wait for the other end of a FIFO.
    fn file(&self, name: &str, access: OFlags) -> io::Result<File> {
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let other = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        let file: File = match openat(&self.dir, name, flags, Mode::empty()) {
            Ok(file) => file.into(),
            Err(Errno::LOOP | Errno::NXIO) => return Err(other()),
            Err(error) => return Err(error.into()),
        };
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(other()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::mknodat;

    use super::*;

    #[test]
    fn a_link_is_not_followed_and_a_fifo_is_not_awaited() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name| dir.path().join(name);
        fs::write(at("victim"), "kept").unwrap();
        symlink(at("victim"), at("link")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let tracefs = Tracefs::open(dir.path()).unwrap();
        for name in ["link", "fifo", "."] {
            assert!(!tracefs.has(name));
            for result in [tracefs.read(name, 100).map(drop), tracefs.write(name, "1")] {
                let error = result.unwrap_err();
                let expected = ["not a regular file", "Is a directory (os error 21)"];
                assert!(expected.contains(&error.to_string().as_str()), "{error}");
            }
        }
        assert_eq!(fs::read(at("victim")).unwrap(), b"kept");
    }

    #[test]
    fn a_directory_that_is_replaced_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name| dir.path().join(name);
        for name in ["tracefs", "victims"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("file"), name).unwrap();
        }
        let tracefs = Tracefs::open(&at("tracefs")).unwrap();
        fs::rename(at("tracefs"), at("moved")).unwrap();
        symlink(at("victims"), at("tracefs")).unwrap();
        assert_eq!(tracefs.read("file", 100).unwrap(), "tracefs");
        tracefs.write("file", "1").unwrap();
        assert_eq!(fs::read(at("victims/file")).unwrap(), b"victims");
        assert_eq!(fs::read(at("moved/file")).unwrap(), b"1");
    }
}
