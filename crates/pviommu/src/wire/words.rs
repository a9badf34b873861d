//! Little-endian numbers and arrays, decoded in place.

use core::slice;

use ringfence_types::{Address, Iova};

use super::GuestPhysical;

/// Array of addresses inside a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Words<'a, Space> {
    words: &'a [[u8; 8]],
    space: core::marker::PhantomData<Space>,
}

/// GIOVAs inside a message.
pub type Giovas<'a> = Words<'a, ringfence_types::DeviceVisible>;
/// GPAs inside a message.
pub type Gpas<'a> = Words<'a, GuestPhysical>;

impl<'a, Space> Words<'a, Space> {
    pub(super) const fn new(words: &'a [[u8; 8]]) -> Self {
        Self {
            words,
            space: core::marker::PhantomData,
        }
    }

    /// Returns the number of addresses.
    #[inline]
    pub const fn len(&self) -> usize {
        self.words.len()
    }

    /// Returns true if the array is empty.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the addresses in order.
    #[inline]
    pub fn iter(&self) -> WordsIter<'a, Space> {
        WordsIter {
            words: self.words.iter(),
            space: core::marker::PhantomData,
        }
    }
}

impl<'a, Space> IntoIterator for Words<'a, Space> {
    type Item = Address<Space>;
    type IntoIter = WordsIter<'a, Space>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Iterator over [`Words`].
#[derive(Debug, Clone)]
pub struct WordsIter<'a, Space> {
    words: slice::Iter<'a, [u8; 8]>,
    space: core::marker::PhantomData<Space>,
}

impl<Space> Iterator for WordsIter<'_, Space> {
    type Item = Address<Space>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.words
            .next()
            .map(|word| Address::new(u64::from_le_bytes(*word)))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.words.size_hint()
    }
}

impl<Space> DoubleEndedIterator for WordsIter<'_, Space> {
    #[inline]
    fn next_back(&mut self) -> Option<Self::Item> {
        self.words
            .next_back()
            .map(|word| Address::new(u64::from_le_bytes(*word)))
    }
}

impl<Space> ExactSizeIterator for WordsIter<'_, Space> {}

/// Decodes a message from its front.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    #[inline]
    pub(super) fn le32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    #[inline]
    pub(super) fn le64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    #[inline]
    pub(super) fn iova(&mut self) -> Option<Iova> {
        self.le64().map(Iova::new)
    }

    /// Returns the next `count` words of 8 bytes.
    #[inline]
    pub(super) fn words(&mut self, count: usize) -> Option<&'a [[u8; 8]]> {
        let bytes = self.0.get(..count.checked_mul(8)?)?;
        self.0 = self.0.get(bytes.len()..)?;
        let (words, _) = bytes.as_chunks();
        Some(words)
    }
}
