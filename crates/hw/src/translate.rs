//! Translation of a device's access: context, IOTLB, walk (rIOMMU section 2.2; VT-d specification, chapter 3).

use ringfence_pgtable::{Cursor, Leaf, WalkErrorKind, walk};
use ringfence_types::{
    Access, DeviceId, Fault, FaultReason, Iova, IovaRange, PageSize, PhysAddr, PhysMemory,
    PhysRange,
};

use crate::context_cache::Cached;
use crate::unit::Power;
use crate::{Attachment, Directory, Iommu, Route, Translation};

/// The longest access that is translated by a table, 1 GiB. No bus carries one in a single request; the bound keeps a table that
/// points at itself, and so translates every address, from keeping the unit busy for ever.
pub const MAX_TRANSLATED_BYTES: u64 = 1 << 30;

const GRANULE: u64 = PageSize::Size4K.bytes();

impl<D: Directory> Iommu<D> {
    /// Translates an access of `bytes` bytes at `iova`: the whole of it before any byte counts as accessed (HW09; the defect of rIOMMU
    /// Fig. 10, which checks the start only).
    ///
    /// An entry in the IOTLB decides alone, its permissions included, whatever the table says by now.
    ///
    /// # Errors
    /// [`Fault`] with the first address that could not be translated; it has been recorded. Pages before it may have been
    /// cached.
    #[inline]
    pub fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        // The access most devices make: within a page, of a known device, with its translation cached.
        if self.power == Power::On
            && bytes.wrapping_sub(1) < GRANULE.wrapping_sub(iova.offset_in(GRANULE))
            && let Some(context) = self.contexts.lookup(device)
            && iova <= context.highest
            && let Some(domain) = context.translated_domain()
            && let Some(leaf) = self.iotlb.lookup(domain, iova)
            && leaf.permissions.allows(access)
            && let Some(range) = PhysRange::new(leaf.translate(iova), bytes)
        {
            self.stats.iotlb_hits = self.stats.iotlb_hits.wrapping_add(1);
            return Ok(Translation::one(range));
        }
        self.translate_slowly(mem, device, iova, bytes, access)
    }

    #[inline(never)]
    fn translate_slowly<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        match self.try_translate(mem, device, iova, bytes, access) {
            Ok(Some(range)) => Ok(Translation::one(range)),
            Ok(None) => Translation::many(&self.ranges).ok_or(Fault {
                device,
                iova,
                access,
                reason: FaultReason::BadLength,
            }),
            Err((iova, reason)) => {
                let fault = Fault {
                    device,
                    iova,
                    access,
                    reason,
                };
                self.stats.faults = self.stats.faults.wrapping_add(1);
                self.faults.record(&fault);
                Err(fault)
            }
        }
    }

    /// The one range of the access; `None` if its ranges are in `self.ranges`.
    #[inline]
    fn try_translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Option<PhysRange>, (Iova, FaultReason)> {
        let at_start = |reason| (iova, reason);
        let untranslated = PhysAddr::new(iova.get());
        let (Some(range), Some(identity)) = (
            IovaRange::new(iova, bytes),
            PhysRange::new(untranslated, bytes),
        ) else {
            return Err(at_start(FaultReason::BadLength));
        };
        if self.power == Power::Off {
            self.stats.passed_through = self.stats.passed_through.wrapping_add(1);
            return Ok(Some(identity));
        }
        let context = self.context(mem, device).map_err(at_start)?;
        if iova > context.highest {
            return Err(at_start(FaultReason::AddressBeyondWidth));
        }
        match context.attachment.route {
            Route::PassThrough { .. } if range.last() <= context.highest => {
                self.stats.passed_through = self.stats.passed_through.wrapping_add(1);
                Ok(Some(identity))
            }
            Route::PassThrough { .. } => Err((
                context.highest.wrapping_add(1),
                FaultReason::AddressBeyondWidth,
            )),
            Route::Table { .. } if bytes > MAX_TRANSLATED_BYTES => {
                Err(at_start(FaultReason::BadLength))
            }
            Route::Table { .. } if range.pages(PageSize::Size4K) == 1 => {
                let leaf = self
                    .page(mem, &context.attachment, iova, access)
                    .map_err(at_start)?;
                PhysRange::new(leaf.translate(iova), bytes)
                    .map(Some)
                    .ok_or_else(|| at_start(FaultReason::TableAccess))
            }
            Route::Table { .. } => self.pages(mem, &context, &range, access),
        }
    }

    /// Where the accesses of `device` go.
    #[inline]
    fn context<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
    ) -> Result<Cached<D::Format>, FaultReason> {
        if let Some(cached) = self.contexts.lookup(device) {
            return Ok(*cached);
        }
        self.stats.context_misses = self.stats.context_misses.wrapping_add(1);
        let cached = Cached::new(device, self.directory.find(mem, device)?);
        self.contexts.fill(cached);
        Ok(cached)
    }

    /// The page that `iova` lies on, from the IOTLB or by a walk that fills it.
    #[inline]
    fn page<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        attachment: &Attachment<D::Format>,
        iova: Iova,
        access: Access,
    ) -> Result<Leaf, FaultReason> {
        let Route::Table { format, root } = attachment.route else {
            return Err(FaultReason::ContextInvalid);
        };
        let domain = attachment.domain;
        let stats = &mut self.stats;
        if let Some(leaf) = self.iotlb.lookup(domain, iova) {
            stats.iotlb_hits = stats.iotlb_hits.wrapping_add(1);
            return permitted(leaf, access);
        }
        stats.iotlb_misses = stats.iotlb_misses.wrapping_add(1);

        let root = Cursor::root(&format, root);
        let walk_caches = &mut self.walk_caches;
        let cached = walk_caches.lookup(&format, root.level(), domain, iova, |level, hit| {
            let counts = if hit {
                &mut stats.walk_cache_hits
            } else {
                &mut stats.walk_cache_misses
            };
            if let Some(count) = counts.get_mut(level) {
                *count = count.wrapping_add(1);
            }
        });
        // One word for the table the walk begins at, and one for each that it is led to.
        let mut references = 1;
        let found = walk(&format, mem, cached.unwrap_or(root), iova, |table| {
            references += 1;
            walk_caches.fill(&format, domain, iova, table);
        });
        stats.walk_references = stats.walk_references.wrapping_add(references);
        match found {
            Ok(leaf) => {
                let leaf = permitted(leaf, access)?;
                let evicted = self.iotlb.fill(domain, iova, &leaf);
                stats.iotlb_evictions = stats.iotlb_evictions.wrapping_add(u64::from(evicted));
                Ok(leaf)
            }
            Err(error) => Err(error.kind.fault_reason(access)),
        }
    }

    /// An access of several pages: all of them are translated, into `self.ranges`, or none counts.
    #[inline(never)]
    fn pages<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        context: &Cached<D::Format>,
        range: &IovaRange,
        access: Access,
    ) -> Result<Option<PhysRange>, (Iova, FaultReason)> {
        self.ranges.clear();
        let mut at = range.start();
        let mut last: Option<PhysRange> = None;
        loop {
            let fail = |reason| (at, reason);
            if at > context.highest {
                return Err(fail(WalkErrorKind::BeyondWidth.fault_reason(access)));
            }
            let leaf = self
                .page(mem, &context.attachment, at, access)
                .map_err(fail)?;
            // Up to the end of this page, whatever its size, or of the access.
            let offset = at.offset_in(leaf.page.bytes());
            let page_end = at.wrapping_add(leaf.page.bytes().wrapping_sub(offset).wrapping_sub(1));
            let end = page_end.min(range.last());
            let piece = PhysRange::new(
                leaf.translate(at),
                end.get().wrapping_sub(at.get()).wrapping_add(1),
            )
            .ok_or_else(|| fail(FaultReason::TableAccess))?;
            last = match last {
                Some(before) if before.last().checked_add(1) == Some(piece.start()) => {
                    PhysRange::inclusive(before.start(), piece.last())
                }
                Some(before) => {
                    // Memory for the list is the only thing that can run out; an access that long is too long.
                    if self.ranges.try_reserve(1).is_err() {
                        return Err(fail(FaultReason::BadLength));
                    }
                    self.ranges.push(before);
                    Some(piece)
                }
                None => Some(piece),
            };
            if end == range.last() {
                break;
            }
            at = end.wrapping_add(1);
        }
        match last {
            Some(only) if self.ranges.is_empty() => return Ok(Some(only)),
            Some(last) => {
                if self.ranges.try_reserve(1).is_err() {
                    return Err((at, FaultReason::BadLength));
                }
                self.ranges.push(last);
            }
            None => {}
        }
        Ok(None)
    }
}

#[inline]
const fn permitted(leaf: Leaf, access: Access) -> Result<Leaf, FaultReason> {
    if leaf.permissions.allows(access) {
        return Ok(leaf);
    }
    Err(match access {
        Access::Read => FaultReason::ReadDenied,
        Access::Write => FaultReason::WriteDenied,
    })
}
