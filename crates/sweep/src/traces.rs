//! The traces of a plan: files, directories, or the bundled sample.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ringfence_trace::{
    Chunk, Operations, SAMPLE, TraceError, TraceOptions, TraceSource, printable,
};

use crate::digest;
use crate::error::Problem;

/// A trace of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trace {
    /// Path of the file; `None` is the bundled sample.
    pub(crate) path: Option<PathBuf>,
}

/// Endings that the name of a trace does not keep, in the order of their removal.
const ENDINGS: [&str; 5] = [".zst", ".txt", ".trace", ".dat", ".parquet"];

impl Trace {
    /// Returns the traces at `path`: a file, or all files of a directory, sorted by name. Hidden
    /// files do not count.
    ///
    /// # Errors
    /// The path cannot be read, or is neither a regular file nor a directory with files.
    pub(crate) fn at(path: &Path) -> Result<Vec<Self>, Problem> {
        let wrong = |source| Problem::Trace {
            path: path.to_owned(),
            source,
        };
        // The path in a task is absolute: workers have another current directory.
        let path = &fs::canonicalize(path).map_err(wrong)?;
        let about = fs::metadata(path).map_err(wrong)?;
        if about.is_file() {
            return Ok(vec![Self::of(path.clone())?]);
        }
        if !about.is_dir() {
            return Err(Problem::NotAFile(path.clone()));
        }
        let files = || -> io::Result<Vec<PathBuf>> {
            let mut files = Vec::new();
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                let hidden = entry.file_name().to_string_lossy().starts_with('.');
                if !hidden && fs::metadata(entry.path())?.is_file() {
                    files.push(entry.path());
                }
            }
            files.sort();
            Ok(files)
        };
        let files = files().map_err(wrong)?;
        if files.is_empty() {
            return Err(Problem::EmptyDirectory(path.clone()));
        }
        files.into_iter().map(Self::of).collect()
    }

    fn of(path: PathBuf) -> Result<Self, Problem> {
        match path.to_str() {
            Some(_) => Ok(Self { path: Some(path) }),
            None => Err(Problem::NotUtf8(path)),
        }
    }

    /// Returns the file name without the endings of traces.
    pub(crate) fn name(&self) -> String {
        let Some(path) = &self.path else {
            return "sample".into();
        };
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy();
        let mut name = name.as_ref();
        for ending in ENDINGS {
            name = name.strip_suffix(ending).unwrap_or(name);
        }
        printable(name).into_owned()
    }

    /// Returns the digest of the bytes of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn digest(&self) -> io::Result<String> {
        match &self.path {
            None => Ok(digest::of_bytes(SAMPLE)),
            Some(path) => digest::of_file(path),
        }
    }

    /// Opens the operations of the trace.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn operations(&self) -> Result<Operations<TraceSource>, TraceError> {
        let options = TraceOptions::default();
        match &self.path {
            Some(path) => Operations::open(path, options),
            None => {
                let source = TraceSource::from_reader("sample", SAMPLE)?;
                Ok(Operations::from_source("sample", source, options))
            }
        }
    }

    /// Reads the trace and returns the names of its devices, in order of appearance.
    ///
    /// # Errors
    /// The trace is malformed.
    pub(crate) fn devices(&self) -> Result<Vec<String>, TraceError> {
        let mut operations = self.operations()?;
        let mut chunk = Chunk::default();
        while operations.next_chunk(&mut chunk)? {}
        let devices = operations.devices().iter();
        Ok(devices.map(|(_, device)| device.name.clone()).collect())
    }
}
