//! The DMA layer of a replay behind one object-safe trait.
//!
//! A replay drives [`DmaOps`]. [`DmaLayer`] implements it for every space and flush policy.
//! Timed replays of named modes call it with static types. Oracle replays and timed replays of
//! user-composed modes call it through `dyn DmaOps`, as Linux drivers call `dma_map_ops`.

mod attachments;
mod dma_layer;
mod layer_platform;
mod mapping_token;
mod pass_through;
mod pool_layer;
mod timed_invalidation_queue;

pub use attachments::{Attachments, RINGS, ring_index, ring_of};
pub use dma_layer::{DmaLayer, MakeSpace};
pub use layer_platform::{DynInvalidator, FreeInvalidator, LayerPlatform};
pub use mapping_token::{LentBuffer, MappingToken};
pub use pass_through::PassThrough;
pub use pool_layer::{INSPECTED_BYTES, Inspected, LARGEST_BUFFER, PoolLayer};
pub use timed_invalidation_queue::TimedInvalidationQueue;

use ringfence_dma::space::CopyPool;
use ringfence_dma::{DmaSegment, MapError, NotInvalidated};
use ringfence_trace::DeviceIndex;
use ringfence_types::{
    Direction, DomainId, Invalidator, IovaRange, Nanos, PfnRange, PhysAddr, PhysRange, RequesterId,
};

use crate::error::LabError;
use crate::withholds::Withholds;

/// A layer that shows its memory, clock and invalidator.
pub trait HasPlatform<I> {
    /// Returns the platform of the layer.
    fn platform(&self) -> &LayerPlatform<I>;
}

/// A device that maps for the first time and needs a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachInfo {
    /// Domain that tags its translations.
    pub domain: DomainId,
    /// Requester ID of its accesses.
    pub device: RequesterId,
    /// Index in the trace's device list.
    pub index: DeviceIndex,
}

/// The destination of a device's accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextTarget {
    /// The table at this root; for ring units, the rDEVICE at this address.
    Table(PhysAddr),
    /// The same table, by a device that may also use a device TLB (ATS).
    DeviceTlb(PhysAddr),
    /// Pass-through: no table.
    PassThrough,
}

/// A space and the target of its device's context entry, or the reason why there is no space.
pub type SpaceResult<S> = Result<(S, ContextTarget), LabError>;

/// The device, CPU and direction of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpKey {
    /// Index in the trace's device list.
    pub device: DeviceIndex,
    /// Index of the CPU.
    pub cpu: u16,
    /// Direction of the DMA.
    pub direction: Direction,
}

impl OpKey {
    /// Returns the key of an operation of `device` on `cpu`.
    #[inline(always)]
    pub const fn new(device: DeviceIndex, cpu: u16, direction: Direction) -> Self {
        Self {
            device,
            cpu,
            direction,
        }
    }
}

/// A successful map.
#[derive(Debug)]
pub struct Mapped {
    /// The token that the driver holds.
    pub token: MappingToken,
    /// Steps of the allocator's search.
    pub steps: u32,
}

/// The result of an unmap.
#[derive(Debug)]
pub enum UnmapOutcome {
    /// The layer returned the buffer.
    Returned {
        /// The buffer of the mapping.
        buffer: u64,
        /// True if a device may still reach the buffer.
        stale: bool,
    },
    /// The layer withholds the buffer until the burst ends.
    Withheld,
    /// The invalidation failed. The layer withholds the buffer until a retry succeeds.
    NotInvalidated(NotInvalidated<u64>),
    /// Some pieces of a list are unmapped and others are not. The buffer stays withheld for good.
    PartlyUnmapped,
    /// The layer refused the unmap, and nothing changed.
    Refused(Refusal),
}

/// The reason why a layer refused an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No mapping of this length begins at the address.
    NotMapped,
    /// The mapping belongs to another domain or ring.
    OtherOwner,
    /// Any other reason, for example an unknown device.
    Other,
}

