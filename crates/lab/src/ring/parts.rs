//! Creates the rings (rRINGs of an rDEVICE, rIOMMU section 4.1) of a device in a ring mode.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use ringfence_dma::ring::{Ring, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{RingDriver, Rings};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, TableError};
use ringfence_types::{PageSize, PhysAddr};

use super::RingSizes;
use crate::error::LabError;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform, SpaceResult};

/// The parts of which a ring mode is built. `D` is the driver of one ring, `F` the flush policy.
/// `L` is the [`RingLogic`](ringfence_hw::RingLogic) of the modelled IOMMU, for the users of
/// the parts that also create the IOMMU.
pub struct RingParts<D, L, F> {
    /// The slot choice of maps, and the coherency of walks with the CPU's caches.
    pub setup: RingSetup,
    /// Creates the flush policy.
    pub flush: fn() -> F,
    /// `D` and `L` are types without a value here.
    types: PhantomData<fn() -> (D, L)>,
}

impl<D, L, F> Clone for RingParts<D, L, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D, L, F> Copy for RingParts<D, L, F> {}

impl<D, L, F> RingParts<D, L, F> {
    /// Returns the parts of a mode whose rings have this slot choice and coherency.
    pub fn new(choice: SlotChoice, coherency: Coherency, flush: fn() -> F) -> Self {
        Self {
            setup: RingSetup { choice, coherency },
            flush,
            types: PhantomData,
        }
    }
}

impl<D: RingDriver + From<Ring>, L, F> RingParts<D, L, F> {
    /// Creates the empty rings of `device`. Returns them with the address of the rDEVICE, the
    /// table to which the device's context entry points.
    ///
    /// # Errors
    /// `frames` has too few contiguous frames, or a ring size is invalid.
    pub fn space(
        &self,
        device: &AttachInfo,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Rings<D, RefCell<D>>, PhysAddr), LabError> {
        let (rings, base) = self.lay_out(device, sizes, memory, frames)?;
        let space = Rings::new(device.domain, device.device, rings, RefCell::new);
        Ok((space, base))
    }

    /// Writes the empty tables of the rings into memory. Returns the rings and the address of the
    /// rDEVICE.
    fn lay_out(
        &self,
        device: &AttachInfo,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Vec<Ring>, PhysAddr), LabError> {
        let slots = sizes.of(device.index);
        let bytes = RingTables::new(PhysAddr::ZERO, &slots)?.memory().bytes();
        let base = frames
            .alloc_contiguous(bytes.div_ceil(PageSize::Size4K.bytes()))
            .map_err(|_| TableError::OutOfFrames)?;
        let rings = lay_out(memory, &RingTables::new(base, &slots)?, self.setup)?;
        Ok((rings, base))
    }

    /// Returns a function that creates the rings of each device that attaches.
    pub fn make_space<I>(
        self,
        sizes: RingSizes,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Rings<D, RefCell<D>>> + 'static
    where
        D: 'static,
        L: 'static,
        F: 'static,
    {
        move |device, platform| {
            let (space, base) = self.space(device, &sizes, &platform.arena, &platform.frames)?;
            Ok((space, ContextTarget::Table(base)))
        }
    }
}
