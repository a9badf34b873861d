//! Translation of endpoints' accesses, and fault reports.

use ringfence_types::{Access, Iova, IovaRange, PhysAddr, PhysRange};

use super::Device;
use crate::domain::DomainKind;
use crate::endpoint::{AttachState, Endpoint, ReservedRegionKind};
use crate::fault::{BufferTooSmall, TranslationFault, TranslationFaultReason};
use crate::{AccessTarget, EndpointId, MemoryKind, Sink};

impl<S: Sink> Device<S> {
    /// Translates the first bytes of an access, up to the end of one mapping or reserved region. An
    /// access is allowed only if all its pieces are. Translate all of them before moving the first
    /// byte.
    ///
    /// # Errors
    /// Returns the fault of a blocked access. The driver sees it only after [`Device::report`].
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
        // No mapping of the domain overlaps a reserved region of its endpoints.
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
        // MAP has checked that the last byte does not wrap.
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

    /// Queues a report of an access that [`translate`](Device::translate) or the sink's consumer
    /// blocked. Reports must contain valid endpoints, so a fault of an unknown endpoint only counts
    /// as dropped.
    pub fn report(&mut self, denied: TranslationFault) {
        if self.find_endpoint(denied.endpoint).is_ok() {
            self.events.push(denied);
        } else {
            self.events.count_dropped();
        }
    }

    /// Writes the oldest report into `buffer`, the device-writable part of a chain of the event
    /// queue. Returns the used length, or `None` if no report is waiting.
    ///
    /// # Errors
    /// The buffer is too small. The report waits for the next one. Return this buffer to the driver
    /// with used length 0.
    pub fn next_event(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, BufferTooSmall> {
        self.events.next(buffer)
    }

    /// Returns the number of reports that wait for a buffer.
    pub fn events_waiting(&self) -> usize {
        self.events.waiting()
    }

    /// Returns the number of dropped reports: above the limit, or of an unknown or removed
    /// endpoint.
    pub const fn events_dropped(&self) -> u64 {
        self.events.dropped()
    }
}

/// Returns the target of an access in bypass mode.
fn identity(range: IovaRange) -> AccessTarget {
    let at = |iova: Iova| PhysAddr::new(iova.get());
    // Never `None`: the physical range has the same length.
    match PhysRange::inclusive(at(range.start()), at(range.last())) {
        Some(physical) => AccessTarget::Memory {
            physical,
            memory: MemoryKind::Normal,
        },
        None => AccessTarget::Doorbell { at: range },
    }
}

/// Returns `None` if `range` starts outside the reserved regions. The inner value is the doorbell,
/// or `None` if the access is blocked.
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
