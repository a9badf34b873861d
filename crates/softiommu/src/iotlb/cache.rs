//! The IOTLB: the effects of messages.

mod install;

use std::collections::BTreeMap;

use ringfence_types::{
    DomainId, Fault, FaultReason, Iova, IovaRange, PageSize, Permissions, PhysAddr, RequesterId,
};

use super::error::IotlbError;
use super::message::Message;
use super::misses::{MissAction, MissId, MissOutcome, Misses};
use super::regions::Regions;
use super::resident::{CachedPage, ResidentPages};
use crate::domain_mut::DomainMut;
use crate::error::{DomainMapError, DomainMapReason, IommuError};
use crate::iommu::{SoftIommu, SoftIommuLimits, may_wait};
use crate::reader::{Reader, permissions};
use crate::table::Width;

const PAGE: PageSize = PageSize::Size4K;

/// The only domain.
const DOMAIN: DomainId = DomainId::new(0);

/// Resource limits. No message of the front-end can exceed them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IotlbLimits {
    /// Maximum number of cached 4 KiB pages; at least one.
    pub pages: usize,
    /// Maximum number of pages of one update to cache in addition to missed pages. They follow the
    /// first missed page.
    pub extra_pages: usize,
    /// Maximum number of tables, 4 KiB each; at least as many as one page needs.
    pub tables: usize,
    /// Maximum number of pending misses.
    pub misses: usize,
    /// Address width of the cached IOVAs.
    pub width: Width,
    /// Maximum number of readers: one per thread that accesses memory for the device.
    pub readers: usize,
}

impl Default for IotlbLimits {
    /// 8192 pages in 4 MiB of tables, 64 pages of an update, 64 misses, 48 bits, 32 readers.
    fn default() -> Self {
        Self {
            pages: 8192,
            extra_pages: 64,
            tables: 1024,
            misses: 64,
            width: Width::BITS_48,
            readers: 32,
        }
    }
}

/// The pages of an update to cache, without duplicates.
struct PagesToCache {
    /// Missed pages, oldest miss first.
    missed: Vec<u64>,
    /// Pages that follow the first missed page, in order.
    extra: Vec<u64>,
}

impl PagesToCache {
    /// Returns all pages, and whether each was missed.
    fn in_order(&self) -> impl Iterator<Item = (u64, bool)> {
        let missed = self.missed.iter().map(|page| (*page, true));
        missed.chain(self.extra.iter().map(|page| (*page, false)))
    }
}

/// The IOTLB of one device, over the memory `M` that its front-end has shared. See the
/// [module](super).
///
/// As with [`SoftIommu`], a thread that changes it must not be in a read section. Protect it with a
/// lock that no reader takes while online.
pub struct Iotlb<M> {
    unit: SoftIommu<M>,
    device: RequesterId,
    limits: IotlbLimits,
    regions: Regions,
    resident: ResidentPages,
    misses: Misses,
}

impl<M> Iotlb<M> {
    /// Creates an empty IOTLB over `memory`, of which the front-end has shared `regions`.
    ///
    /// # Errors
    /// [`IotlbError::Unit`] if there is no memory for the tables.
    pub fn new(
        mut limits: IotlbLimits,
        device: RequesterId,
        memory: M,
        regions: Regions,
    ) -> Result<Self, IotlbError> {
        let mut unit = SoftIommu::new(
            SoftIommuLimits {
                width: limits.width,
                tables: limits.tables,
                domains: 1,
                endpoints: 1,
                readers: limits.readers,
            },
            memory,
        );
        unit.add_endpoint(device)?;
        unit.create_domain(DOMAIN)?;
        unit.attach(device, DOMAIN)?;
        limits.pages = limits.pages.max(1);
        Ok(Self {
            unit,
            device,
            limits,
            regions,
            resident: ResidentPages::new(limits.pages),
            misses: Misses::default(),
        })
    }

    /// Creates a reader for one thread that accesses memory for the device.
    ///
    /// # Errors
    /// The limit of readers is reached.
    pub fn reader(&self) -> Result<Reader<M>, IommuError> {
        self.unit.reader(self.device)
    }

    /// Returns the number of cached pages.
    pub fn pages(&self) -> usize {
        self.resident.len()
    }

    /// Returns the number of pending misses.
    pub fn misses(&self) -> usize {
        self.misses.len()
    }

    /// Returns the maximum number of pending misses.
    #[cfg(feature = "vhost-user")]
    pub(super) fn max_misses(&self) -> usize {
        self.limits.misses
    }

