//! Translation requests and translated requests (VT-d specification, sections 4.1 and 7.1.3).

use ringfence_types::{
    Access, Fault, FaultReason, Iova, PageSize, Permissions, PhysAddr, PhysMemory, PhysRange,
    RequesterId,
};

use crate::context_cache::CachedContext;
use crate::unit::TranslationState;
use crate::walker::Faulted;
use crate::{ContextLookup, DeviceTlbPermission, Iommu, TableRoot, Translate, Translation};

/// Answer to a translation request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranslationCompletion {
    /// Success: the device may cache this page and make translated requests to it.
    Page {
        /// First host address of the page.
        base: PhysAddr,
        /// Size of the page (the S field and the low bits of the address).
        size: PageSize,
        /// The R and W fields.
        permissions: Permissions,
    },
    /// Success with R = W = 0: the page is not mapped. No fault is recorded. The device may make a
    /// page request.
    NotMapped,
    /// Unsupported Request: the device may not make translation requests. A fault is recorded. The
    /// device must stop using ATS.
    UnsupportedRequest(Fault),
    /// Completer Abort: the tables are malformed. A fault is recorded.
    CompleterAbort(Fault),
}

/// Requests of devices with a device TLB, in addition to untranslated requests.
pub trait TranslationService: Translate {
    /// Answers a translation request for the page of `iova`. A request names one page; a device
    /// makes one request for each page of an access.
    fn translation_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
    ) -> TranslationCompletion;

    /// Checks a translated request of `bytes` bytes at host address `at`.
    ///
    /// # Errors
    /// [`Fault`] if `device` may not make the request. The fault's address is the host address. The
    /// unit has recorded the fault.
    fn translated_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        at: PhysAddr,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault>;
}

impl<D: ContextLookup> Iommu<D> {
    /// Returns the context of `device`, from the context cache or from memory.
    pub(crate) fn context<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<CachedContext<D::Format>, FaultReason> {
        if self.translation_state == TranslationState::Disabled {
            return Err(FaultReason::RequestTypeBlocked);
        }
        if let Some(cached) = self.contexts.lookup(device) {
            return Ok(*cached);
        }
        let misses = &mut self.walker.stats.context_misses;
        *misses = misses.wrapping_add(1);
        let read = CachedContext::new(self.context_lookup.find(mem, device)?);
        self.contexts.fill(device, read);
        Ok(read)
    }

    /// Returns the table and the highest address of a device that may use a device TLB.
    pub(crate) fn device_tlb_table<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<(TableRoot<D::Format>, Iova), FaultReason> {
        let context = self.context(mem, device)?;
        match context.table_root() {
            Some(table) if table.device_tlb != DeviceTlbPermission::Blocked => {
                Ok((*table, context.highest))
            }
            _ => Err(FaultReason::RequestTypeBlocked),
        }
    }

    /// Translates the page of `iova` for both kinds of access.
    fn page_of<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        table: &TableRoot<D::Format>,
        iova: Iova,
    ) -> Result<TranslationCompletion, FaultReason> {
        for access in [Access::Read, Access::Write] {
            match self.walker.page(mem, table, iova, access) {
                Ok(page) => {
                    let Some(permissions) = page.permissions() else {
                        return Ok(TranslationCompletion::NotMapped);
                    };
                    let size = page.size();
                    let base = page.translate(iova.align_down(size.bytes()));
                    return Ok(TranslationCompletion::Page {
                        base,
                        size,
                        permissions,
                    });
                }
                Err(_) => match self.walker.last_fault().1 {
                    FaultReason::ReadDenied => {}
                    FaultReason::NotPresent | FaultReason::WriteDenied => break,
                    reason => return Err(reason),
                },
            }
        }
        Ok(TranslationCompletion::NotMapped)
    }

    /// Records `reason` as a fault of a request that has no translation.
    pub(crate) fn blocked(
        &mut self,
        device: RequesterId,
        at: Iova,
        access: Access,
        reason: FaultReason,
    ) -> Fault {
        let _ = self.walker.fault_at(at, reason);
        self.fault(device, access, Faulted)
    }
}

impl<D: ContextLookup> TranslationService for Iommu<D> {
    fn translation_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
    ) -> TranslationCompletion {
        let (table, highest) = match self.device_tlb_table(mem, device) {
            Ok(found) => found,
            Err(reason) => {
                let fault = self.blocked(device, iova, Access::Read, reason);
                return TranslationCompletion::UnsupportedRequest(fault);
            }
        };
        if iova > highest {
            let reason = FaultReason::AddressBeyondWidth;
            let fault = self.blocked(device, iova, Access::Read, reason);
            return TranslationCompletion::UnsupportedRequest(fault);
        }
        self.page_of(mem, &table, iova).unwrap_or_else(|reason| {
            let fault = self.blocked(device, iova, Access::Read, reason);
            TranslationCompletion::CompleterAbort(fault)
        })
    }

    /// Passes the request to any host address: the unit trusts a device that may use a device TLB.
    /// [`TranslatedCheck`](crate::TranslatedCheck) restricts it.
    fn translated_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        at: PhysAddr,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let allowed = self.device_tlb_table(mem, device);
        let range = PhysRange::new(at, bytes).ok_or(FaultReason::BadLength);
        match allowed.and(range) {
            Ok(range) => Ok(Translation::one(range)),
            Err(reason) => Err(self.blocked(device, Iova::new(at.get()), access, reason)),
        }
    }
}
