//! The mapped ranges of a device, by which its DMAs find their buffers.

use std::collections::{BTreeMap, HashMap};

use ringfence_types::{Iova, IovaRange, PfnRange};

use super::stream::MAX_PAGES;

/// A mapped range.
#[derive(Debug, Clone, Copy)]
struct MappedRange {
    range: IovaRange,
    /// The buffer, and the index of the range's first page in it. `None` for a coherent buffer.
    buffer: Option<(u32, u64)>,
}

/// The mapped ranges of a device. They do not overlap in a sound trace.
#[derive(Debug, Default)]
pub(super) struct MappedRanges {
    ranges: BTreeMap<Iova, MappedRange>,
    /// Starts of each buffer's ranges.
    starts: HashMap<u32, Vec<Iova>>,
}

impl MappedRanges {
    /// Adds the pieces of a buffer, each a first address and a size; `None` for a coherent buffer.
    pub(super) fn insert(
        &mut self,
        buffer: Option<u32>,
        pieces: impl IntoIterator<Item = (Iova, u64)>,
    ) {
        let mut pages = 0;
        for (start, bytes) in pieces {
            let Some(range) = IovaRange::new(start, bytes) else {
                continue;
            };
            let mapped = MappedRange {
                range,
                buffer: buffer.map(|buffer| (buffer, pages)),
            };
            pages += PfnRange::covering(&range).pages();
            self.ranges.insert(start, mapped);
            if let Some(buffer) = buffer {
                self.starts.entry(buffer).or_default().push(start);
            }
        }
    }

    pub(super) fn remove_buffer(&mut self, buffer: u32) {
        for start in self.starts.remove(&buffer).unwrap_or_default() {
            let of = self.ranges.get(&start).and_then(|range| range.buffer);
            if of.is_some_and(|(of, _)| of == buffer) {
                self.ranges.remove(&start);
            }
        }
    }

    /// Removes a coherent buffer.
    pub(super) fn remove_coherent(&mut self, start: Iova) {
        let range = self.ranges.get(&start);
        if range.is_some_and(|range| range.buffer.is_none()) {
            self.ranges.remove(&start);
        }
    }

    /// Calls `each` on the pages of every buffer that an access reaches, as buffer, first page and
    /// number of pages. Returns false if a part of the access is outside all ranges. Stops at the
    /// maximum number of pages of a buffer, so that a damaged trace costs no more than a sound one.
    pub(super) fn split(
        &self,
        (start, bytes): (Iova, u64),
        mut each: impl FnMut(u32, u64, u64),
    ) -> bool {
        let Some(access) = IovaRange::new(start, bytes) else {
            return false;
        };
        let (mut at, mut left) = (start, MAX_PAGES);
        while left > 0 {
            let before = self.ranges.range(..=at).next_back();
            let found = before.filter(|(_, mapped)| mapped.range.contains_address(at));
            let Some((_, mapped)) = found else {
                return false;
            };
            let last = mapped.range.last().min(access.last());
            let page = |address: Iova| address.get() >> 12;
            let pages = (page(last) - page(at) + 1).min(left);
            left -= pages;
            if let Some((buffer, first)) = mapped.buffer {
                each(buffer, first + page(at) - page(mapped.range.start()), pages);
            }
            match last.checked_add(1) {
                Some(next) if last < access.last() => at = next,
                _ => break,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte's buffer and page, by search over all pieces.
    fn reference(pieces: &[(Option<u32>, u64, u64)], at: u64) -> Option<Option<(u32, u64)>> {
        pieces.iter().find_map(|&(buffer, start, bytes)| {
            let inside = (start..start + bytes).contains(&at);
            inside.then(|| buffer.map(|buffer| (buffer, (at >> 12) - (start >> 12))))
        })
    }

    #[test]
    fn accesses_find_the_pages_of_their_buffers() {
        let pieces = [
            (Some(0), 0x1000, 0x3000),
            (Some(1), 0x4000, 0x1800),
            (Some(2), 0x5800, 0x0800),
            (None, 0x6000, 0x2000),
            (Some(3), 0x9fff, 2),
        ];
        let mut mapped = MappedRanges::default();
        for (buffer, start, bytes) in pieces {
            mapped.insert(buffer, [(Iova::new(start), bytes)]);
        }
        for start in (0..0xc000).step_by(0x3ff) {
            for bytes in [1, 2, 0x800, 0x1000, 0x1801, 0x4000] {
                let mut pages = Vec::new();
                let whole = mapped.split((Iova::new(start), bytes), |buffer, first, count| {
                    pages.extend((first..first + count).map(|page| (buffer, page)));
                });
                let of = |at| reference(&pieces, at);
                let end = (start..start + bytes).find(|&at| of(at).is_none());
                let mut expected: Vec<_> = (start..end.unwrap_or(start + bytes))
                    .filter_map(|at| of(at)?)
                    .collect();
                expected.dedup();
                assert_eq!(pages, expected, "{start:#x} {bytes:#x}");
                assert_eq!(whole, end.is_none(), "{start:#x} {bytes:#x}");
            }
        }
        mapped.remove_buffer(1);
        mapped.remove_coherent(Iova::new(0x1000));
        mapped.remove_coherent(Iova::new(0x6000));
        for (start, whole) in [
            (0x1000, true),
            (0x4000, false),
            (0x5800, true),
            (0x6000, false),
        ] {
            let found = mapped.split((Iova::new(start), 1), |_, _, _| ());
            assert_eq!(found, whole, "{start:#x}");
        }
    }

    #[test]
    fn pieces_of_a_list_number_their_pages_in_order() {
        let mut mapped = MappedRanges::default();
        let pieces = [
            (0x10_0000, 0x2000),
            (0x20_0800, 0x1000),
            (0x30_0000, 1 << 36),
        ];
        mapped.insert(
            Some(7),
            pieces.map(|(start, bytes)| (Iova::new(start), bytes)),
        );
        let split = |start, bytes| {
            let mut found = Vec::new();
            mapped.split((Iova::new(start), bytes), |buffer, first, count| {
                found.push((buffer, first, count));
            });
            found
        };
        assert_eq!(split(0x10_1000, 8), [(7, 1, 1)]);
        assert_eq!(split(0x20_0800, 0x1000), [(7, 2, 2)]);
        assert_eq!(split(0x30_0000, 1 << 36), [(7, 4, MAX_PAGES)]);
        assert_eq!(split(0x30_1000, 1), [(7, 5, 1)]);
    }
}
