//! The IOTLB: cached pages, eviction, and the effects of messages.

use std::collections::{BTreeMap, VecDeque};

use ringfence_types::{
    DomainId, Fault, FaultReason, Iova, IovaRange, PageSize, Permissions, PhysAddr, RequesterId,
};

use super::error::IotlbError;
use super::message::Message;
use super::misses::{MissAction, MissId, MissOutcome, Misses};
use super::regions::Regions;
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
    /// Number of pages of one update to cache in addition to missed pages.
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

/// A cached page.
#[derive(Debug, Clone, Copy)]
struct CachedPage {
    memory: PhysAddr,
    permissions: Permissions,
    /// Sequence number of the insertion.
    number: u64,
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
    resident: BTreeMap<u64, CachedPage>,
    /// Pages in order of insertion. Evicted or replaced pages stay in the list under their old
    /// number.
    arrivals: VecDeque<(u64, u64)>,
    number: u64,
    misses: Misses,
}

impl<M> Iotlb<M> {
    /// Creates an empty IOTLB over `memory`, of which the front-end has shared `regions`.
    pub fn new(
        limits: IotlbLimits,
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
        Ok(Self {
            unit,
            device,
            limits,
            regions,
            resident: BTreeMap::new(),
            arrivals: VecDeque::new(),
            number: 0,
            misses: Misses::default(),
        })
    }

    /// Creates a reader for one thread that accesses memory for the device.
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
    pub(super) fn most_misses(&self) -> usize {
        self.limits.misses
    }

    /// Replaces the shared memory (`VHOST_USER_SET_MEM_TABLE`, `ADD_MEM_REG`, `REM_MEM_REG`). On
    /// return, no reader can access the old memory and the IOTLB is empty. Answers to pending
    /// misses are ignored.
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
    pub fn replied(&mut self, miss: MissId, done: bool) -> Result<MissOutcome, IotlbError> {
        let (page, required) = self.misses.remove(miss).ok_or(IotlbError::NoMiss)?;
        Ok(match done {
            _ if self.allows(page, required) => MissOutcome::Present,
            true => MissOutcome::Invalidated,
            false => MissOutcome::Refused,
        })
    }

    fn allows(&self, page: u64, required: Permissions) -> bool {
        self.resident
            .get(&page)
            .is_some_and(|resident| resident.permissions.union(required) == resident.permissions)
    }

