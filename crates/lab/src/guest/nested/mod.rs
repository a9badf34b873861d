//! Nested translation for a guest (W14): the guest owns the first stage, and the host the second
//! (Linux: iommufd's `IOMMU_HWPT_ALLOC_NEST_PARENT` and `IOMMU_HWPT_DATA_VTD_S1`).
//!
//! The host maps all guest memory once. The hardware walks the guest's table itself, so a map is
//! no exit: the unit caches no entry that is not present. The guest submits invalidations through
//! a queue in its memory, and each write of the tail register is an exit. The host decodes the
//! descriptors and invalidates the first stage for its guest.

mod table;
mod unit;

pub(crate) use table::nested_table;
pub use table::{NestedTable, WRITE_ONLY_OFFSET};
pub use unit::NestedVtd;

use std::rc::Rc;

use ringfence_hw::InvalidationDescriptor;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{Invalidation, InvalidationError, Ticket};

use super::guest_queue::GuestQueue;
use super::{HostBackend, HostUnit, KickCause, QueueStats};
use crate::error::LabError;
use unit::RID_PASID;

/// The guest's driver for the queue, and the host that executes its descriptors.
#[derive(Debug)]
pub struct NestedHost {
    memory: Rc<Arena>,
    unit: HostUnit<NestedVtd>,
    queue: GuestQueue,
    /// True after a malformed descriptor or a failed invalidation: the queue has stopped.
    broken: bool,
    traffic: QueueStats,
}

impl HostBackend for NestedHost {
    type Unit = NestedVtd;

    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        _: Coherency,
        unit: HostUnit<NestedVtd>,
    ) -> Result<Self, LabError> {
        Ok(Self {
            memory: Rc::clone(memory),
            unit,
            queue: GuestQueue::new(frames)?,
            broken: false,
            traffic: QueueStats::default(),
        })
    }

    #[inline]
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit<NestedVtd>) -> R) -> R {
        act(&mut self.unit)
    }

    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let descriptor = InvalidationDescriptor::covering_first_stage(&request, RID_PASID)
            .ok_or(InvalidationError::Unsupported)?;
        let ticket = self.queue.submit(&self.memory, descriptor)?;
        self.traffic.requests += 1;
        self.traffic.kick(KickCause::Unmap);
        self.on_tail_write();
        self.is_completed(ticket)?;
        Ok(ticket)
    }

    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.broken {
            return Err(InvalidationError::Failed);
        }
        self.queue.is_completed(&self.memory, ticket)
    }

    fn traffic(&self) -> QueueStats {
        QueueStats {
            invalidations: self.unit.invalidations(),
            ..self.traffic
        }
    }
}

/// The host's side.
impl NestedHost {
    /// Handles the exit of a write to the tail register: executes all new descriptors. A malformed
    /// one stops the queue (IQE).
    fn on_tail_write(&mut self) {
        while !self.broken
            && let Some(descriptor) = self.queue.next(&self.memory)
        {
            let done = descriptor.and_then(|descriptor| self.execute(&descriptor));
            self.broken |= done.is_err();
        }
    }

    /// Invalidates entries of the guest's first stages. The second stage never changes.
    fn execute(&mut self, descriptor: &InvalidationDescriptor) -> Result<(), InvalidationError> {
        use InvalidationDescriptor as D;
        let request = match *descriptor {
            D::FirstStagePages {
                domain,
                pasid: RID_PASID,
                range,
                levels,
            } => Invalidation::Pages {
                domain,
                range,
                levels,
            },
            D::FirstStage {
                domain,
                pasid: RID_PASID,
            } => Invalidation::Domain(domain),
            // A replay has one guest, so all domains are its own.
            D::IotlbGlobal => Invalidation::Global,
            // The devices of a replay keep their contexts.
            D::Context(_) | D::AllContexts => return Ok(()),
            D::Wait { status, data } => {
                return GuestQueue::write_status(&self.memory, status, data);
            }
            // The guest has no second stage and no other PASID.
            D::IotlbDomain(_)
            | D::IotlbPages { .. }
            | D::FirstStage { .. }
            | D::FirstStagePages { .. } => return Err(InvalidationError::Unsupported),
        };
        self.unit.invalidate(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::LayerPlatform;
    use ringfence_types::Pasid;
    use ringfence_types::{CachedLevels, DomainId, Pfn, PfnRange};

    /// A descriptor of another PASID or of the host's stage stops the queue, as a malformed one
    /// does: no later invalidation completes.
    #[test]
    fn the_guest_invalidates_its_own_stage_only() {
        let domain = DomainId::new(1);
        let range = PfnRange::new(Pfn::new(5), 1).unwrap();
        let levels = CachedLevels::Leaves;
        let foreign = InvalidationDescriptor::FirstStage {
            domain,
            pasid: Pasid::new(1).unwrap(),
        };
        let second = InvalidationDescriptor::IotlbPages {
            domain,
            range,
            levels,
        };
        for words in [[0xf, 0], foreign.encode(), second.encode()] {
            let own = LayerPlatform::timed().unwrap();
            let unit = HostUnit::CostOnly(own.queue());
            let coherency = Coherency::Coherent;
            let mut host = NestedHost::new(&own.arena, &own.frames, coherency, unit).unwrap();
            for (count, request) in [
                Invalidation::Pages {
                    domain,
                    range,
                    levels,
                },
                Invalidation::Domain(domain),
                Invalidation::Global,
            ]
            .into_iter()
            .enumerate()
            {
                let ticket = host.commit(request).unwrap();
                assert_eq!(host.is_completed(ticket), Ok(true));
                assert_eq!(host.traffic().invalidations, count as u64 + 1);
            }
            host.queue.push(&own.arena, words).unwrap();
            let request = Invalidation::Domain(domain);
            assert_eq!(host.commit(request), Err(InvalidationError::Failed));
            assert_eq!(host.traffic().invalidations, 3);
        }
    }
}
