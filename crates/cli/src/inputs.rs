//! The traces named on the command line.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource, printable, short_name};

use crate::failure::Failure;
use crate::same_file::{FileId, same_file};
use crate::spool::Spool;
use crate::spool_limit::SpoolLimit;

/// Limit on the stored bytes of standard input in commands without `--max-spool`.
pub(crate) const SPOOL_LIMIT: SpoolLimit = SpoolLimit {
    bytes: 4 << 30,
    option: None,
};

/// Source of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// The sample bundled with the program.
    Sample,
    /// Standard input, which can be read only once.
    Stdin,
    /// A FIFO at this path, which can be read only once. A shell makes one of `<(zstdcat t.zst)`.
    Pipe(PathBuf),
    /// One of these two, stored for repeated reading.
    Spooled { name: String, spool: Spool },
    /// A trace file at this path.
    File(PathBuf),
}

impl Input {
    /// Returns the inputs that the arguments name, or the sample if they name none.
    ///
    /// # Errors
    /// [`Failure::SameOnce`] if two arguments name an input that can be read only once.
    pub(crate) fn all(paths: &[PathBuf]) -> Result<Vec<Self>, Failure> {
        if paths.is_empty() {
            return Ok(vec![Self::Sample]);
        }
        let inputs: Vec<Self> = paths.iter().map(|path| Self::of(path)).collect();
        for (index, (input, path)) in inputs.iter().zip(paths).enumerate() {
            let mut earlier = inputs.iter().take(index);
            if earlier.any(|other| other.is_same_stream(input)) {
                return Err(Failure::SameOnce(path.clone()));
            }
        }
        Ok(inputs)
    }

    /// Returns the input for one argument. `-` is standard input, and so is the path of a FIFO or
    /// a socket that standard input has open, such as `/dev/stdin`.
    pub(crate) fn of(path: &Path) -> Self {
        if path == OsStr::new("-") {
            return Self::Stdin;
        }
        let Ok(about) = fs::metadata(path) else {
            return Self::File(path.to_owned());
        };
        let kind = about.file_type();
        // A socket cannot be opened through its path.
        if (kind.is_fifo() || kind.is_socket()) && is_standard_input(&about) {
            Self::Stdin
        } else if kind.is_fifo() {
            Self::Pipe(path.to_owned())
        } else {
            Self::File(path.to_owned())
        }
    }

