//! The key of a cached mapping.

use core::fmt;

use ringfence_types::{Direction, PageSize, Permissions, PhysAddr, PhysRange};

const PAGE: u64 = PageSize::Size4K.bytes();

/// Key of a mapping: first page of memory, number of pages and direction. A mapping serves a buffer
/// only if their keys are equal. The pages are consecutive in memory. A scatterlist of other
/// pages has no key, because two lists may begin with the same page and then differ.
///
/// The PVIOMMU paper's key is the guest page alone (errata 16). A writable mapping then serves a
/// buffer that the device may only read. A mapping of one page serves a buffer of several pages.
///
/// A bidirectional mapping serves only bidirectional buffers. If it served both directions, a
/// device could write a read-only buffer for as long as the buffer is in use. No cycle bounds that
/// time.
///
/// Encoded in one word: the page address in the high 52 bits, the number of pages less one (10
/// bits), and the permissions (2 bits, never 0).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct MappingKey(u64);

impl MappingKey {
    /// Maximum number of pages of one key: 4 MiB. Longer buffers bypass the cache.
    pub const PAGES_MAX: u64 = 1 << 10;

    /// Creates the key of `pages` pages from the one that holds `first`. `None` if `pages` is 0 or
    /// above [`PAGES_MAX`](Self::PAGES_MAX), or if the pages reach past 2^64.
    #[inline]
    pub const fn new(first: PhysAddr, pages: u64, direction: Direction) -> Option<Self> {
        let page = first.align_down(PAGE);
        if pages == 0 || pages > Self::PAGES_MAX || page.checked_add(pages * PAGE - 1).is_none() {
            return None;
        }
        Some(Self(
            page.get() | (pages - 1) << 2 | direction.permissions().bits(),
        ))
    }

    /// Creates the key of the pages that `buffer` touches. `None` if they are more than
    /// [`PAGES_MAX`](Self::PAGES_MAX).
    #[inline]
    pub const fn covering(buffer: &PhysRange, direction: Direction) -> Option<Self> {
        Self::new(buffer.start(), buffer.pages(PageSize::Size4K), direction)
    }

    /// Creates the key of the pages that `buffer` touches, mapped with `permissions`. `None` as for
    /// [`covering`](Self::covering).
    #[inline]
    pub const fn mapped(buffer: &PhysRange, permissions: Permissions) -> Option<Self> {
        let direction = match permissions {
            Permissions::READ => Direction::ToDevice,
            Permissions::WRITE => Direction::FromDevice,
            _ => Direction::Bidirectional,
        };
        Self::covering(buffer, direction)
    }

    /// Returns the address of the first page, guest-physical in a guest.
    #[inline]
    pub const fn first(self) -> PhysAddr {
        PhysAddr::new(self.0).align_down(PAGE)
    }

    /// Returns the number of pages, 1 to [`PAGES_MAX`](Self::PAGES_MAX).
    #[inline]
    pub const fn pages(self) -> u64 {
        (self.0 >> 2 & (Self::PAGES_MAX - 1)) + 1
    }

    /// Returns the direction of the mapping.
    #[inline]
    pub const fn direction(self) -> Direction {
        match self.0 & 3 {
            1 => Direction::ToDevice,
            2 => Direction::FromDevice,
            _ => Direction::Bidirectional,
        }
    }

    /// Returns the encoded word; never 0.
    #[inline]
    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    /// Decodes a word; `None` for 0, which encodes no key.
    #[inline]
    pub(crate) const fn from_word_if_any(word: u64) -> Option<Self> {
        match word {
            0 => None,
            word => Some(Self(word)),
        }
    }

    /// Decodes a word that [`word`](Self::word) returned.
    #[inline]
    pub(super) const fn from_word(word: u64) -> Self {
        Self(word)
    }
}

impl fmt::Debug for MappingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for MappingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} x {} {}",
            self.first(),
            self.pages(),
            self.direction()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_round_trips() {
        for direction in Direction::ALL {
            for (first, pages) in [
                (0, 1),
                (0xfff, 1),
                (0x1000, 1024),
                (u64::MAX, 1),
                (1 << 51, 17),
            ] {
                let key = MappingKey::new(PhysAddr::new(first), pages, direction).unwrap();
                assert_eq!(key.first().get(), first & !0xfff);
                assert_eq!(key.pages(), pages);
                assert_eq!(key.direction(), direction);
                assert_ne!(key.word(), 0);
                assert_eq!(MappingKey::from_word(key.word()), key);
            }
        }
    }

    #[test]
    fn unrepresentable_mappings_have_no_key() {
        for (first, pages) in [(0, 0), (0, 1025), (u64::MAX, 2), (!0xfff, 2)] {
            assert_eq!(
                MappingKey::new(PhysAddr::new(first), pages, Direction::ToDevice),
                None
            );
        }
    }

    #[test]
    fn a_buffer_has_the_key_of_the_pages_it_touches() {
        let buffer = PhysRange::new(PhysAddr::new(0x1fff), 2).unwrap();
        let key = MappingKey::covering(&buffer, Direction::FromDevice).unwrap();
        assert_eq!((key.first().get(), key.pages()), (0x1000, 2));
    }
}