    fn invalidate(&mut self, range: Option<IovaRange>) -> Result<(), IotlbError> {
        let all = IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX));
        let Some(range) = range.or(all).map(|range| range.to_pages(PAGE)) else {
            return Ok(());
        };
        self.misses.invalidated(range);
        let (first, last) = (page_of(range.start()), page_of(range.last()));
        if first == 0 && last == page_of(Iova::new(u64::MAX)) {
            self.resident.clear();
            self.arrivals.clear();
        } else {
            while let Some((&page, _)) = self.resident.range(first..=last).next() {
                self.resident.remove(&page);
            }
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
        let grants: BTreeMap<u64, (PhysAddr, Permissions)> = pages
            .into_iter()
            .map(|page| {
                let memory = memory_of(range, memory, page);
                (
                    page,
                    (memory, self.granted(page, memory, permissions, answered)),
                )
            })
            .collect();
        self.make_room(&grants, outdated)?;
        for (page, (memory, permissions)) in grants {
            if !self.resident.contains_key(&page) {
                self.install(page, memory, permissions)?;
            }
        }
        Ok(())
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
            !same || resident.permissions.union(offered) != offered
        };
        self.resident
            .range(pages)
            .filter(|(page, resident)| contradicted(**page, resident))
            .map(|(page, _)| *page)
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

    /// Returns the permissions to grant for an update that grants `offered`: at most those
    /// requested, now or since the page was cached. QEMU checks only the requested access and then
    /// reports both as allowed.
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
        let before = self.resident.get(&page);
        let before = before.filter(|resident| resident.memory == memory);
        let requested = before.map_or(requested, |resident| requested.union(resident.permissions));
        // The update does not grant the requested permission; use what it grants.
        Permissions::from_bits(offered.bits() & requested.bits()).unwrap_or(offered)
    }

    /// Returns the pages of an update to cache: the missed pages, and some that follow the first of
    /// them. Omits pages whose translation may have been looked up before an invalidation. Sorted,
    /// without duplicates.
    fn pages_to_cache(&self, first: u64, last: u64) -> Vec<u64> {
        let from = self.misses.pages(first, last).min().unwrap_or(first);
        let extra = u64::try_from(self.limits.extra_pages).unwrap_or(u64::MAX);
        let end = from.saturating_add(extra).min(last.saturating_add(1));
        let mut pages: Vec<u64> = self.misses.pages(first, last).chain(from..end).collect();
        pages.sort_unstable();
        pages.dedup();
        pages.retain(|page| !self.misses.is_doubtful(*page));
        pages.truncate(self.limits.pages.max(1));
        pages
    }

    /// Evicts the pages in `outdated`, old translations of `pages`, and, if there is no room, the
    /// oldest pages. Waits for readers once.
    fn make_room(
        &mut self,
        pages: &BTreeMap<u64, (PhysAddr, Permissions)>,
        outdated: Vec<u64>,
    ) -> Result<(), IotlbError> {
        let mut evicted = outdated;
        for page in &evicted {
            self.resident.remove(page);
        }
        for (page, grant) in pages {
            if let Some(resident) = self.resident.get(page)
                && (resident.memory, resident.permissions) != *grant
            {
                self.resident.remove(page);
                evicted.push(*page);
            }
        }
        let coming = pages
            .keys()
            .filter(|page| !self.resident.contains_key(*page))
            .count();
        let room = self.limits.pages.max(1);
        let mut kept_arrivals = Vec::new();
        while self.resident.len().saturating_add(coming) > room {
            let Some((page, number)) = self.arrivals.pop_front() else {
                break;
            };
            let current = self.resident.get(&page).map(|resident| resident.number);
            if current != Some(number) {
                continue;
            }
            if pages.contains_key(&page) {
                kept_arrivals.push((page, number));
            } else {
                self.resident.remove(&page);
                evicted.push(page);
            }
        }
        self.arrivals.extend(kept_arrivals);
        self.unmap_pages(evicted)
    }

    /// Evicts pages from the bookkeeping and from the table.
    fn evict(&mut self, pages: Vec<u64>) -> Result<(), IotlbError> {
        for page in &pages {
            self.resident.remove(page);
        }
        self.unmap_pages(pages)
    }

    fn unmap_pages(&mut self, pages: Vec<u64>) -> Result<(), IotlbError> {
        let ranges: Vec<IovaRange> = pages.into_iter().filter_map(range_of).collect();
        if !ranges.is_empty() {
            self.domain()?
                .unmap_all(ranges)
                .map_err(|_| read_section_open())?;
        }
        Ok(())
    }

    /// Maps a page that is not cached. The caller has checked that it is within the width and that
    /// no read section is open.
    fn install(
        &mut self,
        page: u64,
        memory: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), IotlbError> {
        let Some(range) = range_of(page) else {
            return Ok(());
        };
        let mut mapped = self.domain()?.map(range, memory, permissions);
        if let Err(error) = &mapped
            && error.reason == DomainMapReason::OutOfTables
        {
            // Distant pages need a table each. Evict all pages and retry.
            let all = std::mem::take(&mut self.resident).into_keys().collect();
            self.arrivals.clear();
            self.unmap_pages(all)?;
            mapped = self.domain()?.map(range, memory, permissions);
        }
        mapped.map_err(IotlbError::Map)?;
        self.number = self.number.wrapping_add(1);
        let number = self.number;
        let resident = CachedPage {
            memory,
            permissions,
            number,
        };
        self.resident.insert(page, resident);
        self.arrivals.push_back((page, number));
        self.trim_arrivals();
        Ok(())
    }

    /// Limits the insertion list to twice the maximum number of pages.
    fn trim_arrivals(&mut self) {
        if self.arrivals.len() > self.limits.pages.max(1).saturating_mul(2) {
            let resident = &self.resident;
            self.arrivals.retain(|(page, number)| {
                resident
                    .get(page)
                    .is_some_and(|resident| resident.number == *number)
            });
        }
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

fn range_of(page: u64) -> Option<IovaRange> {
    IovaRange::new(Iova::new(page << PAGE.shift()), PAGE.bytes())
}
