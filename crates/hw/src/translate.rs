//! Translation of device accesses: context, IOTLB, walk (rIOMMU section 2.2; VT-d specification,
//! chapter 3).

use alloc::vec::Vec;

use ringfence_pgtable::Format;
use ringfence_types::{
    Access, Fault, FaultReason, Iova, IovaRange, PageSize, PhysAddr, PhysMemory, PhysRange,
    RequesterId,
};

use crate::context_cache::CachedContext;
use crate::unit::TranslationState;
use crate::walker::{Faulted, Walker};
use crate::{ContextLookup, Iommu, TableRoot, Translation};

/// Maximum length of an access that a table translates, 1 GiB. No bus carries a request of this
/// length. The limit bounds the work for a table that points to itself and so translates every
/// address.
pub const MAX_TRANSLATED_BYTES: u64 = 1 << 30;

const GRANULE: u64 = PageSize::Size4K.bytes();

/// Translation of device accesses, by a unit or a combination of units.
pub trait Translate {
    /// Translates an access of `bytes` bytes at `iova` by `device`.
    ///
    /// # Errors
    /// [`Fault`] with the first address that has no translation. The unit has recorded the fault.
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault>;
}

impl<D: ContextLookup> Translate for Iommu<D> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        Iommu::translate(self, mem, device, iova, bytes, access)
    }
}

impl<D: ContextLookup> Iommu<D> {
    /// Translates an access of `bytes` bytes at `iova`. Translates all pages before any byte counts
    /// as accessed. The published rIOMMU algorithm (Fig. 10) checks only the start.
    ///
    /// An IOTLB hit alone decides, including its permissions, even if the table has changed since.
    ///
    /// # Errors
    /// [`Fault`] with the first address that has no translation. The unit has recorded the fault.
    /// It may have cached the pages before that address.
    #[inline]
    pub fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        if self.translation_state == TranslationState::Disabled {
            return match PhysRange::new(PhysAddr::new(iova.get()), bytes) {
                Some(range) => Ok(Translation::one(self.pass_through(range))),
                None => Err(self.fault_at(device, iova, access, FaultReason::BadLength)),
            };
        }
        // Fast path for most accesses: within one page, by a device whose context is cached, and
        // often to the page used last.
        if bytes.wrapping_sub(1) < GRANULE.wrapping_sub(iova.offset_in(GRANULE))
            && let Some(context) = self.contexts.lookup(device)
            && iova <= context.highest
            && let Some(source) = context.table_root()
        {
            if let Some(page) = self.walker.iotlb.newest(source.domain, iova)
                && page.allows(access)
                && let Some(range) = PhysRange::new(page.translate_small(iova), bytes)
            {
                self.walker.stats.iotlb_hits = self.walker.stats.iotlb_hits.wrapping_add(1);
                return Ok(Translation::one(range));
            }
            return match self.walker.page(mem, source, iova, access) {
                Ok(page) => match PhysRange::new(page.translate(iova), bytes) {
                    Some(range) => Ok(Translation::one(range)),
                    None => Err(self.fault_at(device, iova, access, FaultReason::TableAccess)),
                },
                Err(faulted) => Err(self.fault(device, access, faulted)),
            };
        }
        self.translate_on(mem, device, iova, bytes, access)
    }

    /// Translates any access while translation is enabled.
    #[inline(never)]
    fn translate_on<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
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
            Err(faulted) => Err(self.fault(device, access, faulted)),
        }
    }

    /// Translates the access to a single range; `None` if there are several, in `self.ranges`.
    #[inline]
    fn try_translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Option<PhysRange>, Faulted> {
        let (Some(range), Some(untranslated)) = (
            IovaRange::new(iova, bytes),
            PhysRange::new(PhysAddr::new(iova.get()), bytes),
        ) else {
            return Err(self.walker.fault_at(iova, FaultReason::BadLength));
        };
        let walker = &mut self.walker;
        let read;
        let context = match self.contexts.lookup(device) {
            Some(cached) => cached,
            None => {
                walker.stats.context_misses = walker.stats.context_misses.wrapping_add(1);
                let attachment = self.context_lookup.find(mem, device);
                read =
                    CachedContext::new(attachment.map_err(|reason| walker.fault_at(iova, reason))?);
                self.contexts.fill(device, read);
                &read
            }
        };
        let highest = context.highest;
        if iova > highest {
            return Err(walker.fault_at(iova, FaultReason::AddressBeyondWidth));
        }
        match context.table_root() {
            Some(_) if bytes > MAX_TRANSLATED_BYTES => {
                Err(walker.fault_at(iova, FaultReason::BadLength))
            }
            Some(source) if range.pages(PageSize::Size4K) == 1 => {
                let page = walker.page(mem, source, iova, access)?;
                match PhysRange::new(page.translate(iova), bytes) {
                    Some(range) => Ok(Some(range)),
                    None => Err(walker.fault_at(iova, FaultReason::TableAccess)),
                }
            }
            Some(source) => {
                self.ranges.clear();
                let pages = MultiPageAccess {
                    walker,
                    mem,
                    table_root: source,
                    highest,
                    access,
                };
                pages.translate(&range, &mut self.ranges)
            }
            None if range.last() <= highest => Ok(Some(self.pass_through(untranslated))),
            None => Err(walker.fault_at(highest.wrapping_add(1), FaultReason::AddressBeyondWidth)),
        }
    }

    #[inline]
    fn pass_through(&mut self, range: PhysRange) -> PhysRange {
        let stats = &mut self.walker.stats;
        stats.passed_through = stats.passed_through.wrapping_add(1);
        range
    }

    #[cold]
    #[inline(never)]
    fn fault_at(
        &mut self,
        device: RequesterId,
        iova: Iova,
        access: Access,
        reason: FaultReason,
    ) -> Fault {
        let faulted = self.walker.fault_at(iova, reason);
        self.fault(device, access, faulted)
    }

    /// Counts and records the last fault.
    #[cold]
    #[inline(never)]
    pub(crate) fn fault(&mut self, device: RequesterId, access: Access, _: Faulted) -> Fault {
        let (iova, reason) = self.walker.last_fault();
        let fault = Fault {
            device,
            iova,
            access,
            reason,
        };
        self.walker.stats.faults = self.walker.stats.faults.wrapping_add(1);
        self.faults.record(&fault);
        fault
    }
}

