//! Files that appear complete or not at all.
//!
//! A regular file is written under a hidden random name in the same directory and renamed at the
//! end. An existing device, FIFO or other special file is written in place.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use tempfile::{NamedTempFile, TempPath};

use crate::failure::Failure;
use crate::interrupt::{self, RemoveOnSignal};

/// A file that is being written, or standard output for `-`. Compressed if its name ends in `.zst`.
pub(crate) struct OutFile {
    path: PathBuf,
    part: Option<TemporaryFile>,
    writer: Writer,
}

enum Writer {
    Plain(BufWriter<Box<dyn Write + Send>>),
    Zstd(zstd::Encoder<'static, Box<dyn Write + Send>>),
}

/// Read access to a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAccess {
    /// Access according to the umask. A replaced file keeps its permissions.
    Umask,
    /// Access for the user alone, even if a file is replaced.
    User,
}

/// Higher levels are wasted on traces, which shrink to a tenth anyway.
const LEVEL: i32 = 6;
/// Number of random letters and digits in the name of a temporary file.
const RANDOM: usize = 12;
/// Permission bits, without set-user-ID and the like.
const PERMISSIONS: u32 = 0o777;
/// Access for the user alone.
const PRIVATE: u32 = 0o600;

/// The temporary file that will replace a regular file.
struct TemporaryFile {
    temporary: TempPath,
    file: File,
    target: PathBuf,
    /// Final mode of the file.
    mode: u32,
    _remove_on_signal: RemoveOnSignal,
}

/// Destination of the bytes for a path.
enum OutputTarget {
    /// A device, a FIFO or the like, which is open.
    Open(File),
    /// A regular file with this path, which replaces an existing one.
    Replace(PathBuf, Option<Metadata>),
}

impl OutFile {
    /// Creates a file. Follows a symbolic link if the kernel follows it for this user.
    pub(crate) fn create(path: &Path, readers: FileAccess) -> Result<Self, Failure> {
        let (part, sink): (_, Box<dyn Write + Send>) = if path == OsStr::new("-") {
            (None, Box::new(io::stdout()))
        } else {
            match output_target(path).map_err(Failure::io(path))? {
                OutputTarget::Open(file) => (None, Box::new(file)),
                OutputTarget::Replace(target, replaced) => {
                    let part = TemporaryFile::new(target, replaced.as_ref(), readers);
                    let part = part.map_err(Failure::io(path))?;
                    let file = part.file.try_clone().map_err(Failure::io(path))?;
                    (Some(part), Box::new(file))
                }
            }
        };
        let writer = if path.extension() == Some(OsStr::new("zst")) {
            Writer::Zstd(zstd::Encoder::new(sink, LEVEL).map_err(Failure::io(path))?)
        } else {
            Writer::Plain(BufWriter::with_capacity(1 << 18, sink))
        };
        Ok(Self {
            path: path.to_owned(),
            part,
            writer,
        })
    }

    /// Completes the file and renames it to its final name.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        let ended = match &mut self.writer {
            Writer::Plain(writer) => writer.flush(),
            Writer::Zstd(encoder) => encoder.do_finish().and_then(|()| encoder.get_mut().flush()),
        };
        let named = ended.and_then(|()| match self.part {
            Some(part) => part.finish(),
            None => Ok(()),
        });
        named.map_err(|source| match source.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::Io {
                path: self.path.clone(),
                source,
            },
        })
    }
}

