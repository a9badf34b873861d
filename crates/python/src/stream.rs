//! Arrow streams through the PyCapsule interface
//! (<https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html>).

use std::sync::Arc;

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::operations::TraceTable;
use crate::signals::{Signals, detached};
use crate::source::Source;

/// A table that consumers of the Arrow PyCapsule interface read, such as `polars.DataFrame`,
/// `pyarrow.table`, `pandas.DataFrame.from_arrow` and DuckDB. Each of them gets a stream from the
/// beginning of the table.
#[pyclass(frozen, module = "ringfence")]
pub(crate) struct Stream(Contents);

/// The source of the batches.
enum Contents {
    Batch(RecordBatch),
    /// Read from the trace, one batch after the other.
    Trace(Source, TraceTable),
}

impl Stream {
    pub(crate) fn of_batch(batch: RecordBatch) -> Self {
        Self(Contents::Batch(batch))
    }

    pub(crate) fn of_trace(source: Source, table: TraceTable) -> Self {
        Self(Contents::Trace(source, table))
    }

    fn schema(&self) -> SchemaRef {
        match &self.0 {
            Contents::Batch(batch) => batch.schema(),
            Contents::Trace(_, table) => table.schema(),
        }
    }
}

#[pymethods]
impl Stream {
    /// Returns a capsule with an `ArrowArrayStream`. A consumer that asks for another schema casts
    /// the columns itself.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = requested_schema;
        let reader: Box<dyn RecordBatchReader + Send> = match &self.0 {
            Contents::Batch(batch) => {
                let batches = [Ok(batch.clone())];
                Box::new(RecordBatchIterator::new(batches, batch.schema()))
            }
            Contents::Trace(source, table) => {
                // The stream outlives this call, so its signals do too.
                let signals = Signals::new();
                let reader = detached(py, |_| table.read(source, Arc::clone(&signals)));
                Box::new(reader?)
            }
        };
        let stream = FFI_ArrowArrayStream::new(reader);
        PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
    }

    /// Returns a capsule with the `ArrowSchema` of the stream.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(self.schema().as_ref());
        let schema = schema.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        PyCapsule::new_with_value(py, schema, c"arrow_schema")
    }

    fn __repr__(&self) -> String {
        let schema = self.schema();
        let names: Vec<&str> = schema
            .fields()
            .iter()
            .map(|field| field.name().as_str())
            .collect();
        format!("<ringfence.Stream of {}>", names.join(", "))
    }
}
