//! The meter of modes whose maps and unmaps another core executes.
//!
//! It measures the cycles of the core that does I/O: the queue, and the wait for the other core,
//! which runs a real layer at the same time. The work of the other core has no components here, so
//! all cycles count as `other`. On a machine with one processor the wait includes the switch to the
//! other thread.

use ringfence_dma::flush::Strict;
use ringfence_pgtable::Coherency;

use super::{Ablations, FlushFor, ReplayAlloc, TimedReplay};
use crate::components::{HostOf, ModeParts, ReplayTable};
use crate::error::LabError;
use crate::hardware::Host;
use crate::layer::{DmaLayer, LayerPlatform};
use crate::sidecore::{Sidecore, ThreadLink, UnmapWait};

impl Ablations {
    /// Creates the meter of a mode with a sidecore.
    ///
    /// # Errors
    /// Memory is short, or a thread cannot be created.
    pub fn offloaded<A, T>(
        parts: ModeParts<A, T, Strict>,
        wait: UnmapWait,
        coherency: Coherency,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        A: ReplayAlloc,
        T: ReplayTable,
        Strict: FlushFor<A, T>,
    {
        Self::undivided(repetitions, &|| {
            let link = ThreadLink::start(move || {
                let platform = LayerPlatform::timed()?;
                let (host, invalidator) = HostOf::<T>::for_meter(&platform.arena, coherency)?;
                let make = parts.make_space(coherency, host);
                let platform = platform.map_invalidator(|_| invalidator);
                Ok(DmaLayer::new((parts.flush)(), platform, make))
            })?;
            Ok(Box::new(TimedReplay::of(Box::new(Sidecore::new(
                link, wait,
            )?))))
        })
    }
}
