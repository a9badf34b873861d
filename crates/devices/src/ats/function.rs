//! A function with a device TLB.

use ringfence_hw::{InvalidateRequest, InvalidationTag, TranslationCompletion, TranslationService};
use ringfence_types::{Access, Fault, Iova, IovaRange, PhysAddr, PhysMemory, RequesterId};

use super::{CachedTranslation, DeviceTlb, PageRequester};
use crate::{Bus, ByteMemory, DmaError, Observer, Unreachable};

/// E bit of the ATS control register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AtsControl {
    /// The function makes untranslated requests only.
    #[default]
    Disabled,
    /// The function caches translations and makes translated requests.
    Enabled,
}

/// Reaction of a function to an invalidate request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnInvalidate {
    /// Removes the entries and completes the request.
    #[default]
    RemovesAndCompletes,
    /// Completes the request and keeps the entries (attack A14).
    CompletesAndKeeps,
    /// Neither removes the entries nor completes the request.
    Ignores,
}

/// Error of an access through the device TLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AtsError {
    /// The page of this address is not mapped, or not for this access. The function may make a page
    /// request.
    #[error("no translation of {0} for a {1}")]
    PageFault(Iova, Access),
    /// The unit does not serve translation requests of this function. The function has disabled
    /// ATS.
    #[error("translation request rejected: {0}")]
    UnsupportedRequest(Fault),
    /// The unit could not translate because its tables are malformed.
    #[error("translation request aborted: {0}")]
    CompleterAbort(Fault),
    /// The unit blocked the access.
    #[error(transparent)]
    Blocked(#[from] Fault),
    /// The unit allowed an access to an address without memory.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The access is empty, wraps, or is longer than [`AtsFunction::MAX_BYTES`].
    #[error("access of {1} bytes at {0} is empty, wraps or is too long")]
    BadLength(Iova, u64),
}

impl From<DmaError> for AtsError {
    fn from(error: DmaError) -> Self {
        match error {
            DmaError::Fault(fault) => Self::Blocked(fault),
            DmaError::Unreachable(at) => Self::Unreachable(at),
        }
    }
}

/// A PCI function with ATS and PRI. Both are disabled until the driver enables them.
#[derive(Debug, Clone)]
pub struct AtsFunction {
    id: RequesterId,
    control: AtsControl,
    on_invalidate: OnInvalidate,
    /// The device TLB.
    pub tlb: DeviceTlb,
    /// Sends page requests and takes their responses.
    pub page_requests: PageRequester,
}

impl AtsFunction {
    /// Maximum length of an access.
    pub const MAX_BYTES: u64 = 1 << 20;

    /// Creates the function `id` with a device TLB of `entries` entries.
    pub const fn new(id: RequesterId, entries: usize, on_invalidate: OnInvalidate) -> Self {
        Self {
            id,
            control: AtsControl::Disabled,
            on_invalidate,
            tlb: DeviceTlb::new(entries),
            page_requests: PageRequester::new(id),
        }
    }

    /// Returns the requester ID.
    pub const fn id(&self) -> RequesterId {
        self.id
    }

    /// Returns the E bit.
    pub const fn control(&self) -> AtsControl {
        self.control
    }

    /// Writes the E bit. Any write removes all cached translations.
    pub fn set_control(&mut self, control: AtsControl) {
        self.control = control;
        self.tlb.clear();
    }

    /// Accesses `bytes` bytes at `iova` without moving them.
    ///
    /// # Errors
    /// [`AtsError`] of the first page that failed. Nothing was accessed if a page has no
    /// translation.
    pub fn probe<U: TranslationService, M: PhysMemory, O: Observer>(
        &mut self,
        bus: &mut Bus<'_, U, M, O>,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<(), AtsError> {
        for (at, bytes) in self.pieces(bus, iova, bytes, access)? {
            match at {
                Target::Untranslated(iova) => bus.probe(&crate::DmaRequest {
                    device: self.id,
                    iova,
                    bytes,
                    access,
                })?,
                Target::Translated(at) => bus.probe_translated(self.id, at, bytes, access)?,
            }
        }
        Ok(())
    }

