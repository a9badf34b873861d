//! A unit with nested translation.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};

use ringfence_pgtable::{Cursor, FirstStage, NestedEntry, SecondStage, WalkErrorKind, walk};
use ringfence_types::{
    Access, Fault, FaultReason, GuestPhysAddr, Iova, IovaRange, PageSize, Pasid, PhysAddr,
    PhysMemory, PhysRange, RequesterId,
};

use super::cache::{Combined, CombinedCache, SecondStageCache};
use super::fault::StageFault;
use super::view::SecondStageView;
use super::{NestedFault, Stage};
use crate::{FaultLog, MAX_TRANSLATED_BYTES, Translate, Translation};

/// Parameters of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NestedUnitConfig {
    /// Number of combined translations in the IOTLB.
    pub iotlb: usize,
    /// Number of second-stage leaves in the cache.
    pub second_stage: usize,
    /// Largest page of both stages.
    pub largest: PageSize,
    /// Number of fault recording registers.
    pub fault_log: usize,
}

/// Counters of a unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NestedStats {
    /// Pages found in the IOTLB.
    pub iotlb_hits: u64,
    /// Pages not found; each needs a walk.
    pub iotlb_misses: u64,
    /// Words that walks read, of both stages.
    pub walk_references: u64,
    /// Accesses that the unit blocked.
    pub faults: u64,
}

/// An IOMMU that translates through two stages.
///
/// The embedder registers the PASID table entry of each device
/// ([`set_context`](Self::set_context)), and the unit reads the entry from memory. The model has no
/// scalable-mode root table, context table or PASID directory.
#[derive(Debug, Clone)]
pub struct NestedUnit {
    /// Address of the PASID table entry of each device.
    entries: BTreeMap<RequesterId, (Pasid, PhysAddr)>,
    /// Entries read from memory with their PASIDs, until an invalidation of the context.
    pub(super) contexts: BTreeMap<RequesterId, (Pasid, NestedEntry)>,
    pub(super) combined: CombinedCache,
    pub(super) second: SecondStageCache,
    largest: PageSize,
    faults: FaultLog,
    last_fault: Option<NestedFault>,
    ranges: Vec<PhysRange>,
    stats: NestedStats,
    pub(super) last_ticket: u64,
}

impl NestedUnit {
    /// Creates a unit without contexts: all DMA is denied.
    pub fn new(config: &NestedUnitConfig) -> Self {
        Self {
            entries: BTreeMap::new(),
            contexts: BTreeMap::new(),
            combined: CombinedCache::new(config.iotlb),
            second: SecondStageCache::new(config.second_stage),
            largest: config.largest,
            faults: FaultLog::new(config.fault_log),
            last_fault: None,
            ranges: Vec::new(),
            stats: NestedStats::default(),
            last_ticket: 0,
        }
    }

    /// Registers the entry of `device` at `at`, with its PASID. The unit uses both from the next
    /// access after an invalidation of the device's context.
    pub fn set_context(&mut self, device: RequesterId, pasid: Pasid, at: PhysAddr) {
        self.entries.insert(device, (pasid, at));
    }

    /// Returns the fault recording registers.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    /// Returns the last fault with its stage.
    pub fn last_fault(&self) -> Option<NestedFault> {
        self.last_fault
    }

    /// Returns the counters.
    pub fn stats(&self) -> &NestedStats {
        &self.stats
    }

    /// Returns the number of combined translations in the IOTLB.
    pub fn iotlb_live(&self) -> usize {
        self.combined.len()
    }

    /// Returns the PASID and the entry of `device`, from the cache or from memory.
    fn context<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<(Pasid, NestedEntry), FaultReason> {
        if let Some(context) = self.contexts.get(&device) {
            return Ok(*context);
        }
        let (pasid, at) = *self.entries.get(&device).ok_or(FaultReason::Blocked)?;
        let entry = NestedEntry::read(mem, at).map_err(|error| error.fault_reason())?;
        self.contexts.insert(device, (pasid, entry));
        Ok((pasid, entry))
    }

