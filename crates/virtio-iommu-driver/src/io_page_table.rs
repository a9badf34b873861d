//! A domain of the device as an I/O page table of the mapping layer.

use core::marker::PhantomData;
use core::ops::Deref;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, FrameSource, Invalidation, InvalidationError, Invalidator, Lock, Pfn,
    PfnRange, PhysMemory, Ticket, Unmapped,
};

use crate::error::{Status, UnitError};
use crate::transport::Transport;
use crate::unit::Unit;

/// Type parameters of the unit that `L` owns.
type Parts<T, M, S> = fn() -> (T, M, S);

/// A unit behind the embedder's lock, shared by CPUs. A reference to it is an [`Invalidator`].
#[derive(Debug)]
pub struct SharedUnit<T, M, S, L> {
    unit: L,
    parts: PhantomData<Parts<T, M, S>>,
}

impl<T, M, S, L: Lock<Unit<T, M, S>>> SharedUnit<T, M, S, L> {
    /// Wraps `unit` in the lock that `lock` creates.
    pub fn new(unit: Unit<T, M, S>, lock: impl FnOnce(Unit<T, M, S>) -> L) -> Self {
        Self {
            unit: lock(unit),
            parts: PhantomData,
        }
    }

    /// Runs `critical` with exclusive access to the unit.
    pub fn with<R>(&self, critical: impl FnOnce(&mut Unit<T, M, S>) -> R) -> R {
        self.unit.with(critical)
    }
}

impl<T, M, S, L> Invalidator for &SharedUnit<T, M, S, L>
where
    T: Transport,
    M: PhysMemory,
    S: FrameSource,
    L: Lock<Unit<T, M, S>>,
{
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.with(|unit| unit.submit(request))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.with(|unit| unit.poll(ticket))
    }
}

/// The table of one domain, which the device keeps. The platform's invalidator is a reference to
/// the same [`SharedUnit`].
///
/// | error of the unit | error of the table |
/// |---|---|
/// | `Overlap` | [`MapError::AlreadyMapped`] |
/// | `Misaligned` | [`MapError::Misaligned`] |
/// | `Range` of a request without pages | [`MapError::Empty`] |
/// | `OutsideInput`, other `Range`, status RANGE | [`MapError::BeyondWidth`] |
/// | status FAULT | [`MapError::PhysicalBeyondWidth`] |
/// | status NOMEM | [`MapError::OutOfFrames`] |
/// | `NotMapped`, `Splits` | [`UnmapError::NotMapped`], [`UnmapError::WouldSplit`] |
/// | others | [`MapError::Refused`], [`UnmapError::Refused`] |
///
/// A map, and an unmap when the queue is full, poll the device inside the embedder's lock. Other
/// CPUs wait meanwhile; the poll limit bounds the wait.
#[derive(Debug)]
pub struct DomainTable<R> {
    unit: R,
    domain: DomainId,
}

impl<R> DomainTable<R> {
    /// Makes the table of `domain`, through a pointer to its [`SharedUnit`].
    pub const fn new(unit: R, domain: DomainId) -> Self {
        Self { unit, domain }
    }
}

