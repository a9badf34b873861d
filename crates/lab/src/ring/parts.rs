//! How one makes the rings of a device.

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
use crate::mode_dispatch::ThreadCell;
use crate::replay::AttachInfo;

/// How one makes a ring mode's parts: `D` drives its rings, `L` is the logic of its unit, `F` its
/// flush policy.
pub struct RingParts<D, L, F> {
    /// Which slot a map takes, and whether walks snoop.
    pub setup: RingSetup,
    /// The flush policy of the unit.
    pub flush: fn() -> F,
    /// The driver and the logic are types.
    types: PhantomData<fn() -> (D, L)>,
}

impl<D, L, F> Clone for RingParts<D, L, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D, L, F> Copy for RingParts<D, L, F> {}

impl<D, L, F> RingParts<D, L, F> {
    /// Rings of `choice`, whose entries the unit's walks see as `coherency` says.
    pub fn new(choice: SlotChoice, coherency: Coherency, flush: fn() -> F) -> Self {
        Self {
            setup: RingSetup { choice, coherency },
            flush,
            types: PhantomData,
        }
    }
}

impl<D: RingDriver + From<Ring>, L, F> RingParts<D, L, F> {
    /// The rings of a device, empty, and its rDEVICE.
    ///
    /// # Errors
    /// No room, or a size that no ring can have.
    pub fn space(
        &self,
        of: &AttachInfo,
        sizes: &RingSizes,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Rings<D, ThreadCell<D>>, PhysAddr), LabError> {
        let (rings, base) = self.lay_out(of, sizes, memory, frames)?;
        let space = Rings::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, base))
    }

    /// The rings in memory, before anybody drives them.
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
}
