//! Translation of an access by a unit that translates each direction on its own.

use std::cell::Cell;

use ringfence_types::{Access, Fault, FaultReason, Iova, RequesterId};
use vm_memory::{GuestAddress, GuestMemoryError, Permissions};

use super::Part;

/// Bytes of a page. A range of frames may have its pages in several mappings.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// An access of a device to a range of its addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RangeAccess {
    pub(crate) device: RequesterId,
    pub(crate) addr: GuestAddress,
    pub(crate) bytes: usize,
    pub(crate) wanted: Permissions,
}

impl RangeAccess {
    /// Translates the range. Fails unless the device may access all of it in every direction. The
    /// first fault is stored in `first`.
    ///
    /// An access in both directions is translated twice. If the guest changes its tables between,
    /// and the two results differ, the access fails.
    pub(crate) fn translate(
        self,
        first: &Cell<Option<Fault>>,
        mut translated: impl FnMut(Iova, u64, Access) -> Result<Vec<Part>, Fault>,
    ) -> Result<Vec<Part>, GuestMemoryError> {
        let accesses: &[Access] = match self.wanted {
            Permissions::Read => &[Access::Read],
            Permissions::Write => &[Access::Write],
            Permissions::ReadWrite => &[Access::Write, Access::Read],
            Permissions::No => &[],
        };
        // An access of zero bytes needs no translation. An access without a direction fails.
        if self.bytes == 0 {
            return Ok(Vec::new());
        }
        let iova = Iova::new(self.addr.0);
        let mut found: Option<Vec<Part>> = None;
        for access in accesses.iter().copied() {
            let parts = translated(iova, self.bytes as u64, access);
            let parts = parts.and_then(|parts| match &found {
                Some(other) if *other != parts => Err(Fault {
                    device: self.device,
                    iova,
                    access,
                    reason: FaultReason::NotPresent,
                }),
                _ => Ok(parts),
            });
            found = Some(parts.map_err(|fault| {
                first.set(first.get().or(Some(fault)));
                GuestMemoryError::InvalidGuestAddress(self.addr)
            })?);
        }
        found.ok_or(GuestMemoryError::InvalidGuestAddress(self.addr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: RequesterId = RequesterId::new(0x20);

    fn access(bytes: usize, wanted: Permissions) -> RangeAccess {
        RangeAccess {
            device: DEVICE,
            addr: GuestAddress(0x1000),
            bytes,
            wanted,
        }
    }

    fn fault(access: Access) -> Fault {
        Fault {
            device: DEVICE,
            iova: Iova::new(0x1000),
            access,
            reason: FaultReason::NotPresent,
        }
    }

    #[test]
    fn each_direction_is_translated() {
        let first = Cell::new(None);
        let cases: [(_, &[Access]); 4] = [
            (Permissions::Read, &[Access::Read]),
            (Permissions::Write, &[Access::Write]),
            (Permissions::ReadWrite, &[Access::Write, Access::Read]),
            (Permissions::No, &[]),
        ];
        for (wanted, directions) in cases {
            let mut seen = Vec::new();
            let parts = access(8, wanted).translate(&first, |_, _, direction| {
                seen.push(direction);
                Ok(vec![(GuestAddress(0x5000), 8)])
            });
            assert_eq!(seen, directions);
            assert_eq!(parts.is_ok(), wanted != Permissions::No);
        }
        let none = access(0, Permissions::No).translate(&first, |_, _, _| unreachable!());
        assert!(none.unwrap().is_empty());
        assert_eq!(first.get(), None);
    }

    #[test]
    fn the_first_fault_is_kept() {
        let first = Cell::new(None);
        for direction in [Access::Read, Access::Write] {
            let wanted = match direction {
                Access::Read => Permissions::Read,
                Access::Write => Permissions::Write,
            };
            let stopped = |_, _, direction| Err(fault(direction));
            assert!(access(8, wanted).translate(&first, stopped).is_err());
            assert_eq!(first.get(), Some(fault(Access::Read)));
        }
    }

    /// The guest changes the entry between the two translations, and the unit caches nothing.
    #[test]
    fn directions_with_different_results_fail() {
        let first = Cell::new(None);
        let mut pages = [0x5000, 0x6000].into_iter();
        let parts = access(8, Permissions::ReadWrite).translate(&first, |_, bytes, _| {
            let page = pages.next().unwrap_or(0);
            Ok(vec![(GuestAddress(page), bytes as usize)])
        });
        assert!(parts.is_err());
        assert_eq!(first.get(), Some(fault(Access::Read)));
    }
}
