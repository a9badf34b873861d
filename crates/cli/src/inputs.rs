//! The traces named on the command line.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource, printable, short_name};

use crate::failure::Failure;
use crate::spool::Spool;

/// Default limit on the stored bytes of standard input.
pub(crate) const SPOOL_LIMIT: u64 = 4 << 30;

/// Source of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// The sample bundled with the program.
    Sample,
    /// Standard input, which can be read only once.
    Stdin,
    /// Standard input, stored for repeated reading.
    Spooled(Spool),
    /// A trace file at this path.
    File(PathBuf),
}

impl Input {
    /// Returns the inputs that the arguments name, or the sample if they name none.
    ///
    /// # Errors
    /// [`Failure::StdinTwice`] if two arguments name standard input.
    pub(crate) fn all(paths: &[PathBuf]) -> Result<Vec<Self>, Failure> {
        if paths.is_empty() {
            return Ok(vec![Self::Sample]);
        }
        let inputs: Vec<Self> = paths.iter().map(|path| Self::of(path)).collect();
        let stdin = inputs.iter().filter(|input| **input == Self::Stdin);
        if stdin.count() > 1 {
            return Err(Failure::StdinTwice);
        }
        Ok(inputs)
    }

    /// Returns the input for one argument; `-` is standard input.
    pub(crate) fn of(path: &Path) -> Self {
        if path == OsStr::new("-") {
            Self::Stdin
        } else {
            Self::File(path.to_owned())
        }
    }

    /// Makes this input readable more than once. Standard input is read to its end and stored.
    ///
    /// # Errors
    /// Standard input cannot be read or stored, or exceeds `limit` bytes.
    pub(crate) fn reusable(self, limit: u64) -> Result<Self, Failure> {
        match self {
            Self::Stdin => Spool::of_stdin(limit).map(Self::Spooled),
            other => Ok(other),
        }
    }

    /// Returns a short name: the file name without the extensions of traces.
    fn short_name(&self) -> String {
        match self {
            Self::Sample => "sample".into(),
            Self::Stdin | Self::Spooled(_) => "stdin".into(),
            Self::File(path) => short_name(path),
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
                Self::File(path) if !is_unique(name) => {
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
            Self::Spooled(spool) => TraceSource::from_reader("stdin", spool.reader()?)?,
            Self::File(path) => TraceSource::open(path)?,
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
            Self::File(path) => Operations::open(path, options)?,
            Self::Sample => Operations::sample(options)?,
            Self::Stdin | Self::Spooled(_) => {
                Operations::from_source("stdin", self.source()?, options)
            }
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
            Self::Stdin | Self::Spooled(_) => None,
            Self::File(path) => fs::metadata(path).ok().map(|meta| meta.len()),
        }
    }
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
