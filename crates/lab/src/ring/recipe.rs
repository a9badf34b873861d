//! How one makes the rings of a device.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use ringfence_dma::ring::{Ring, RingSetup, SlotChoice, Tables, lay_out};
use ringfence_dma::space::{RingDriver, Rings};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, TableError};
use ringfence_types::{PageSize, PhysAddr};

use super::RingSizes;
use crate::build::Single;
use crate::error::LabError;
use crate::replay::Newcomer;

/// How one makes a ring mode's parts: `D` drives its rings, `L` is the logic of its unit, `F` its flush policy.
pub struct RingRecipe<D, L, F> {
    /// Which slot a map takes, and whether walks snoop.
    pub setup: RingSetup,
    /// The flush policy of the unit.
    pub flush: fn() -> F,
    /// The driver and the logic are types.
    parts: PhantomData<fn() -> (D, L)>,
}

impl<D, L, F> Clone for RingRecipe<D, L, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D, L, F> Copy for RingRecipe<D, L, F> {}

impl<D, L, F> RingRecipe<D, L, F> {
    /// Rings of `choice`, whose entries the unit's walks see as `coherency` says.
    pub fn new(choice: SlotChoice, coherency: Coherency, flush: fn() -> F) -> Self {
        Self {
            setup: RingSetup { choice, coherency },
            flush,
            parts: PhantomData,
        }
    }
}

impl<D: RingDriver + From<Ring>, L, F> RingRecipe<D, L, F> {
    /// The rings of a device, empty, and its rDEVICE.
    ///
    /// # Errors
    /// No room, or a size that no ring can have.
    pub fn space(
        &self,
        of: &Newcomer,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Rings<D, Single<D>>, PhysAddr), LabError> {
        let (rings, base) = self.lay_out(of, sizes, memory, frames)?;
        let space = Rings::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, base))
    }

    /// The rings in memory, before anybody drives them.
    fn lay_out(
        &self,
        of: &Newcomer,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Vec<Ring>, PhysAddr), LabError> {
        let slots = sizes.of(of.row);
        let bytes = Tables::new(PhysAddr::ZERO, &slots)?.memory().bytes();
        let base = frames
            .alloc_contiguous(bytes.div_ceil(PageSize::Size4K.bytes()))
            .map_err(|_| TableError::OutOfFrames)?;
        let rings = lay_out(memory, &Tables::new(base, &slots)?, self.setup)?;
        Ok((rings, base))
    }
}
