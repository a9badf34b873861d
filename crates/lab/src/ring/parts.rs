//! Creates the rings of a device.

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

/// The constructors of a ring mode. `D` drives the rings, `L` is the logic of the unit, `F` the
/// flush policy.
pub struct RingParts<D, L, F> {
    /// The slot choice of maps and the coherency of walks.
    pub setup: RingSetup,
    /// Creates the flush policy of the unit.
    pub flush: fn() -> F,
    /// Marks the driver and logic types.
    types: PhantomData<fn() -> (D, L)>,
}

impl<D, L, F> Clone for RingParts<D, L, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D, L, F> Copy for RingParts<D, L, F> {}

impl<D, L, F> RingParts<D, L, F> {
    /// Returns constructors for rings with this slot choice and coherency.
    pub fn new(choice: SlotChoice, coherency: Coherency, flush: fn() -> F) -> Self {
        Self {
            setup: RingSetup { choice, coherency },
            flush,
            types: PhantomData,
        }
    }
}

impl<D: RingDriver + From<Ring>, L, F> RingParts<D, L, F> {
    /// Creates the empty rings of a device. Returns them with the address of the rDEVICE.
    ///
    /// # Errors
    /// Memory is short, or a ring size is invalid.
    pub fn space(
        &self,
        of: &AttachInfo,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Rings<D, RefCell<D>>, PhysAddr), LabError> {
        let (rings, base) = self.lay_out(of, sizes, memory, frames)?;
        let space = Rings::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, base))
    }

    /// Lays the rings out in memory.
    fn lay_out(
        &self,
        of: &AttachInfo,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Vec<Ring>, PhysAddr), LabError> {
        let slots = sizes.of(of.index);
        let bytes = RingTables::new(PhysAddr::ZERO, &slots)?.memory().bytes();
        let base = frames
            .alloc_contiguous(bytes.div_ceil(PageSize::Size4K.bytes()))
            .map_err(|_| TableError::OutOfFrames)?;
        let rings = lay_out(memory, &RingTables::new(base, &slots)?, self.setup)?;
        Ok((rings, base))
    }

    /// Returns a constructor of the spaces of devices.
    pub fn make_space<I>(
        self,
        sizes: RingSizes,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Rings<D, RefCell<D>>> + 'static
    where
        D: 'static,
        L: 'static,
        F: 'static,
    {
        move |of, platform| {
            let (space, base) = self.space(of, &sizes, &platform.arena, &platform.frames)?;
            Ok((space, ContextTarget::Table(base)))
        }
    }
}
