//! Full emulation of a VT-d unit for a guest (W07; QEMU's `intel-iommu` with caching mode).
//!
//! The guest's kernel owns an I/O page table in its memory, as on bare metal. It submits
//! invalidations through a queue of descriptors, and each write of the tail register is an exit.
//! The host decodes the descriptors, walks the guest's table for these pages, and updates its
//! shadow table, which the hardware walks. The emulated unit reports caching mode (CM = 1): the
//! guest must also invalidate after a map, so each map is an exit, too.

use std::collections::BTreeMap;
use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_hw::InvalidationDescriptor;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Cursor, DirtyLines, Levels, MapError, MapRequest, SecondStage, Table, UnmapError,
    walk,
};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Iova, Permissions, Pfn, PfnRange,
    PhysAddr, Ticket, Unmapped,
};

use super::guest_queue::GuestQueue;
use super::{HostBackend, HostHardware, HostUnit, KickCause, QueueStats, SharedHost};
use crate::components::{HostOf, ReplayTable};
use crate::error::LabError;
use crate::hardware::Vtd;

/// The emulated unit, and the guest's driver for its queue.
#[derive(Debug)]
pub struct EmulatedHost {
    memory: Rc<Arena>,
    frames: Rc<Frames<Rc<Arena>>>,
    coherency: Coherency,
    unit: HostUnit,
    queue: GuestQueue,
    /// Domains by number, which counts up from 1.
    domains: Vec<Option<ShadowedDomain>>,
    /// Ranges removed from a shadow table, which the unit may still cache.
    removed: Vec<(DomainId, PfnRange, CachedLevels)>,
    dirty: DirtyLines,
    /// True after a malformed descriptor or a failed update: the queue has stopped.
    broken: bool,
    traffic: QueueStats,
}

/// A domain with the guest's table and the host's shadow of it.
#[derive(Debug)]
struct ShadowedDomain {
    guest_root: PhysAddr,
    shadow: Table<SecondStage>,
    /// Shadowed pages: frame and permissions.
    pages: BTreeMap<Pfn, (PhysAddr, Permissions)>,
}

const fn format() -> SecondStage {
    SecondStage::new(Levels::Four)
}

impl HostBackend for EmulatedHost {
    type Unit = Vtd;

    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit,
    ) -> Result<Self, LabError> {
        Ok(Self {
            memory: Rc::clone(memory),
            frames: Rc::clone(frames),
            coherency,
            unit,
            queue: GuestQueue::new(frames)?,
            domains: Vec::new(),
            removed: Vec::new(),
            dirty: DirtyLines::new(),
            broken: false,
            traffic: QueueStats::default(),
        })
    }

    #[inline]
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit) -> R) -> R {
        act(&mut self.unit)
    }

    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.invalidate(&request, KickCause::Unmap)
    }

    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.broken {
            return Err(InvalidationError::Failed);
        }
        self.queue.is_completed(&self.memory, ticket)
    }

    fn traffic(&self) -> QueueStats {
        QueueStats {
            invalidations: self.unit.invalidations(),
            ..self.traffic
        }
    }
}

/// The guest's driver.
impl EmulatedHost {
    /// Submits an invalidation with a wait descriptor and writes the tail register.
    fn invalidate(
        &mut self,
        request: &Invalidation,
        cause: KickCause,
    ) -> Result<Ticket, InvalidationError> {
        let descriptor =
            InvalidationDescriptor::covering(request).ok_or(InvalidationError::Unsupported)?;
        let ticket = self.queue.submit(&self.memory, descriptor)?;
        self.traffic.requests += 1;
        self.traffic.kick(cause);
        self.on_tail_write();
        self.is_completed(ticket)?;
        Ok(ticket)
    }
}

