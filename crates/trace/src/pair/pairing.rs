//! Produces the stream of operations from text.

use std::io::Read;
use std::path::{Path, PathBuf};

use ringfence_types::{Iova, IovaRange, PfnRange};

use super::resolve::{ResolveError, Resolver};
use super::window::{LineWindow, WindowOutput};
use crate::addresses::{AddressEvent, AddressKind};
use crate::devices::Devices;
use crate::domain_type::DomainType;
use crate::error::TraceError;
use crate::input::{ByteCounter, TraceSource};
use crate::interrupt::Interrupt;
use crate::limits::{Progress, TraceLimits};
use crate::op::{Chunk, DeviceIndex, MappingId, Mark, PageOp, Position};
use crate::options::{Addresses, Attribution, TraceOptions};
use crate::summary::Summary;
use crate::text::{RawChunk, RawEvent, RawKind, Text, TraceReader};

/// The operations of a trace's text, read as a stream. The caller passes the source to each call.
#[derive(Debug)]
pub(crate) struct Pairing {
    text: Text,
    window: LineWindow,
    resolver: Resolver,
    raw: RawChunk,
    /// Number of events of `raw` already processed.
    taken: usize,
    attribution: Attribution,
    addresses: Addresses,
    /// File that can be read again to check that the first device remains the only one.
    reread: Option<PathBuf>,
    /// Texts of the marks in the window's queue. They are kept here because the raw chunk is
    /// reused.
    marks: std::collections::VecDeque<String>,
    error: Option<TraceError>,
    stage: Stage,
    limits: TraceLimits,
    progress: Progress,
    /// Counts the input bytes if the input is not the text itself.
    input: Option<ByteCounter>,
    interrupt: Interrupt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Reading,
    Draining,
    Ended,
}

impl Pairing {
    /// Begins at the start of a trace's text; errors show `name`.
    pub(crate) fn new(name: &str, options: TraceOptions) -> Self {
        Self {
            text: Text::new(name, &options),
            window: LineWindow::new(options.look_ahead, options.addresses),
            resolver: Resolver::new(options.limits.clone(), options.page_events),
            raw: RawChunk::default(),
            taken: 0,
            attribution: options.attribution,
            addresses: options.addresses,
            reread: None,
            marks: std::collections::VecDeque::new(),
            error: None,
            stage: Stage::Reading,
            limits: options.limits,
            progress: Progress::default(),
            input: None,
            interrupt: options.interrupt,
        }
    }

    /// Uses the bytes that `input` counts as the size of the trace's input.
    pub(crate) fn metered(mut self, input: ByteCounter) -> Self {
        self.input = Some(input);
        self
    }

    /// Sets the file that can be read again.
    pub(crate) fn rereadable(mut self, path: Option<PathBuf>) -> Self {
        self.reread = path;
        self
    }

    /// Like [`Operations::next_chunk`](crate::Operations::next_chunk), and passes each raw event to
    /// `tap` before its operation is emitted.
    pub(crate) fn next_chunk_with(
        &mut self,
        source: &mut dyn Read,
        chunk: &mut Chunk,
        tap: &mut dyn FnMut(&RawEvent, &RawChunk),
    ) -> Result<bool, TraceError> {
        chunk.clear();
        while self.stage != Stage::Ended && !chunk.is_full() {
            if let Err(error) = self.step(source, chunk, tap) {
                // This error is the final one, even if the reader has met another error further on.
                self.stage = Stage::Ended;
                self.count();
                return Err(error);
            }
        }
        self.count();
        Ok(!chunk.ops.is_empty()
            || !chunk.marks.is_empty()
            || !chunk.addresses.is_empty()
            || !chunk.page_events.is_empty())
    }

    pub(crate) fn devices(&self) -> &Devices {
        self.text.devices()
    }

    pub(crate) fn domain_type(&self, device: DeviceIndex) -> Option<DomainType> {
        self.text.domain_type(device)
    }

    /// Returns the name that errors show.
    pub(crate) fn name(&self) -> &str {
        self.text.name()
    }