    /// Reads `into.len()` bytes at `iova`.
    ///
    /// # Errors
    /// As for [`probe`](Self::probe).
    pub fn read<U: TranslationService, M: PhysMemory + ByteMemory, O: Observer>(
        &mut self,
        bus: &mut Bus<'_, U, M, O>,
        iova: Iova,
        into: &mut [u8],
    ) -> Result<(), AtsError> {
        let mut rest = into;
        for (at, bytes) in self.pieces(bus, iova, rest.len() as u64, Access::Read)? {
            // The lengths add up to `into.len()`.
            let (piece, tail) = rest.split_at_mut(bytes as usize);
            rest = tail;
            match at {
                Target::Untranslated(iova) => bus.read(self.id, iova, piece)?,
                Target::Translated(at) => bus.read_translated(self.id, at, piece)?,
            }
        }
        Ok(())
    }

    /// Writes `from` at `iova`.
    ///
    /// # Errors
    /// As for [`probe`](Self::probe).
    pub fn write<U: TranslationService, M: PhysMemory + ByteMemory, O: Observer>(
        &mut self,
        bus: &mut Bus<'_, U, M, O>,
        iova: Iova,
        from: &[u8],
    ) -> Result<(), AtsError> {
        let mut rest = from;
        for (at, bytes) in self.pieces(bus, iova, rest.len() as u64, Access::Write)? {
            let (piece, tail) = rest.split_at(bytes as usize);
            rest = tail;
            match at {
                Target::Untranslated(iova) => bus.write(self.id, iova, piece)?,
                Target::Translated(at) => bus.write_translated(self.id, at, piece)?,
            }
        }
        Ok(())
    }

    /// Accepts an invalidate request. Returns the tag of the completion, if the function sends one.
    /// A request for another function has none.
    pub fn invalidate(&mut self, request: &InvalidateRequest) -> Option<InvalidationTag> {
        if request.device != self.id {
            return None;
        }
        match self.on_invalidate {
            OnInvalidate::RemovesAndCompletes => {
                self.tlb.invalidate(&request.range);
                Some(request.tag)
            }
            OnInvalidate::CompletesAndKeeps => Some(request.tag),
            OnInvalidate::Ignores => None,
        }
    }

    /// Splits an access into pieces with the targets of their requests. Translates all pages first.
    fn pieces<U: TranslationService, M: PhysMemory, O: Observer>(
        &mut self,
        bus: &mut Bus<'_, U, M, O>,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Vec<(Target, u64)>, AtsError> {
        let range = IovaRange::new(iova, bytes)
            .filter(|range| range.bytes() <= Self::MAX_BYTES)
            .ok_or(AtsError::BadLength(iova, bytes))?;
        if self.control == AtsControl::Disabled {
            return Ok(vec![(Target::Untranslated(iova), bytes)]);
        }
        let mut pieces = Vec::new();
        let mut at = iova;
        loop {
            let entry = self.translate(bus, at, access)?;
            let end = entry.range().last().min(range.last());
            let bytes = end.get() - at.get() + 1;
            pieces.push((Target::Translated(entry.translate(at)), bytes));
            if end == range.last() {
                return Ok(pieces);
            }
            at = end.wrapping_add(1);
        }
    }

    /// Returns the translation of `iova`, from the device TLB or from the unit.
    fn translate<U: TranslationService, M: PhysMemory, O: Observer>(
        &mut self,
        bus: &mut Bus<'_, U, M, O>,
        iova: Iova,
        access: Access,
    ) -> Result<CachedTranslation, AtsError> {
        if let Some(entry) = self.tlb.lookup(iova, access) {
            return Ok(entry);
        }
        match bus.translation_request(self.id, iova) {
            TranslationCompletion::Page {
                base,
                size,
                permissions,
            } => {
                let entry = CachedTranslation {
                    page: iova.align_down(size.bytes()),
                    size,
                    base,
                    permissions,
                };
                self.tlb.fill(entry);
                if permissions.allows(access) {
                    Ok(entry)
                } else {
                    Err(AtsError::PageFault(iova, access))
                }
            }
            TranslationCompletion::NotMapped => Err(AtsError::PageFault(iova, access)),
            TranslationCompletion::UnsupportedRequest(fault) => {
                self.set_control(AtsControl::Disabled);
                Err(AtsError::UnsupportedRequest(fault))
            }
            TranslationCompletion::CompleterAbort(fault) => Err(AtsError::CompleterAbort(fault)),
        }
    }
}

/// Address of one request.
#[derive(Debug, Clone, Copy)]
enum Target {
    Untranslated(Iova),
    Translated(PhysAddr),
}
