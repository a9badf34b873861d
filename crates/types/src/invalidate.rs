//! The port to the IOMMU's invalidation interface.
//!
//! An invalidation is submitted and completes later: a register write and a poll, an entry of an
//! invalidation queue and a wait descriptor, or a request on a virtqueue.
//! [`Pending`](crate::Pending) is what stands between the two.

use core::fmt;

use crate::{DomainId, PfnRange, RequesterId, RingId};

/// What is to be purged from the translation caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Invalidation {
    /// The pages of one range of one domain (VT-d "page-selective-within-domain").
    Pages {
        /// The domain.
        domain: DomainId,
        /// The pages.
        range: PfnRange,
        /// Which cached entries of that range must go.
        levels: CachedLevels,
    },
    /// Everything of one domain (VT-d "domain-selective").
    Domain(DomainId),
    /// Everything of all domains (VT-d "global").
    Global,
    /// The cached context entry of one device, and all that was cached under it.
    Context(RequesterId),
    /// What a ring IOMMU caches of one ring: its one entry with the copy of the next (rIOMMU Fig.
    /// 11, `riotlb_invalidate`).
    Ring {
        /// The device's domain, which no other device is in: a ring's addresses mean nothing
        /// without the device.
        domain: DomainId,
        /// The device.
        device: RequesterId,
        /// The ring.
        ring: RingId,
    },
}

/// Which kinds of cached entries a page invalidation removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CachedLevels {
    /// Leaf translations only: no table page was taken away (VT-d invalidation hint IH = 1).
    /// Keeping the walk caches is what F&S (SOSP'24) relies on.
    Leaves,
    /// Leaf translations and the walk caches over the range: a table page was taken away (IH = 0).
    All,
}

impl Invalidation {
    /// The levels that this invalidation purges wherever it purges anything.
    #[inline]
    pub const fn levels(&self) -> CachedLevels {
        match self {
            Self::Pages { levels, .. } => *levels,
            // A ring is a flat table: no walk cache holds anything of it.
            Self::Domain(_) | Self::Global | Self::Context(_) | Self::Ring { .. } => {
                CachedLevels::All
            }
        }
    }

    /// Completion of this invalidation purges all cached entries of `range` in `domain` that
    /// `levels` names. A caller that took a table page away asks for [`CachedLevels::All`].
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

/// Names a submitted invalidation. Tickets of one invalidator complete in the order in which they
/// were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// From the invalidator's own sequence number.
    #[inline]
    pub const fn new(sequence: u64) -> Self {
        Self(sequence)
    }

    /// The sequence number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Why an invalidation could not be submitted or completed. After an error nothing may be assumed
/// purged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The queue takes no more requests until earlier ones have completed.
    QueueFull,
    /// The hardware or the device behind the queue rejected the request or stopped answering.
    Failed,
    /// The invalidation does not cover the ranges that it was to release.
    ScopeTooNarrow,
    /// The unit has no cache of the kind that the request names: it was sent to the wrong unit.
    Unsupported,
}

impl fmt::Display for InvalidationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::QueueFull => "invalidation queue full",
            Self::Failed => "invalidation failed",
            Self::ScopeTooNarrow => "invalidation does not cover the ranges it was to release",
            Self::Unsupported => "the unit caches nothing of the kind that was to be invalidated",
        })
    }
}

impl core::error::Error for InvalidationError {}

/// The invalidation interface of an IOMMU, as one processor uses it.
///
/// # Contract
/// When [`poll`](Self::poll) returns `Ok(true)` for a ticket, no access that starts afterwards uses
/// an entry that the request named, and accesses that used one have reached memory (VT-d "read and
/// write draining").
pub trait Invalidator {
    /// Queues `request`.
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError>;

    /// Whether the request behind `ticket` has completed.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError>;
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

    /// VT-d section 6.5.2.3: with invalidation hint IH = 1 the walk caches stay.
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
