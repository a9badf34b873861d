//! Bounds on what one trace may ask of its reader and of a replay.

use std::fmt;

use ringfence_types::PhysRange;

use crate::printable::printable;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Longest text of a mark, in bytes. The reader cuts longer ones: a mark is a note for people.
pub const MARK_BYTES: usize = 1024;

/// Bytes that the list of marks takes for one mark beside its text.
const MARK_OVERHEAD: u64 = 96;

/// Bounds on one trace. [`TraceLimits::default`] suits all traces that Linux wrote; a caller that
/// trusts a larger one raises a bound.
///
/// "Input" is the file as it is stored: compressed bytes of zstd, the whole file of trace-cmd and
/// Parquet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceLimits {
    /// Longest line in bytes. A line grows with its scatterlist: 128 printed entries take under
    /// 8 KiB, an uncut unmap of the largest request a few times that.
    pub line: usize,
    /// Bytes of text in all. `None`: any amount of plain text; of zstd and trace-cmd 16 MiB plus
    /// 200 times the input. Linux traces compress 20 to 60 times.
    pub text: Option<u64>,
    /// Bytes of one mapping.
    pub mapping: u64,
    /// Bytes mapped at once.
    pub live: u64,
    /// Bytes mapped in all, which bounds the time of a replay. `None`: 64 GiB plus 2 MiB for
    /// each line or row.
    pub mapped: Option<u64>,
    /// Segments of the mappings alive at once, at least one a mapping. `None`: 65536 plus one for
    /// each 8 bytes of input.
    pub segments: Option<u64>,
    /// Segments of one mapping. A mode looks through all of them at each access.
    pub list: u64,
    /// Rows and segments of a Parquet file in all. `None`: 131072 plus one for each byte of the
    /// file. Traces that Linux wrote take 3 bytes or more for each.
    pub rows: Option<u64>,
    /// Bytes of marks in all, 96 a mark beside its text. `None`: 16 MiB plus 16 times the input.
    pub marks: Option<u64>,
}

impl Default for TraceLimits {
    fn default() -> Self {
        Self {
            line: MIB as usize,
            text: None,
            mapping: GIB,
            live: 16 * GIB,
            mapped: None,
            segments: None,
            list: 8192,
            rows: None,
            marks: None,
        }
    }
}

impl TraceLimits {
    /// The bound on text behind `input` compressed bytes.
    pub(crate) fn text_of(&self, input: u64) -> u64 {
        let relative = input.saturating_mul(200).saturating_add(16 * MIB);
        self.text.unwrap_or(relative)
    }

    fn mapped_of(&self, lines: u64) -> u64 {
        let relative = lines.saturating_mul(2 * MIB).saturating_add(64 * GIB);
        self.mapped.unwrap_or(relative)
    }

    fn segments_of(&self, input: u64) -> u64 {
        self.segments.unwrap_or(64 * KIB + input / 8)
    }

    /// The bound on rows and segments of a Parquet file of `input` bytes.
    #[cfg(feature = "parquet")]
    pub(crate) fn rows_of(&self, input: u64) -> u64 {
        self.rows.unwrap_or(input.saturating_add(128 * KIB))
    }

    fn marks_of(&self, input: u64) -> u64 {
        let relative = input.saturating_mul(16).saturating_add(16 * MIB);
        self.marks.unwrap_or(relative)
    }
}

/// A bound that a trace exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitExceeded {
    /// [`TraceLimits::text`].
    Text {
        /// The bound in bytes.
        limit: u64,
    },
    /// [`TraceLimits::mapping`].
    Mapping {
        /// Size of the mapping.
        bytes: u64,
        /// The bound in bytes.
        limit: u64,
    },
    /// [`TraceLimits::live`].
    Live {
        /// The bound in bytes.
        limit: u64,
    },
    /// [`TraceLimits::mapped`].
    Mapped {
        /// The bound in bytes.
        limit: u64,
    },
    /// [`TraceLimits::segments`].
    Segments {
        /// The bound.
        limit: u64,
    },
    /// [`TraceLimits::list`].
    List {
        /// Segments of the mapping.
        segments: u64,
        /// The bound.
        limit: u64,
    },
    /// [`TraceLimits::rows`].
    Rows {
        /// The bound.
        limit: u64,
    },
    /// [`TraceLimits::marks`].
    Marks {
        /// The bound in bytes.
        limit: u64,
    },
}

