//! The operations of a trace as Arrow batches, one for each chunk that is read.

mod bursts;
mod mappings;
mod ops;

use std::mem;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use ringfence_trace::{
    Chunk, DeviceIndex, Devices, FlowBursts, Operations, TraceError, TraceOptions, TraceSource,
};

use self::mappings::Mappings;
use crate::error::{Failure, text};
use crate::signals::Signals;
use crate::source::Source;

/// A table of a trace.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TraceTable {
    /// One row for each map, unmap and mark, with the columns of a Parquet file of operations.
    /// `device` is the name.
    Ops,
    /// One row for each mapping, in the order of the unmaps; mappings without an unmap follow.
    Mappings,
    /// One row for each burst of unmaps, in the order of their ends.
    Bursts,
}

impl TraceTable {
    /// Returns the columns.
    pub(crate) fn schema(self) -> SchemaRef {
        let fields = match self {
            Self::Ops => ops::fields(),
            Self::Mappings => mappings::fields(),
            Self::Bursts => bursts::fields(),
        };
        Arc::new(Schema::new(fields))
    }

    /// Opens the trace for one pass, which `signals` may end.
    pub(crate) fn read(self, source: &Source, signals: Arc<Signals>) -> Result<Reader, Failure> {
        let mut options = TraceOptions::default();
        options.interrupt = signals.interrupt();
        Ok(Reader {
            operations: source.operations(options)?,
            signals,
            schema: self.schema(),
            rows: match self {
                Self::Ops => Rows::Ops,
                Self::Mappings => Rows::Mappings(Mappings::default()),
                Self::Bursts => Rows::Bursts(FlowBursts::default()),
            },
            chunk: Chunk::default(),
            stage: Stage::Reading,
            error: None,
        })
    }
}

/// Returns a column without nulls.
fn required(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, false)
}

/// Returns a column whose values may be null.
fn nullable(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, true)
}

/// One pass over a trace. It holds one chunk, and what the table keeps of live mappings.
pub(crate) struct Reader {
    operations: Operations<TraceSource>,
    signals: Arc<Signals>,
    schema: SchemaRef,
    rows: Rows,
    chunk: Chunk,
    stage: Stage,
    /// The error that ended the read.
    error: Option<TraceError>,
}

enum Rows {
    Ops,
    Mappings(Mappings),
    Bursts(FlowBursts),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Reading,
    /// The trace is read; mappings from this index on have no row yet.
    Remaining(usize),
    Ended,
}

impl RecordBatchReader for Reader {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl Iterator for Reader {
    type Item = Result<RecordBatch, ArrowError>;

    /// Returns the next batch with rows.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.step() {
                Ok(Some(arrays)) => {
                    if arrays.first().is_some_and(|array| !array.is_empty()) {
                        return Some(RecordBatch::try_new(self.schema(), arrays));
                    }
                }
                Ok(None) => return None,
                Err(error) => {
                    self.stage = Stage::Ended;
                    return Some(Err(ArrowError::ExternalError(self.message(error).into())));
                }
            }
        }
    }
}

impl Reader {
    /// Returns the columns of the next chunk, which may have no row; `None` at the end.
    fn step(&mut self) -> Result<Option<Vec<ArrayRef>>, TraceError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        match self.stage {
            Stage::Reading => {
                match self.operations.next_chunk(&mut self.chunk) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.stage = Stage::Remaining(0);
                        return Ok(Some(Vec::new()));
                    }
                    // The operations before the error come first.
                    Err(error) => {
                        self.stage = Stage::Ended;
                        self.error = Some(error);
                    }
                }
                let devices = self.operations.devices();
                let chunk = &self.chunk;
                Ok(Some(match &mut self.rows {
                    Rows::Ops => ops::rows(chunk, devices),
                    Rows::Mappings(mappings) => mappings.rows(chunk, devices),
                    Rows::Bursts(bursts) => {
                        let ended = chunk.ops.iter().filter_map(|op| bursts.add(op));
                        bursts::rows(ended, devices)
                    }
                }))
            }
            Stage::Remaining(from) => {
                let devices = self.operations.devices();
                Ok(Some(match &mut self.rows {
                    Rows::Mappings(mappings) if from < mappings.identifiers() => {
                        self.stage = Stage::Remaining(from.saturating_add(Chunk::OPS));
                        mappings.remaining(from, devices)
                    }
                    Rows::Bursts(bursts) => {
                        self.stage = Stage::Ended;
                        bursts::rows(mem::take(bursts).finish().into_iter(), devices)
                    }
                    Rows::Ops | Rows::Mappings(_) => {
                        self.stage = Stage::Ended;
                        return Ok(None);
                    }
                }))
            }
            Stage::Ended => Ok(None),
        }
    }

    /// Returns the message of an error: the interface has room for a text only. It names the file
    /// and the line. Ctrl-C, which ends the read, raises its exception after the consumer's own.
    fn message(&self, error: TraceError) -> String {
        match self.signals.take() {
            Some(raised) => Python::attach(|py| {
                // The text comes first: it runs code of the interpreter, which would raise the
                // pending exception here.
                let text = raised.to_string();
                if raised.is_instance_of::<PyKeyboardInterrupt>(py) {
                    interrupt_again(py);
                }
                text
            }),
            None => text(&error),
        }
    }
}

/// Makes the signal of Ctrl-C pending again. An error of this call loses only the exception: the
/// consumer's own error stays.
fn interrupt_again(py: Python<'_>) {
    let _ = py
        .import("_thread")
        .and_then(|module| module.call_method0("interrupt_main"));
}

fn device_name(devices: &Devices, device: DeviceIndex) -> &str {
    devices.get(device).map_or("", |device| &device.name)
}