/// Writes a file with a name chosen by this program into a directory chosen by the user. Replaces a
/// link of that name instead of following it.
pub(crate) fn write_into(dir: &Path, name: &str, content: &[u8]) -> Result<PathBuf, Failure> {
    let path = dir.join(name);
    let write = || {
        let replaced = match fs::symlink_metadata(&path) {
            Ok(about) if about.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(about) => Some(about).filter(Metadata::is_file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let mut part = TemporaryFile::new(path.clone(), replaced.as_ref(), FileAccess::Umask)?;
        part.file.write_all(content)?;
        part.finish()
    };
    write().map_err(Failure::io(&path))?;
    Ok(path)
}

/// Examines the existing file and opens a file that is written in place.
fn output_target(path: &Path) -> io::Result<OutputTarget> {
    let about = match fs::symlink_metadata(path) {
        Ok(about) => about,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(OutputTarget::Replace(path.to_owned(), None));
        }
        Err(error) => return Err(error),
    };
    if about.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // With O_CREAT, the kernel refuses FIFOs and files of other users in world-writable sticky
    // directories. It also does not follow links of such users (fs.protected_fifos and the like).
    // Opening an existing file checks that the user may write to it. O_NOFOLLOW prevents following
    // a link that has replaced the file in the meantime.
    let mut options = OpenOptions::new();
    options.write(true);
    let is_link = about.is_symlink();
    if !is_link {
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    }
    if about.is_file() {
        options.open(path)?;
        return Ok(OutputTarget::Replace(path.to_owned(), Some(about)));
    }
    let file = options.create(!is_link).mode(PRIVATE).open(path)?;
    let opened = file.metadata()?;
    if !opened.is_file() {
        return Ok(OutputTarget::Open(file));
    }
    // The file behind a link: the one that the kernel opened, not the one that the path leads to
    // now.
    let target = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let there = fs::symlink_metadata(&target)?;
    if (there.dev(), there.ino()) != (opened.dev(), opened.ino()) {
        return Err(io::Error::other("the link changes while it is read"));
    }
    Ok(OutputTarget::Replace(target, Some(opened)))
}

impl TemporaryFile {
    fn new(target: PathBuf, replaced: Option<&Metadata>, readers: FileAccess) -> io::Result<Self> {
        let parent = target.parent().filter(|dir| !dir.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let make = |mode: u32| {
            tempfile::Builder::new()
                .prefix(".ringfence-")
                .suffix(".part")
                .rand_bytes(RANDOM)
                .permissions(Permissions::from_mode(mode))
                .tempfile_in(parent)
        };
        let user = rustix::process::geteuid().as_raw();
        let (begun, mode) = match (readers, replaced) {
            (FileAccess::Umask, None) => (0o666, None),
            (FileAccess::Umask, Some(old)) if old.uid() == user => {
                (PRIVATE, Some(old.mode() & PERMISSIONS))
            }
            // The file belongs to another user, so this user did not choose its permissions.
            (FileAccess::Umask, Some(_)) | (FileAccess::User, _) => (PRIVATE, Some(PRIVATE)),
        };
        let (made, under_way) = interrupt::make(|| make(begun), NamedTempFile::path)?;
        let (file, temporary) = made.into_parts();
        let mode = match mode {
            Some(mode) => mode,
            // The creation mode after the umask.
            None => file.metadata()?.mode() & PERMISSIONS,
        };
        Ok(Self {
            temporary,
            file,
            target,
            mode,
            _remove_on_signal: under_way,
        })
    }

    /// Renames the file to its final name. On any error, the temporary file is removed.
    fn finish(self) -> io::Result<()> {
        self.file
            .set_permissions(Permissions::from_mode(self.mode))?;
        self.temporary
            .persist(&self.target)
            .map_err(|error| error.error)
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Writer::Plain(writer) => writer.write(bytes),
            Writer::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.writer {
            Writer::Plain(writer) => writer.flush(),
            Writer::Zstd(encoder) => encoder.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_is_for_its_user_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("out");
        let written = |readers| {
            let mut out = OutFile::create(&path, readers).unwrap();
            out.write_all(b"text").unwrap();
            out.finish().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"text");
            fs::metadata(&path).unwrap().mode() & 0o777
        };
        assert_eq!(written(FileAccess::User), 0o600);
        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        assert_eq!(written(FileAccess::Umask), 0o664);
        assert_eq!(written(FileAccess::User), 0o600);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    }
}
