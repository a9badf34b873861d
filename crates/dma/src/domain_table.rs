//! Who holds a domain identifier, and since when.
//!
//! Identifiers are few (2^16 - 1, and less in hardware), so a detached domain's is given out again;
//! a token of the old domain that turns up later must not reach the new one. Each identifier
//! therefore counts its generations, and every token carries the one that it was made in. An
//! identifier whose count is used up is given out no more. With the number of its unit a tenant is
//! told from those of other layers too.

use alloc::vec::Vec;

use ringfence_types::{DomainId, RequesterId};

/// One domain, distinct from all that had its identifier before and will have it after, and from
/// those of other units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DomainHandle {
    unit: u16,
    index: u16,
    generation: u32,
}

impl DomainHandle {
    /// The place of its identifier among all.
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.index as usize
    }

    /// Whether both are domains of one unit.
    pub(crate) const fn same_iommu(self, other: Self) -> bool {
        self.unit == other.unit
    }

    /// The identifier. Identifiers begin at 1: hardware reserves 0 where absent entries are cached
    /// (VT-d section 6.2.2.1).
    #[inline]
    pub(crate) const fn domain(self) -> DomainId {
        DomainId::new(self.index.wrapping_add(1))
    }
}

/// A domain identifier, and the space of the domain that has it.
#[derive(Debug)]
pub(crate) struct DomainSlot<S> {
    handle: DomainHandle,
    space: Option<S>,
    /// The devices of the domain.
    pub(crate) devices: Vec<RequesterId>,
}

impl<S> DomainSlot<S> {
    /// The `index`th identifier of `unit`, which nobody has had; none if there are not that many.
    pub(crate) fn new(unit: u16, index: usize) -> Option<Self> {
        let index = u16::try_from(index).ok().filter(|i| *i < u16::MAX)?;
        Some(Self {
            handle: DomainHandle {
                unit,
                index,
                generation: 0,
            },
            space: None,
            devices: Vec::new(),
        })
    }

    /// Whether the next domain can have it.
    pub(crate) fn is_free(&self) -> bool {
        self.space.is_none() && self.handle.generation < u32::MAX
    }

    /// The present tenant; if there is none, the next one.
    #[inline]
    pub(crate) fn handle(&self) -> DomainHandle {
        self.handle
    }

    /// The space, whoever's it is.
    #[inline]
    pub(crate) fn space(&self) -> Option<&S> {
        self.space.as_ref()
    }

    /// The space, if it is `tenant`'s.
    #[inline]
    pub(crate) fn space_of(&self, tenant: DomainHandle) -> Option<&S> {
        if self.handle == tenant {
            self.space.as_ref()
        } else {
            None
        }
    }

    /// Whether `tenant` had it before and has no more.
    pub(crate) fn is_stale(&self, tenant: DomainHandle) -> bool {
        tenant.same_iommu(self.handle)
            && tenant.index == self.handle.index
            && tenant.generation < self.handle.generation
    }

    /// Seats a domain, with its first device.
    pub(crate) fn assign(&mut self, space: S, device: RequesterId) -> DomainHandle {
        self.space = Some(space);
        self.devices.push(device);
        self.handle
    }

    /// Ends the tenancy: from now on no token of it is current.
    pub(crate) fn release(&mut self) -> Option<S> {
        self.devices.clear();
        self.handle.generation = self.handle.generation.saturating_add(1);
        self.space.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_whose_generations_are_used_up_is_not_given_out() {
        let mut seat = DomainSlot::new(3, 6).expect("a small index");
        seat.handle.generation = u32::MAX - 1;
        assert!(seat.is_free());
        let last = seat.assign((), RequesterId::new(1));
        assert!(!seat.is_free());
        assert_eq!(
            (last.domain(), seat.space_of(last)),
            (DomainId::new(7), Some(&()))
        );
        assert_eq!(seat.release(), Some(()));
        assert!(!seat.is_free());
        assert_eq!(seat.space_of(last), None);
    }

    #[test]
    fn there_are_as_many_as_the_identifier_counts() {
        assert!(DomainSlot::<()>::new(0, usize::from(u16::MAX)).is_none());
        let last = DomainSlot::<()>::new(0, usize::from(u16::MAX) - 1).expect("the last");
        assert_eq!(last.handle().domain(), DomainId::new(u16::MAX));
    }
}
