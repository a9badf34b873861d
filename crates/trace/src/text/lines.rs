//! Splits a byte stream into lines with bounded memory.

use std::io::{self, Read};

use memchr::memchr;

/// Bytes of the first reads; a short input uses no more memory than it needs.
const FIRST_BLOCK: usize = 4 * 1024;

/// Bytes of a read after the input has proved long.
const BLOCK: usize = 256 * 1024;

/// Maximum length of the skipped rest of an overlong line, in multiples of the line limit or, if
/// that is larger, of [`BLOCK`].
const SKIPPED: u64 = 64;

/// One line, without its line end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// A line of text.
    Text(&'a [u8]),
    /// A line that contains a NUL byte.
    Binary,
    /// A line longer than the limit. The next call skips its rest.
    TooLong,
    /// The rest of an overlong line exceeds the bound that [`SKIPPED`] sets: the input is not
    /// divided into lines.
    Endless,
    /// The last line, truncated before its line end.
    CutShort,
}

/// Splits the input of a reader that the caller passes to each call. Memory: one block, or one line
/// if that is longer; `limit` bounds it.
#[derive(Debug)]
pub(super) struct Lines {
    buffer: Vec<u8>,
    /// Bytes of the next read.
    block: usize,
    /// Start of the bytes not yet delivered: `buffer[start..end]`.
    start: usize,
    end: usize,
    /// True if `buffer` contains a NUL byte. Searching each block has no measurable cost.
    nul: bool,
    at_end: bool,
    limit: usize,
    /// True if the next call must skip the rest of a line.
    skips: bool,
    /// Bytes read so far.
    read: u64,
}

