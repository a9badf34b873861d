//! A check of translated requests by host address.
//!
//! A translated request carries a host address that the device itself supplies. A malicious device
//! supplies any address (attack A13), and a device that keeps a translation after its invalidation
//! uses an old one (attack A14). The Device Permission Table (DPT) of SMMUv3 stops both: the unit
//! looks up the host address in a table of the domain before each translated request.

use alloc::vec::Vec;

use ringfence_pgtable::{Cursor, Levels, SecondStage, walk};
use ringfence_types::{
    Access, DomainId, FaultReason, Iova, PageSize, PhysAddr, PhysMemory, PhysRange,
};

use crate::MAX_TRANSLATED_BYTES;

/// The check of translated requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TranslatedCheck {
    /// The unit checks only that the device may use a device TLB.
    #[default]
    DeviceOnly,
    /// The unit also looks up the host address in the permission table of the domain. It blocks a
    /// domain without a table.
    HostAddress(PermissionTables),
}

/// The permission tables of all domains.
///
/// A table has the second-stage format with four levels. Its index is the host address. Only the
/// permissions of its entries count. The unit caches no entry, so a cleared entry takes effect at
/// once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PermissionTables {
    roots: Vec<(DomainId, PhysAddr)>,
}

impl TranslatedCheck {
    /// Returns the check by host address, with no table.
    pub const fn host_address() -> Self {
        Self::HostAddress(PermissionTables { roots: Vec::new() })
    }

    /// Sets the permission table of `domain`, or removes it with `None`. Has no effect without the
    /// check by host address.
    pub fn set_table(&mut self, domain: DomainId, root: Option<PhysAddr>) {
        if let Self::HostAddress(tables) = self {
            tables.roots.retain(|(old, _)| *old != domain);
            tables.roots.extend(root.map(|root| (domain, root)));
        }
    }

    /// Checks an access of `domain` to all pages of `range`.
    ///
    /// # Errors
    /// The first address that is not permitted, with the reason.
    pub(crate) fn check<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        domain: DomainId,
        range: PhysRange,
        access: Access,
    ) -> Result<(), (PhysAddr, FaultReason)> {
        let Self::HostAddress(PermissionTables { roots }) = self else {
            return Ok(());
        };
        let denied = |at| Err((at, FaultReason::HostAddressDenied));
        let Some((_, root)) = roots.iter().find(|(owner, _)| *owner == domain) else {
            return denied(range.start());
        };
        if range.bytes() > MAX_TRANSLATED_BYTES {
            return Err((range.start(), FaultReason::BadLength));
        }
        let format = SecondStage::new(Levels::Four);
        let mut at = range.start();
        loop {
            let start = Cursor::root(&format, *root);
            match walk(&format, mem, start, Iova::new(at.get()), |_| {}) {
                Ok(leaf) if leaf.permissions.allows(access) => {}
                _ => return denied(at),
            }
            let next = at
                .align_down(PageSize::Size4K.bytes())
                .checked_add(PageSize::Size4K.bytes());
            match next {
                Some(next) if next <= range.last() => at = next,
                _ => return Ok(()),
            }
        }
    }
}
