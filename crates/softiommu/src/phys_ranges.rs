//! Result of a translation: physical ranges in order.

use std::iter;

use ringfence_types::PhysRange;

/// The physical ranges of a range of I/O virtual addresses, in order and without gaps. Physically
/// adjacent pages are merged into one range. Most accesses have a single range, which needs no
/// allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhysRanges {
    first: PhysRange,
    /// Boxed, so that the result of a typical translation has only three words.
    #[expect(clippy::box_collection, reason = "an empty list takes one word")]
    rest: Option<Box<Vec<PhysRange>>>,
}

impl PhysRanges {
    #[inline]
    pub(crate) fn one(first: PhysRange) -> Self {
        Self { first, rest: None }
    }

    /// Appends `next`. Merges it with the last range if it starts directly after that range.
    pub(crate) fn push(&mut self, next: PhysRange) {
        let last = match &mut self.rest {
            Some(rest) => rest.last_mut(),
            None => None,
        };
        let last = last.unwrap_or(&mut self.first);
        let follows = last.last().checked_add(1) == Some(next.start());
        match PhysRange::inclusive(last.start(), next.last()) {
            Some(both) if follows => *last = both,
            _ => self.rest.get_or_insert_default().push(next),
        }
    }

    /// Returns the first range.
    #[inline]
    pub fn first(&self) -> PhysRange {
        self.first
    }

    /// Returns the only range; `None` if there are several.
    #[inline]
    pub fn only(&self) -> Option<PhysRange> {
        self.rest.is_none().then_some(self.first)
    }

    /// Returns all ranges.
    pub fn iter(&self) -> impl Iterator<Item = PhysRange> + '_ {
        iter::once(self.first).chain(self.rest.iter().flat_map(|rest| rest.iter().copied()))
    }
}

impl IntoIterator for PhysRanges {
    type Item = PhysRange;
    type IntoIter = iter::Chain<iter::Once<PhysRange>, std::vec::IntoIter<PhysRange>>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        iter::once(self.first).chain(self.rest.map_or_else(Vec::new, |rest| *rest))
    }
}
