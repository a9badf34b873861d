//! Domain identifiers and their generations.
//!
//! Identifiers are scarce (2^16 - 1, and fewer in hardware), so the layer reuses those of detached
//! domains. A token of the old domain must not reach the new one. Each identifier therefore counts
//! its generations, and every token carries the generation of its creation. An identifier whose
//! counter has reached its maximum is never reused. A handle also holds the unit number, which
//! distinguishes it from handles of other layers.

use alloc::vec::Vec;

use ringfence_types::{DomainId, RequesterId};

use crate::token::DomainHandle;

/// Returns the index of a domain in every list of per-domain state.
#[inline]
pub(crate) const fn domain_index(domain: DomainId) -> usize {
    domain.get() as usize
}

/// The domains of one IOMMU, by identifier. Slot 0 stays empty: hardware reserves that identifier
/// to cache entries that are not present (VT-d section 6.2.2.1).
#[derive(Debug)]
pub(crate) struct DomainTable<S> {
    unit: u16,
    slots: Vec<DomainSlot<S>>,
}

/// A domain identifier, and the space of the domain that uses it.
#[derive(Debug)]
pub(crate) struct DomainSlot<S> {
    handle: DomainHandle,
    space: Option<S>,
    /// The devices of the domain.
    pub(crate) devices: Vec<RequesterId>,
}

impl<S> DomainTable<S> {
    /// Creates the table of IOMMU number `unit`, without domains.
    pub(crate) fn new(unit: u16) -> Self {
        Self {
            unit,
            slots: Vec::new(),
        }
    }

    /// Returns the slot of `domain`.
    #[inline]
    pub(crate) fn get(&self, domain: DomainId) -> Option<&DomainSlot<S>> {
        self.slots.get(domain_index(domain))
    }

    /// Returns the slot of `domain`.
    pub(crate) fn get_mut(&mut self, domain: DomainId) -> Option<&mut DomainSlot<S>> {
        self.slots.get_mut(domain_index(domain))
    }

    /// Returns all slots in the order of their identifiers, slot 0 included.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DomainSlot<S>> {
        self.slots.iter()
    }

    /// Returns the space of a domain. `None` if the domain was removed, or belongs to another unit.
    #[inline]
    pub(crate) fn space_of(&self, handle: DomainHandle) -> Option<&S> {
        let slot = self.get(handle.domain())?;
        if slot.handle == handle {
            slot.space.as_ref()
        } else {
            None
        }
    }

    /// Returns true if the domain was removed, so that no device reaches its mappings any more.
    pub(crate) fn is_stale(&self, handle: DomainHandle) -> bool {
        self.get(handle.domain()).is_some_and(|slot| {
            handle.same_iommu(slot.handle) && handle.generation < slot.handle.generation
        })
    }

    /// Returns an identifier that no domain uses. `None` if all are in use.
    pub(crate) fn free_id(&self) -> Option<DomainId> {
        let free = self.slots.iter().skip(1).find(|slot| slot.is_free());
        free.map(|slot| slot.handle.domain()).or_else(|| {
            let next = u16::try_from(self.slots.len().max(1)).ok()?;
            Some(DomainId::new(next))
        })
    }

    /// Assigns `domain` to a new domain with its first device.
    pub(crate) fn install(
        &mut self,
        domain: DomainId,
        space: S,
        device: RequesterId,
    ) -> Option<DomainHandle> {
        while self.slots.len() <= domain_index(domain) {
            let id = u16::try_from(self.slots.len()).ok()?;
            self.slots.push(DomainSlot {
                handle: DomainHandle {
                    unit: self.unit,
                    domain: DomainId::new(id),
                    generation: 0,
                },
                space: None,
                devices: Vec::new(),
            });
        }
        let slot = self.get_mut(domain)?;
        slot.space = Some(space);
        slot.devices.push(device);
        Some(slot.handle)
    }
}

impl<S> DomainSlot<S> {
    /// Returns true if a new domain may use the slot.
    fn is_free(&self) -> bool {
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

    /// Removes the domain and returns its space. All its tokens become stale.
    pub(crate) fn release(&mut self) -> Option<S> {
        self.devices.clear();
        self.handle.generation = self.handle.generation.saturating_add(1);
        self.space.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: RequesterId = RequesterId::new(1);

    #[test]
    fn an_identifier_whose_generations_are_used_up_is_not_given_out() {
        let mut table = DomainTable::new(3);
        let domain = table.free_id().expect("an empty table");
        assert_eq!(domain, DomainId::new(1));
        table.install(domain, (), DEVICE).expect("a free slot");
        let slot = table.get_mut(domain).expect("installed");
        assert_eq!(slot.release(), Some(()));
        slot.handle.generation = u32::MAX - 1;
        assert_eq!(table.free_id(), Some(domain));
        let last = table.install(domain, (), DEVICE).expect("a free slot");
        assert_ne!(table.free_id(), Some(domain));
        assert_eq!((last.domain(), table.space_of(last)), (domain, Some(&())));
        assert_eq!(
            table.get_mut(domain).and_then(DomainSlot::release),
            Some(())
        );
        assert_ne!(table.free_id(), Some(domain));
        assert_eq!(table.space_of(last), None);
    }

    #[test]
    fn there_are_as_many_as_the_identifier_counts() {
        let mut table = DomainTable::new(0);
        let last = DomainId::new(u16::MAX);
        let handle = table.install(last, (), DEVICE).expect("the last");
        assert_eq!(handle.domain(), last);
        assert_eq!(table.free_id(), Some(DomainId::new(1)));
        for slot in &mut table.slots {
            slot.space = Some(());
        }
        assert_eq!(table.free_id(), None);
    }
}