    pub(crate) fn summary(&self) -> &Summary {
        &self.resolver.summary
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = MappingId> {
        self.resolver.live().iter().map(|(id, _)| id)
    }

    /// Processes one event, or reads the next raw chunk.
    fn step(
        &mut self,
        source: &mut dyn Read,
        chunk: &mut Chunk,
        tap: &mut dyn FnMut(&RawEvent, &RawChunk),
    ) -> Result<(), TraceError> {
        if let Some(event) = self.raw.events.get(self.taken) {
            self.taken += 1;
            tap(event, &self.raw);
            if let RawKind::Mark(text) = event.kind {
                let text = self.raw.marks.get_mut(text as usize).map(std::mem::take);
                self.marks.push_back(text.unwrap_or_default());
            }
            self.window.push(event, &self.raw);
            return self.drain(chunk);
        }
        if self.stage == Stage::Draining {
            self.resolver.summary.cut_lines = self.window.finish();
            self.drain(chunk)?;
            self.resolver.finish();
            self.stage = Stage::Ended;
            return match self.error.take() {
                Some(error) => Err(error),
                None => Ok(()),
            };
        }
        if self.interrupt.is_set() {
            let file = self.text.name().to_owned();
            return Err(TraceError::Interrupted { file });
        }
        self.taken = 0;
        let read = self.text.next_chunk(source, &mut self.raw);
        self.progress.input = match &self.input {
            Some(input) => input.bytes(),
            None => self.text.bytes(),
        };
        match read {
            Ok(true) => {}
            Ok(false) => self.stage = Stage::Draining,
            // Resolve the events before the error first.
            Err(error) => {
                self.error = Some(error);
                self.stage = Stage::Draining;
            }
        }
        Ok(())
    }

    /// Resolves the lines that the window has decided.
    fn drain(&mut self, chunk: &mut Chunk) -> Result<(), TraceError> {
        while let Some(resolved) = self.window.pop() {
            let (WindowOutput::Event { event, .. }
            | WindowOutput::Map { event }
            | WindowOutput::Unmap { event, .. }
            | WindowOutput::Address { event, .. }) = &resolved;
            self.progress.lines = event.line;
            self.resolver.progress = self.progress;
            match resolved {
                WindowOutput::Event {
                    event,
                    lists,
                    pieces,
                    lines,
                } => {
                    if let RawKind::Page(page) = event.kind {
                        chunk.page_events.push(PageOp {
                            before_op: u32::try_from(chunk.ops.len()).unwrap_or(u32::MAX),
                            position: Position {
                                line: event.line,
                                time: event.time,
                            },
                            pid: event.context.pid,
                            event: page,
                        });
                        continue;
                    }
                    if let RawKind::Mark(_) = event.kind {
                        let time = self.resolver.advance_to(&event);
                        let text = self.marks.pop_front().unwrap_or_default();
                        let charged = self.resolver.mark(&text);
                        charged.map_err(|problem| self.failed(problem, &event))?;
                        chunk.marks.push(Mark {
                            before_op: u32::try_from(chunk.ops.len()).unwrap_or(u32::MAX),
                            time,
                            text,
                        });
                        continue;
                    }
                    let done =
                        self.resolver
                            .event(&event, lists, pieces, lines, &self.window, chunk);
                    self.window.release(lists, pieces);
                    done.map_err(|problem| self.failed(problem, &event))?;
                }
                WindowOutput::Map { event } => {
                    let device = self.attribute(&event)?;
                    let (device, own_row) =
                        device.map_or((None, true), |(device, own_row)| (Some(device), own_row));
                    if self.addresses == Addresses::Keep {
                        let device = device.filter(|_| !own_row);
                        self.group_address(&event, device, chunk);
                    }
                    self.resolver
                        .iommu_map(&event, self.window.group(), device, own_row, chunk)
                        .map_err(|problem| self.failed(problem, &event))?;
                }
                WindowOutput::Address { event, device, end } => {
                    chunk.addresses.extend(address(&event, Some(device), end));
                }
                WindowOutput::Unmap { event, cut } => {
                    if let (RawKind::IommuUnmap { iova, size }, Addresses::Keep) =
                        (event.kind, self.addresses)
                    {
                        let device = self.resolver.only_named();
                        let end = iova.get().wrapping_add(size);
                        chunk.addresses.extend(address(&event, device, end));
                    }
                    self.resolver
                        .iommu_unmap(&event, cut, chunk)
                        .map_err(|problem| self.failed(problem, &event))?;
                }
            }
        }
        Ok(())
    }

    /// Adds the range of an unexplained mapping, unless it is an identity mapping: the allocator
    /// gives out none of those.
    fn group_address(&self, event: &RawEvent, device: Option<DeviceIndex>, chunk: &mut Chunk) {
        let group = self.window.group();
        if let Some(last) = group.last()
            && group.iter().any(|piece| piece.iova != piece.phys)
        {
            chunk.addresses.extend(address(event, device, last.end()));
        }
    }

    /// Returns the device of an unexplained mapping, and true if it is the row without a device;
    /// `None` before the first event of a device.
    fn attribute(&mut self, event: &RawEvent) -> Result<Option<(DeviceIndex, bool)>, TraceError> {
        if !self.resolver.any_named() {
            return Ok(None);
        }
        if self.attribution == Attribution::Auto
            && let Some(only) = self.resolver.only_named()
        {
            if let Some(path) = self.reread.take()
                && names_several_devices(&path, &self.limits)
            {
                self.attribution = Attribution::OwnRow;
            } else {
                return Ok(Some((only, false)));
            }
        }
        let row = self.text.devices_mut().unattributed();
        match row {
            Some(row) => Ok(Some((row, true))),
            None => Err(TraceError::TooManyDevices {
                file: self.text.name().to_owned(),
                line: event.line,
            }),
        }
    }

    fn failed(&self, problem: ResolveError, event: &RawEvent) -> TraceError {
        let (file, line) = (self.text.name().to_owned(), event.line);
        match problem {
            ResolveError::PhysicalSpaceExhausted => {
                TraceError::PhysicalSpaceExhausted { file, line }
            }
            ResolveError::FreshFramesTooLarge { bytes } => {
                TraceError::FreshFramesTooLarge { file, line, bytes }
            }
            ResolveError::SegmentWraps { start } => TraceError::SegmentWraps { file, line, start },
            ResolveError::TooManyMappings => TraceError::TooManyMappings { file, line },
            ResolveError::LimitExceeded(excess) => TraceError::Limit { file, line, excess },
        }
    }

    fn count(&mut self) {
        let counts = self.text.counts();
        let summary = &mut self.resolver.summary;
        summary.lines = counts.lines;
        summary.events = counts.events;
        summary.unknown = counts.unknown;
        summary.malformed = counts.malformed;
        summary.lost = counts.lost;
    }
}

/// Returns the pages from the IOVA of an `iommu:*` line up to `end`. `None` if they are no range of
/// pages.
fn address(event: &RawEvent, device: Option<DeviceIndex>, end: u64) -> Option<AddressEvent> {
    let (kind, iova) = match event.kind {
        RawKind::IommuMap { iova, .. } => (AddressKind::Allocated, iova.get()),
        RawKind::IommuUnmap { iova, .. } => (AddressKind::Freed, iova.get()),
        _ => return None,
    };
    let bytes = end.wrapping_sub(iova);
    let range = IovaRange::new(Iova::new(iova), bytes)?;
    Some(AddressEvent {
        time: event.time,
        line: event.line,
        cpu: event.cpu,
        device,
        kind,
        range: PfnRange::covering(&range),
    })
}

/// Returns true if a trace names more than one device. Stops at the second device; an error counts
/// as the end of the trace.
fn names_several_devices(path: &Path, limits: &TraceLimits) -> bool {
    let Ok(source) = TraceSource::open(path) else {
        return false;
    };
    let mut options = TraceOptions::default().lenient();
    options.limits = limits.clone();
    let mut reader = TraceReader::new("", source.with_limits(limits), &options);
    let mut chunk = RawChunk::default();
    while reader.devices().len() < 2 {
        match reader.next_chunk(&mut chunk) {
            Ok(true) => {}
            Ok(false) | Err(_) => return false,
        }
    }
    true
}
