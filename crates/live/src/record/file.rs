//! A record file of bounded size, which several processes can continue one after the other.
//!
//! The guest controls the number of lines, so the file has a size limit. Lines beyond the limit are
//! only counted. After a failed write, as to a full disk, nothing follows: the file may end with a
//! part of a line.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::process::geteuid;

use crate::saved_state::{Reader, SaveState, StateError, Writer};

/// Pending bytes at which the recorder writes them to the file.
pub const PENDING_BYTES: usize = 8192;

/// Access for the user alone.
const PRIVATE: u32 = 0o600;

/// Lines that a format has for the limit and for the end of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordMarks {
    /// Line at the limit.
    pub(crate) full: &'static str,
    /// Last line of a record with all lines.
    pub(crate) end: &'static str,
    /// Formats the last line of a record that lacks this number of lines.
    pub(crate) lost: fn(u64) -> String,
}

/// A record file that is open for writing.
#[derive(Debug)]
pub(crate) struct RecordFile {
    marks: RecordMarks,
    file: File,
    pending: Vec<u8>,
    /// True until the first write, which empties a file that existed before.
    unwritten: bool,
    /// True if every line so far is in the file or pending. If false, `lost` is 0 after a failed
    /// write, and positive at the limit.
    whole: bool,
    ended: bool,
    /// Limit for the bytes of lines in the file.
    max_bytes: u64,
    /// Bytes of lines written or pending.
    bytes: u64,
    /// Number of lines that the file lacks.
    lost: u64,
}

impl RecordFile {
    /// Creates a file at `path` for at most `most` bytes of lines, for this user alone. An existing
    /// file keeps its permissions, and its content until the first write.
    ///
    /// # Errors
    /// The file cannot be created, or belongs to another user.
    pub(crate) fn create(path: &Path, most: u64, marks: RecordMarks) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).mode(PRIVATE).open(path)?;
        let about = file.metadata()?;
        if about.is_file() && about.uid() != geteuid().as_raw() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the file belongs to another user: remove it, or name another one",
            ));
        }
        Ok(Self {
            marks,
            file,
            pending: Vec::new(),
            unwritten: about.is_file(),
            whole: true,
            ended: false,
            max_bytes: most,
            bytes: 0,
            lost: 0,
        })
    }

    /// Adds the line that `line` formats. Does not call it once the file is full.
    pub(crate) fn add(&mut self, line: impl FnOnce() -> String) {
        if !self.whole {
            if self.lost > 0 {
                self.lost = self.lost.saturating_add(1);
            }
            return;
        }
        let line = line();
        let bytes = self.bytes.saturating_add(line.len() as u64 + 1);
        if bytes > self.max_bytes {
            self.put(self.marks.full);
            self.write();
            self.lost = u64::from(self.whole);
            self.whole = false;
            return;
        }
        self.bytes = bytes;
        self.put(&line);
        if self.pending.len() >= PENDING_BYTES {
            self.write();
        }
    }

    /// Ends the record: no line follows, in this process or in another. A file without an end line
    /// is incomplete.
    pub(crate) fn end(&mut self) {
        if self.ended {
            return;
        }
        self.ended = true;
        if self.whole {
            self.put(self.marks.end);
            self.write();
            self.whole = false;
        } else if self.lost > 0 {
            self.put(&(self.marks.lost)(self.lost));
            self.write();
            self.whole = false;
            self.lost = 0;
        }
    }

    fn put(&mut self, line: &str) {
        self.pending.extend(line.as_bytes());
        self.pending.push(b'\n');
    }

    fn write(&mut self) {
        let emptied = self.empty();
        self.unwritten = false;
        self.whole = emptied
            .and_then(|()| self.file.write_all(&self.pending))
            .is_ok();
        self.pending.clear();
    }

    /// Removes the content of a file that existed before the record.
    fn empty(&self) -> io::Result<()> {
        if self.unwritten {
            self.file.set_len(0)?;
        }
        Ok(())
    }

    /// Returns the state that another process needs to continue the record. Writes no line.
    pub(crate) fn save(&self) -> io::Result<RecordState> {
        self.empty()?;
        Ok(RecordState {
            file: self.file.try_clone()?.into(),
            whole: self.whole,
            pending: self.pending.clone(),
            lost: self.lost,
        })
    }

    /// Continues another process's record, up to `most` bytes. Writes nothing.
    ///
    /// # Errors
    /// The file is not writable, or the pending lines are invalid.
    pub(crate) fn restore(
        state: RecordState,
        most: u64,
        marks: RecordMarks,
    ) -> Result<Self, StateError> {
        let RecordState {
            file,
            whole,
            pending,
            lost,
        } = state;
        let about = fstat(&file).map_err(io::Error::from)?;
        let kind = FileType::from_raw_mode(about.st_mode);
        let flags = fcntl_getfl(&file).map_err(io::Error::from)?;
        let writable = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        let is_file = matches!(
            kind,
            FileType::RegularFile | FileType::Fifo | FileType::CharacterDevice
        );
        if !is_file || !writable {
            return Err(StateError::NotA { what: "record" });
        }
        let whole_lines = pending.last().is_none_or(|last| *last == b'\n');
        let possible = whole || pending.is_empty();
        if pending.len() >= PENDING_BYTES || !whole_lines || !pending.is_ascii() || !possible {
            return Err(StateError::Register {
                what: "record line count",
            });
        }
        // Files other than regular ones have no size.
        let written = u64::try_from(about.st_size).unwrap_or(0);
        let bytes = written.saturating_add(pending.len() as u64);
        Ok(Self {
            marks,
            file: file.into(),
            pending,
            unwritten: false,
            whole,
            ended: false,
            max_bytes: most,
            bytes,
            lost,
        })
    }
}

