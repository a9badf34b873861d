//! The file or bundled sample with a trace, which every pass over the trace opens again.

use std::path::{Path, PathBuf};

use ringfence_trace::{Operations, SAMPLE, TraceOptions, TraceSource, short_name};

use crate::error::Failure;

/// The name of the bundled trace.
pub(crate) const SAMPLE_NAME: &str = "sample";

/// The file or bundled sample with a trace, and the options to read it.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// Path of the file; `None` for the bundled sample.
    path: Option<PathBuf>,
    pub(crate) lenient: bool,
}

impl Source {
    pub(crate) fn of_file(path: PathBuf) -> Self {
        Self {
            path: Some(path),
            lenient: false,
        }
    }

    pub(crate) fn sample() -> Self {
        Self {
            path: None,
            lenient: false,
        }
    }

    /// Returns the path of the file; `None` for the bundled sample.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the name of the trace in reports.
    pub(crate) fn name(&self) -> String {
        match &self.path {
            Some(path) => short_name(path),
            None => SAMPLE_NAME.to_owned(),
        }
    }

    /// Returns the stored bytes; `None` if they are unknown.
    pub(crate) fn bytes(&self) -> Option<u64> {
        match &self.path {
            Some(path) => path.metadata().ok().map(|meta| meta.len()),
            None => Some(SAMPLE.len() as u64),
        }
    }

    /// Opens the operations.
    pub(crate) fn operations(
        &self,
        mut options: TraceOptions,
    ) -> Result<Operations<TraceSource>, Failure> {
        options.lenient = self.lenient;
        Ok(match &self.path {
            Some(path) => Operations::open(path, options)?,
            None => Operations::sample(options)?,
        })
    }
}
