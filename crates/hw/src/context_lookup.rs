//! How a unit finds the table of a device.

use core::fmt;

use ringfence_pgtable::Format;
use ringfence_types::{DomainId, FaultReason, PhysAddr, PhysMemory, RequesterId};

/// Where the accesses of one device go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextEntry<F> {
    /// To where a table says.
    Translated(TableRoot<F>),
    /// To the physical address of the same number (HW10).
    PassThrough {
        /// The domain the device is in, though no translation is cached for it.
        domain: DomainId,
        /// Address bits that the unit accepts.
        width: u32,
    },
}

/// What translates the addresses of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRoot<F> {
    /// Tags what is cached.
    pub domain: DomainId,
    /// The format of the table.
    pub format: F,
    /// The root of the table.
    pub root: PhysAddr,
}

impl<F> ContextEntry<F> {
    /// The domain.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        match self {
            Self::Translated(TableRoot { domain, .. }) | Self::PassThrough { domain, .. } => {
                *domain
            }
        }
    }
}

/// The part of a unit that goes from a requester to its domain: root and context tables in memory
/// ([`RootTable`](crate::RootTable)), or one register per host bridge
/// ([`HostBridges`](crate::HostBridges)).
pub trait ContextLookup: fmt::Debug {
    /// The format of its tables. The address bits that a level translates do not depend on the
    /// depth of the table.
    type Format: Format;

    /// Finds where the accesses of `device` go. The unit caches what is found, never that nothing
    /// was.
    ///
    /// # Errors
    /// Why the device's accesses are stopped.
    fn find<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        device: RequesterId,
    ) -> Result<ContextEntry<Self::Format>, FaultReason>;
}