impl fmt::Display for LimitExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { limit } => write!(
                f,
                "the file expands to more than {limit} bytes of text; `--max-text` raises this limit"
            ),
            Self::Mapping { bytes, limit } => write!(
                f,
                "a mapping of {bytes} bytes, where the limit is {limit}; `--max-mapping` raises it"
            ),
            Self::Live { limit } => write!(
                f,
                "more than {limit} bytes are mapped at once; `--max-live` raises this limit"
            ),
            Self::Mapped { limit } => write!(
                f,
                "the trace so far maps more than {limit} bytes in all; `--max-mapped` raises this limit"
            ),
            Self::Segments { limit } => write!(
                f,
                "mappings of more than {limit} segments are alive; `--max-segments` raises this limit"
            ),
            Self::List { segments, limit } => write!(
                f,
                "a mapping of {segments} segments, where the limit is {limit}; `--max-list` raises it"
            ),
            Self::Rows { limit } => write!(
                f,
                "a file of this size holds at most {limit} rows and segments; `--max-rows` raises this limit"
            ),
            Self::Marks { limit } => write!(
                f,
                "marks take more than {limit} bytes; `--max-marks` raises this limit"
            ),
        }
    }
}

/// Where a trace stands when something is charged to its [`Budget`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Bytes of input read.
    pub(crate) input: u64,
    /// Lines or rows read.
    pub(crate) lines: u64,
}

/// What a trace has used of its [`TraceLimits`].
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limits: TraceLimits,
    /// By mapping id: bytes and segments while it is alive.
    mappings: Vec<(u64, u64)>,
    live: u64,
    mapped: u64,
    segments: u64,
    marks: u64,
}