/// Translation of an access that spans several pages.
struct MultiPageAccess<'a, F, M: ?Sized> {
    walker: &'a mut Walker,
    mem: &'a M,
    table_root: &'a TableRoot<F>,
    highest: Iova,
    access: Access,
}

impl<F: Format, M: PhysMemory + ?Sized> MultiPageAccess<'_, F, M> {
    /// Translates all pages of `range`; stops at the first page that is not allowed. Returns a
    /// single range, or `None` if there are several, in `ranges`.
    fn translate(
        mut self,
        range: &IovaRange,
        ranges: &mut Vec<PhysRange>,
    ) -> Result<Option<PhysRange>, Faulted> {
        let mut at = range.start();
        let mut open: Option<PhysRange> = None;
        loop {
            let (piece, end) = self.piece(at, range.last())?;
            open = match open {
                Some(before) if before.last().checked_add(1) == Some(piece.start()) => {
                    PhysRange::inclusive(before.start(), piece.last())
                }
                Some(before) => {
                    self.keep(ranges, before, at)?;
                    Some(piece)
                }
                None => Some(piece),
            };
            if end == range.last() {
                break;
            }
            at = end.wrapping_add(1);
        }
        match open {
            Some(last) if !ranges.is_empty() => {
                self.keep(ranges, last, at)?;
                Ok(None)
            }
            only => Ok(only),
        }
    }

    /// Translates the bytes from `at` to `last` or to the end of the page, whichever comes first.
    /// Returns the physical range and the last IOVA covered.
    #[inline]
    fn piece(&mut self, at: Iova, last: Iova) -> Result<(PhysRange, Iova), Faulted> {
        if at > self.highest {
            return Err(self.walker.fault_at(at, FaultReason::AddressBeyondWidth));
        }
        let page = self
            .walker
            .page(self.mem, self.table_root, at, self.access)?;
        let end = Iova::new(at.get() | page.mask()).min(last);
        match PhysRange::inclusive(page.translate(at), page.translate(end)) {
            Some(piece) => Ok((piece, end)),
            None => Err(self.walker.fault_at(at, FaultReason::TableAccess)),
        }
    }

    /// Appends `range` to `ranges`. Only this allocation can fail; the access then counts as too
    /// long.
    #[inline]
    fn keep(
        &mut self,
        ranges: &mut Vec<PhysRange>,
        range: PhysRange,
        at: Iova,
    ) -> Result<(), Faulted> {
        if ranges.try_reserve(1).is_err() {
            return Err(self.walker.fault_at(at, FaultReason::BadLength));
        }
        ranges.push(range);
        Ok(())
    }
}
