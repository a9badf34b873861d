//! Who may master the bus: a function whose Bus Master Enable bit is set, and no other.
//!
//! A function whose bit is clear issues no requests to memory, and so no MSI-X interrupts, which
//! are writes to memory (PCI Express Base Specification, "Command Register"; PCI Local Bus
//! Specification 3.0, section 6.2.2). Kernels count on it when they take a device from its driver
//! or start another kernel. Here nothing reaches memory or a vector without a [`BusMasterGuard`],
//! and only the configuration space makes one.

use std::marker::PhantomData;

use vm_memory::GuestMemoryMmap;

use super::ConfigSpace;
use crate::dma::Dma;
use crate::handover::{DeviceState, HandOverBlocker};

/// A function is master of the bus. Its configuration space cannot be written while this lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BusMasterGuard<'c>(PhantomData<&'c ConfigSpace>);

impl ConfigSpace {
    /// That the function may master the bus, if it may.
    pub(crate) fn bus_master(&self) -> Option<BusMasterGuard<'_>> {
        self.bus_master_enable()
            .then_some(BusMasterGuard(PhantomData))
    }
}

/// A function's way to memory, shut unless it is master of the bus.
#[derive(Debug)]
pub(crate) struct BusMasterGate<A>(A);

impl<A> BusMasterGate<A> {
    pub(crate) const fn new(way: A) -> Self {
        Self(way)
    }

    /// The way to memory.
    pub(crate) const fn open(&mut self, _by: BusMasterGuard<'_>) -> &mut A {
        &mut self.0
    }
}

/// What is no access.
impl<A: Dma> BusMasterGate<A> {
    /// The guest's memory is another one now.
    pub(crate) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.0.set_memory(memory);
    }

    /// What another process is told of the device.
    ///
    /// # Errors
    /// It cannot have it.
    pub(crate) fn hand_over(&self, device: DeviceState) -> Result<DeviceState, HandOverBlocker> {
        self.0.hand_over(device)
    }
}