    /// Replaces the shared memory (`VHOST_USER_SET_MEM_TABLE`, `ADD_MEM_REG`, `REM_MEM_REG`). On
    /// return, no reader can access the old memory and the IOTLB is empty. Answers to pending
    /// misses are ignored.
    ///
    /// # Errors
    /// [`IotlbError::ReadSectionOpen`] if this thread is in a read section. Nothing has changed.
    pub fn set_memory(&mut self, memory: M, regions: Regions) -> Result<(), IotlbError> {
        may_wait()?;
        self.invalidate(None)?;
        self.unit.set_memory(memory)?;
        self.regions = regions;
        Ok(())
    }

    /// Executes a message of the front-end. After `Ok`, the caller can acknowledge the message.
    /// After an invalidation, no reader holds a translation of the range.
    ///
    /// # Errors
    /// The caller must acknowledge the message as failed. The IOTLB is unchanged, except that pages
    /// may have been evicted: to make room, or because a rejected update contradicts them.
    pub fn receive(&mut self, message: &Message) -> Result<(), IotlbError> {
        may_wait()?;
        match *message {
            Message::Update {
                range,
                user,
                permissions,
            } => self.update(range, user, permissions),
            Message::Invalidate(range) => self.invalidate(range),
            Message::Miss { .. } | Message::AccessFail { .. } => Err(IotlbError::NotForUs),
        }
    }

    /// Handles a fault of a reader of this device. Returns the action that the caller must take.
    ///
    /// # Errors
    /// [`IotlbError::NotAMiss`] if the fault is not a missing translation or permission of this
    /// device, [`IotlbError::TooManyMisses`] at the limit.
    pub fn miss(&mut self, fault: &Fault) -> Result<MissAction, IotlbError> {
        match fault.reason {
            FaultReason::NotPresent | FaultReason::ReadDenied | FaultReason::WriteDenied => {}
            _ => return Err(IotlbError::NotAMiss(*fault)),
        }
        if fault.device != self.device {
            return Err(IotlbError::NotAMiss(*fault));
        }
        let (page, required) = (page_of(fault.iova), permissions(fault.access));
        if self.allows(page, required) {
            return Ok(MissAction::Present);
        }
        if let Some(id) = self.misses.find(page, required) {
            return Ok(MissAction::Wait(id));
        }
        if self.misses.len() >= self.limits.misses {
            return Err(IotlbError::TooManyMisses);
        }
        let id = self.misses.add(page, required);
        let iova = fault.iova;
        Ok(MissAction::Send(id, Message::Miss { iova, required }))
    }

    /// Returns true if the translation that the miss requested has arrived before the reply. The
    /// miss stays pending until the reply.
    pub fn has_arrived(&self, miss: MissId) -> bool {
        self.misses
            .get(miss)
            .is_some_and(|(page, required)| self.allows(page, required))
    }

    /// Completes a miss after the reply of the front-end; `done` is the status in the reply.
    ///
    /// # Errors
    /// [`IotlbError::NoMiss`] if `miss` is not pending.
    pub fn replied(&mut self, miss: MissId, done: bool) -> Result<MissOutcome, IotlbError> {
        let (page, required) = self.misses.remove(miss).ok_or(IotlbError::NoMiss)?;
        Ok(if self.allows(page, required) {
            MissOutcome::Present
        } else if done {
            MissOutcome::Invalidated
        } else {
            MissOutcome::Refused
        })
    }

    fn allows(&self, page: u64, required: Permissions) -> bool {
        self.resident
            .get(page)
            .is_some_and(|resident| resident.permissions.contains(required))
    }

    fn invalidate(&mut self, range: Option<IovaRange>) -> Result<(), IotlbError> {
        let range = range.unwrap_or(IovaRange::ALL).to_pages(PAGE);
        self.misses.invalidated(range);
        if range == IovaRange::ALL {
            self.resident.clear();
        } else {
            self.resident
                .remove_range(page_of(range.start())..=page_of(range.last()));
        }
        // Unmap the whole range without regard to `resident`: the effect of an invalidation must
        // not depend on bookkeeping. It cannot fail: the range is whole pages and the thread has no
        // read section open.
        self.domain()?
            .unmap(range)
            .map_err(|_| read_section_open())?;
        Ok(())
    }

    /// Handles an update. Whether the update is accepted or rejected, it leaves no older state of
    /// the pages it touches. Neither an old physical address nor a permission outside the update
    /// remains.
    fn update(
        &mut self,
        range: IovaRange,
        user: u64,
        permissions: Permissions,
    ) -> Result<(), IotlbError> {
        let memory = self.regions.find(user, range.bytes());
        let outdated = self.outdated(range, memory, permissions);
        let (memory, first, last) = match self.whole_pages(range, user, memory) {
            Ok(found) => found,
            Err(refused) => {
                self.evict(outdated)?;
                return Err(refused);
            }
        };
        let pages = self.pages_to_cache(first, last);
        let answered = self
            .misses
            .answered(first, last, |page, required| self.allows(page, required));
        let mut grants: BTreeMap<u64, CachedPage> = pages
            .missed
            .iter()
            .chain(&pages.extra)
            .map(|page| {
                let memory = memory_of(range, memory, *page);
                let permissions = self.granted(*page, memory, permissions, answered);
                let grant = CachedPage {
                    memory,
                    permissions,
                };
                (*page, grant)
            })
            .collect();
        self.evict_for_update(&pages, &mut grants, outdated)?;
        self.install(&pages, &grants)
    }