    /// Returns true if both inputs are the same stream, whose bytes only one of them reads.
    fn is_same_stream(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stdin, Self::Stdin) => true,
            (Self::Pipe(one), Self::Pipe(other)) => same_file(one, other),
            _ => false,
        }
    }

    /// Returns false if the next reader would not read the same bytes.
    pub(crate) fn is_reusable(&self) -> bool {
        !matches!(self, Self::Stdin | Self::Pipe(_))
    }

    /// Makes this input readable more than once. An input that is not
    /// [`is_reusable`](Self::is_reusable) is read to its end and stored.
    ///
    /// # Errors
    /// It cannot be read or stored, or exceeds the limit.
    pub(crate) fn reusable(self, limit: SpoolLimit) -> Result<Self, Failure> {
        let spool = match &self {
            Self::Stdin => Spool::of("standard input", io::stdin(), limit)?,
            Self::Pipe(path) => {
                let pipe = File::open(path).map_err(Failure::io(path))?;
                Spool::of(&printable(&path.display().to_string()), pipe, limit)?
            }
            Self::Sample | Self::Spooled { .. } | Self::File(_) => return Ok(self),
        };
        let name = self.short_name();
        Ok(Self::Spooled { name, spool })
    }

    /// Returns a short name: the file name without the extensions of traces.
    fn short_name(&self) -> String {
        match self {
            Self::Sample => "sample".into(),
            Self::Stdin => "stdin".into(),
            Self::Spooled { name, .. } => name.clone(),
            Self::Pipe(path) | Self::File(path) => short_name(path),
        }
    }

    /// Returns distinct names for the rows of `inputs`: short names where they are unique,
    /// otherwise the paths as given. A name that an earlier row has gets a number.
    pub(crate) fn names(inputs: &[Self]) -> Vec<String> {
        let short: Vec<String> = inputs.iter().map(Self::short_name).collect();
        let is_unique = |name: &String| short.iter().filter(|other| *other == name).count() == 1;
        let mut names: Vec<String> = Vec::with_capacity(inputs.len());
        for (input, name) in inputs.iter().zip(&short) {
            let name = match input {
                Self::Pipe(path) | Self::File(path) if !is_unique(name) => {
                    printable(&path.display().to_string()).into_owned()
                }
                _ => name.clone(),
            };
            let mut distinct = name.clone();
            let mut number = 2;
            while names.contains(&distinct) {
                distinct = format!("{name}#{number}");
                number += 1;
            }
            names.push(distinct);
        }
        names
    }

    /// Opens the text of the trace.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn source(&self) -> Result<TraceSource, Failure> {
        Ok(match self {
            Self::Sample => TraceSource::from_reader("sample", SAMPLE)?,
            Self::Stdin => TraceSource::from_reader("stdin", io::stdin())?,
            Self::Spooled { name, spool } => TraceSource::from_reader(name, spool.reader()?)?,
            Self::Pipe(path) | Self::File(path) => TraceSource::open(path)?,
        })
    }

    /// Opens the operations of the trace.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn operations(
        &self,
        options: TraceOptions,
    ) -> Result<Operations<TraceSource>, Failure> {
        Ok(match self {
            Self::Pipe(path) | Self::File(path) => Operations::open(path, options)?,
            Self::Sample => Operations::sample(options)?,
            Self::Stdin => Operations::from_source("stdin", self.source()?, options),
            Self::Spooled { name, .. } => Operations::from_source(name, self.source()?, options),
        })
    }

    /// Returns the number of lines of the trace if it is a stored file of at most 64 MiB. For the
    /// progress bar only. Decompresses the whole file.
    pub(crate) fn lines(&self) -> Option<u64> {
        const MAX_STORED: u64 = 64 << 20;
        let Self::File(path) = self else {
            return None;
        };
        let meta = fs::metadata(path).ok()?;
        if !meta.is_file() || meta.len() > MAX_STORED {
            return None;
        }
        let mut source = TraceSource::open(path).ok()?;
        let mut block = vec![0; 1 << 16];
        let mut lines = 0;
        loop {
            match source.read(&mut block) {
                Ok(0) => return Some(lines),
                Ok(read) => {
                    let read = block.get(..read)?;
                    lines += read.iter().filter(|byte| **byte == b'\n').count() as u64;
                }
                Err(_) => return None,
            }
        }
    }

    /// Returns the stored bytes of the trace; `None` if they are unknown.
    pub(crate) fn bytes(&self) -> Option<u64> {
        match self {
            Self::Sample => Some(SAMPLE.len() as u64),
            Self::Stdin | Self::Pipe(_) | Self::Spooled { .. } => None,
            Self::File(path) => fs::metadata(path).ok().map(|meta| meta.len()),
        }
    }
}

/// Returns true if `about` describes the file that standard input has open.
fn is_standard_input(about: &Metadata) -> bool {
    let descriptor = io::stdin().as_fd().try_clone_to_owned();
    let open = descriptor.and_then(|descriptor| File::from(descriptor).metadata());
    open.is_ok_and(|open| FileId::of(&open) == FileId::of(about))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_different_traces_have_different_names() {
        let cases: [(&[&str], &[&str]); 6] = [
            (&["x/a.trace.zst", "b.txt", "-"], &["a", "b", "stdin"]),
            (&["x/a.zst", "y/a.zst"], &["x/a.zst", "y/a.zst"]),
            // A comparison of a trace with itself.
            (&["a.zst", "a.zst"], &["a.zst", "a.zst#2"]),
            // The path of a trace can be the short name of another, or one with a number.
            (
                &["b.txt", "b.dat", "b.txt.trace"],
                &["b.txt", "b.dat", "b.txt#2"],
            ),
            (
                &["b.txt.trace", "b.txt", "b.dat"],
                &["b.txt", "b.txt#2", "b.dat"],
            ),
            (
                &["a.zst", "a.zst", "a.zst#2"],
                &["a.zst", "a.zst#2", "a.zst#2#2"],
            ),
        ];
        for (paths, expected) in cases {
            let inputs: Vec<Input> = paths.iter().map(|p| Input::of(Path::new(p))).collect();
            assert_eq!(Input::names(&inputs), expected, "{paths:?}");
        }
    }
}
