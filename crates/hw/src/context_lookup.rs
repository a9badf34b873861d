//! The trait that finds the table root of a device. VT-d's tables are in `root_table.rs`, Calgary's
//! in `host_bridge.rs`.

use core::fmt;

use ringfence_pgtable::Format;
use ringfence_types::{DomainId, FaultReason, PhysAddr, PhysMemory, RequesterId};

/// Translation type of one device's accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextEntry<F> {
    /// The accesses are translated through a table.
    Translated(TableRoot<F>),
    /// The accesses are passed through to the same physical address.
    PassThrough {
        /// Domain of the device. The unit caches no translations for it.
        domain: DomainId,
        /// Number of address bits that the unit accepts.
        width: u32,
    },
}

/// The page table of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRoot<F> {
    /// Domain-id, the tag of cached translations.
    pub domain: DomainId,
    /// The format of the table.
    pub format: F,
    /// Physical address of the root.
    pub root: PhysAddr,
    /// Requests other than untranslated ones that the device may make.
    pub device_tlb: DeviceTlbPermission,
}

/// Permission of a device to cache translations (PCIe ATS) and to request pages (PCIe PRI).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DeviceTlbPermission {
    /// Untranslated requests only.
    #[default]
    Blocked,
    /// Also translation requests and translated requests.
    Allowed,
    /// Also page requests.
    AllowedWithPageRequests,
}

impl<F> ContextEntry<F> {
    /// Returns the domain of the device.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        match self {
            Self::Translated(TableRoot { domain, .. }) | Self::PassThrough { domain, .. } => {
                *domain
            }
        }
    }
}

/// Lookup from a requester ID to its domain and table: root and context tables in memory
/// ([`RootTable`](crate::RootTable)), or one register per host bridge
/// ([`HostBridges`](crate::HostBridges)).
pub trait ContextLookup: fmt::Debug {
    /// Format of the tables. The address bits that a level translates must not depend on the depth
    /// of the table.
    type Format: Format;

    /// Finds the context entry of `device`. The unit caches successful lookups only.
    ///
    /// # Errors
    /// The reason why the unit must block the device's accesses.
    fn find<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        device: RequesterId,
    ) -> Result<ContextEntry<Self::Format>, FaultReason>;
}