impl UnmapOutcome {
    /// Returns the buffer if the layer returned it.
    #[inline]
    pub fn into_buffer(self) -> Option<u64> {
        match self {
            Self::Returned { buffer, .. } => Some(buffer),
            _ => None,
        }
    }
}

/// The constants of the layer's spaces and flush policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceTraits {
    /// The segments of a scatterlist get consecutive addresses.
    pub contiguous_sg: bool,
    /// The space keeps mappings after their unmap.
    pub caches_unmapped: bool,
    /// A map may find its ring full.
    pub can_be_full: bool,
    /// The driver's buffers are memory of the device's own pool.
    pub lends: bool,
    /// The buffers that the driver's descriptors withhold; `None` if bursts end with its loops.
    pub descriptors: Option<Withholds>,
}

/// The DMA layer with its CPU handles and its platform, as a replay uses it.
pub trait DmaOps {
    /// Returns the constants of the layer's spaces.
    fn space_traits(&self) -> SpaceTraits;

    /// Sets the time on the trace's clock.
    fn set_time(&mut self, now: Nanos);

    /// Creates the handles of CPUs below `cpus`, and room for scatterlists of `segments` segments.
    ///
    /// # Errors
    /// The room cannot be created.
    fn reserve(&mut self, cpus: usize, segments: usize) -> Result<(), LabError>;

    /// Returns true if a device is attached.
    fn is_attached(&self, index: DeviceIndex) -> bool;

    /// Attaches a device to a new domain. Returns the domain and the target of the device's
    /// context entry.
    ///
    /// # Errors
    /// Memory is short, or all domains are in use.
    fn attach(
        &mut self,
        index: DeviceIndex,
        device: RequesterId,
    ) -> Result<(DomainId, ContextTarget), LabError>;

    /// Detaches a device and removes its domain. Live mappings end with the domain. The caller has
    /// cleared the device's context entry.
    ///
    /// # Errors
    /// The device is not attached, or an invalidation failed.
    fn detach(&mut self, index: DeviceIndex) -> Result<(), LabError>;

    /// Rebuilds the token of a mapping from its address, as a driver does that keeps addresses
    /// ([`Mapping::claim`](ringfence_dma::Mapping::claim)). `None` if the device is not attached.
    fn claim(&mut self, key: OpKey, range: IovaRange, buffer: u64) -> Option<MappingToken>;

    /// Maps a buffer of one or more segments. The mapping owns `buffer` until unmap.
    ///
    /// # Errors
    /// The layer refused the map and is unchanged.
    fn map(&mut self, key: OpKey, buffer: u64, pieces: &[PhysRange]) -> Result<Mapped, MapError>;

    /// Maps several single buffers in one call, or none. Returns their tokens in order. A layer
    /// without such a call maps one after the other.
    ///
    /// # Errors
    /// The layer refused a map. A layer with such a call is unchanged.
    fn map_multi(
        &mut self,
        key: OpKey,
        buffers: &[(u64, PhysRange)],
    ) -> Result<Vec<MappingToken>, MapError> {
        let mut tokens = Vec::with_capacity(buffers.len());
        for (buffer, memory) in buffers {
            tokens.push(self.map(key, *buffer, &[*memory])?.token);
        }
        Ok(tokens)
    }

    /// Returns the IOVA ranges of the last mapped scatterlist, followed by unused ones.
    fn segments(&self) -> &[DmaSegment];

    /// Calls `each` with every range that the space reserved for the mapping of `pieces` segments
    /// just made.
    fn each_reserved(
        &self,
        key: OpKey,
        token: &MappingToken,
        pieces: usize,
        each: &mut dyn FnMut(Option<PfnRange>),
    );

    /// Returns the memory that the device reaches at `range`, the range of a mapping. `None` if it
    /// is the buffer itself.
    fn shadow(&self, key: OpKey, range: IovaRange) -> Option<PhysRange> {
        let _ = (key, range);
        None
    }

