//! MAP and UNMAP (virtio 1.3, sections 5.13.6.5 and 5.13.6.6), and the proposed IOTLB_FLUSH.

use ringfence_types::{Iova, IovaRange, PhysAddr, PhysRange};

use super::Device;
use crate::domain::DomainKind;
use crate::spec::{
    VIRTIO_IOMMU_F_MAP_UNMAP, VIRTIO_IOMMU_F_MMIO, VIRTIO_IOMMU_MAP_F_MMIO,
    VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE,
};
use crate::store::{Entry, InsertError};
use crate::{DomainId, LimitReached, Options, RequestError, Sink};

impl<S: Sink> Device<S> {
    /// Handles a MAP request. On error nothing has changed.
    #[inline]
    pub(super) fn map(
        &mut self,
        domain: DomainId,
        start: u64,
        last: u64,
        physical: u64,
        flags: u32,
    ) -> Result<(), RequestError> {
        if !self.has(VIRTIO_IOMMU_F_MAP_UNMAP) {
            return Err(RequestError::NotNegotiated);
        }
        let unknown_flags = flags & !map_flags(self.accepted);
        if unknown_flags != 0 {
            return Err(RequestError::UnknownFlags(unknown_flags));
        }
        let index = self.domain_index(domain)?;
        let full = self.mappings >= self.options.limits.mappings;
        let Some(target) = self.domains.get_mut(index) else {
            return Err(RequestError::NoDomain(domain));
        };
        let store = match &mut target.kind {
            DomainKind::Mapped(store) => store,
            DomainKind::Bypass => return Err(RequestError::BypassDomain(domain)),
            DomainKind::Blocked => return Err(RequestError::Blocked(domain)),
        };

        let range = self.options.check_mapping(start, last, physical)?;
        if target
            .reserved
            .iter()
            .any(|reserved| reserved.overlaps(&range))
        {
            return Err(RequestError::Reserved(range));
        }
        if full {
            return Err(RequestError::LimitReached(LimitReached::Mappings));
        }

        let entry = Entry {
            start,
            last,
            physical,
            flags,
        };
        store.insert(entry).map_err(|error| match error {
            InsertError::Overlap => RequestError::Overlap(range),
            InsertError::OutOfMemory => RequestError::LimitReached(LimitReached::Memory),
        })?;
        // Insert into the store first, because removing the entry cannot fail.
        if let Some(mapping) = entry.mapping()
            && let Err(error) = self.sink.map(domain, &mapping)
        {
            store.remove_at(start);
            return Err(error.into());
        }
        self.mappings += 1;
        Ok(())
    }

    /// Handles an UNMAP request. On error nothing has changed, except after
    /// [`RequestError::Blocked`]: then the domain's endpoints have no access. An endpoint must not
    /// keep access to memory that the driver reuses, because Linux ignores the status of an UNMAP.
    #[inline]
    pub(super) fn unmap(
        &mut self,
        domain: DomainId,
        start: u64,
        last: u64,
    ) -> Result<(), RequestError> {
        if !self.has(VIRTIO_IOMMU_F_MAP_UNMAP) {
            return Err(RequestError::NotNegotiated);
        }
        let index = self.domain_index(domain)?;
        let Some(target) = self.domains.get_mut(index) else {
            return Err(RequestError::NoDomain(domain));
        };
        let store = match &mut target.kind {
            DomainKind::Mapped(store) => store,
            DomainKind::Bypass => return Err(RequestError::BypassDomain(domain)),
            DomainKind::Blocked => return Err(RequestError::Blocked(domain)),
        };
        let range = request_range(start, last)?;
        let span = store
            .covered(start, last)
            .map_err(|_| RequestError::Splits(range))?;
        let sink = &mut self.sink;
        let mapped = store
            .span(span)
            .filter_map(Entry::mapping)
            .try_for_each(|mapping| sink.unmap(domain, &mapping));
        if mapped.is_err() {
            self.block_domain(index);
            return Err(RequestError::Blocked(domain));
        }
        store.remove(span);
        self.mappings = self.mappings.saturating_sub(span.count);
        Ok(())
    }

    /// Handles an `IOTLB_FLUSH` (issue 204 of the specification, [`crate::lazy`]). When the batch
    /// has ended, no endpoint of the domain can access what was unmapped before this request.
    ///
    /// On error nothing has changed, except after [`RequestError::Blocked`]: then the domain's
    /// endpoints have no access, as after an UNMAP that fails.
    pub(super) fn iotlb_flush(&mut self, domain: DomainId) -> Result<(), RequestError> {
        let index = self.domain_index(domain)?;
        match self.domains.get(index) {
            None => return Err(RequestError::NoDomain(domain)),
            Some(target) if matches!(target.kind, DomainKind::Blocked) => {
                return Err(RequestError::Blocked(domain));
            }
            Some(target) if !target.lazy => return Err(RequestError::NotLazy(domain)),
            Some(_) => {}
        }
        if self.sink.iotlb_flush(domain).is_err() {
            self.block_domain(index);
            return Err(RequestError::Blocked(domain));
        }
        Ok(())
    }

    /// Removes all access from the domain's endpoints, because the sink's state is unknown.
    #[cold]
    fn block_domain(&mut self, index: usize) {
        let Some(domain) = self.domains.get_mut(index) else {
            return;
        };
        for endpoint in &self.endpoints {
            if endpoint.domain() == Some(domain.id) {
                self.sink.block(endpoint.id);
            }
        }
        self.sink.destroy(domain.id);
        if let DomainKind::Mapped(store) = core::mem::replace(&mut domain.kind, DomainKind::Blocked)
        {
            self.mappings = self.mappings.saturating_sub(store.len());
        }
    }
}

/// Returns the flags that a MAP may have if the driver has accepted `features`.
#[inline]
pub(super) const fn map_flags(features: u64) -> u32 {
    let both = VIRTIO_IOMMU_MAP_F_READ | VIRTIO_IOMMU_MAP_F_WRITE;
    if features >> VIRTIO_IOMMU_F_MMIO & 1 == 0 {
        both
    } else {
        both | VIRTIO_IOMMU_MAP_F_MMIO
    }
}

impl Options {
    /// Checks that `start..=last` can be mapped to `physical` onwards in any domain. Returns the
    /// range.
    #[inline]
    pub(super) fn check_mapping(
        &self,
        start: u64,
        last: u64,
        physical: u64,
    ) -> Result<IovaRange, RequestError> {
        let range = request_range(start, last)?;
        let below = self.granule().wrapping_sub(1);
        // `last` is inclusive, so the next address is aligned if all low bits of `last` are set.
        // This includes 2^64 - 1 without a special case.
        if (start | physical | !last) & below != 0 {
            return Err(RequestError::Misaligned(range));
        }
        if !self.input.contains(&range) {
            return Err(RequestError::OutsideInput(range));
        }
        physical
            .checked_add(last - start)
            .and_then(|end| PhysRange::inclusive(PhysAddr::new(physical), PhysAddr::new(end)))
            .filter(|target| self.physical.contains(target))
            .ok_or(RequestError::OutsidePhysical(range))?;
        Ok(range)
    }
}

/// Returns `virt_start..=virt_end` of a request as a range.
#[inline]
fn request_range(start: u64, last: u64) -> Result<IovaRange, RequestError> {
    IovaRange::inclusive(Iova::new(start), Iova::new(last))
        .ok_or(RequestError::EndBeforeStart { start, end: last })
}
