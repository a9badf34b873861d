//! What the layer needs from the machine it runs on.

use ringfence_types::{FrameSource, Invalidator, Nanos, PhysMemory};

/// The ports of one processor: memory, frames for tables, the invalidation interface, and the time.
pub trait Platform {
    /// Memory that holds tables, rings and bounce buffers.
    type Memory: PhysMemory;
    /// Frames for table pages and coherent allocations.
    type Frames: FrameSource;
    /// The IOMMU's invalidation interface as this processor uses it.
    type Invalidator: Invalidator;

    /// The memory port.
    fn memory(&self) -> &Self::Memory;
    /// The frame port.
    fn frames(&self) -> &Self::Frames;
    /// The invalidation port.
    fn invalidator(&mut self) -> &mut Self::Invalidator;
    /// The time now, on the clock that drives timers.
    fn now(&self) -> Nanos;
}