    /// Returns the cached pages that an update of `range` touches, fully or partly, and
    /// contradicts. Iterates over cached pages only, so a large update costs no more. If `memory`
    /// is `None`, every touched page counts as contradicted.
    fn outdated(
        &self,
        range: IovaRange,
        memory: Option<PhysAddr>,
        offered: Permissions,
    ) -> Vec<u64> {
        let pages = page_of(range.start())..=page_of(range.last());
        let contradicted = |page: u64, resident: &CachedPage| {
            let same =
                memory.is_some_and(|memory| memory_of(range, memory, page) == resident.memory);
            !same || !offered.contains(resident.permissions)
        };
        self.resident
            .range(pages)
            .filter(|(page, resident)| contradicted(*page, resident))
            .map(|(page, _)| page)
            .collect()
    }

    /// Returns the physical address and the first and last page of a valid update.
    fn whole_pages(
        &self,
        range: IovaRange,
        user: u64,
        memory: Option<PhysAddr>,
    ) -> Result<(PhysAddr, u64, u64), IotlbError> {
        let memory = memory.ok_or(IotlbError::NotShared { range, user })?;
        let no_page = IotlbError::NoPage { range, memory };
        let start = range.start().get();
        if !(start ^ memory.get()).is_multiple_of(PAGE.bytes()) {
            return Err(no_page);
        }
        // Whole pages only: a partial page at either end cannot be mapped.
        let first = start.div_ceil(PAGE.bytes());
        let end = match range.last().checked_add(1) {
            Some(end) => page_of(end),
            None => page_of(range.last()).saturating_add(1),
        };
        let last = end
            .checked_sub(1)
            .filter(|last| *last >= first)
            .ok_or(no_page)?;
        if !self.limits.width.holds(&range) {
            let reason = DomainMapReason::BeyondWidth;
            let domain = DOMAIN;
            return Err(IotlbError::Map(DomainMapError {
                domain,
                range,
                reason,
            }));
        }
        Ok((memory, first, last))
    }

    /// Returns the permissions to grant for an update that offers `offered`. If a miss is pending
    /// in its range, grants at most what was requested, now or since the page was cached: QEMU
    /// checks only the requested access and then reports both as allowed. Without one, or if
    /// nothing requested is offered, returns `offered`.
    fn granted(
        &self,
        page: u64,
        memory: PhysAddr,
        offered: Permissions,
        answered: Option<Permissions>,
    ) -> Permissions {
        let Some(requested) = answered else {
            return offered;
        };
        let before = self.resident.get(page);
        let before = before.filter(|resident| resident.memory == memory);
        let requested = before.map_or(requested, |resident| requested.union(resident.permissions));
        offered.intersect(requested).unwrap_or(offered)
    }

    /// Returns the pages of an update to cache, at most as many as the IOTLB holds. Omits pages
    /// whose translation may have been looked up before an invalidation.
    fn pages_to_cache(&self, first: u64, last: u64) -> PagesToCache {
        let is_trusted = |page: &u64| !self.misses.is_doubtful(*page);
        let mut missed = Vec::new();
        for page in self.misses.pages(first, last).filter(is_trusted) {
            if missed.len() < self.limits.pages && !missed.contains(&page) {
                missed.push(page);
            }
        }
        let from = self.misses.pages(first, last).min().unwrap_or(first);
        let extra_pages = self.limits.extra_pages;
        let end = from.saturating_add(u64::try_from(extra_pages).unwrap_or(u64::MAX));
        let extra = (from..=end.min(last))
            .filter(|page| is_trusted(page) && !missed.contains(page))
            .take(extra_pages.min(self.limits.pages.saturating_sub(missed.len())))
            .collect();
        PagesToCache { missed, extra }
    }

    fn domain(&mut self) -> Result<DomainMut<'_, M>, IotlbError> {
        Ok(self.unit.domain(DOMAIN)?)
    }
}

fn read_section_open() -> IotlbError {
    IotlbError::ReadSectionOpen(crate::error::ReadSectionOpen)
}

/// Returns the physical address of `page` if `range` starts at `memory`.
fn memory_of(range: IovaRange, memory: PhysAddr, page: u64) -> PhysAddr {
    let start = range.start().get();
    memory.wrapping_add((page << PAGE.shift()).wrapping_sub(start))
}

fn page_of(iova: Iova) -> u64 {
    iova.get() >> PAGE.shift()
}
