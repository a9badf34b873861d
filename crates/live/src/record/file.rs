//! A record file of bounded size, which several processes can continue one after the other.
//!
//! The guest controls the number of lines, so the file has a size limit. Lines beyond the limit, or
//! that the disk has no room for, are only counted.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};

use crate::saved_state::{Reader, SaveState, StateError, Writer};

/// Pending bytes at which the recorder writes them to the file.
pub const PENDING_BYTES: usize = 8192;

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
    /// Creates a file at `path` for at most `most` bytes of lines.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(path: &Path, most: u64, marks: RecordMarks) -> io::Result<Self> {
        Ok(Self {
            marks,
            file: File::create(path)?,
            pending: Vec::new(),
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
            self.lost = self.lost.saturating_add(1);
            return;
        }
        let line = line();
        let bytes = self.bytes.saturating_add(line.len() as u64 + 1);
        if bytes > self.max_bytes {
            self.put(self.marks.full);
            self.write();
            self.whole = false;
            self.lost = 1;
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
        self.whole = self.file.write_all(&self.pending).is_ok();
        self.pending.clear();
    }

    /// Returns the state that another process needs to continue the record. Writes nothing.
    pub(crate) fn save(&self) -> io::Result<RecordState> {
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
    /// Number of lines that are not recorded; 0 if `whole` is set.
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