/// The host's side: it handles exits and keeps the shadow tables.
impl EmulatedHost {
    /// Creates the guest's table of a domain and its shadow, as the host does when the guest writes
    /// the context entry.
    fn attach(&mut self, domain: DomainId) -> Result<(Table<SecondStage>, PhysAddr), LabError> {
        let (memory, frames) = (&*self.memory, &*self.frames);
        let guest = Table::new(format(), domain, Coherency::Coherent, memory, frames)?;
        let shadow = Table::new(format(), domain, self.coherency, memory, frames)?;
        let root = shadow.root();
        let at = usize::from(domain.get());
        if self.domains.len() <= at {
            self.domains.resize_with(at + 1, || None);
        }
        self.domains[at] = Some(ShadowedDomain {
            guest_root: guest.root(),
            shadow,
            pages: BTreeMap::new(),
        });
        Ok((guest, root))
    }

    /// Handles the exit of a write to the tail register: processes all new descriptors. A malformed
    /// one stops the queue (IQE).
    fn on_tail_write(&mut self) {
        while !self.broken
            && let Some(descriptor) = self.queue.next(&self.memory)
        {
            let done = descriptor.and_then(|descriptor| self.process(&descriptor));
            self.broken |= done.is_err();
        }
    }

    fn process(&mut self, descriptor: &InvalidationDescriptor) -> Result<(), InvalidationError> {
        match descriptor {
            InvalidationDescriptor::IotlbPages { domain, range, .. } => {
                for page in range.lo().get()..=range.hi().get() {
                    self.update(*domain, Pfn::new(page))?;
                }
            }
            InvalidationDescriptor::IotlbDomain(domain) => {
                self.update_all(*domain)?;
                self.flush_domain(*domain)?;
            }
            InvalidationDescriptor::IotlbGlobal => {
                for number in 0..self.domains.len() {
                    if let Ok(number) = u16::try_from(number) {
                        self.update_all(DomainId::new(number))?;
                    }
                }
            }
            // The devices of a replay keep their contexts.
            InvalidationDescriptor::Context(_) | InvalidationDescriptor::AllContexts => {}
            InvalidationDescriptor::Wait { status, data } => {
                self.flush()?;
                GuestQueue::write_status(&self.memory, *status, *data)?;
            }
            // The emulated unit has no scalable mode.
            InvalidationDescriptor::FirstStage { .. }
            | InvalidationDescriptor::FirstStagePages { .. } => {
                return Err(InvalidationError::Unsupported);
            }
        }
        Ok(())
    }

    /// Updates every shadowed page of `domain`. Caching mode requires an invalidation of each new
    /// page, so no other page can have changed.
    fn update_all(&mut self, domain: DomainId) -> Result<(), InvalidationError> {
        let shadowed = self.domains.get(usize::from(domain.get()));
        let Some(shadowed) = shadowed.and_then(Option::as_ref) else {
            return Ok(());
        };
        let pages: Vec<_> = shadowed.pages.keys().copied().collect();
        pages
            .into_iter()
            .try_for_each(|page| self.update(domain, page))
    }

    /// Makes the shadow of a page equal to the guest's entry.
    fn update(&mut self, domain: DomainId, page: Pfn) -> Result<(), InvalidationError> {
        let shadowed = self.domains.get_mut(usize::from(domain.get()));
        let Some(shadowed) = shadowed.and_then(Option::as_mut) else {
            return Ok(());
        };
        let memory = &*self.memory;
        let start = Cursor::root(&format(), shadowed.guest_root);
        let entry = walk(&format(), memory, start, page.iova(), |_| {}).ok();
        let entry = entry.map(|leaf| (leaf.translate(page.iova()), leaf.permissions));
        let before = shadowed.pages.get(&page).copied();
        if entry == before {
            return Ok(());
        }
        let range = PfnRange::inclusive(page, page).ok_or(InvalidationError::Failed)?;
        if before.is_some() {
            shadowed.pages.remove(&page);
            let (_, levels) = shadowed
                .shadow
                .unmap_nosync(memory, range, &mut self.dirty)
                .map_err(|_| InvalidationError::Failed)?;
            add_removed(&mut self.removed, domain, range, levels);
        }
        if let Some((pa, permissions)) = entry {
            if before.is_some() {
                // The unit must not keep the old frame while the new one is in the table.
                self.flush()?;
            }
            let shadowed = self.domains.get_mut(usize::from(domain.get()));
            let shadowed = shadowed.and_then(Option::as_mut);
            let shadowed = shadowed.ok_or(InvalidationError::Failed)?;
            let request = MapRequest {
                iova: page.iova(),
                pa,
                pages: 1,
                permissions,
            };
            shadowed
                .shadow
                .map(&*self.memory, &*self.frames, request)
                .map_err(|_| InvalidationError::Failed)?;
            shadowed.pages.insert(page, (pa, permissions));
        }
        Ok(())
    }

