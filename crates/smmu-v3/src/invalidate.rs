//! The commands that an invalidation needs (IHI 0070, sections 4.3, 4.4 and 3.21).

use ringfence_types::{CachedLevels, DomainId, Invalidation, PageSize, PfnRange, RequesterId};

use crate::attachments::{Attachments, Device, Stage};
use crate::capabilities::Capabilities;
use crate::command::{Addresses, Command, Span};
use crate::ranges::Granules;

/// Receives commands one by one.
pub(crate) type Emit<'a> = &'a mut dyn FnMut(Command);

/// Translates invalidations to commands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(crate) unit: &'a Capabilities,
    pub(crate) attachments: &'a Attachments,
    /// Most commands for one range without invalidation of ranges.
    pub(crate) page_commands: u32,
}

impl Planner<'_> {
    /// Emits the commands of a burst.
    pub(crate) fn burst(&self, requests: &[Invalidation], emit: Emit<'_>) {
        for request in requests {
            match request {
                Invalidation::Pages {
                    domain,
                    range,
                    levels,
                } => self.pages(*domain, range, *levels, emit),
                Invalidation::Domain(domain) => self.domain(*domain, emit),
                Invalidation::Global => self.global(emit),
                Invalidation::Context(device) => self.context(*device, emit),
                Invalidation::Ring { .. } => {}
            }
        }
    }

    /// Emits the invalidation of everything that the unit caches.
    ///
    /// The unit reads a guest's context descriptor through stage 2, and fills its TLB through
    /// stream table entries and context descriptors. Each step may refill what was read through
    /// what is invalidated next, so the TLB is emptied before and after.
    pub(crate) fn everything(emit: Emit<'_>) {
        emit(Command::AllTranslations);
        emit(Command::Sync);
        emit(Command::AllStreams);
        emit(Command::Sync);
        emit(Command::AllTranslations);
    }

    fn pages(&self, id: DomainId, range: &PfnRange, levels: CachedLevels, emit: Emit<'_>) {
        let Some(domain) = self.attachments.domain(id) else {
            return self.domain(id, emit);
        };
        // Entries of both stages bear no intermediate address.
        if domain.nested > 0 {
            return self.domain(id, emit);
        }
        let mut each = |addresses| {
            emit(match domain.stage {
                Stage::One => Command::Stage1Pages {
                    asid: id.get(),
                    addresses,
                },
                Stage::Two => Command::Stage2Pages {
                    vmid: id.get(),
                    addresses,
                },
            });
        };
        let leaf = levels == CachedLevels::Leaves;
        let page_bits = domain.table.width.wrapping_sub(PageSize::Size4K.shift());
        let is_within = range.hi().get().checked_shr(page_bits) == Some(0);
        let granules = Granules::covering(range, domain.table.granule);
        if !is_within || !self.addresses(&granules, leaf, &mut each) {
            self.domain(id, emit);
        }
    }

    /// Calls `each` with addresses that cover `granules`. Returns false, without a call, if they
    /// need too many commands.
    fn addresses(&self, granules: &Granules, leaf: bool, each: &mut dyn FnMut(Addresses)) -> bool {
        if self.unit.range_invalidation {
            let Some(commands) = granules.commands() else {
                return false;
            };
            for span in commands.into_iter().flatten() {
                each(Addresses { span, leaf });
            }
            return true;
        }
        if granules.count > u64::from(self.page_commands) {
            return false;
        }
        for index in 0..granules.count {
            let one = Granules {
                first: granules.first.wrapping_add(index),
                ..*granules
            };
            let span = Span {
                first: one.address(),
                range: None,
            };
            each(Addresses { span, leaf });
        }
        true
    }

    /// Emits the invalidation of all entries of a domain.
    fn domain(&self, id: DomainId, emit: Emit<'_>) {
        let domain = self.attachments.domain(id);
        let stage = domain.map(|domain| domain.stage);
        // Nobody uses the domain-id: its entries may date from any earlier use.
        if self.unit.stage1 && stage != Some(Stage::Two) {
            emit(Command::Stage1Space {
                vmid: 0,
                asid: id.get(),
            });
        }
        if self.unit.stage2 && stage != Some(Stage::One) {
            emit(Command::BothStages { vmid: id.get() });
        }
        if domain.is_some_and(|domain| domain.nested > 0) {
            self.guest_contexts(|device| device.domain == id, emit);
            emit(Command::Stage1 { vmid: id.get() });
        }
    }

    fn global(&self, emit: Emit<'_>) {
        emit(Command::AllTranslations);
        if self.attachments.devices.values().any(Device::is_nested) {
            self.guest_contexts(|_| true, emit);
            emit(Command::AllTranslations);
        }
    }

    /// Emits the invalidation of context descriptors that the unit found through stage 2, between
    /// that of stage 2 and that of stage 1, which is found through them.
    fn guest_contexts(&self, wanted: impl Fn(&Device) -> bool, emit: Emit<'_>) {
        emit(Command::Sync);
        for device in self.attachments.devices.values() {
            if device.is_nested() && wanted(device) {
                let stream = device.stream;
                emit(Command::Context { stream });
            }
        }
        emit(Command::Sync);
    }

    /// Emits the invalidation of a stream table entry and of what was cached through it.
    fn context(&self, requester: RequesterId, emit: Emit<'_>) {
        if let Ok(device) = self.attachments.device(requester) {
            let stream = device.stream;
            emit(Command::StreamEntry { stream, leaf: true });
            self.translations_of(device, emit);
        }
    }

    /// Emits the invalidation of a device's domain, after that of its entry.
    pub(crate) fn translations_of(&self, device: &Device, emit: Emit<'_>) {
        if self.attachments.domain(device.domain).is_some() && device.has_table() {
            emit(Command::Sync);
            self.domain(device.domain, emit);
        }
    }
}
