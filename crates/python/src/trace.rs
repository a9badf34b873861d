//! The class `Trace`, and traces as arguments of functions.

use std::path::PathBuf;

use pyo3::prelude::*;
use ringfence_report::{NamedInfo, json};
use ringfence_trace::{Info, TraceOptions};

use crate::operations::TraceTable;
use crate::signals::detached;
use crate::source::{SAMPLE_NAME, Source};
use crate::stream::Stream;

/// A trace, its name or its path, as an argument.
#[derive(FromPyObject)]
pub(crate) enum TraceArgument {
    Trace(Py<Trace>),
    Name(String),
    Path(PathBuf),
}

impl TraceArgument {
    pub(crate) fn source(self) -> Source {
        match self {
            Self::Trace(trace) => trace.get().source.clone(),
            Self::Name(name) if name == SAMPLE_NAME => Source::sample(),
            Self::Name(name) => Source::of_file(name.into()),
            Self::Path(path) => Source::of_file(path),
        }
    }
}

/// A trace. Every use reads it again, so memory does not grow with its size.
#[pyclass(frozen, module = "ringfence")]
pub(crate) struct Trace {
    pub(crate) source: Source,
}

/// Opens a trace: text of tracefs, trace-cmd or perf, plain or zstd, trace-cmd's .dat, or Parquet.
/// The string "sample" names the bundled trace. With `lenient`, malformed lines are counted instead
/// of ending the read.
#[pyfunction]
#[pyo3(signature = (path, *, lenient=false))]
pub(crate) fn open(py: Python<'_>, path: TraceArgument, lenient: bool) -> PyResult<Trace> {
    let mut source = path.source();
    source.lenient |= lenient;
    // A missing file fails here, and not at the first use.
    detached(py, |_| source.operations(TraceOptions::default()).map(drop))?;
    Ok(Trace { source })
}

#[pymethods]
impl Trace {
    /// The name of the trace in reports.
    #[getter]
    fn name(&self) -> String {
        self.source.name()
    }

    /// Statistics of the trace, as an element of `ringfence trace info --json`. Reads the whole
    /// trace.
    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let source = &self.source;
        let text = detached(py, |signals| {
            let mut options = TraceOptions::default();
            options.interrupt = signals.interrupt();
            let info = Info::read(&mut source.operations(options)?)?;
            let trace = source.name();
            Ok(json(&NamedInfo { trace, info }))
        })?;
        loads(py, &text)
    }

    /// The operations: maps, unmaps and marks.
    #[getter]
    fn ops(&self) -> Stream {
        Stream::of_trace(self.source.clone(), TraceTable::Ops)
    }

    /// The mappings: each map with its unmap.
    #[getter]
    fn mappings(&self) -> Stream {
        Stream::of_trace(self.source.clone(), TraceTable::Mappings)
    }

    /// The bursts of unmaps: consecutive unmaps of one device and direction on one CPU, at most 50
    /// us apart, without a map between them.
    #[getter]
    fn bursts(&self) -> Stream {
        Stream::of_trace(self.source.clone(), TraceTable::Bursts)
    }

    fn __repr__(&self) -> String {
        match self.source.path() {
            Some(path) => format!("ringfence.open({:?})", path.display().to_string()),
            None => format!("ringfence.open({SAMPLE_NAME:?})"),
        }
    }
}

/// Returns the Python objects of a JSON text.
pub(crate) fn loads<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}
