//! What a translation gives: where the bytes lie, in order.

use std::iter;

use ringfence_types::PhysRange;

/// The memory behind a range of I/O virtual addresses, in order and without gaps. Pages that follow
/// each other in memory are one piece; most accesses have one piece only, and allocate nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhysRanges {
    first: PhysRange,
    /// Boxed, so that the usual result of a translation is three words and no more.
    #[expect(clippy::box_collection, reason = "one word where there is nothing")]
    rest: Option<Box<Vec<PhysRange>>>,
}

impl PhysRanges {
    #[inline]
    pub(crate) fn one(first: PhysRange) -> Self {
        Self { first, rest: None }
    }

    /// Appends `next`.
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

    /// The first piece.
    #[inline]
    pub fn first(&self) -> PhysRange {
        self.first
    }

    /// The only piece; `None` if there are several.
    #[inline]
    pub fn only(&self) -> Option<PhysRange> {
        self.rest.is_none().then_some(self.first)
    }

    /// All pieces.
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
