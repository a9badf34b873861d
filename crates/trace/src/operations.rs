//! Reads the operations of a trace in any storage format.

use std::io::Read;
use std::path::Path;

use crate::devices::Devices;
use crate::error::TraceError;
use crate::input::TraceSource;
use crate::op::{Chunk, MappingId};
use crate::options::TraceOptions;
use crate::pair::Pairing;
#[cfg(feature = "parquet")]
use crate::parquet::Rows;
#[cfg(feature = "parquet")]
use crate::problem::ParquetProblem;
use crate::summary::Summary;
use crate::text::{RawChunk, RawEvent};

/// The operations of a trace, read as a stream.
#[derive(Debug)]
pub struct Operations<R>(Kind<R>);

#[derive(Debug)]
enum Kind<R> {
    Text(R, Box<Pairing>),
    #[cfg(feature = "parquet")]
    Parquet(Box<Rows>),
}

impl Operations<TraceSource> {
    /// Opens a trace by path: text, zstd, a trace-cmd recording or, with the feature `parquet`,
    /// Parquet.
    ///
    /// # Errors
    /// As [`TraceSource::open`].
    pub fn open(path: &Path, options: TraceOptions) -> Result<Self, TraceError> {
        #[cfg(feature = "parquet")]
        if TraceSource::is_parquet(path)? {
            return Ok(Self(Kind::Parquet(Box::new(Rows::open(
                path,
                options.limits,
            )?))));
        }
        let source = TraceSource::open(path)?.with_limits(&options.limits);
        let text = Pairing::new(&path.display().to_string(), options).metered(source.meter());
        let reread = path.is_file().then(|| path.to_owned());
        Ok(Self(Kind::Text(source, Box::new(text.rereadable(reread)))))
    }

    /// Reads the text of a trace from `source`. Limits relative to the input count the compressed
    /// bytes of `source`; errors show `name`.
    pub fn from_source(name: &str, source: TraceSource, options: TraceOptions) -> Self {
        let source = source.with_limits(&options.limits);
        let text = Pairing::new(name, options).metered(source.meter());
        Self(Kind::Text(source, Box::new(text)))
    }
}

impl<R: Read> Operations<R> {
    /// Reads the text of a trace from `reader`; errors show `name`.
    pub fn new(name: &str, reader: R, options: TraceOptions) -> Self {
        Self(Kind::Text(reader, Box::new(Pairing::new(name, options))))
    }

    /// Fills `chunk` with about [`Chunk::OPS`] operations. Returns false at the end of the trace,
    /// with `chunk` empty.
    ///
    /// # Errors
    /// See [`TraceError`]. `chunk` holds the operations before the error; further calls return
    /// false.
    pub fn next_chunk(&mut self, chunk: &mut Chunk) -> Result<bool, TraceError> {
        match &mut self.0 {
            Kind::Text(source, text) => text.next_chunk_with(source, chunk, &mut |_, _| {}),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.next_chunk(chunk),
        }
    }

    /// Like [`Operations::next_chunk`], and passes each raw event to `tap` before its operation is
    /// emitted. Fails for Parquet, which has no raw events.
    pub(crate) fn next_chunk_with(
        &mut self,
        chunk: &mut Chunk,
        tap: &mut dyn FnMut(&RawEvent, &RawChunk),
    ) -> Result<bool, TraceError> {
        match &mut self.0 {
            Kind::Text(source, text) => text.next_chunk_with(source, chunk, tap),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => Err(rows.refuse(ParquetProblem::NoLines)),
        }
    }

    /// Returns the devices seen so far. A device appears here before its first operation is
    /// delivered.
    pub fn devices(&self) -> &Devices {
        match &self.0 {
            Kind::Text(_, text) => text.devices(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.devices(),
        }
    }

    /// Returns the counts so far, which are complete after `next_chunk` has returned false. For
    /// Parquet, the counts are always those of the complete original trace.
    pub fn summary(&self) -> &Summary {
        match &self.0 {
            Kind::Text(_, text) => text.summary(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.summary(),
        }
    }

    /// Returns the mappings that are live after the operations delivered so far, in order of their
    /// ids.
    pub fn live(&self) -> Box<dyn Iterator<Item = MappingId> + '_> {
        match &self.0 {
            Kind::Text(_, text) => Box::new(text.live()),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => Box::new(rows.live()),
        }
    }
}
