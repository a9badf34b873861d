//! The layer's platform in a replay: memory, frames, an invalidator, and the trace's clock.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_dma::Platform;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{
    Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange, Ticket,
};

use super::TimedInvalidationQueue;
use crate::error::LabError;

/// Memory of one timed replay: tables only, no buffers.
const ARENA: u64 = 256 << 20;
/// Frames that are touched in advance, so that page faults of this process do not count as work of
/// the layer.
const WARM_FRAMES: u64 = 64;
/// Frames of the invalidation queue, the first ones of the memory.
const QUEUE_FRAMES: u64 = 2;

/// The platform of a DMA layer in a replay.
#[derive(Debug)]
pub struct LayerPlatform<I> {
    /// Memory for tables.
    pub arena: Rc<Arena>,
    /// Frames of `arena`.
    pub frames: Rc<Frames<Rc<Arena>>>,
    /// The layer's interface for invalidations.
    pub invalidator: I,
    /// Current time on the trace's clock.
    pub now: Nanos,
}

impl<I: Invalidator> Platform for LayerPlatform<I> {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = I;

    #[inline]
    fn memory(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    fn frames(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }

    #[inline]
    fn invalidator(&mut self) -> &mut I {
        &mut self.invalidator
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }
}

impl LayerPlatform<FreeInvalidator> {
    /// Creates a platform for one timed replay with tables.
    ///
    /// # Errors
    /// Memory is short.
    pub(crate) fn timed() -> Result<Self, LabError> {
        Self::warmed(WARM_FRAMES)
    }

    /// Creates a platform for one timed replay without tables.
    ///
    /// # Errors
    /// Memory is short.
    pub(crate) fn without_tables() -> Result<Self, LabError> {
        Self::warmed(QUEUE_FRAMES)
    }

    fn warmed(warm: u64) -> Result<Self, LabError> {
        let arena = Rc::new(Arena::new(ARENA)?);
        let queue = QUEUE_FRAMES << 12;
        let region = PhysRange::new(PhysAddr::new(queue), ARENA - queue)
            .ok_or(LabError::Internal("replica region"))?;
        for page in 0..warm {
            if let Ok(word) = arena.word(PhysAddr::new(page << 12)) {
                word.store(0, Ordering::Relaxed);
            }
        }
        Ok(Self {
            frames: Rc::new(Frames::new(Rc::clone(&arena), region)),
            arena,
            invalidator: FreeInvalidator,
            now: Nanos(0),
        })
    }
}

impl<I> LayerPlatform<I> {
    /// Returns an invalidation queue in the first frames of the memory.
    pub(crate) fn queue(&self) -> TimedInvalidationQueue {
        TimedInvalidationQueue::in_first_frames(&self.arena)
    }

    /// Replaces the invalidator by an invalidation queue.
    pub(crate) fn with_queue(self) -> LayerPlatform<TimedInvalidationQueue> {
        let queue = self.queue();
        self.map_invalidator(|_| queue)
    }

    /// Replaces the invalidator by what `map` returns.
    pub(crate) fn map_invalidator<J>(self, map: impl FnOnce(I) -> J) -> LayerPlatform<J> {
        LayerPlatform {
            arena: self.arena,
            frames: self.frames,
            invalidator: map(self.invalidator),
            now: self.now,
        }
    }
}

/// The stub of an invalidator: requests complete at no cost.
#[derive(Debug, Default)]
pub struct FreeInvalidator;

impl Invalidator for FreeInvalidator {
    #[inline]
    fn submit(&mut self, _request: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    #[inline]
    fn poll(&mut self, _ticket: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// An invalidator of any type.
pub struct DynInvalidator(Box<dyn Invalidator>);

impl DynInvalidator {
    /// Erases the type of `invalidator`.
    pub fn new(invalidator: impl Invalidator + 'static) -> Self {
        Self(Box::new(invalidator))
    }
}

impl Invalidator for DynInvalidator {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.0.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.0.poll(ticket)
    }
}