    /// Returns the parts of the mapping at `range` that the device reaches as copies, if it reaches
    /// the rest of the buffer itself: addresses and copy of each.
    fn copied_parts(&self, key: OpKey, range: IovaRange) -> Vec<(IovaRange, PhysRange)> {
        let _ = (key, range);
        Vec::new()
    }

    /// Returns the pool of the copies that the device uses; `None` without copies.
    fn copies(&self, device: DeviceIndex) -> Option<CopyPool> {
        let _ = device;
        None
    }

    /// Unmaps a buffer.
    fn unmap(&mut self, key: OpKey, token: MappingToken) -> UnmapOutcome;

    /// Returns true if [`unmap`](Self::unmap) returns before another core has executed it.
    fn unmaps_later(&self) -> bool {
        false
    }

    /// Unmaps several single buffers in one call and appends the buffers that the layer returns to
    /// `returned`. Returns false if the layer refused one of them. A layer without such a call
    /// unmaps one after the other.
    fn unmap_multi(
        &mut self,
        key: OpKey,
        tokens: Vec<MappingToken>,
        returned: &mut Vec<u64>,
    ) -> bool {
        let mut complete = true;
        for token in tokens {
            let outcome = self.unmap(key, token);
            complete &= !matches!(outcome, UnmapOutcome::Refused(_));
            returned.extend(outcome.into_buffer());
        }
        complete
    }

    /// Retries a failed invalidation and returns the buffer.
    ///
    /// # Errors
    /// The invalidation failed again.
    fn retry_invalidation(
        &mut self,
        token: NotInvalidated<u64>,
    ) -> Result<u64, NotInvalidated<u64>>;

    /// Ends a burst of unmaps. Appends the buffers that the layer returns to `returned`. If the
    /// invalidation fails, the buffers stay withheld.
    fn end_burst(&mut self, key: OpKey, returned: Option<&mut Vec<u64>>);

    /// Makes maps visible to the device, before the driver writes the doorbell.
    fn sync_map(&mut self, key: OpKey);

    /// Runs the timers of the flush policy. Ranges of a failed flush stay unusable.
    fn tick(&mut self);
}

/// The binding time of a layer's calls.
pub trait Dispatch {
    /// The invalidator of a platform, from a concrete one.
    type Invalidator<I: Invalidator + 'static>: Invalidator + 'static;
    /// The layer, from a concrete one.
    type Layer<L: DmaOps + 'static>: DmaOps + ?Sized + 'static;

    /// Converts an invalidator.
    fn invalidator<I: Invalidator + 'static>(of: I) -> Self::Invalidator<I>;

    /// Converts a layer.
    fn layer<L: DmaOps + 'static>(of: L) -> Box<Self::Layer<L>>;
}

/// Static types, so that timed operations contain no indirect call.
#[derive(Debug, Clone, Copy)]
pub struct StaticDispatch;

impl Dispatch for StaticDispatch {
    type Invalidator<I: Invalidator + 'static> = I;
    type Layer<L: DmaOps + 'static> = L;

    fn invalidator<I: Invalidator + 'static>(of: I) -> I {
        of
    }

    fn layer<L: DmaOps + 'static>(of: L) -> Box<L> {
        Box::new(of)
    }
}

/// Trait objects, so that all modes share the code of a replay.
#[derive(Debug, Clone, Copy)]
pub struct DynDispatch;

impl Dispatch for DynDispatch {
    type Invalidator<I: Invalidator + 'static> = DynInvalidator;
    type Layer<L: DmaOps + 'static> = dyn DmaOps;

    fn invalidator<I: Invalidator + 'static>(of: I) -> DynInvalidator {
        DynInvalidator::new(of)
    }

    fn layer<L: DmaOps + 'static>(of: L) -> Box<dyn DmaOps> {
        Box::new(of)
    }
}
