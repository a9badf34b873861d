//! The Python module `ringfence`: traces and reports as Arrow streams.
//!
//! The package is `python/ringfence`; this crate is its native part, `ringfence._native`. It calls
//! `trace`, `lab`, `attack` and `report`, as the command does. Calls that take long release the
//! interpreter's lock and end at a signal ([`signals`]).
#![forbid(unsafe_code)]

mod columns;
mod commands;
mod error;
mod operations;
mod recording;
mod signals;
mod source;
mod stream;
mod trace;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::commands::{Report, attack, compare, modes, size};
    #[pymodule_export]
    use super::error::{Error, RecordError, TraceError};
    #[pymodule_export]
    use super::recording::record;
    #[pymodule_export]
    use super::stream::Stream;
    #[pymodule_export]
    use super::trace::{Trace, open};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