impl Lines {
    /// Creates a splitter for lines of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            block: FIRST_BLOCK,
            start: 0,
            end: 0,
            nul: false,
            at_end: false,
            limit,
            skips: false,
            read: 0,
        }
    }

    /// Returns the number of bytes read so far.
    pub(super) fn bytes(&self) -> u64 {
        self.read
    }

    /// Returns the next line of `source`; `None` at its end.
    #[inline]
    pub(super) fn next(&mut self, source: &mut dyn Read) -> io::Result<Option<Line<'_>>> {
        if self.skips && !self.skip_line(source)? {
            return Ok(Some(Line::Endless));
        }
        let mut searched = 0;
        loop {
            let pending = self.buffer.get(self.start..self.end).unwrap_or(&[]);
            let found = memchr(b'\n', pending.get(searched..).unwrap_or(&[]));
            if let Some(offset) = found {
                let length = searched + offset;
                let first = self.start;
                self.start += length + 1;
                if length > self.limit {
                    return Ok(Some(Line::TooLong));
                }
                let line = self.buffer.get(first..first + length).unwrap_or(&[]);
                if self.nul && memchr(0, line).is_some() {
                    return Ok(Some(Line::Binary));
                }
                return Ok(Some(Line::Text(line.strip_suffix(b"\r").unwrap_or(line))));
            }
            searched = pending.len();
            if searched > self.limit {
                self.skips = true;
                return Ok(Some(Line::TooLong));
            }
            if self.at_end {
                let binary = self.nul && memchr(0, pending).is_some();
                self.start = self.end;
                return Ok(match searched {
                    0 => None,
                    _ if binary => Some(Line::Binary),
                    _ => Some(Line::CutShort),
                });
            }
            self.fill(source)?;
        }
    }

    /// Moves the pending bytes to the front of the buffer and reads one block after them.
    fn fill(&mut self, source: &mut dyn Read) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.buffer.len() < self.end + self.block {
            self.buffer.resize(self.end + self.block, 0);
        }
        let space = self.buffer.get_mut(self.end..).unwrap_or(&mut []);
        let read = loop {
            match source.read(space) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        let fresh = space.get(..read).unwrap_or(&[]);
        // The pending bytes may contain a NUL from an earlier block.
        self.nul = (self.nul && self.end > 0) || memchr(0, fresh).is_some();
        self.end += fresh.len();
        self.read += fresh.len() as u64;
        self.at_end = read == 0;
        // A reader that returns short reads would not fill a larger block either.
        if read >= self.block {
            self.block = (self.block * 4).min(BLOCK);
        }
        Ok(())
    }

    /// Drops bytes up to and including the next line end; false if the line end is too far away.
    fn skip_line(&mut self, source: &mut dyn Read) -> io::Result<bool> {
        let most = SKIPPED.saturating_mul(self.limit.max(BLOCK) as u64);
        let until = self.read.saturating_add(most);
        loop {
            let pending = self.buffer.get(self.start..self.end).unwrap_or(&[]);
            if let Some(offset) = memchr(b'\n', pending) {
                self.start += offset + 1;
                self.skips = false;
                return Ok(true);
            }
            self.start = self.end;
            if self.at_end {
                self.skips = false;
                return Ok(true);
            }
            if self.read >= until {
                return Ok(false);
            }
            self.fill(source)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns at most a fixed number of bytes per read.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(space.len());
            let (now, later) = self.0.split_at(count);
            space[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    fn shapes(text: &[u8], step: usize, limit: usize) -> Vec<String> {
        let mut lines = Lines::new(limit);
        let mut source = Slow(text, step);
        let mut shapes = Vec::new();
        while let Some(line) = lines.next(&mut source).unwrap() {
            shapes.push(match line {
                Line::Text(text) => String::from_utf8_lossy(text).into_owned(),
                other => format!("{other:?}"),
            });
        }
        shapes
    }

    #[test]
    fn every_split_gives_the_same_lines() {
        let text = b"one\n\ntwo\r\nna\0ught\nthis one is longer than the limit\nlast\ncut";
        let expected = ["one", "", "two", "Binary", "TooLong", "last", "CutShort"];
        for step in 1..text.len() {
            assert_eq!(shapes(text, step, 10), expected, "{step} bytes at a time");
        }
    }

    #[test]
    fn the_limit_is_exact() {
        assert_eq!(
            shapes(b"12345\n123456\n1\n", 1, 5),
            ["12345", "TooLong", "1"]
        );
        assert_eq!(shapes(b"123456", 6, 5), ["TooLong"]);
        assert_eq!(shapes(b"", 6, 5), [""; 0]);
        assert_eq!(shapes(b"\0\x01", 6, 5), ["Binary"]);
    }

    #[test]
    fn memory_grows_with_available_input() {
        let text = [b'\n'; 100];
        let mut lines = Lines::new(1000);
        let mut source = Slow(&text, 1);
        while lines.next(&mut source).unwrap().is_some() {}
        assert!(
            lines.buffer.len() <= 2 * FIRST_BLOCK,
            "{}",
            lines.buffer.len()
        );
        let text = vec![b'\n'; 4 * BLOCK];
        let mut lines = Lines::new(1000);
        let mut source = &text[..];
        while lines.next(&mut source).unwrap().is_some() {}
        assert!(lines.buffer.len() >= BLOCK, "{}", lines.buffer.len());
    }

    #[test]
    fn a_stream_without_line_ends_is_given_up() {
        let mut lines = Lines::new(10);
        let mut source = io::repeat(b'x').take(1 << 40);
        assert_eq!(lines.next(&mut source).unwrap(), Some(Line::TooLong));
        assert!(lines.bytes() <= 2 * BLOCK as u64, "at once");
        for _ in 0..2 {
            assert_eq!(lines.next(&mut source).unwrap(), Some(Line::Endless));
        }
        assert!(lines.bytes() <= 3 * SKIPPED * BLOCK as u64);
    }

    #[test]
    fn a_line_of_any_length_costs_bounded_memory() {
        let text = vec![b'x'; 8 * BLOCK];
        let mut lines = Lines::new(1000);
        let mut source = &text[..];
        assert_eq!(lines.next(&mut source).unwrap(), Some(Line::TooLong));
        assert!(
            lines.buffer.len() <= 2 * BLOCK + 1000,
            "{}",
            lines.buffer.len()
        );
        assert_eq!(lines.next(&mut source).unwrap(), None);
    }
}
