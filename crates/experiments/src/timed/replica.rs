//! Timed replays of a mode: layers without devices that replay a plan and measure it.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{FlushPolicy, Never};
use ringfence_dma::ring::{RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::space::{Identity, Rings};
use ringfence_hw::RingLogic;
use ringfence_lab::LabError;
use ringfence_lab::components::{ModeParts, ReplayTable};
use ringfence_lab::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, HasPlatform, INSPECTED_BYTES, LayerPlatform,
    PassThrough,
};
use ringfence_lab::mapping_cache::CachedParts;
use ringfence_lab::meter::{
    Clock, FlushFor, FlushForRings, InvalidationQueue, ReplayAlloc, ReplayRing, TimedReplay,
};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor};
use ringfence_lab::plan::Plan;
use ringfence_lab::platform::{DATA_BYTES, MEMORY_BYTES};
use ringfence_lab::ring::RingParts;
use ringfence_lab::shadow::{CopyParts, TimedLayerVisitor};
use ringfence_memory::{Arena, Frames, WriteBack};
use ringfence_pgtable::Coherency;
use ringfence_types::{Nanos, PhysAddr, PhysMemory, PhysRange};

use super::steps::Block;

/// Bytes of memory of one timed replay: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames touched in advance, so that no page fault of this process counts as work of the layer.
const WARM_FRAMES: u64 = 256;

#[cfg(test)]
thread_local! {
    /// True if new timed replays have memory with a device view.
    static DEVICE_VIEW: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `make`, whose timed replays get memory with the view of a device that does not snoop.
#[cfg(test)]
pub(super) fn with_device_view<T>(make: impl FnOnce() -> T) -> T {
    DEVICE_VIEW.set(true);
    let made = make();
    DEVICE_VIEW.set(false);
    made
}

/// A platform that executes write-backs with the instruction `write_back`.
fn platform(write_back: WriteBack) -> Result<LayerPlatform<InvalidationQueue>, LabError> {
    let arena = Arena::with_write_back(ARENA, write_back)?;
    #[cfg(test)]
    let arena = match DEVICE_VIEW.get() {
        true => Arena::with_device_view(ARENA)?,
        false => arena,
    };
    let arena = Rc::new(arena);
    let region = PhysRange::new(PhysAddr::new(0x2000), ARENA - 0x2000)
        .ok_or(LabError::Internal("replica region"))?;
    for page in 0..WARM_FRAMES {
        if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let queue = InvalidationQueue::new(Rc::clone(&arena), PhysAddr::new(0), PhysAddr::new(0x1000));
    // Same type as in the meter's replicas, so both share one monomorphisation.
    Ok(LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
        arena,
        invalidator: queue,
        now: Nanos(0),
    })
}

/// A platform with memory for buffers below the tables, and for pools of copies above them. The
/// table frames are not touched in advance.
fn platform_with_buffers(
    write_back: WriteBack,
) -> Result<LayerPlatform<InvalidationQueue>, LabError> {
    let arena = Rc::new(Arena::with_write_back(MEMORY_BYTES, write_back)?);
    let page = |page: u64| PhysAddr::new(DATA_BYTES + (page << 12));
    let region = PhysRange::new(page(2), ARENA).ok_or(LabError::Internal("replica region"))?;
    Ok(LayerPlatform {
        frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
        invalidator: InvalidationQueue::new(Rc::clone(&arena), page(0), page(1)),
        arena,
        now: Nanos(0),
    })
}

/// A timed replay that copies the buffers of a plan.
struct Copying {
    replay: Box<dyn DynExperimentReplay>,
    memory: Rc<Arena>,
}

impl DynExperimentReplay for Copying {
    /// Touches the buffers first, so that page faults of this process do not count.
    fn drive(&mut self, plan: &Plan, blocks: &[Block], clock: &mut Clock) -> Result<u64, LabError> {
        for segment in &plan.segments {
            let first = segment.start().align_down(4096).get();
            for at in (first..=segment.last().get()).step_by(4096) {
                if let Ok(word) = self.memory.word(PhysAddr::new(at)) {
                    word.fetch_add(0, std::sync::atomic::Ordering::Relaxed);
                }
            }
        }
        self.replay.drive(plan, blocks, clock)
    }

    #[cfg(test)]
    fn layer_type(&self) -> &'static str {
        self.replay.layer_type()
    }

    #[cfg(test)]
    fn words_of_tables(&self) -> (usize, usize) {
        self.replay.words_of_tables()
    }

    #[cfg(test)]
    fn write_back(&self) -> WriteBack {
        self.replay.write_back()
    }
}

