//! Domain identifiers and their generations.
//!
//! Identifiers are scarce (2^16 - 1, and fewer in hardware), so the layer reuses those of detached
//! domains. A token of the old domain must not reach the new one. Each identifier therefore counts
//! its generations, and every token carries the generation of its creation. An identifier whose
//! counter has reached its maximum is never reused. A handle also holds the unit number, which
//! distinguishes it from handles of other layers.

use alloc::vec::Vec;

use ringfence_types::RequesterId;

use crate::token::DomainHandle;

/// A domain identifier, and the space of the domain that uses it.
#[derive(Debug)]
pub(crate) struct DomainSlot<S> {
    handle: DomainHandle,
    space: Option<S>,
    /// The devices of the domain.
    pub(crate) devices: Vec<RequesterId>,
}

impl<S> DomainSlot<S> {
    /// Creates the unused slot of the `index`th identifier of `unit`. `None` if `index` is out of
    /// range.
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

    /// Returns true if a new domain may use the slot.
    pub(crate) fn is_free(&self) -> bool {
        self.space.is_none() && self.handle.generation < u32::MAX
    }

    /// Returns the handle of the present domain or, in a free slot, of the next one.
    #[inline]
    pub(crate) fn handle(&self) -> DomainHandle {
        self.handle
    }

    /// Returns the space of the present domain, whatever its generation.
    #[inline]
    pub(crate) fn space(&self) -> Option<&S> {
        self.space.as_ref()
    }

    /// Returns the space if it belongs to `tenant`.
    #[inline]
    pub(crate) fn space_of(&self, tenant: DomainHandle) -> Option<&S> {
        if self.handle == tenant {
            self.space.as_ref()
        } else {
            None
        }
    }

    /// Returns true if `tenant` is an earlier domain of this slot.
    pub(crate) fn is_stale(&self, tenant: DomainHandle) -> bool {
        tenant.same_iommu(self.handle)
            && tenant.index == self.handle.index
            && tenant.generation < self.handle.generation
    }

    /// Assigns the slot to a new domain with its first device.
    pub(crate) fn assign(&mut self, space: S, device: RequesterId) -> DomainHandle {
        self.space = Some(space);
        self.devices.push(device);
        self.handle
    }

    /// Removes the domain and returns its space. All its tokens become stale.
    pub(crate) fn release(&mut self) -> Option<S> {
        self.devices.clear();
        self.handle.generation = self.handle.generation.saturating_add(1);
        self.space.take()
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::DomainId;

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
