//! Opens a trace and detects its format from its first bytes, not from its name.

use std::fs::File;
use std::io::{self, BufReader, Chain, Cursor, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::dat::{self, Report};
use crate::error::TraceError;
use crate::limits::{LimitExceeded, TraceLimits};
use crate::printable::printable;
use crate::problem::ParquetProblem;

/// First bytes of a zstd frame (RFC 8878, section 3.1.1).
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// First bytes of a Parquet file.
const PARQUET_MAGIC: &[u8] = b"PAR1";

/// All bytes of the input; the peeked ones come first.
type Peeked = Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>;

/// First bytes of unsupported compression formats, and the program that decompresses each to
/// standard output.
const ARCHIVES: [(&[u8], &str); 4] = [
    (b"\x1f\x8b", "zcat"),
    (b"\xfd7zXZ\0", "xzcat"),
    (b"BZh", "bzcat"),
    (b"\x04\x22\x4d\x18", "lz4cat"),
];

/// The text of a trace from any source. [`TraceLimits::text`] bounds compressed text.
#[derive(Debug)]
pub struct TraceSource {
    kind: Kind,
    limits: TraceLimits,
    /// Bytes of text read.
    text: u64,
    input: ByteCounter,
}

/// Counts bytes of input; clones share one count.
#[derive(Debug, Clone, Default)]
pub(crate) struct ByteCounter(Arc<AtomicU64>);

impl ByteCounter {
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A reader that counts its bytes.
struct CountedReader<R>(R, ByteCounter);

impl<R: Read> Read for CountedReader<R> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(space)?;
        self.1.add(read as u64);
        Ok(read)
    }
}

enum Kind {
    Plain(CountedReader<Peeked>),
    Zstd(Box<zstd::Decoder<'static, BufReader<CountedReader<Peeked>>>>),
    Report(Box<Report>),
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain",
            Self::Zstd(_) => "Zstd",
            Self::Report(_) => "Report",
        })
    }
}

/// Cause of a failed read, carried inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Compression(io::Error),
    #[error(transparent)]
    Report(TraceError),
    #[error(transparent)]
    LimitExceeded(LimitExceeded),
}

/// Converts a failed read of the trace `file`, before `line`, to a [`TraceError`].
pub(crate) fn read_error(file: &str, line: u64, source: io::Error) -> TraceError {
    let file = file.to_owned();
    match source.downcast::<ReadError>() {
        Ok(ReadError::Compression(source)) => TraceError::Compression { file, line, source },
        Ok(ReadError::Report(error)) => error,
        Ok(ReadError::LimitExceeded(excess)) => TraceError::Limit { file, line, excess },
        Err(source) => TraceError::Io { file, line, source },
    }
}

/// Returns a short name for the trace at `path`: the file name without the extensions of traces.
pub fn short_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let name = name.to_string_lossy();
    let mut name = name.as_ref();
    for ending in [".zst", ".txt", ".trace", ".dat", ".parquet"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    printable(name).into_owned()
}

