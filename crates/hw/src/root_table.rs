//! VT-d lookup of a requester ID: root table, then context table.

use ringfence_pgtable::Levels;
use ringfence_pgtable::{PageRequests, SecondStage, TranslationType, find_context};
use ringfence_types::{DomainId, FaultReason, PageSize, PhysAddr, PhysMemory, RequesterId};

use crate::{ContextEntry, ContextLookup, DeviceTlbPermission, TableRoot};

/// The root table address register (RTADDR_REG) and the unit's capabilities that limit contexts.
#[derive(Debug, Clone, Copy)]
pub struct RootTable {
    at: Option<PhysAddr>,
    widest: Levels,
    largest: PageSize,
    /// True if the unit honours the contiguous hint.
    contiguous_hint: bool,
}

impl RootTable {
    /// Creates the lookup of a unit whose register is not programmed: all DMA is denied. The unit
    /// supports tables of up to `widest` levels (capability fields SAGAW, MGAW) and leaves of up to
    /// `largest` (SLLPS).
    pub const fn unprogrammed(widest: Levels, largest: PageSize) -> Self {
        Self {
            at: None,
            widest,
            largest,
            contiguous_hint: false,
        }
    }

    pub(crate) fn set_contiguous_hint(&mut self, honoured: bool) {
        self.contiguous_hint = honoured;
    }

    pub(crate) fn program(&mut self, at: PhysAddr) {
        self.at = Some(at.align_down(PageSize::Size4K.bytes()));
    }

    fn table(
        &self,
        domain: DomainId,
        root: PhysAddr,
        levels: Levels,
        device_tlb: DeviceTlbPermission,
    ) -> ContextEntry<SecondStage> {
        let mut format = SecondStage::new(levels).with_pages_up_to(self.largest);
        if self.contiguous_hint {
            format = format.with_contiguous_hint();
        }
        ContextEntry::Translated(TableRoot {
            domain,
            format,
            root,
            device_tlb,
        })
    }
}

impl ContextLookup for RootTable {
    type Format = SecondStage;

    fn find<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        device: RequesterId,
    ) -> Result<ContextEntry<SecondStage>, FaultReason> {
        let root_table = self.at.ok_or(FaultReason::Blocked)?;
        let context =
            find_context(mem, root_table, device).map_err(|error| error.fault_reason())?;
        let domain = context.domain;
        match context.translation {
            TranslationType::Table { root, levels } if levels <= self.widest => {
                Ok(self.table(domain, root, levels, DeviceTlbPermission::Blocked))
            }
            TranslationType::DeviceTlb {
                root,
                levels,
                page_requests,
            } if levels <= self.widest => {
                let permission = match page_requests {
                    PageRequests::Blocked => DeviceTlbPermission::Allowed,
                    PageRequests::Allowed => DeviceTlbPermission::AllowedWithPageRequests,
                };
                Ok(self.table(domain, root, levels, permission))
            }
            TranslationType::PassThrough { levels } if levels <= self.widest => {
                Ok(ContextEntry::PassThrough {
                    domain,
                    width: levels.width(),
                })
            }
            // AW requests more levels than the unit supports.
            _ => Err(FaultReason::ContextInvalid),
        }
    }
}
