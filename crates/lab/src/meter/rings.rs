//! The meter of modes with rings.

use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_types::Invalidator;

use super::ablations::AblationSet;
use super::{
    Ablations, AllocTrace, EmptyLoop, FlushForRings, ReplayRing, ReplayedRings, SecondAblation,
    TimedReplay,
};
use crate::error::LabError;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform};
use crate::replay::DynTimedReplay;
use crate::ring::{RingParts, RingSizes};

type Made = Box<dyn DynTimedReplay>;

/// Creates a timed replay with rings.
fn real<D, L, F, I>(
    parts: RingParts<D, L, F>,
    sizes: &RingSizes,
    platform: LayerPlatform<I>,
) -> Made
where
    D: ReplayRing,
    L: 'static,
    F: FlushForRings<D> + 'static,
    I: Invalidator + 'static,
{
    let flush: F = (parts.flush)();
    let make = parts.make_space(sizes.clone());
    Box::new(TimedReplay::new(flush, platform, make))
}

/// Creates a timed replay whose slots come from `trace`, with or without entries.
fn replayed<D, L, F, I, const ENTRIES: bool>(
    parts: RingParts<D, L, F>,
    sizes: &RingSizes,
    trace: &Rc<AllocTrace>,
    platform: LayerPlatform<I>,
) -> Made
where
    D: ReplayRing,
    L: 'static,
    F: FlushPolicy<ReplayedRings<D, ENTRIES>, u64> + 'static,
    I: Invalidator + 'static,
{
    let (sizes, trace) = (sizes.clone(), Rc::clone(trace));
    let make = move |of: &AttachInfo, platform: &LayerPlatform<I>| {
        let (memory, frames) = (&platform.arena, &platform.frames);
        let (_, rings) = parts.space(of, &sizes, memory, frames)?;
        let coherency = parts.setup.coherency;
        let space =
            ReplayedRings::<D, ENTRIES>::new(of, coherency, rings, memory, Rc::clone(&trace))?;
        Ok((space, ContextTarget::Table(rings)))
    };
    let flush: F = (parts.flush)();
    Box::new(TimedReplay::new(flush, platform, make))
}

impl Ablations {
    /// Creates the meter of a mode with rings.
    ///
    /// # Errors
    /// Memory is short.
    pub fn rings<D, L, F>(
        parts: RingParts<D, L, F>,
        sizes: &RingSizes,
        repetitions: usize,
    ) -> Result<Self, LabError>
    where
        D: ReplayRing,
        L: 'static,
        F: FlushForRings<D> + 'static,
    {
        let trace = Rc::new(AllocTrace::default());
        let free = LayerPlatform::timed;
        let queue = || Ok::<_, LabError>(free()?.with_queue());
        let recorder = real(parts, sizes, queue()?);
        let mut ablations = Self::new(repetitions, Rc::clone(&trace), recorder, &mut || {
            Ok(AblationSet {
                replicas: [
                    Some(real(parts, sizes, queue()?)),
                    None,
                    Some(replayed::<_, _, _, _, true>(parts, sizes, &trace, queue()?)),
                    Some(replayed::<_, _, _, _, false>(
                        parts,
                        sizes,
                        &trace,
                        queue()?,
                    )),
                    Some(replayed::<_, _, _, _, false>(parts, sizes, &trace, free()?)),
                    Some(real(parts, sizes, free()?)),
                    Some(replayed::<_, _, _, _, true>(parts, sizes, &trace, free()?)),
                    Some(Box::new(EmptyLoop::default())),
                ],
            })
        })?;
        ablations.second = SecondAblation::Allocator;
        Ok(ablations)
    }
}