    /// Translates the page of `iova`.
    fn page<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        pasid: Pasid,
        entry: &NestedEntry,
        iova: Iova,
        access: Access,
    ) -> Result<Combined, StageFault> {
        let domain = entry.domain;
        if let Some(found) = self.combined.lookup(domain, pasid, iova) {
            self.stats.iotlb_hits = self.stats.iotlb_hits.wrapping_add(1);
            if found.permissions.allows(access) {
                return Ok(found);
            }
            // The entry combines both stages. Only a walk shows which stage denies the access.
        } else {
            self.stats.iotlb_misses = self.stats.iotlb_misses.wrapping_add(1);
        }
        let view = SecondStageView {
            mem,
            domain,
            format: SecondStage::new(entry.second_levels).with_pages_up_to(self.largest),
            root: entry.second_root,
            cache: RefCell::new(&mut self.second),
            references: Cell::new(0),
            stopped: Cell::new(None),
        };
        let walked = walk_both(&view, entry, self.largest, pasid, iova, access);
        let references = view.references.get();
        self.stats.walk_references = self.stats.walk_references.wrapping_add(references);
        let combined = walked?;
        self.combined.fill(combined);
        Ok(combined)
    }

    fn try_translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        range: &IovaRange,
        access: Access,
    ) -> Result<(), StageFault> {
        let (pasid, entry) = self.context(mem, device).map_err(|reason| StageFault {
            at: range.start(),
            reason,
            stage: Stage::Context,
        })?;
        let mut at = range.start();
        loop {
            let page = self.page(mem, pasid, &entry, at, access)?;
            let mask = page.size.bytes().wrapping_sub(1);
            let end = Iova::new(at.get() | mask).min(range.last());
            let piece = PhysRange::inclusive(page.translate(at), page.translate(end));
            let first_stage = |reason| StageFault {
                at,
                reason,
                stage: Stage::First,
            };
            let piece = piece.ok_or(first_stage(FaultReason::TableAccess))?;
            match self.ranges.last_mut() {
                Some(last)
                    if last.last().checked_add(1) == Some(piece.start())
                        && PhysRange::inclusive(last.start(), piece.last()).is_some() =>
                {
                    if let Some(joined) = PhysRange::inclusive(last.start(), piece.last()) {
                        *last = joined;
                    }
                }
                _ => {
                    if self.ranges.try_reserve(1).is_err() {
                        return Err(first_stage(FaultReason::BadLength));
                    }
                    self.ranges.push(piece);
                }
            }
            if end == range.last() {
                return Ok(());
            }
            at = end.wrapping_add(1);
        }
    }
}

/// Walks the first stage through the second, then the second for the page.
fn walk_both<M: PhysMemory + ?Sized>(
    view: &SecondStageView<'_, M>,
    entry: &NestedEntry,
    largest: PageSize,
    pasid: Pasid,
    iova: Iova,
    access: Access,
) -> Result<Combined, StageFault> {
    let stopped = |reason, stage| {
        Err(StageFault {
            at: iova,
            reason,
            stage,
        })
    };
    let format = FirstStage::new(entry.first_levels)
        .unwrap_or(FirstStage::FOUR_LEVELS)
        .with_pages_up_to(largest);
    let start = Cursor::root(&format, PhysAddr::new(entry.first_root.get()));
    let first = match walk(&format, view, start, iova, |_| {}) {
        Ok(leaf) if leaf.permissions.allows(access) => leaf,
        Ok(_) => {
            let reason = WalkErrorKind::NoPermission.fault_reason(access);
            return stopped(reason, Stage::First);
        }
        Err(error) => {
            return match view.stopped.get() {
                Some((guest, kind)) => stopped(
                    kind.fault_reason(Access::Read),
                    Stage::SecondForTable { guest },
                ),
                None => stopped(error.kind.fault_reason(access), Stage::First),
            };
        }
    };
    let guest = GuestPhysAddr::new(first.translate(iova).get());
    let second = match view.translate(guest, access) {
        Ok(leaf) => leaf,
        Err(kind) => return stopped(kind.fault_reason(access), Stage::SecondForPage { guest }),
    };
    let Some(permissions) = first.permissions.intersect(second.permissions) else {
        let reason = WalkErrorKind::NoPermission.fault_reason(access);
        return stopped(reason, Stage::SecondForPage { guest });
    };
    let size = first.page.min(second.page);
    Ok(Combined {
        domain: entry.domain,
        pasid,
        page: iova.align_down(size.bytes()),
        size,
        base: second
            .translate(Iova::new(guest.get()))
            .align_down(size.bytes()),
        permissions,
    })
}

impl Translate for NestedUnit {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        self.ranges.clear();
        let translated = match IovaRange::new(iova, bytes) {
            Some(range) if bytes <= MAX_TRANSLATED_BYTES => {
                self.try_translate(mem, device, &range, access)
            }
            _ => Err(StageFault {
                at: iova,
                reason: FaultReason::BadLength,
                stage: Stage::First,
            }),
        };
        if let Err(StageFault { at, reason, stage }) = translated {
            let fault = Fault {
                device,
                iova: at,
                access,
                reason,
            };
            self.stats.faults = self.stats.faults.wrapping_add(1);
            self.last_fault = Some(NestedFault { fault, stage });
            self.faults.record(&fault);
            return Err(fault);
        }
        match self.ranges.as_slice() {
            [single] => Ok(Translation::one(*single)),
            several => Translation::many(several).ok_or(Fault {
                device,
                iova,
                access,
                reason: FaultReason::BadLength,
            }),
        }
    }
}
