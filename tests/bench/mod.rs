//! One mode's layer, hardware, attackers and oracle behind one trait object, so that a test is
//! written and compiled once for all modes.

mod build;
mod mode_bench;
mod observer;

use ringfence_lab::mode_dispatch::dispatch;
use ringfence_lab::modes::Mode;
use ringfence_lab::oracle::{Verdict, VerdictCounts};
use ringfence_types::{
    Access, Direction, Fault, Iova, IovaRange, PhysAddr, PhysRange, RequesterId,
};

pub(crate) use build::SPLIT;

use build::Build;

/// Devices of a bench; other requester IDs are unknown to it.
pub(crate) const DEVICES: usize = 2;
/// CPUs of a bench.
pub(crate) const CPUS: usize = 2;

/// Returns the requester ID of a device. Each device is on a separate bus, because a Calgary bridge
/// has one address space for all devices behind it.
pub(crate) fn device(index: usize) -> RequesterId {
    RequesterId::new((0x10 + index as u16) << 8)
}

/// Identifies a mapping of a bench, live or unmapped.
pub(crate) type Handle = usize;

/// Result of an access.
pub(crate) type AccessResult = Result<Vec<PhysRange>, Fault>;

/// A mode under test.
pub(crate) trait Bench {
    /// Maps one buffer or a list; `None` if the ring is full.
    fn try_map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Option<Handle>;
    fn map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Handle {
        self.try_map(device, cpu, pieces, direction).expect("room")
    }
    /// Maps several buffers; the buffers of a ring have the same direction. Empty if the ring has
    /// no room for all.
    fn map_multi(
        &mut self,
        device: usize,
        cpu: usize,
        buffers: &[(PhysRange, Direction)],
    ) -> Vec<Handle>;
    fn map_coherent(&mut self, device: usize, cpu: usize, pages: usize) -> Option<Handle>;
    fn unmap(&mut self, handle: Handle, cpu: usize);
    fn unmap_multi(&mut self, handles: &[Handle], cpu: usize);
    fn end_burst(&mut self, device: usize, cpu: usize, direction: Direction);
    /// Advances the clock and runs the timers.
    fn tick(&mut self, cpu: usize, nanos: u64);
    /// Invalidates all deferred unmaps of the layer.
    fn flush(&mut self);
    /// Performs an access by a device; the oracle judges it.
    fn access(
        &mut self,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> AccessResult;
    /// Returns the device-visible range of a mapping, or of its first piece if the pieces are not
    /// contiguous.
    fn range(&self, handle: Handle) -> IovaRange {
        self.ranges(handle)[0]
    }
    /// Returns the device-visible ranges: one, or one per piece if the pieces are not contiguous.
    fn ranges(&self, handle: Handle) -> &[IovaRange];
    /// Returns true if the driver has the buffer of the mapping back.
    fn is_back(&self, handle: Handle) -> bool;
    /// Returns the verdict of the last access.
    fn verdict(&self) -> Verdict;
    fn tally(&self) -> VerdictCounts;
    /// Switches the attackers on (the default) or off.
    fn attackers(&mut self, on: bool);
    /// Purges all caches of the hardware without the layer's knowledge.
    fn invalidate_all(&mut self);
    /// Returns the physical ranges of the pieces of a live mapping.
    fn lies_at(&self, handle: Handle) -> Vec<PhysRange>;
    /// Returns the number of accesses by the attackers.
    fn attempts(&self) -> u64;
    /// Returns the number of unmaps and of invalidations so far.
    fn counts(&self) -> (u64, u64);
}

/// Returns a bench of `mode`.
pub(crate) fn bench(mode: &Mode) -> Box<dyn Bench> {
    dispatch(mode, Build).unwrap()
}

/// Returns a bench of the mode named `name`.
pub(crate) fn named(name: &str) -> Box<dyn Bench> {
    bench(&Mode::find(name).unwrap())
}

/// Returns `bytes` bytes of memory from `start`.
pub(crate) fn memory(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).unwrap()
}
