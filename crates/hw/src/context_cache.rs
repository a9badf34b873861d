//! The context cache (VT-d specification, section 6.2.1 "Context-cache").

use alloc::boxed::Box;
use alloc::vec::Vec;

use ringfence_types::{Iova, RequesterId};

use ringfence_pgtable::Format;

use crate::tag::MAX_WIDTH;
use crate::{ContextEntry, Geometry, TableRoot};

/// A cached context of a walking unit. It includes the highest address, so that the width check of
/// each access is one comparison.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedContext<F> {
    pub(crate) entry: ContextEntry<F>,
    /// Highest address that the table translates or that is passed through.
    pub(crate) highest: Iova,
}

impl<F: Format> CachedContext<F> {
    #[inline]
    pub(crate) fn new(entry: ContextEntry<F>) -> Self {
        let width = match &entry {
            ContextEntry::Translated(source) => source.format.width().min(MAX_WIDTH),
            ContextEntry::PassThrough { width, .. } => (*width).min(64),
        };
        let highest = Iova::new(
            u64::MAX
                .checked_shr(64_u32.wrapping_sub(width))
                .unwrap_or(0),
        );
        Self { entry, highest }
    }

    /// Returns the table of the device; `None` if its accesses are passed through.
    #[inline]
    pub(crate) const fn table_root(&self) -> Option<&TableRoot<F>> {
        match &self.entry {
            ContextEntry::Translated(source) => Some(source),
            ContextEntry::PassThrough { .. } => None,
        }
    }
}

/// Direct-mapped cache of contexts, indexed by a hash of the requester ID.
#[derive(Debug, Clone)]
pub(crate) struct ContextCache<C> {
    slots: Box<[Option<(RequesterId, C)>]>,
    mask: usize,
}

impl<C> ContextCache<C> {
    /// Creates a cache with one slot per entry of `geometry`.
    pub(crate) fn new(geometry: Geometry) -> Self {
        let mut slots = Vec::new();
        slots.resize_with(geometry.entries() as usize, || None);
        Self {
            mask: slots.len().saturating_sub(1),
            slots: slots.into_boxed_slice(),
        }
    }

    #[inline]
    fn slot(&self, device: RequesterId) -> usize {
        // Most devices are function 0 of different buses: include the bus number.
        let id = usize::from(device.get());
        (id ^ (id >> 8)) & self.mask
    }

    #[inline]
    pub(crate) fn lookup(&self, device: RequesterId) -> Option<&C> {
        match self.slots.get(self.slot(device))? {
            Some((cached, context)) if *cached == device => Some(context),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn fill(&mut self, device: RequesterId, context: C) {
        let at = self.slot(device);
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = Some((device, context));
        }
    }

    /// Drops the context of `device` and returns it.
    pub(crate) fn remove(&mut self, device: RequesterId) -> Option<C> {
        let at = self.slot(device);
        self.slots
            .get_mut(at)?
            .take_if(|(cached, _)| *cached == device)
            .map(|(_, context)| context)
    }

    pub(crate) fn clear(&mut self) {
        self.slots.fill_with(|| None);
    }
}