impl TraceSource {
    /// Opens a file: text, zstd, or a trace-cmd recording, which is read through `trace-cmd
    /// report`.
    ///
    /// # Errors
    /// [`TraceError::Io`], [`TraceError::Compression`], [`TraceError::TraceCmdMissing`];
    /// [`TraceError::Parquet`], because Parquet has no text.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let mut file = File::open(path).map_err(|source| read_error(&name, 0, source))?;
        let head = peek(&mut file).map_err(|source| read_error(&name, 0, source))?;
        if head.starts_with(dat::MAGIC) {
            // trace-cmd reads the whole recording.
            let input = ByteCounter::default();
            input.add(file.metadata().map_or(0, |file| file.len()));
            drop(file);
            let kind = Kind::Report(Box::new(Report::of(path)?));
            return Ok(Self::of(kind, input));
        }
        if head.starts_with(PARQUET_MAGIC) {
            return Err(TraceError::Parquet {
                file: name,
                problem: match cfg!(feature = "parquet") {
                    true => ParquetProblem::NoLines,
                    false => ParquetProblem::NotBuilt,
                },
            });
        }
        Self::detect(&name, head, Box::new(file))
    }

    /// Returns true if the file at `path` begins like a Parquet file.
    #[cfg(feature = "parquet")]
    pub(crate) fn is_parquet(path: &Path) -> Result<bool, TraceError> {
        // Peeking at a pipe would lose its first bytes.
        if !path.is_file() {
            return Ok(false);
        }
        let name = path.display().to_string();
        let head = File::open(path).and_then(|mut file| peek(&mut file));
        let head = head.map_err(|source| read_error(&name, 0, source))?;
        Ok(head.starts_with(PARQUET_MAGIC))
    }

    /// Opens text or zstd from any reader, such as standard input; errors show `name`. A trace-cmd
    /// recording must be a file.
    ///
    /// # Errors
    /// As [`TraceSource::open`].
    pub fn from_reader(name: &str, reader: impl Read + Send + 'static) -> Result<Self, TraceError> {
        let mut reader: Box<dyn Read + Send> = Box::new(reader);
        let head = peek(&mut reader).map_err(|source| read_error(name, 0, source))?;
        if head.starts_with(PARQUET_MAGIC) {
            return Err(TraceError::Parquet {
                file: name.to_owned(),
                problem: ParquetProblem::NotSeekable,
            });
        }
        Self::detect(name, head, reader)
    }

    fn of(kind: Kind, input: ByteCounter) -> Self {
        Self {
            kind,
            limits: TraceLimits::default(),
            text: 0,
            input,
        }
    }

    /// Returns this source with `limits`, of which only [`TraceLimits::text`] applies.
    #[must_use]
    pub fn with_limits(mut self, limits: &TraceLimits) -> Self {
        self.limits = limits.clone();
        self
    }

    /// Returns the counter of input bytes.
    pub(crate) fn meter(&self) -> ByteCounter {
        self.input.clone()
    }

    fn detect(name: &str, head: Vec<u8>, rest: Box<dyn Read + Send>) -> Result<Self, TraceError> {
        let archive = ARCHIVES.iter().find(|(magic, _)| head.starts_with(magic));
        if let Some((_, reader)) = archive {
            let file = name.to_owned();
            return Err(TraceError::Archive { file, reader });
        }
        let compressed = head.starts_with(ZSTD_MAGIC);
        let input = ByteCounter::default();
        let whole = CountedReader(Cursor::new(head).chain(rest), input.clone());
        if !compressed {
            return Ok(Self::of(Kind::Plain(whole), input));
        }
        let decoder =
            BufReader::with_capacity(zstd::Decoder::<io::Empty>::recommended_output_size(), whole);
        match zstd::Decoder::with_buffer(decoder) {
            Ok(decoder) => Ok(Self::of(Kind::Zstd(Box::new(decoder)), input)),
            Err(source) => Err(TraceError::Compression {
                file: name.to_owned(),
                line: 0,
                source,
            }),
        }
    }
}

impl Read for TraceSource {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let (read, limit) = match &mut self.kind {
            Kind::Plain(reader) => (reader.read(space)?, self.limits.text),
            Kind::Zstd(decoder) => {
                let read = decoder.read(space);
                let read = read.map_err(|error| io::Error::other(ReadError::Compression(error)))?;
                (read, Some(self.limits.text_of(self.input.bytes())))
            }
            Kind::Report(report) => {
                let read = report.read(space)?;
                (read, Some(self.limits.text_of(self.input.bytes())))
            }
        };
        self.text = self.text.saturating_add(read as u64);
        match limit {
            Some(limit) if self.text > limit => Err(io::Error::other(ReadError::LimitExceeded(
                LimitExceeded::Text { limit },
            ))),
            _ => Ok(read),
        }
    }
}

/// Reads as many bytes as the longest magic number has, or fewer at the end of the input.
fn peek(reader: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    reader
        .take(dat::MAGIC.len() as u64)
        .read_to_end(&mut head)?;
    Ok(head)
}