impl Budget {
    pub(crate) fn new(limits: TraceLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Whether a mapping of `segments` has room. Changes nothing.
    pub(crate) fn admit(&self, segments: &[PhysRange], at: Progress) -> Result<(), LimitExceeded> {
        let bytes = bytes_of(segments);
        let limit = self.limits.mapping;
        if bytes > limit {
            return Err(LimitExceeded::Mapping { bytes, limit });
        }
        let (segments_here, limit) = (segments.len() as u64, self.limits.list);
        if segments_here > limit {
            let segments = segments_here;
            return Err(LimitExceeded::List { segments, limit });
        }
        let limit = self.limits.live;
        if self.live.saturating_add(bytes) > limit {
            return Err(LimitExceeded::Live { limit });
        }
        let limit = self.limits.mapped_of(at.lines);
        if self.mapped.saturating_add(bytes) > limit {
            return Err(LimitExceeded::Mapped { limit });
        }
        let limit = self.limits.segments_of(at.input);
        if self.segments.saturating_add(segments.len() as u64) > limit {
            return Err(LimitExceeded::Segments { limit });
        }
        Ok(())
    }

    /// Charges mapping `id`; [`Budget::unmap`] gives back what counts while it is alive.
    pub(crate) fn map(&mut self, id: usize, segments: &[PhysRange]) {
        let (bytes, count) = (bytes_of(segments), segments.len() as u64);
        if self.mappings.len() <= id {
            self.mappings.resize(id + 1, (0, 0));
        }
        if let Some(mapping) = self.mappings.get_mut(id) {
            *mapping = (bytes, count);
        }
        self.live = self.live.saturating_add(bytes);
        self.mapped = self.mapped.saturating_add(bytes);
        self.segments = self.segments.saturating_add(count);
    }

    /// Gives back what mapping `id` has used.
    pub(crate) fn unmap(&mut self, id: usize) {
        let mapping = self.mappings.get_mut(id).map(std::mem::take);
        let (bytes, segments) = mapping.unwrap_or_default();
        self.live = self.live.saturating_sub(bytes);
        self.segments = self.segments.saturating_sub(segments);
    }

    /// Charges a mark of `bytes` bytes.
    pub(crate) fn mark(&mut self, bytes: usize, at: Progress) -> Result<(), LimitExceeded> {
        let more = MARK_OVERHEAD.saturating_add(bytes as u64);
        self.marks = self.marks.saturating_add(more);
        let limit = self.limits.marks_of(at.input);
        match self.marks > limit {
            true => Err(LimitExceeded::Marks { limit }),
            false => Ok(()),
        }
    }
}

fn bytes_of(segments: &[PhysRange]) -> u64 {
    let bytes = segments.iter().map(PhysRange::bytes);
    bytes.fold(0, u64::saturating_add)
}

/// The text of a mark: cut at [`MARK_BYTES`] bytes, never inside a character, and fit for a
/// terminal.
pub(crate) fn mark_text(bytes: &[u8]) -> String {
    let first = bytes.get(..MARK_BYTES).unwrap_or(bytes);
    let text = String::from_utf8_lossy(first);
    let text = printable(&text);
    let end = text.floor_char_boundary(MARK_BYTES);
    text.get(..end).unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use ringfence_types::PhysAddr;

    use super::*;

    const START: Progress = Progress { input: 0, lines: 0 };

    /// Charges one mapping of `count` segments of `bytes` bytes each.
    fn map(
        budget: &mut Budget,
        id: usize,
        bytes: u64,
        count: usize,
        at: Progress,
    ) -> Result<(), LimitExceeded> {
        let segment = PhysRange::new(PhysAddr::new(0), bytes).unwrap();
        let segments = vec![segment; count];
        budget.admit(&segments, at)?;
        budget.map(id, &segments);
        Ok(())
    }

    #[test]
    fn what_is_unmapped_is_given_back() {
        let mut budget = Budget::new(TraceLimits {
            live: 200,
            segments: Some(3),
            ..TraceLimits::default()
        });
        for _ in 0..10 {
            assert_eq!(map(&mut budget, 0, 60, 2, START), Ok(()));
            assert_eq!(map(&mut budget, 1, 40, 1, START), Ok(()));
            budget.unmap(0);
            budget.unmap(1);
            budget.unmap(1);
        }
        assert_eq!(map(&mut budget, 0, 10, 3, START), Ok(()));
        let refused = Err(LimitExceeded::Segments { limit: 3 });
        assert_eq!(map(&mut budget, 1, 10, 1, START), refused);
    }

    #[test]
    fn each_bound_is_exact_and_grows_with_the_input() {
        let later = Progress {
            input: 80,
            lines: 1,
        };
        let of = || Budget::new(TraceLimits::default());
        assert_eq!(map(&mut of(), 0, GIB, 1, START), Ok(()));
        let (bytes, limit) = (GIB + 1, GIB);
        let refused = Err(LimitExceeded::Mapping { bytes, limit });
        assert_eq!(map(&mut of(), 0, bytes, 1, START), refused);
        let mut budget = of();
        for id in 0..16 {
            assert_eq!(map(&mut budget, id, GIB, 1, START), Ok(()));
        }
        let refused = Err(LimitExceeded::Live { limit: 16 * GIB });
        assert_eq!(map(&mut budget, 16, 1, 1, START), refused);

        let mut budget = of();
        for _ in 0..64 {
            assert_eq!(map(&mut budget, 0, GIB, 1, START), Ok(()));
            budget.unmap(0);
        }
        assert_eq!(map(&mut budget, 0, 2 * MIB, 1, later), Ok(()));
        let limit = 64 * GIB + 2 * MIB;
        let refused = Err(LimitExceeded::Mapped { limit });
        assert_eq!(map(&mut budget, 1, 1, 1, later), refused);

        let mut budget = of();
        for id in 0..8 {
            assert_eq!(map(&mut budget, id, 1, 8192, later), Ok(()));
        }
        assert_eq!(map(&mut budget, 8, 1, 10, later), Ok(()));
        let refused = Err(LimitExceeded::Segments { limit: 65_546 });
        assert_eq!(map(&mut budget, 9, 1, 1, later), refused);
        let (segments, limit) = (8193, 8192);
        let refused = Err(LimitExceeded::List { segments, limit });
        assert_eq!(map(&mut of(), 0, 1, 8193, later), refused);
        let limit = 16 * MIB + 80 * 16;
        let room = (limit - MARK_OVERHEAD) as usize;
        assert_eq!(of().mark(room, later), Ok(()));
        assert_eq!(
            of().mark(room + 1, later),
            Err(LimitExceeded::Marks { limit })
        );
        assert_eq!(TraceLimits::default().text_of(7), 16 * MIB + 1400);
    }

    #[test]
    fn marks_are_cut_between_characters() {
        let long = format!("{}é", "a".repeat(MARK_BYTES - 1));
        assert!(mark_text(long.as_bytes()).starts_with(&long[..MARK_BYTES - 1]));
        assert!(mark_text(&[0xff; 5000]).len() <= MARK_BYTES);
        assert!(mark_text(&[0x1b; 5000]).len() <= MARK_BYTES);
        assert_eq!(mark_text(b"a\tb \xc3\xa9"), "a\tb \u{e9}");
    }
}
