//! Tags of cached translations: domain, kind and page number in one word.

use ringfence_types::{DomainId, Pfn};

use crate::cache::SetAssociative;

/// Address bits of the widest translated address space (VT-d, five levels). Page numbers above it
/// do not fit in a key.
pub(crate) const MAX_WIDTH: u32 = 57;

// valid (63) | kind (61..=62) | domain (45..=60) | page number in units of the kind's size
// (0..=44).
const VALID: u64 = 1 << 63;
const KIND_SHIFT: u32 = 61;
const DOMAIN_SHIFT: u32 = MAX_WIDTH - 12;
const DOMAIN: u64 = 0xffff << DOMAIN_SHIFT;
const PAGE: u64 = (1 << DOMAIN_SHIFT) - 1;

/// Returns the key of block number `page` of `domain`. `kind` (0 to 3) distinguishes block sizes
/// within one cache.
#[inline]
pub(crate) const fn key(domain: DomainId, kind: u64, page: u64) -> u64 {
    VALID | (kind & 3) << KIND_SHIFT | (domain.get() as u64) << DOMAIN_SHIFT | page & PAGE
}

#[inline]
pub(crate) const fn kind(key: u64) -> u64 {
    (key >> KIND_SHIFT) & 3
}

#[inline]
pub(crate) const fn is_of(key: u64, domain: DomainId) -> bool {
    key & DOMAIN == (domain.get() as u64) << DOMAIN_SHIFT
}

/// Returns the set selector. Neighbouring pages map to neighbouring sets. The same page of
/// different domains maps to different sets, because the IOVA allocators of all domains start at
/// the same address.
#[inline]
pub(crate) const fn selector(domain: DomainId, page: u64) -> u64 {
    page.wrapping_add((domain.get() as u64).wrapping_mul(0x9e37_79b1))
}

/// Drops every entry of `domain` and `kind` whose block of 2^shift bytes overlaps the pages
/// `lo..=hi`. Returns the number dropped. If the range has at least as many blocks as the cache has
/// sets, scans all entries instead of looking up each block.
pub(crate) fn remove_range<V: Copy>(
    cache: &mut SetAssociative<V>,
    domain: DomainId,
    kind_wanted: u64,
    shift: u32,
    lo: Pfn,
    hi: Pfn,
) -> u32 {
    let before = cache.live();
    let up = shift.wrapping_sub(12);
    let lo = lo.get().wrapping_shr(up);
    // Blocks beyond the widest address space are never cached. Truncated to a key, they would alias
    // lower blocks.
    let hi = hi.get().wrapping_shr(up).min(PAGE);
    if hi.saturating_sub(lo) >= cache.sets() {
        cache.remove_if(|key, _| {
            is_of(key, domain) && kind(key) == kind_wanted && (lo..=hi).contains(&(key & PAGE))
        });
    } else {
        for page in lo..=hi {
            cache.remove(selector(domain, page), key(domain, kind_wanted, page));
        }
    }
    before.wrapping_sub(cache.live())
}
