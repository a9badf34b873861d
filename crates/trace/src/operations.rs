//! Reads the operations of a trace in any storage format.

use std::io::Read;
use std::path::Path;

use crate::devices::Devices;
use crate::domain_type::DomainType;
use crate::error::TraceError;
use crate::input::TraceSource;
use crate::interrupt::Interrupt;
use crate::op::{Chunk, DeviceIndex, MappingId};
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
pub struct Operations<R> {
    kind: Kind<R>,
    interrupt: Interrupt,
}

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
            let interrupt = options.interrupt.clone();
            let kind = Kind::Parquet(Box::new(Rows::open(path, options.limits)?));
            return Ok(Self { kind, interrupt });
        }
        let source = TraceSource::open(path)?.with_limits(&options.limits);
        let reread = path.is_file().then(|| path.to_owned());
        let meter = source.meter();
        let name = path.display().to_string();
        Ok(Self::of_text(&name, source, options, |text| {
            text.metered(meter).rereadable(reread)
        }))
    }

    /// Reads the bundled sample, [`SAMPLE`](crate::SAMPLE).
    ///
    /// # Errors
    /// As [`TraceSource::from_reader`].
    pub fn sample(options: TraceOptions) -> Result<Self, TraceError> {
        let source = TraceSource::from_reader("sample", crate::SAMPLE)?;
        Ok(Self::from_source("sample", source, options))
    }

    /// Reads the text of a trace from `source`. Limits relative to the input count the compressed
    /// bytes of `source`; errors show `name`.
    pub fn from_source(name: &str, source: TraceSource, options: TraceOptions) -> Self {
        let source = source.with_limits(&options.limits);
        let meter = source.meter();
        Self::of_text(name, source, options, |text| text.metered(meter))
    }
}

impl<R: Read> Operations<R> {
    /// Reads the text of a trace from `reader`; errors show `name`.
    pub fn new(name: &str, reader: R, options: TraceOptions) -> Self {
        Self::of_text(name, reader, options, |text| text)
    }

    fn of_text(
        name: &str,
        reader: R,
        options: TraceOptions,
        with: impl FnOnce(Pairing) -> Pairing,
    ) -> Self {
        let interrupt = options.interrupt.clone();
        let text = with(Pairing::new(name, options));
        Self {
            kind: Kind::Text(reader, Box::new(text)),
            interrupt,
        }
    }

    /// Returns the interrupt of the options, for a replay that works long on each chunk.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Fills `chunk` with about [`Chunk::OPS`] operations. Returns false at the end of the trace,
    /// with `chunk` empty.
    ///
    /// # Errors
    /// See [`TraceError`]. `chunk` holds the operations before the error; further calls return
    /// false.
    pub fn next_chunk(&mut self, chunk: &mut Chunk) -> Result<bool, TraceError> {
        match &mut self.kind {
            Kind::Text(source, text) => text.next_chunk_with(source, chunk, &mut |_, _| {}),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.next_chunk(chunk, &self.interrupt),
        }
    }

    /// Like [`Operations::next_chunk`], and passes each raw event to `tap` before its operation is
    /// emitted. Fails for Parquet, which has no raw events.
    pub(crate) fn next_chunk_with(
        &mut self,
        chunk: &mut Chunk,
        tap: &mut dyn FnMut(&RawEvent, &RawChunk),
    ) -> Result<bool, TraceError> {
        match &mut self.kind {
            Kind::Text(source, text) => text.next_chunk_with(source, chunk, tap),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => Err(rows.refuse(ParquetProblem::NoLines)),
        }
    }

    /// Returns the type of a device's IOMMU domain, if the recording has it and the options keep
    /// [`PageEvents`](crate::PageEvents).
    pub fn domain_type(&self, device: DeviceIndex) -> Option<DomainType> {
        match &self.kind {
            Kind::Text(_, text) => text.domain_type(device),
            #[cfg(feature = "parquet")]
            Kind::Parquet(_) => None,
        }
    }

    /// Returns the name that errors show.
    pub(crate) fn name(&self) -> &str {
        match &self.kind {
            Kind::Text(_, text) => text.name(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.name(),
        }
    }

    /// Returns the devices seen so far. A device appears here before its first operation is
    /// delivered.
    pub fn devices(&self) -> &Devices {
        match &self.kind {
            Kind::Text(_, text) => text.devices(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.devices(),
        }
    }

    /// Returns the counts so far, which are complete after `next_chunk` has returned false. For
    /// Parquet, the counts are always those of the complete original trace.
    pub fn summary(&self) -> &Summary {
        match &self.kind {
            Kind::Text(_, text) => text.summary(),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => rows.summary(),
        }
    }

    /// Returns the mappings that are live after the operations delivered so far, in order of their
    /// ids.
    pub fn live(&self) -> Box<dyn Iterator<Item = MappingId> + '_> {
        match &self.kind {
            Kind::Text(_, text) => Box::new(text.live()),
            #[cfg(feature = "parquet")]
            Kind::Parquet(rows) => Box::new(rows.live()),
        }
    }
}