impl<R, T, M, S, L> IoPageTable for DomainTable<R>
where
    R: Deref<Target = SharedUnit<T, M, S, L>>,
    T: Transport,
    M: PhysMemory,
    S: FrameSource,
    L: Lock<Unit<T, M, S>>,
{
    type PerCpu = ();
    type Pages = ();

    fn per_cpu(&self) {}

    fn domain(&self) -> DomainId {
        self.domain
    }

    /// A full queue is no error of a map: the unit waits for a free slot.
    fn map<P: Platform>(
        &self,
        (): &mut (),
        _platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        let mapped = self.unit.with(|unit| unit.map(self.domain, request));
        mapped.map_err(|error| map_error(error, &request))
    }

    /// Waits for the answers to earlier UNMAPs if the queue is full. If the device does not answer
    /// them, [`UnmapError::Refused`] names this range, which is unchanged. The invalidations of the
    /// earlier ranges fail too.
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        _platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        let unmapped = self.unit.with(|unit| {
            match unit.unmap(self.domain, range) {
                // The queue is full of earlier UNMAPs. Wait until the device answers them; later
                // invalidations of them complete at once.
                Err(UnitError::QueueFull) => {
                    unit.drain()?;
                    unit.unmap(self.domain, range)
                }
                other => other,
            }
        });
        match unmapped {
            Ok(unmapped) => Ok((unmapped, CachedLevels::Leaves, ())),
            Err(error) => Err(unmap_error(error, range)),
        }
    }

    fn is_mapped<P: Platform>(&self, _platform: &P, page: Pfn) -> Option<bool> {
        let found = self.unit.with(|unit| unit.lookup(self.domain, page));
        Some(found.is_some())
    }

    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        self.unit.with(|unit| unit.is_empty(self.domain))
    }

    /// Has no effect: [`map`](Self::map) waits for the reply, and an invalidation notifies the
    /// device of queued UNMAPs.
    fn sync<P: Platform>(&self, (): &mut (), _platform: &mut P) {}
}

const fn unmap_error(error: UnitError, range: PfnRange) -> UnmapError {
    let iova = range.lo().iova();
    match error {
        UnitError::NotMapped(_) => UnmapError::NotMapped { iova },
        UnitError::Splits(_) => UnmapError::WouldSplit { iova },
        _ => UnmapError::Refused { iova },
    }
}

const fn map_error(error: UnitError, request: &MapRequest) -> MapError {
    let iova = request.iova;
    match error {
        UnitError::Range if request.pages == 0 => MapError::Empty,
        UnitError::Misaligned => MapError::Misaligned,
        UnitError::Overlap(_) => MapError::AlreadyMapped { iova },
        UnitError::OutsideInput(_) | UnitError::Refused(Status::Range) | UnitError::Range => {
            MapError::BeyondWidth { iova }
        }
        UnitError::Refused(Status::Fault) => MapError::PhysicalBeyondWidth { at: request.pa },
        UnitError::Refused(Status::NoMem) => MapError::OutOfFrames,
        _ => MapError::Refused { iova },
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::{Iova, Permissions, PhysAddr};

    use super::*;
    use crate::error::Failure;

    #[test]
    fn errors_of_the_unit_are_errors_of_the_table() {
        let (iova, pa) = (Iova::new(0x5000), PhysAddr::new(0x9000));
        let range = PfnRange::new(Pfn::containing(iova), 1).unwrap();
        let request = |pages| MapRequest {
            iova,
            pa,
            pages,
            permissions: Permissions::READ,
        };
        let refused = UnitError::Refused;
        for (error, pages, wanted) in [
            (UnitError::Range, 0, MapError::Empty),
            (UnitError::Range, 1, MapError::BeyondWidth { iova }),
            (UnitError::Misaligned, 1, MapError::Misaligned),
            (
                UnitError::Overlap(range),
                1,
                MapError::AlreadyMapped { iova },
            ),
            (
                UnitError::OutsideInput(range),
                1,
                MapError::BeyondWidth { iova },
            ),
            (refused(Status::Range), 1, MapError::BeyondWidth { iova }),
            (
                refused(Status::Fault),
                1,
                MapError::PhysicalBeyondWidth { at: pa },
            ),
            (refused(Status::NoMem), 1, MapError::OutOfFrames),
            (refused(Status::DevErr), 1, MapError::Refused { iova }),
            (
                UnitError::Failed(Failure::TimedOut),
                1,
                MapError::Refused { iova },
            ),
        ] {
            assert_eq!(map_error(error, &request(pages)), wanted, "{error:?}");
        }
        for (error, wanted) in [
            (UnitError::NotMapped(range), UnmapError::NotMapped { iova }),
            (UnitError::Splits(range), UnmapError::WouldSplit { iova }),
            (
                UnitError::Failed(Failure::TimedOut),
                UnmapError::Refused { iova },
            ),
        ] {
            assert_eq!(unmap_error(error, range), wanted, "{error:?}");
        }
    }
}