/// A timed replay of any mode.
pub(super) trait DynExperimentReplay {
    /// Performs the blocks of `plan`. Returns the number of invalidations in those that count, and
    /// leaves their times in `clock`.
    fn drive(&mut self, plan: &Plan, blocks: &[Block], clock: &mut Clock) -> Result<u64, LabError>;

    /// Name of the layer's type.
    #[cfg(test)]
    fn layer_type(&self) -> &'static str;

    /// Number of words other than 0 in the first frames of tables: in memory, and in the view of a
    /// device that does not snoop.
    #[cfg(test)]
    fn words_of_tables(&self) -> (usize, usize);

    /// Instruction that writes lines of the layer's memory back.
    #[cfg(test)]
    fn write_back(&self) -> WriteBack;
}

impl<L: DmaOps + HasPlatform<InvalidationQueue>> DynExperimentReplay for TimedReplay<L> {
    fn drive(&mut self, plan: &Plan, blocks: &[Block], clock: &mut Clock) -> Result<u64, LabError> {
        self.prepare(plan)?;
        let mut invalidations = 0;
        for block in blocks {
            let before = self.layer().platform().invalidator.requests();
            self.run_block(plan, block.steps(plan), clock, None);
            if block.counts {
                invalidations += self.layer().platform().invalidator.requests() - before;
            } else {
                clock.blocks.pop();
            }
        }
        match self.refusals() {
            None => Ok(invalidations),
            Some(_) => Err(LabError::Internal("a map that was refused")),
        }
    }

    #[cfg(test)]
    fn layer_type(&self) -> &'static str {
        std::any::type_name::<L>()
    }

    #[cfg(test)]
    fn words_of_tables(&self) -> (usize, usize) {
        let memory = &self.layer().platform().arena;
        let count = |memory: &Arena| {
            let addresses = (0x2000..WARM_FRAMES << 12).step_by(8).map(PhysAddr::new);
            let words = addresses.map(|at| memory.word(at).unwrap());
            let words = words.filter(|word| word.load(std::sync::atomic::Ordering::Relaxed) != 0);
            words.count()
        };
        let view = memory.device_view();
        (count(memory), view.map_or(0, |view| count(view.memory())))
    }

    #[cfg(test)]
    fn write_back(&self) -> WriteBack {
        self.layer().platform().arena.write_back_kind()
    }
}

/// Makes the replay of a layer with a pool.
struct BoxedReplay;

impl TimedLayerVisitor<InvalidationQueue> for BoxedReplay {
    type Output = Box<dyn DynExperimentReplay>;

    fn visit<L: DmaOps + HasPlatform<InvalidationQueue> + 'static>(self, layer: L) -> Self::Output {
        Box::new(TimedReplay::of(Box::new(layer)))
    }
}

/// Visitor that makes a timed replay of a mode.
pub(super) struct MakeReplica {
    pub(super) coherency: Coherency,
    pub(super) write_back: WriteBack,
}

impl ModeVisitor for MakeReplica {
    type Output = Result<Box<dyn DynExperimentReplay>, LabError>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        let make = |of: &AttachInfo, _: &LayerPlatform<InvalidationQueue>| {
            Ok((Identity::new(of.domain), ContextTarget::PassThrough))
        };
        let layer = DmaLayer::new(Never, platform(self.write_back)?, make);
        Ok(if kind.has_generic_path() {
            Box::new(TimedReplay::of(Box::new(PassThrough::new(layer))))
        } else {
            Box::new(TimedReplay::of(Box::new(layer)))
        })
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let make = parts.make_space(self.coherency, None);
        let platform = platform(self.write_back)?;
        Ok(Box::new(TimedReplay::new((parts.flush)(), platform, make)))
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        Err(LabError::Internal(
            "experiments do not support mapping caches",
        ))
    }

    fn shadow<P: CopyParts>(self, parts: P) -> Self::Output {
        let platform = platform_with_buffers(self.write_back)?;
        let memory = Rc::clone(&platform.arena);
        let make = parts.make_space(self.coherency, None);
        let layer = DmaLayer::new(parts.flush(), platform, make);
        let replay = parts.timed(layer, INSPECTED_BYTES, BoxedReplay);
        Ok(Box::new(Copying { replay, memory }))
    }

    /// Rejects rings of a trace: experiments use the rings of a port, which [`rings`] makes.
    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Err(LabError::Internal(
            "experiments do not support rings of a trace",
        ))
    }
}

