//! What an endpoint's access reaches, and the faults of those that reach nothing.

use ringfence_types::{Access, Iova, IovaRange, PhysAddr, PhysRange};

use super::Device;
use crate::domain::DomainKind;
use crate::endpoint::{AttachState, Endpoint, ReservedRegionKind};
use crate::fault::{BufferTooSmall, TranslationFault, TranslationFaultReason};
use crate::{AccessTarget, EndpointId, MemoryKind, Sink};

impl<S: Sink> Device<S> {
    /// Where the first bytes of an access go: as far as one mapping, or one reserved region, goes.
    /// An access is allowed if every piece of it is: look at all before the first byte is moved.
    ///
    /// # Errors
    /// Why it was stopped. Nobody is told: see [`Device::report`].
    pub fn translate(
        &self,
        endpoint: EndpointId,
        range: IovaRange,
        access: Access,
    ) -> Result<AccessTarget, TranslationFault> {
        let denied = |reason| TranslationFault {
            endpoint,
            iova: range.start(),
            access,
            reason,
        };
        let source = self
            .find_endpoint(endpoint)
            .ok()
            .and_then(|index| self.endpoints.get(index))
            .ok_or(denied(TranslationFaultReason::NoEndpoint))?;
        let id = match source.state {
            AttachState::Unattached { bypasses: false } => {
                return Err(denied(TranslationFaultReason::Unattached));
            }
            AttachState::Unattached { bypasses: true } => return Ok(identity(range)),
            AttachState::Attached(id) => id,
        };
        let domain = self
            .find_domain(id)
            .ok()
            .and_then(|index| self.domains.get(index))
            .ok_or(denied(TranslationFaultReason::Unattached))?;
        let store = match &domain.kind {
            DomainKind::Bypass => return Ok(identity(range)),
            DomainKind::Blocked => return Err(denied(TranslationFaultReason::Blocked)),
            DomainKind::Mapped(store) => store,
        };
        // No mapping of the domain overlaps what is reserved for its endpoints.
        if let Some(doorbell) = reserved_at(source, range, access) {
            return doorbell.ok_or(denied(TranslationFaultReason::Reserved));
        }
        let start = range.start().get();
        let entry = store
            .lookup(start)
            .ok_or(denied(TranslationFaultReason::NotMapped))?;
        if !entry
            .permissions()
            .is_some_and(|allowed| allowed.allows(access))
        {
            return Err(denied(TranslationFaultReason::Permission));
        }
        // MAP saw to it that the last byte does not wrap.
        let at =
            |iova: u64| PhysAddr::new(entry.physical.wrapping_add(iova.wrapping_sub(entry.start)));
        let last = range.last().get().min(entry.last);
        let physical = PhysRange::inclusive(at(start), at(last))
            .ok_or(denied(TranslationFaultReason::NotMapped))?;
        Ok(AccessTarget::Memory {
            physical,
            memory: entry.memory(),
        })
    }

    /// Tells the driver of an access that was stopped, by [`translate`](Device::translate) or by
    /// whatever the sink feeds. A fault of an endpoint that does not exist is not told, only
    /// counted as dropped: reports carry valid endpoints.
    pub fn report(&mut self, denied: TranslationFault) {
        if self.find_endpoint(denied.endpoint).is_ok() {
            self.events.push(denied);
        } else {
            self.events.drop_one();
        }
    }

    /// Writes the oldest report into `buffer`, the device-writable part of one chain of the event
    /// queue: the used length, or `None` if there is nothing to report.
    ///
    /// # Errors
    /// The buffer has no room for it. The report stays for the next one; this one goes back to the
    /// driver with used length 0.
    pub fn next_event(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, BufferTooSmall> {
        self.events.next(buffer)
    }

    /// Reports that wait for a buffer.
    pub fn events_waiting(&self) -> usize {
        self.events.waiting()
    }

    /// Reports that were dropped because too many waited.
    pub const fn events_dropped(&self) -> u64 {
        self.events.dropped()
    }
}

/// The access of an endpoint in bypass mode.
fn identity(range: IovaRange) -> AccessTarget {
    let at = |iova: Iova| PhysAddr::new(iova.get());
    // Never `None`: a range is no emptier as a physical one.
    match PhysRange::inclusive(at(range.start()), at(range.last())) {
        Some(physical) => AccessTarget::Memory {
            physical,
            memory: MemoryKind::Normal,
        },
        None => AccessTarget::Doorbell { at: range },
    }
}

/// If `range` begins in a reserved region: the doorbells it rings, or `None` inside for nothing.
fn reserved_at(
    source: &Endpoint,
    range: IovaRange,
    access: Access,
) -> Option<Option<AccessTarget>> {
    let region = source
        .reserved
        .iter()
        .find(|region| region.range.contains_address(range.start()))?;
    if region.kind != ReservedRegionKind::Msi || access != Access::Write {
        return Some(None);
    }
    let last = range.last().min(region.range.last());
    Some(IovaRange::inclusive(range.start(), last).map(|at| AccessTarget::Doorbell { at }))
}
