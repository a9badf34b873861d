//! The port to the IOMMU's invalidation interface.
//!
//! An invalidation is submitted and completes later: a register write and a poll, an entry of an
//! invalidation queue and a wait descriptor, or a request on a virtqueue. [`Pending`](crate::Pending) is
//! what stands between the two.

use core::fmt;

use crate::{DeviceId, DomainId, PfnRange};

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
    Context(DeviceId),
}

/// Which kinds of cached entries a page invalidation removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CachedLevels {
    /// Leaf translations only: no table page was taken away (VT-d invalidation hint IH = 1). Keeping the walk caches
    /// is what F&S (SOSP'24) relies on.
    Leaves,
    /// Leaf translations and the walk caches over the range: a table page was taken away (IH = 0).
    All,
}

impl Invalidation {
    /// Whether completing this invalidation purges all leaf translations of `range` in `domain`.
    #[inline]
    pub fn covers(&self, domain: DomainId, range: &PfnRange) -> bool {
        match self {
            Self::Pages {
                domain: d,
                range: r,
                ..
            } => *d == domain && r.contains(range),
            Self::Domain(d) => *d == domain,
            Self::Global => true,
            Self::Context(_) => false,
        }
    }
}

/// Names a submitted invalidation. Tickets of one invalidator complete in the order in which they were given.
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

/// Why an invalidation could not be submitted or completed. After an error nothing may be assumed purged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The queue takes no more requests until earlier ones have completed.
    QueueFull,
    /// The hardware or the device behind the queue rejected the request or stopped answering.
    Failed,
    /// The invalidation does not cover the ranges that it was to release.
    ScopeTooNarrow,
}

impl fmt::Display for InvalidationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::QueueFull => "invalidation queue full",
            Self::Failed => "invalidation failed",
            Self::ScopeTooNarrow => "invalidation does not cover the ranges it was to release",
        })
    }
}

impl core::error::Error for InvalidationError {}

/// The invalidation interface of an IOMMU, as one processor uses it.
///
/// # Contract
/// When [`poll`](Self::poll) returns `Ok(true)` for a ticket, no access that starts afterwards uses an entry that the
/// request named, and accesses that used one have reached memory (VT-d "read and write draining").
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