/// A record that another process continues.
#[derive(Debug)]
pub struct RecordState {
    /// The record file. Its duplicated descriptors share the file offset.
    pub file: OwnedFd,
    /// True if every line so far is in the file or pending. Otherwise no further line is recorded.
    pub whole: bool,
    /// Lines that are not written yet.
    pub pending: Vec<u8>,
    /// Number of lines that are not recorded; 0 if `whole` is set, and after a failed write.
    pub lost: u64,
}

impl SaveState for RecordState {
    fn encode(self, out: &mut Writer) {
        out.fd(self.file);
        out.flag(self.whole);
        out.blob(&self.pending);
        if !self.whole {
            out.u64(self.lost);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (file, whole) = (input.fd()?, input.flag()?);
        Ok(Self {
            file,
            whole,
            pending: input.blob("record length", PENDING_BYTES)?,
            lost: if whole { 0 } else { input.u64()? },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, chown};

    use rustix::fs::fcntl_setfl;

    use super::*;

    const MARKS: RecordMarks = RecordMarks {
        full: "full",
        end: "end",
        lost: |count| format!("lost {count}"),
    };

    #[test]
    fn a_record_is_for_its_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        RecordFile::create(&path, 100, MARKS).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        if !geteuid().is_root() {
            return;
        }
        // Another user has planted a file that this user then may keep writing to.
        fs::write(&path, "planted").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        chown(&path, Some(65534), None).unwrap();
        let refused = RecordFile::create(&path, 100, MARKS).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&path).unwrap(), b"planted");
    }

    #[test]
    fn an_existing_file_is_replaced_by_the_first_write_or_hand_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let content = || fs::read_to_string(&path).unwrap();
        let create = || RecordFile::create(&path, 100, MARKS).unwrap();
        fs::write(&path, "an earlier record\n").unwrap();
        // The start of the devices failed.
        create().add(|| "line".to_owned());
        assert_eq!(content(), "an earlier record\n");
        let mut file = create();
        file.add(|| "line".to_owned());
        file.end();
        assert_eq!(content(), "line\nend\n");
        let mut first = create();
        first.add(|| "first".to_owned());
        let mut second = RecordFile::restore(first.save().unwrap(), 100, MARKS).unwrap();
        drop(first);
        second.add(|| "second".to_owned());
        second.end();
        assert_eq!(content(), "first\nsecond\nend\n");
    }

    /// A line for lost events after a part of a line would be read as one malformed line, and its
    /// number would lack the lines of the failed write.
    #[test]
    fn nothing_follows_a_failed_write() {
        for handed_over in [false, true] {
            let (mut reader, writer) = io::pipe().unwrap();
            let writer: OwnedFd = writer.into();
            fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
            let state = RecordState {
                file: writer,
                whole: true,
                pending: Vec::new(),
                lost: 0,
            };
            let mut file = RecordFile::restore(state, u64::MAX, MARKS).unwrap();
            // A pipe holds 64 KiB.
            while file.whole {
                file.add(|| "x".repeat(4000));
            }
            file.add(|| "a line that has no room".to_owned());
            let mut text = vec![0; 32 << 10];
            reader.read_exact(&mut text).unwrap();
            if handed_over {
                file = RecordFile::restore(file.save().unwrap(), u64::MAX, MARKS).unwrap();
                file.add(|| "another line".to_owned());
            }
            file.end();
            drop(file);
            reader.read_to_end(&mut text).unwrap();
            let text = String::from_utf8(text).unwrap();
            assert!(text.bytes().all(|byte| byte == b'x' || byte == b'\n'));
        }
    }
}
