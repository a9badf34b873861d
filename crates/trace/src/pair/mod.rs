//! Raw events to operations.

use std::io::Read;

use crate::devices::Devices;
use crate::error::TraceError;
use crate::op::{Chunk, MappingId};
use crate::options::Options;
use crate::summary::Summary;

/// The operations of a trace, read as a stream.
#[derive(Debug)]
pub struct Operations<R> {
    reader: R,
    options: Options,
    devices: Devices,
    summary: Summary,
}

impl<R: Read> Operations<R> {
    /// Reads the text of a trace from `reader`; `name` stands in errors.
    pub fn new(_name: &str, reader: R, options: Options) -> Self {
        Self {
            reader,
            options,
            devices: Devices::new(),
            summary: Summary::default(),
        }
    }

    /// Fills `chunk` with the next operations, about [`Chunk::OPS`] of them; false at the end of the trace,
    /// with `chunk` empty.
    ///
    /// # Errors
    /// See [`TraceError`]. After an error, the operations delivered before it stand, and further calls
    /// return false.
    pub fn next_chunk(&mut self, chunk: &mut Chunk) -> Result<bool, TraceError> {
        chunk.clear();
        let _ = (&mut self.reader, &self.options);
        Ok(false)
    }

    /// The devices seen so far. A device appears here before its first operation is delivered.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Counts so far; complete after `next_chunk` has returned false.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// The mappings alive after the operations delivered so far, in order of their ids.
    pub fn live(&self) -> impl Iterator<Item = MappingId> {
        std::iter::empty()
    }
}
