//! The commands that an invalidation needs (specification 1.0, section "Guidelines for
//! invalidations").

use ringfence_types::{CachedLevels, DomainId, Invalidation, PfnBlock, PfnRange, RequesterId};

use crate::attachments::{Attachments, Device, Stage};
use crate::capabilities::Capabilities;
use crate::command::{Addresses, Command, LARGEST_ORDER};
use crate::translation::{GuestFirstStage, Translation};

/// Receives commands one by one.
pub(crate) type Emit<'a> = &'a mut dyn FnMut(Command);

/// Translates invalidations to commands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(crate) unit: &'a Capabilities,
    pub(crate) attachments: &'a Attachments,
    /// Most commands for one range.
    pub(crate) page_commands: u32,
}

impl Planner<'_> {
    /// Emits the commands of a burst: the caches of the unit first, then the device TLBs. A device
    /// could otherwise fill its TLB again from the unit's cache.
    pub(crate) fn burst(&self, requests: &[Invalidation], emit: Emit<'_>) {
        for request in requests {
            self.caches(request, emit);
        }
        if self.attachments.with_ats == 0 {
            return;
        }
        // The unit may execute commands out of order, except around a fence.
        emit(Command::Fence);
        for request in requests {
            self.device_tlbs(request, emit);
        }
    }

    /// Emits the invalidation of everything that the unit caches.
    pub(crate) fn everything(&self, emit: Emit<'_>) {
        emit(Command::DeviceContext { device: None });
        self.burst(&[Invalidation::Global], emit);
    }

    /// Emits the commands for the unit's own caches.
    fn caches(&self, request: &Invalidation, emit: Emit<'_>) {
        match *request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => self.pages(domain, &range, levels, emit),
            Invalidation::Domain(domain) => self.domain(domain, emit),
            Invalidation::Global => self.global(emit),
            Invalidation::Context(device) => self.context(device, emit),
            Invalidation::Ring { .. } => {}
        }
    }

    fn pages(&self, id: DomainId, range: &PfnRange, levels: CachedLevels, emit: Emit<'_>) {
        let Some(domain) = self.attachments.domain(id) else {
            return self.domain(id, emit);
        };
        match domain.stage {
            Stage::First => self.addresses(range, levels, &mut |addresses| {
                emit(Command::FirstStage {
                    guest: None,
                    space: Some(u32::from(id.get())),
                    addresses,
                });
            }),
            // Most caches hold entries from the guest's virtual to host addresses and do not
            // record the guest-physical address between them. They invalidate the whole domain
            // anyway, and QEMU's model, which compares the virtual address, misses the entry.
            Stage::Second if domain.nested > 0 => {
                emit(second_stage(id, Addresses::All));
                self.guest_pointers(id, emit);
            }
            Stage::Second => self.addresses(range, levels, &mut |addresses| {
                emit(second_stage(id, addresses));
            }),
        }
    }

    /// Emits the invalidation of all entries of a domain.
    fn domain(&self, id: DomainId, emit: Emit<'_>) {
        let domain = self.attachments.domain(id);
        // Nobody uses the domain-id: its entries may date from any earlier use.
        let unknown = domain.is_none();
        let first = domain.is_some_and(|domain| domain.stage == Stage::First);
        if unknown || first {
            emit(Command::FirstStage {
                guest: None,
                space: Some(u32::from(id.get())),
                addresses: Addresses::All,
            });
        }
        if unknown || !first {
            emit(second_stage(id, Addresses::All));
        }
        if unknown || domain.is_some_and(|domain| domain.nested > 0) {
            emit(guest_first_stage(id));
            self.guest_pointers(id, emit);
        }
    }

    fn global(&self, emit: Emit<'_>) {
        emit(Command::FirstStage {
            guest: None,
            space: None,
            addresses: Addresses::All,
        });
        emit(Command::SecondStage {
            guest: None,
            addresses: Addresses::All,
        });
        let mut any = false;
        for domain in self.attachments.nested_domains() {
            any = true;
            emit(guest_first_stage(domain));
        }
        if any {
            // As in `guest_pointers`.
            emit(Command::Fence);
            emit(Command::DeviceContext { device: None });
        }
    }

    /// Emits the invalidation of a device context and of what was cached through it (section
    /// "Changing device directory table entry").
    pub(crate) fn context(&self, requester: RequesterId, emit: Emit<'_>) {
        let Some(device) = self.attachments.devices.get(&requester) else {
            return;
        };
        let context = Command::DeviceContext {
            device: Some(device.id),
        };
        emit(context);
        match device.translation {
            Translation::PassThrough => {}
            Translation::FirstStage(_) => self.domain(device.domain, emit),
            Translation::SecondStage { .. } => {
                emit(guest_first_stage(device.domain));
                emit(second_stage(device.domain, Addresses::All));
            }
            Translation::Processes(_) => emit(Command::FirstStage {
                guest: None,
                space: None,
                addresses: Addresses::All,
            }),
        }
    }

    /// Emits the invalidation of the contexts whose guest-physical pointers the second stage
    /// translates: the unit may cache them translated. The fence keeps it from reading one through
    /// an entry of the second stage that it has not invalidated yet.
    fn guest_pointers(&self, domain: DomainId, emit: Emit<'_>) {
        let devices = self.attachments.devices.values();
        let mut guests = devices
            .filter(|device| device.is_nested() && device.domain == domain)
            .peekable();
        if guests.peek().is_some() {
            emit(Command::Fence);
        }
        for device in guests {
            emit(Command::DeviceContext {
                device: Some(device.id),
            });
        }
    }

    /// Calls `each` with operands that cover `range` and the requested levels.
    pub(crate) fn addresses(
        &self,
        range: &PfnRange,
        levels: CachedLevels,
        each: &mut dyn FnMut(Addresses),
    ) {
        let non_leaf = levels == CachedLevels::All;
        let largest = if self.unit.s { LARGEST_ORDER } else { 0 };
        let fits = range
            .blocks(largest)
            .nth(self.page_commands as usize)
            .is_none();
        // Without NL a command with an address removes leaf entries only.
        if !fits || (non_leaf && !self.unit.nl) {
            return each(Addresses::All);
        }
        for block in range.blocks(largest) {
            each(Addresses::Block { block, non_leaf });
        }
    }

    /// Emits the commands for the device TLBs.
    fn device_tlbs(&self, request: &Invalidation, emit: Emit<'_>) {
        for (requester, device) in &self.attachments.devices {
            if device.ats.is_none() {
                continue;
            }
            match *request {
                Invalidation::Pages { domain, range, .. } => {
                    // The device caches addresses of the guest's first stage; the range has
                    // guest-physical ones.
                    let block = PfnBlock::enclosing(&range);
                    let fits = !device.is_nested() && block.order() <= LARGEST_ORDER;
                    let block = fits.then_some(block);
                    device_tlb(device, Some(domain), block, emit);
                }
                Invalidation::Domain(domain) => device_tlb(device, Some(domain), None, emit),
                Invalidation::Global => device_tlb(device, None, None, emit),
                Invalidation::Context(changed) if changed == *requester => {
                    device_tlb(device, None, None, emit);
                }
                Invalidation::Context(_) | Invalidation::Ring { .. } => {}
            }
        }
    }
}

