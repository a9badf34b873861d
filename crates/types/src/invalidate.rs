//! The port to the IOMMU's invalidation interface.
//!
//! The caller submits an invalidation, and the IOMMU completes it later. The interface may be a
//! register write and a poll, a descriptor and a wait descriptor of an invalidation queue, or a
//! request on a virtqueue. [`Pending`](crate::Pending) is an invalidation that was submitted and
//! has not completed.

use core::fmt;

use crate::{DomainId, PfnRange, RequesterId, RingId};

/// A request to remove entries from the translation caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Invalidation {
    /// Entries for one range of one domain (VT-d "page-selective-within-domain").
    Pages {
        /// The domain whose entries are tagged with its id.
        domain: DomainId,
        /// The pages to invalidate.
        range: PfnRange,
        /// The kinds of cached entries to remove for that range.
        levels: CachedLevels,
    },
    /// All entries of one domain (VT-d "domain-selective").
    Domain(DomainId),
    /// All entries of all domains (VT-d "global").
    Global,
    /// The cached context entry of one device, and every entry cached through it.
    Context(RequesterId),
    /// The entry that a ring IOMMU caches for one ring, with its copy of the next one (rIOMMU Fig.
    /// 11, `riotlb_invalidate`).
    Ring {
        /// The device's domain. No other device belongs to it, because the addresses of a ring are
        /// defined only for one device.
        domain: DomainId,
        /// The device that owns the ring.
        device: RequesterId,
        /// The ring whose entry is removed.
        ring: RingId,
    },
}

/// The kinds of cached entries that a page-selective invalidation removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CachedLevels {
    /// Leaf translations only (VT-d invalidation hint IH = 1): the unmap freed no table page. F&S
    /// (SOSP'24) relies on this hint to keep the walk caches.
    Leaves,
    /// Leaf translations and the walk caches over the range (IH = 0): the unmap freed a table page.
    All,
}

impl Invalidation {
    /// Returns the kinds of entries that this invalidation removes in its scope.
    #[inline]
    pub const fn levels(&self) -> CachedLevels {
        match self {
            Self::Pages { levels, .. } => *levels,
            // A ring is a flat table: no walk cache holds any part of it.
            Self::Domain(_) | Self::Global | Self::Context(_) | Self::Ring { .. } => {
                CachedLevels::All
            }
        }
    }

    /// Returns true if completion of this invalidation removes all cached entries of `range` in
    /// `domain` that `levels` names. A caller that freed a table page passes [`CachedLevels::All`].
    #[inline]
    pub fn covers(&self, domain: DomainId, range: &PfnRange, levels: CachedLevels) -> bool {
        match self {
            Self::Pages {
                domain: d,
                range: r,
                ..
            } => *d == domain && r.contains(range) && self.levels() >= levels,
            Self::Domain(d) => *d == domain,
            Self::Global => true,
            Self::Context(_) => false,
            Self::Ring {
                domain: d, ring, ..
            } => *d == domain && ring.pages().contains(range),
        }
    }
}

/// Identifies a submitted invalidation. Invalidations of one invalidator complete in the order of
/// their submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// Wraps the invalidator's own sequence number.
    #[inline]
    pub const fn new(sequence: u64) -> Self {
        Self(sequence)
    }

    /// Returns the sequence number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The reason why an invalidation was not submitted or did not complete. After an error the caller
/// must assume that the caches still hold every entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The queue is full until earlier requests complete.
    QueueFull,
    /// The hardware, or the device behind the queue, rejected the request or stopped responding.
    Failed,
    /// The unit did not complete the request within its limit of polls.
    TimedOut,
    /// The request does not cover the ranges that its completion would release.
    ScopeTooNarrow,
    /// The unit has no cache of the requested kind: the request went to the wrong unit.
    Unsupported,
}

impl fmt::Display for InvalidationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::QueueFull => "the invalidation queue is full",
            Self::Failed => "the invalidation failed",
            Self::TimedOut => "the invalidation did not complete in time",
            Self::ScopeTooNarrow => "the invalidation does not cover all ranges of its batch",
            Self::Unsupported => "the unit has no cache of the requested kind",
        })
    }
}

impl core::error::Error for InvalidationError {}

/// The invalidation interface of an IOMMU, as one CPU uses it.
///
/// # Contract
/// If [`poll`](Self::poll) returns `Ok(true)` for a ticket, no access that starts later uses an
/// entry that the request named. Accesses that used such an entry have reached memory (VT-d "read
/// and write draining").
pub trait Invalidator {
    /// Submits `request` without waiting for its completion.
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError>;

    /// Returns true if the request of `ticket` has completed. Does not wait.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError>;

    /// Polls until the request of `ticket` has completed. Ends only if the unit completes it, or
    /// [`poll`](Self::poll) fails after a number of polls.
    fn wait(&mut self, ticket: Ticket) -> Result<(), InvalidationError> {
        while !self.poll(ticket)? {
            core::hint::spin_loop();
        }
        Ok(())
    }
}

impl<I: Invalidator + ?Sized> Invalidator for &mut I {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        (**self).submit(request)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        (**self).poll(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RingIova, RingSlot};

    #[test]
    fn a_ring_covers_its_own_slots_and_nothing_else() {
        let (domain, ring) = (DomainId::new(3), RingId::new(5));
        let request = Invalidation::Ring {
            domain,
            device: RequesterId::new(9),
            ring,
        };
        let slot = |ring, slot| RingIova::start(ring, slot).slot_pages();
        let all = ring.pages();
        for (name, asked, range, covered) in [
            ("first slot", domain, slot(ring, RingSlot::FIRST), true),
            ("last slot", domain, slot(ring, RingSlot::MAX), true),
            ("the whole ring", domain, all, true),
            (
                "another domain",
                DomainId::new(4),
                slot(ring, RingSlot::FIRST),
                false,
            ),
            (
                "the ring before",
                domain,
                slot(RingId::new(4), RingSlot::MAX),
                false,
            ),
            (
                "the ring after",
                domain,
                slot(RingId::new(6), RingSlot::FIRST),
                false,
            ),
            (
                "two rings",
                domain,
                PfnRange::spanning(all.lo(), slot(RingId::new(6), RingSlot::FIRST).lo()),
                false,
            ),
        ] {
            for levels in [CachedLevels::Leaves, CachedLevels::All] {
                assert_eq!(request.covers(asked, &range, levels), covered, "{name}");
            }
        }
    }

    /// VT-d section 6.5.2.3: with invalidation hint IH = 1 the walk caches stay valid.
    #[test]
    fn an_invalidation_of_leaves_does_not_cover_a_table_page() {
        use CachedLevels::{All, Leaves};
        let domain = DomainId::new(3);
        let range = PfnRange::new(crate::Pfn::new(16), 4).unwrap();
        let pages = |levels| Invalidation::Pages {
            domain,
            range,
            levels,
        };
        for (request, asked, covered) in [
            (pages(Leaves), Leaves, true),
            (pages(Leaves), All, false),
            (pages(All), Leaves, true),
            (pages(All), All, true),
            (Invalidation::Domain(domain), All, true),
            (Invalidation::Global, All, true),
        ] {
            let found = request.covers(domain, &range, asked);
            assert_eq!(found, covered, "{request:?} for {asked:?}");
        }
    }
}
