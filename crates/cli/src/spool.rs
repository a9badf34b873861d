//! Stores a stream in an unnamed temporary file, so that it can be read twice. The file disappears
//! with the process, however it ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::failure::Failure;
use crate::spool_limit::SpoolLimit;

/// The contents of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Spool(Rc<File>);

impl PartialEq for Spool {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Spool {}

impl Spool {
    /// Reads `stream` to its end. Errors call it `name`.
    ///
    /// # Errors
    /// The temporary directory is full, the read fails, or the stream exceeds the limit.
    pub(crate) fn of(name: &str, stream: impl Read, limit: SpoolLimit) -> Result<Self, Failure> {
        let (path, mut file) = private_temp_file()?;
        // After the removal only this process can access the file.
        fs::remove_file(&path).map_err(Failure::io(&path))?;
        let stream = BufReader::with_capacity(1 << 16, stream.take(limit.bytes.saturating_add(1)));
        match copy(stream, Path::new(name), &mut file, &path)? > limit.bytes {
            true => Err(Failure::Spool {
                name: name.to_owned(),
                limit,
            }),
            false => Ok(Self(Rc::new(file))),
        }
    }

    /// Returns a reader from the beginning. Use one reader at a time: all share one position.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn reader(&self) -> Result<File, Failure> {
        let open = || {
            let mut file = self.0.try_clone()?;
            file.rewind()?;
            Ok(file)
        };
        open().map_err(Failure::io(&std::env::temp_dir()))
    }
}

/// Copies `from` to its end and returns the number of bytes. An error has the path of the side that
/// failed.
fn copy(
    mut from: impl BufRead,
    from_path: &Path,
    to: &mut File,
    to_path: &Path,
) -> Result<u64, Failure> {
    let mut copied = 0;
    loop {
        let block = match from.fill_buf() {
            Ok([]) => return Ok(copied),
            Ok(block) => block,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::io(from_path)(error)),
        };
        to.write_all(block).map_err(Failure::io(to_path))?;
        let bytes = block.len();
        from.consume(bytes);
        copied += bytes as u64;
    }
}

/// Creates a new file that no other user can open.
fn private_temp_file() -> Result<(PathBuf, File), Failure> {
    let dir = std::env::temp_dir();
    let mut number = 0_u32;
    loop {
        let path = dir.join(format!("ringfence-{}-{number}", std::process::id()));
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        match made {
            Ok(file) => return Ok((path, file)),
            // A process with the same PID left the file behind, or another user created it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 1000 => {
                number += 1;
            }
            Err(error) => return Err(Failure::io(&path)(error)),
        }
    }
}
