//! The reader: converts text into chunks of raw events.

use std::io::Read;

use super::event::RawChunk;
use super::header::{self, NonEvent};
use super::lines::{Line, Lines};
use super::payload::{self, Interner, PayloadError};
use super::prefix;
use crate::devices::Devices;
use crate::domain_type::{DomainType, DomainTypes};
use crate::error::{Malformed, TraceError};
use crate::input;
use crate::op::DeviceIndex;
use crate::options::{PageEvents, TraceOptions};

/// Counts of the reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines of every kind.
    pub lines: u64,
    /// Events, unknown ones included.
    pub events: u64,
    /// Events that are not about DMA mappings.
    pub unknown: u64,
    /// Malformed lines that were skipped.
    pub malformed: u64,
    /// Events that the kernel reports as lost.
    pub lost: u64,
}

/// Reads the text of a trace as a stream of raw events.
#[derive(Debug)]
pub struct TraceReader<R> {
    source: R,
    text: Text,
}

impl<R: Read> TraceReader<R> {
    /// Reads from `reader`; errors show `name`.
    pub fn new(name: &str, reader: R, options: &TraceOptions) -> Self {
        Self {
            source: reader,
            text: Text::new(name, options),
        }
    }

    /// Returns the devices seen so far.
    pub fn devices(&self) -> &Devices {
        self.text.devices()
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.text.counts()
    }

    /// Returns the name that errors show.
    pub fn name(&self) -> &str {
        self.text.name()
    }

    /// Fills `chunk` with about [`RawChunk::EVENTS`] events. Returns false at the end, with `chunk`
    /// empty.
    ///
    /// # Errors
    /// See [`TraceError`]. `chunk` holds the events before the error; further calls return false.
    pub fn next_chunk(&mut self, chunk: &mut RawChunk) -> Result<bool, TraceError> {
        self.text.next_chunk(&mut self.source, chunk)
    }
}

/// The part of the reader that does not depend on the source. The caller passes the source to each
/// call, so this code is compiled once in this crate and not once per source type in each caller.
#[derive(Debug)]
pub(crate) struct Text {
    name: String,
    lines: Lines,
    lenient: bool,
    max_line: usize,
    page_events: PageEvents,
    domain_types: DomainTypes,
    interner: Interner,
    counts: Counts,
    ended: bool,
}

impl Text {
    pub(crate) fn new(name: &str, options: &TraceOptions) -> Self {
        Self {
            name: name.to_owned(),
            lines: Lines::new(options.limits.line),
            lenient: options.lenient,
            max_line: options.limits.line,
            page_events: options.page_events,
            domain_types: DomainTypes::default(),
            interner: Interner::default(),
            counts: Counts::default(),
            ended: false,
        }
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.interner.devices
    }

    pub(crate) fn devices_mut(&mut self) -> &mut Devices {
        &mut self.interner.devices
    }

    /// Returns the type of a device's domain, if a comment gave it.
    pub(crate) fn domain_type(&self, device: DeviceIndex) -> Option<DomainType> {
        let row = self.devices().get(device)?;
        self.domain_types.get(&row.name)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of bytes of text read so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.lines.bytes()
    }

    /// Like [`TraceReader::next_chunk`], from `source`.
    pub(crate) fn next_chunk(
        &mut self,
        source: &mut dyn Read,
        chunk: &mut RawChunk,
    ) -> Result<bool, TraceError> {
        chunk.clear();
        while !self.ended
            && chunk.events.len() < RawChunk::EVENTS
            && chunk.words.len() < RawChunk::WORDS
            && chunk.marks.len() < RawChunk::MARKS
        {
            if let Err(error) = self.next_line(source, chunk) {
                self.ended = true;
                return Err(error);
            }
        }
        Ok(!chunk.events.is_empty() || !self.ended)
    }

    /// Reads one line.
    #[inline]
    fn next_line(&mut self, source: &mut dyn Read, chunk: &mut RawChunk) -> Result<(), TraceError> {
        let line = match self.lines.next(source) {
            Ok(Some(line)) => line,
            Ok(None) => {
                self.ended = true;
                return Ok(());
            }
            Err(source) => {
                return Err(input::read_error(&self.name, self.counts.lines + 1, source));
            }
        };
        self.counts.lines += 1;
        let number = self.counts.lines;
        let refusal = match line {
            Line::Text(text) => {
                // A text may begin with a byte order mark.
                let text = match number {
                    1 => text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text),
                    _ => text,
                };
                if let (PageEvents::Keep, Some(comment)) =
                    (self.page_events, text.strip_prefix(b"#"))
                {
                    self.domain_types.add(comment);
                }
                let (words, marks) = (chunk.words.len(), chunk.marks.len());
                let (interner, counts) = (&mut self.interner, &mut self.counts);
                match parse_line(text, number, chunk, interner, counts, self.page_events) {
                    Ok(()) => return Ok(()),
                    Err(refusal) => {
                        chunk.words.truncate(words);
                        chunk.marks.truncate(marks);
                        refusal
                    }
                }
            }
            Line::Binary => Malformed::Binary.into(),
            Line::TooLong => Malformed::TooLong {
                limit: self.max_line,
            }
            .into(),
            Line::CutShort => Malformed::CutShort.into(),
            Line::Endless => {
                let limit = self.max_line;
                return Err(TraceError::Malformed {
                    file: self.name.clone(),
                    line: number,
                    reason: Malformed::TooLong { limit },
                });
            }
        };
        match refusal {
            PayloadError::Malformed(_) if self.lenient => {
                self.counts.malformed += 1;
                Ok(())
            }
            PayloadError::Malformed(reason) => Err(TraceError::Malformed {
                file: self.name.clone(),
                line: number,
                reason,
            }),
            PayloadError::TooManyDevices => Err(TraceError::TooManyDevices {
                file: self.name.clone(),
                line: number,
            }),
        }
    }
}

/// Reads one line of text into `chunk`.
#[inline]
fn parse_line(
    text: &[u8],
    line: u64,
    chunk: &mut RawChunk,
    interner: &mut Interner,
    counts: &mut Counts,
    page_events: PageEvents,
) -> Result<(), PayloadError> {
    // Most lines are events and begin with the padding of the task's name. Only lines without
    // padding are checked for other contents first.
    let padded = matches!(text, [b' ', ..]);
    if !padded && counted_aside(text, counts)? {
        return Ok(());
    }
    let prefix = match prefix::parse(text) {
        Ok(prefix) => prefix,
        Err(reason) => {
            return match padded && counted_aside(text, counts)? {
                true => Ok(()),
                false => Err(reason.into()),
            };
        }
    };
    let known = payload::parse(&prefix, line, chunk, interner, page_events)?;
    counts.events += 1;
    counts.unknown += u64::from(!known);
    Ok(())
}

/// Counts the contents of a line without an event. Returns false if the line looks like an event.
fn counted_aside(text: &[u8], counts: &mut Counts) -> Result<bool, Malformed> {
    let non_event = header::parse(text)?;
    if let Some(NonEvent::Lost(lost) | NonEvent::Overwritten(lost)) = non_event {
        counts.lost = counts.lost.saturating_add(lost);
    }
    Ok(non_event.is_some())
}
