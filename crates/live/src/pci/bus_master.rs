//! Bus mastering: only a function whose Bus Master Enable bit is set accesses memory.
//!
//! A function whose bit is clear issues no memory requests and therefore no MSI-X interrupts, which
//! are memory writes (PCI Express Base Specification, "Command Register"; PCI Local Bus
//! Specification 3.0, section 6.2.2). Kernels rely on this when they unbind a driver or start
//! another kernel. Here every access to memory or a vector requires a [`BusMasterGuard`], which
//! only the configuration space creates.

use std::io;
use std::marker::PhantomData;

use vm_memory::GuestMemoryMmap;

use super::ConfigSpace;
use crate::dma::{Dma, MemoryInUse};

/// Proof that a function is bus master. While it lives, the configuration space cannot be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BusMasterGuard<'c>(PhantomData<&'c ConfigSpace>);

impl ConfigSpace {
    /// Returns a guard if Bus Master Enable is set.
    pub(crate) fn bus_master(&self) -> Option<BusMasterGuard<'_>> {
        self.bus_master_enable()
            .then_some(BusMasterGuard(PhantomData))
    }
}

/// A function's access to memory, which requires a [`BusMasterGuard`].
#[derive(Debug)]
pub(crate) struct BusMasterGate<A>(A);

impl<A> BusMasterGate<A> {
    pub(crate) const fn new(dma: A) -> Self {
        Self(dma)
    }

    /// Returns the access to memory.
    pub(crate) const fn open(&mut self, _by: BusMasterGuard<'_>) -> &mut A {
        &mut self.0
    }
}

/// Operations that are not memory accesses.
impl<A: Dma> BusMasterGate<A> {
    /// Locks the pages in `memory` that devices can access.
    ///
    /// # Errors
    /// As for [`Dma::lock_pinned`].
    pub(crate) fn lock_pinned(&mut self, memory: &GuestMemoryMmap) -> io::Result<()> {
        self.0.lock_pinned(memory)
    }

    /// Replaces the guest's memory.
    ///
    /// # Errors
    /// As for [`Dma::set_memory`].
    pub(crate) fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        self.0.set_memory(memory)
    }

    /// Completes a replacement of the guest's memory that was refused.
    ///
    /// # Errors
    /// As for [`Dma::complete_set_memory`].
    pub(crate) fn complete_set_memory(&mut self) -> Result<(), MemoryInUse> {
        self.0.complete_set_memory()
    }

    /// Returns true if a hardware IOMMU model translates the accesses.
    pub(crate) fn is_assigned(&self) -> bool {
        self.0.is_assigned()
    }
}