    /// Invalidates the unit for all of `domain`, if pages were removed, and waits.
    fn flush_domain(&mut self, domain: DomainId) -> Result<(), InvalidationError> {
        if self.removed.iter().all(|(other, ..)| *other != domain) {
            return Ok(());
        }
        self.dirty.sync(&*self.memory);
        self.unit.invalidate(Invalidation::Domain(domain))?;
        self.removed.retain(|(other, ..)| *other != domain);
        Ok(())
    }

    /// Invalidates the unit for all removed ranges, and waits.
    fn flush(&mut self) -> Result<(), InvalidationError> {
        if self.removed.is_empty() {
            return Ok(());
        }
        self.dirty.sync(&*self.memory);
        while let Some((domain, range, levels)) = self.removed.last().copied() {
            self.unit.invalidate(Invalidation::Pages {
                domain,
                range,
                levels,
            })?;
            self.removed.pop();
        }
        Ok(())
    }
}

/// Adds `range` to `removed`. Joins it with the last range if it follows directly.
fn add_removed(
    removed: &mut Vec<(DomainId, PfnRange, CachedLevels)>,
    domain: DomainId,
    range: PfnRange,
    levels: CachedLevels,
) {
    if let Some((last_domain, run, run_levels)) = removed.last_mut()
        && *last_domain == domain
        && run.hi().get() + 1 == range.lo().get()
        && let Some(joined) = PfnRange::inclusive(run.lo(), range.hi())
    {
        *run = joined;
        *run_levels = (*run_levels).max(levels);
        return;
    }
    removed.push((domain, range, levels));
}

/// The guest's table of a domain, in the guest's memory.
#[derive(Debug)]
pub struct EmulatedTable {
    host: SharedHost<EmulatedHost>,
    guest: Table<SecondStage>,
    /// Root of the shadow. The guest does not know it.
    root: PhysAddr,
}

/// Creates the table of a domain behind an emulated unit.
///
/// # Errors
/// Memory is short.
pub(crate) fn emulated_table(
    domain: DomainId,
    _: Coherency,
    _: &Arena,
    _: &Frames<Rc<Arena>>,
    host: Option<&HostOf<EmulatedTable>>,
) -> Result<EmulatedTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a host"))?;
    let (guest, root) = host.with(|host| host.attach(domain))?;
    Ok(EmulatedTable {
        host: host.clone(),
        guest,
        root,
    })
}

impl ReplayTable for EmulatedTable {
    type Hardware = HostHardware<EmulatedHost>;

    fn root(&self) -> PhysAddr {
        self.root
    }
}

impl IoPageTable for EmulatedTable {
    type PerCpu = ();
    type Pages = ();

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.guest.domain()
    }

    fn map<P: Platform>(
        &self,
        (): &mut (),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.map_nosync(&mut (), platform, request)
    }

    /// Writes the entries to the guest's table, without an exit.
    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.host.with(|host| {
            let (memory, frames) = (&*host.memory, &*host.frames);
            self.guest.map(memory, frames, request)
        })
    }

    /// Caching mode: invalidates the pages that were not present before a map or a list.
    fn iotlb_sync_map<P: Platform>(
        &self,
        _: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        self.invalidate_not_present(range)
    }

    /// Clears the guest's entries, without an exit. The device uses the shadow until the layer's
    /// invalidation.
    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.host.with(|host| {
            let (unmapped, levels) = self.guest.unmap(&*host.memory, range)?;
            Ok((unmapped, levels, ()))
        })
    }

    fn is_mapped<P: Platform>(&self, _: &P, page: Pfn) -> Option<bool> {
        let found = |iova: Iova| {
            self.host
                .with(|host| self.guest.lookup(&*host.memory, iova).is_some())
        };
        Some(found(page.iova()))
    }

    fn is_empty<P: Platform>(&self, _: &P) -> bool {
        self.host.with(|host| self.guest.is_empty(&*host.memory))
    }

    /// The emulated unit snoops the guest's table.
    fn sync<P: Platform>(&self, (): &mut (), _: &mut P) {}
}

