//! The machine's services that the layer uses.

use ringfence_types::{FrameSource, Invalidator, Nanos, PhysMemory};

/// The ports of one CPU: memory, frames for tables, the IOMMU's invalidation interface, and time.
pub trait Platform {
    /// Memory that holds tables, rings and bounce buffers.
    type Memory: PhysMemory;
    /// Frames for table pages and coherent allocations.
    type Frames: FrameSource;
    /// The IOMMU's invalidation interface as this CPU uses it.
    type Invalidator: Invalidator;

    /// Returns the memory port.
    fn memory(&self) -> &Self::Memory;
    /// Returns the frame port.
    fn frames(&self) -> &Self::Frames;
    /// Returns the invalidation port.
    fn invalidator(&mut self) -> &mut Self::Invalidator;
    /// Returns the current time of the clock that drives timers.
    fn now(&self) -> Nanos;
}
