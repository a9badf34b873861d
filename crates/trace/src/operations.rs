//! The operations of a trace, whatever it is stored as.

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
    /// Opens a trace by path: text, zstd, a trace-cmd recording, or, with the feature `parquet`,
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

    /// Reads the text of a trace from `source`, whose compressed bytes count as its input;
    /// `name` stands in errors.
    pub fn from_source(name: &str, source: TraceSource, options: TraceOptions) -> Self {
        let source = source.with_limits(&options.limits);
        let text = Pairing::new(name, options).metered(source.meter());
        Self(Kind::Text(source, Box::new(text)))
    }
}

impl<R: Read> Operations<R> {
    /// Reads the text of a trace from `reader`; `name` stands in errors.
    pub fn new(name: &str, reader: R, options: TraceOptions) -> Self {
        Self(Kind::Text(reader, Box::new(Pairing::new(name, options))))
    }

    /// Fills `chunk` with the next operations, about [`Chunk::OPS`] of them; false at the end of
    /// the trace, with `chunk` empty.
    ///
    /// # Errors
    /// See [`TraceError`]. The operations before the error stand in `chunk`; further calls return
    /// false.
    pub fn next_chunk(&mut self, chunk: &mut Chunk) -> Result<bool, TraceError> {
        match &mut self.0 {
            Kind::Text(source, text) => text.next_chunk_with(source, chunk, &mut |_, _| {}),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.next_chunk(chunk),
        }
    }

    /// The same, showing each raw event as it is taken, which is before its operation is. Parquet
    /// has none to show.
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

    /// The devices seen so far. A device appears here before its first operation is delivered.
    pub fn devices(&self) -> &Devices {
        match &self.0 {
            Kind::Text(_, text) => text.devices(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.devices(),
        }
    }

    /// Counts so far; complete after `next_chunk` has returned false. Of Parquet, those of the
    /// trace it was made from, at any time.
    pub fn summary(&self) -> &Summary {
        match &self.0 {
            Kind::Text(_, text) => text.summary(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.summary(),
        }
    }

    /// The mappings alive after the operations delivered so far, in order of their ids.
    pub fn live(&self) -> Box<dyn Iterator<Item = MappingId> + '_> {
        match &self.0 {
            Kind::Text(_, text) => Box::new(text.live()),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => Box::new(rows.live()),
        }
    }
}