impl EmulatedTable {
    fn invalidate_not_present(&self, range: PfnRange) -> Result<(), InvalidationError> {
        let request = Invalidation::Pages {
            domain: self.guest.domain(),
            range,
            levels: CachedLevels::Leaves,
        };
        self.host
            .with(|host| host.invalidate(&request, KickCause::Map))
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::LayerPlatform;

    /// A malformed descriptor stops the queue: no later invalidation completes.
    #[test]
    fn a_malformed_descriptor_stops_the_queue() {
        let own = LayerPlatform::timed().unwrap();
        let unit = HostUnit::CostOnly(own.queue());
        let coherency = Coherency::Coherent;
        let mut host = EmulatedHost::new(&own.arena, &own.frames, coherency, unit).unwrap();
        let request = Invalidation::Domain(DomainId::new(1));
        let ticket = host.commit(request).unwrap();
        assert_eq!(host.is_completed(ticket), Ok(true));
        host.queue.push(&own.arena, [0xf, 0]).unwrap();
        assert_eq!(host.commit(request), Err(InvalidationError::Failed));
        assert_eq!(host.is_completed(ticket), Err(InvalidationError::Failed));
    }

    /// The shadow follows the guest's table only for invalidated pages, also after a page changed.
    #[test]
    fn the_shadow_follows_invalidated_pages() {
        let own = LayerPlatform::timed().unwrap();
        let unit = HostUnit::CostOnly(own.queue());
        let coherency = Coherency::Coherent;
        let mut host = EmulatedHost::new(&own.arena, &own.frames, coherency, unit).unwrap();
        let domain = DomainId::new(1);
        let (guest, root) = host.attach(domain).unwrap();
        let map = |page: u64, frame: u64| {
            let request = MapRequest {
                iova: Iova::new(page << 12),
                pa: PhysAddr::new(frame << 12),
                pages: 1,
                permissions: Permissions::READ,
            };
            guest.map(&*own.arena, &*own.frames, request).unwrap();
        };
        let pages = |page| PfnRange::new(Pfn::new(page), 1).unwrap();
        let of = |page: u64| Invalidation::Pages {
            domain,
            range: pages(page),
            levels: CachedLevels::Leaves,
        };
        let shadow = |page: u64| {
            let start = Cursor::root(&format(), root);
            let found = walk(&format(), &*own.arena, start, Iova::new(page << 12), |_| {});
            found.ok().map(|leaf| leaf.base.get() >> 12)
        };
        map(5, 7);
        map(6, 8);
        host.commit(of(5)).unwrap();
        assert_eq!((shadow(5), shadow(6)), (Some(7), None));
        let _ = guest.unmap(&*own.arena, pages(5)).unwrap();
        assert_eq!(shadow(5), Some(7));
        map(5, 9);
        host.commit(of(5)).unwrap();
        assert_eq!(shadow(5), Some(9));
        let _ = guest.unmap(&*own.arena, pages(5)).unwrap();
        host.commit(of(6)).unwrap();
        assert_eq!((shadow(5), shadow(6)), (Some(9), Some(8)));
        host.commit(Invalidation::Domain(domain)).unwrap();
        assert_eq!((shadow(5), shadow(6)), (None, Some(8)));
        assert_eq!(host.traffic().invalidations, 2);
        // A page that only leaves is invalidated before the wait descriptor's status.
        let _ = guest.unmap(&*own.arena, pages(6)).unwrap();
        host.commit(of(6)).unwrap();
        assert_eq!((shadow(6), host.traffic().invalidations), (None, 3));
    }
}
