//! One mode's layer, hardware, attackers and oracle, behind one object, so that a test is written
//! once and built once for all modes.

mod build;
mod eye;
mod world;

use ringfence_lab::mode_dispatch::dispatch;
use ringfence_lab::modes::Mode;
use ringfence_lab::oracle::{Tally, Verdict};
use ringfence_types::{
    Access, Direction, Fault, Iova, IovaRange, PhysAddr, PhysRange, RequesterId,
};

use build::Build;

/// Devices of a bench; any number of others is unknown to it.
pub(crate) const DEVICES: usize = 2;
/// Processors of a bench.
pub(crate) const CPUS: usize = 2;

/// Each on a bus of its own: a Calgary bridge has one space for all devices behind it.
pub(crate) fn device(index: usize) -> RequesterId {
    RequesterId::new((0x10 + index as u16) << 8)
}

/// Names a mapping of a bench, dead or alive.
pub(crate) type Handle = usize;

/// What an access came to.
pub(crate) type Reached = Result<Vec<PhysRange>, Fault>;

/// One mode at work.
pub(crate) trait Bench {
    /// Maps one buffer, or a list; `None` if the ring is full.
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
    /// Maps several buffers; those of a ring have one direction. None if the ring has not room for
    /// all.
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
    /// Lets time pass and runs the timers.
    fn tick(&mut self, cpu: usize, nanos: u64);
    /// Flushes all that the layer holds back.
    fn flush(&mut self);
    /// An access by a device, judged by the oracle.
    fn access(&mut self, device: RequesterId, iova: Iova, bytes: u64, access: Access) -> Reached;
    /// The device-visible bytes of a mapping, or of its first piece where pieces lie apart.
    fn range(&self, handle: Handle) -> IovaRange {
        self.ranges(handle)[0]
    }
    /// The device-visible bytes: one range, or one for each piece where pieces lie apart.
    fn ranges(&self, handle: Handle) -> &[IovaRange];
    /// Whether the buffer of the mapping is back.
    fn is_back(&self, handle: Handle) -> bool;
    /// The verdict of the last access.
    fn verdict(&self) -> Verdict;
    fn tally(&self) -> Tally;
    /// Attackers on (the default) or off.
    fn attackers(&mut self, on: bool);
    /// Purges all that the hardware caches, behind the layer's back.
    fn purge(&mut self);
    /// Stores a word.
    fn poke(&mut self, at: PhysAddr, word: u64);
    /// Where the pieces of a live mapping lie.
    fn lies_at(&self, handle: Handle) -> Vec<PhysRange>;
    /// Accesses that the attackers made.
    fn attempts(&self) -> u64;
    /// Unmaps and invalidations so far.
    fn counts(&self) -> (u64, u64);
}

/// A bench of `mode`.
pub(crate) fn bench(mode: &Mode) -> Box<dyn Bench> {
    dispatch(mode, Build).unwrap()
}

/// A bench of the mode of that name.
pub(crate) fn named(name: &str) -> Box<dyn Bench> {
    bench(&Mode::find(name).unwrap())
}

/// `bytes` bytes of memory from `start`.
pub(crate) fn memory(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).unwrap()
}