/// Emits the commands for the entries of `domain`, or of all domains, in one device TLB.
pub(crate) fn device_tlb(
    device: &Device,
    domain: Option<DomainId>,
    block: Option<PfnBlock>,
    emit: Emit<'_>,
) {
    let mut entries = |process: Option<u32>, global: bool, block: Option<PfnBlock>| {
        emit(Command::DeviceTlb {
            device: device.id,
            process,
            global,
            block,
        });
    };
    if let Translation::Processes(_) = device.translation {
        for (process, used) in &device.processes {
            if domain.is_none_or(|domain| domain == *used) {
                entries(Some(*process), false, block);
                if *process == 0 {
                    entries(None, false, block);
                }
            }
        }
        return;
    }
    if domain.is_some_and(|domain| domain != device.domain) {
        return;
    }
    entries(None, false, block);
    let guest_processes = matches!(
        device.translation,
        Translation::SecondStage {
            guest: GuestFirstStage::Processes { .. },
            ..
        }
    );
    if guest_processes {
        entries(Some(0), true, None);
    }
}

fn second_stage(domain: DomainId, addresses: Addresses) -> Command {
    Command::SecondStage {
        guest: Some(domain.get()),
        addresses,
    }
}

/// All first-stage entries under the second stage of `domain`.
fn guest_first_stage(domain: DomainId) -> Command {
    Command::FirstStage {
        guest: Some(domain.get()),
        space: None,
        addresses: Addresses::All,
    }
}
