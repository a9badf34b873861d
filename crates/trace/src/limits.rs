//! Limits on the resources that one trace may use in its reader and in a replay.

use ringfence_types::PhysRange;

use crate::printable::printable;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Maximum length of a mark's text in bytes. The reader truncates longer marks: they are notes for
/// people.
pub const MARK_BYTES: usize = 1024;

/// Bytes that the list of marks uses per mark in addition to its text.
const MARK_OVERHEAD: u64 = 96;

/// Limits on one trace. [`TraceLimits::default`] suits all traces that Linux writes. Raise a limit
/// to read a larger trace that you trust.
///
/// "Input" means the file as stored: the compressed bytes of a zstd file, or the whole trace-cmd or
/// Parquet file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceLimits {
    /// Maximum length of a line in bytes. A line grows with its scatterlist: 128 printed entries
    /// take less than 8 KiB, a complete unmap of the largest request a few times that.
    pub line: usize,
    /// Maximum total size of the text in bytes. `None`: unlimited for plain text; for zstd and
    /// trace-cmd 16 MiB plus 200 times the input. Linux traces compress by a factor of 20 to 60.
    pub text: Option<u64>,
    /// Maximum size of one mapping in bytes.
    pub mapping: u64,
    /// Maximum number of bytes mapped at once.
    pub live: u64,
    /// Maximum number of bytes mapped in total, which bounds the time of a replay, and the memory
    /// of modes that keep mappings after their unmap. `None`: 8 GiB plus 2 MiB for each line or
    /// row.
    pub mapped: Option<u64>,
    /// Maximum number of segments of all live mappings; each mapping has at least one. `None`:
    /// 65536 plus one for each 8 bytes of input.
    pub segments: Option<u64>,
    /// Maximum number of segments of one mapping. A mode searches all of them at each access.
    pub list: u64,
    /// Maximum total number of rows and segments of a Parquet file. `None`: 131072 plus one for
    /// each byte of the file. Traces that Linux writes use 3 bytes or more for each.
    pub rows: Option<u64>,
    /// Maximum total size of the marks in bytes, including 96 bytes per mark in addition to its
    /// text. `None`: 16 MiB plus 16 times the input.
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
    /// Returns the limit on text for `input` compressed bytes.
    pub(crate) fn text_of(&self, input: u64) -> u64 {
        let relative = input.saturating_mul(200).saturating_add(16 * MIB);
        self.text.unwrap_or(relative)
    }

    fn mapped_of(&self, lines: u64) -> u64 {
        let relative = lines.saturating_mul(2 * MIB).saturating_add(8 * GIB);
        self.mapped.unwrap_or(relative)
    }

    fn segments_of(&self, input: u64) -> u64 {
        self.segments.unwrap_or(64 * KIB + input / 8)
    }

    /// Returns the limit on rows and segments for a Parquet file of `input` bytes.
    #[cfg(feature = "parquet")]
    pub(crate) fn rows_of(&self, input: u64) -> u64 {
        self.rows.unwrap_or(input.saturating_add(128 * KIB))
    }

    fn marks_of(&self, input: u64) -> u64 {
        let relative = input.saturating_mul(16).saturating_add(16 * MIB);
        self.marks.unwrap_or(relative)
    }
}

/// A limit that a trace exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitExceeded {
    /// The trace exceeds [`TraceLimits::text`].
    #[error("the file expands to more than {limit} bytes of text; `--max-text` raises this limit")]
    Text {
        /// The limit in bytes.
        limit: u64,
    },
    /// A mapping exceeds [`TraceLimits::mapping`].
    #[error("a mapping of {bytes} bytes exceeds the limit of {limit}; `--max-mapping` raises it")]
    Mapping {
        /// Size of the mapping in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The live mappings exceed [`TraceLimits::live`].
    #[error("more than {limit} bytes are mapped at once; `--max-live` raises this limit")]
    Live {
        /// The limit in bytes.
        limit: u64,
    },
    /// The mapped bytes exceed [`TraceLimits::mapped`].
    #[error(
        "the trace so far maps more than {limit} bytes in all; `--max-mapped` raises this limit"
    )]
    Mapped {
        /// The limit in bytes.
        limit: u64,
    },
    /// The live segments exceed [`TraceLimits::segments`].
    #[error(
        "the live mappings have more than {limit} segments; `--max-segments` raises this limit"
    )]
    Segments {
        /// The limit in segments.
        limit: u64,
    },
    /// A mapping exceeds [`TraceLimits::list`].
    #[error(
        "a mapping of {segments} segments exceeds the limit of {limit}; `--max-list` raises it"
    )]
    List {
        /// Segments of the mapping.
        segments: u64,
        /// The limit in segments.
        limit: u64,
    },
    /// The rows and segments exceed [`TraceLimits::rows`].
    #[error(
        "a file of this size holds at most {limit} rows and segments; `--max-rows` raises this \
        limit"
    )]
    Rows {
        /// The limit, in rows plus segments.
        limit: u64,
    },
    /// The pages that devices can reach exceed the limit of a judgement.
    #[error("devices can reach more than {limit} pages at once; `--max-pages` raises this limit")]
    Pages {
        /// The limit in pages of 4 KiB, counted once for each mapping.
        limit: usize,
    },
    /// Too many mappings of one page are reachable at once.
    #[error("devices can reach a page through more than {limit} mappings at once")]
    Sharing {
        /// The limit in mappings.
        limit: usize,
    },
    /// The page events touch too many reachable pages.
    #[error("page events touch more than {limit} reachable pages so far")]
    Visits {
        /// The limit, which grows with the number of page events.
        limit: u64,
    },
    /// The marks exceed [`TraceLimits::marks`].
    #[error("marks take more than {limit} bytes; `--max-marks` raises this limit")]
    Marks {
        /// The limit in bytes.
        limit: u64,
    },
}

/// Progress of the reader at the time of a charge to its [`Budget`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Bytes of input read.
    pub(crate) input: u64,
    /// Lines or rows read.
    pub(crate) lines: u64,
}

/// Resources that a trace has used, and its [`TraceLimits`].
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limits: TraceLimits,
    /// Bytes and segments of each live mapping, indexed by mapping id.
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

    /// Checks that a mapping of `segments` is within the limits. Does not charge it.
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

    /// Charges mapping `id`. [`Budget::unmap`] returns the charges that apply only to live
    /// mappings.
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

    /// Returns the live bytes and segments of mapping `id` to the budget.
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

/// Returns the text of a mark, truncated to [`MARK_BYTES`] bytes at a character boundary and with
/// terminal control characters escaped.
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
    fn unmap_frees_the_quota() {
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
        let many = Progress {
            input: 0,
            lines: 4096,
        };
        for id in 0..16 {
            assert_eq!(map(&mut budget, id, GIB, 1, many), Ok(()));
        }
        let refused = Err(LimitExceeded::Live { limit: 16 * GIB });
        assert_eq!(map(&mut budget, 16, 1, 1, many), refused);

        let mut budget = of();
        for _ in 0..8 {
            assert_eq!(map(&mut budget, 0, GIB, 1, START), Ok(()));
            budget.unmap(0);
        }
        assert_eq!(map(&mut budget, 0, 2 * MIB, 1, later), Ok(()));
        let limit = 8 * GIB + 2 * MIB;
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