/// Slots of a ring's table. At most two buffers for each of 1024 descriptors are live, and the
/// unmaps of a burst of 200 packets also occupy slots until it ends.
const SLOTS: u32 = 4096;

/// A timed replay whose driver `D` treats each ring of a port as a device with one table. With
/// non-coherent tables, it writes lines back at each doorbell and at the end of each burst.
pub(super) fn rings<D, F>(
    coherency: Coherency,
    write_back: WriteBack,
    flush: F,
) -> Result<Box<dyn DynExperimentReplay>, LabError>
where
    D: ReplayRing,
    F: FlushPolicy<Rings<D, RefCell<D>>, u64> + 'static,
{
    let make = move |of: &AttachInfo, platform: &LayerPlatform<InvalidationQueue>| {
        let bytes = u64::from(SLOTS) * 16 + 4096;
        let base = platform.frames.alloc_contiguous(bytes.div_ceil(4096) + 1);
        let base = base.map_err(|_| {
            LabError::Internal("the arena has no contiguous frames for a ring table")
        })?;
        let failed = || LabError::Internal("the ring table cannot be laid out");
        let tables = RingTables::new(base, &[SLOTS]).map_err(|_| failed())?;
        let choice = SlotChoice::Tail;
        let setup = RingSetup { choice, coherency };
        let rings = lay_out(&*platform.arena, &tables, setup).map_err(|_| failed())?;
        let space = Rings::<D, RefCell<D>>::new(of.domain, of.device, rings, RefCell::new);
        Ok((space, ContextTarget::Table(base)))
    };
    Ok(Box::new(TimedReplay::new(
        flush,
        platform(write_back)?,
        make,
    )))
}

#[cfg(test)]
mod tests {
    use ringfence_lab::mode_dispatch::dispatch;
    use ringfence_lab::modes::Mode;

    use super::*;

    #[test]
    fn pass_through_is_timed_with_the_generic_path_and_none_without() {
        for (name, wanted) in [("none", false), ("hwpt", true), ("swpt", true)] {
            let make = MakeReplica {
                coherency: Coherency::Coherent,
                write_back: WriteBack::best(),
            };
            let replica = dispatch(&Mode::find(name).unwrap(), make).unwrap().unwrap();
            let layer = replica.layer_type();
            assert_eq!(layer.contains("PassThrough<"), wanted, "{name}: {layer}");
        }
    }

    #[test]
    fn each_mode_is_timed_with_its_allocator_and_its_flush_policy() {
        for (name, eiovar, deferred) in [
            ("strict", false, false),
            ("strict+", true, false),
            ("defer", false, true),
            ("defer+", true, true),
        ] {
            let make = MakeReplica {
                coherency: Coherency::NonCoherent,
                write_back: WriteBack::best(),
            };
            let replica = dispatch(&Mode::find(name).unwrap(), make).unwrap().unwrap();
            let layer = replica.layer_type();
            for (part, wanted) in [
                ("::CachedTree", true),
                ("::Eiovar<", eiovar),
                ("::Strict,", !deferred),
                ("::Deferred<", deferred),
            ] {
                assert_eq!(layer.contains(part), wanted, "{name}: {part} in {layer}");
            }
        }
    }

    #[test]
    fn pool_is_timed_with_the_buffers_of_the_driver_and_copy_with_copies() {
        for (name, wanted) in [("copy", false), ("pool", true), ("copy-hybrid", false)] {
            let make = MakeReplica {
                coherency: Coherency::Coherent,
                write_back: WriteBack::best(),
            };
            let replica = dispatch(&Mode::find(name).unwrap(), make).unwrap().unwrap();
            let layer = replica.layer_type();
            assert_eq!(layer.contains("PoolLayer<"), wanted, "{name}: {layer}");
        }
    }
}
