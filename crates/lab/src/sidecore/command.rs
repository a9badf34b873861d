//! The requests that a CPU sends to the sidecore, and their execution there.

use ringfence_dma::{DmaSegment, MapError, NotInvalidated};
use ringfence_trace::DeviceIndex;
use ringfence_types::{DomainId, IovaRange, Nanos, PhysRange, RequesterId};

use crate::error::LabError;
use crate::layer::{ContextTarget, DmaOps, MappingToken, OpKey, SpaceTraits, UnmapOutcome};

/// The memory of a map. A single piece needs no allocation.
#[derive(Debug)]
pub enum Pieces {
    /// Memory of `map_single`.
    One([PhysRange; 1]),
    /// Pieces of `map_sg`.
    List(Box<[PhysRange]>),
}

impl Pieces {
    pub(super) fn of(pieces: &[PhysRange]) -> Self {
        match pieces {
            [piece] => Self::One([*piece]),
            list => Self::List(list.into()),
        }
    }

    fn as_slice(&self) -> &[PhysRange] {
        match self {
            Self::One(piece) => piece,
            Self::List(list) => list,
        }
    }
}

/// A request to the sidecore.
#[derive(Debug)]
pub enum Command {
    /// Returns the constants of the space.
    Traits,
    /// Creates CPU handles and room for lists.
    Reserve(usize, usize),
    /// Attaches a device.
    Attach(DeviceIndex, RequesterId),
    /// Detaches a device.
    Detach(DeviceIndex),
    /// Rebuilds a token from its address.
    Claim(OpKey, IovaRange, u64),
    /// Maps a buffer.
    Map(Nanos, OpKey, u64, Pieces),
    /// Unmaps a buffer. This command has no reply.
    UnmapLater(Nanos, OpKey, MappingToken),
    /// Unmaps a buffer.
    Unmap(Nanos, OpKey, MappingToken),
    /// Retries an invalidation.
    Retry(NotInvalidated<u64>),
    /// Runs the timers.
    Tick(Nanos),
    /// Ends the thread.
    Stop,
}

/// The reply to a request.
#[derive(Debug)]
pub enum Reply {
    /// Reply to [`Command::Traits`].
    Traits(SpaceTraits),
    /// Reply to [`Command::Reserve`].
    Reserved(Result<(), LabError>),
    /// Reply to [`Command::Attach`].
    Attached(Result<(DomainId, ContextTarget), LabError>),
    /// Reply to [`Command::Detach`].
    Detached(Result<(), LabError>),
    /// Reply to [`Command::Claim`].
    Claimed(Option<MappingToken>),
    /// Reply to [`Command::Map`]: the token, the steps of the search, and the addresses of a list.
    Mapped(Result<(MappingToken, u32, Box<[DmaSegment]>), MapError>),
    /// Reply to [`Command::Unmap`].
    Unmapped(UnmapOutcome),
    /// Reply to [`Command::Retry`].
    Retried(Result<u64, NotInvalidated<u64>>),
    /// Reply to a request without a result.
    Done,
    /// The sidecore has ended.
    Ended,
}

/// The layer on the sidecore.
#[derive(Debug)]
pub(super) struct Executor<L> {
    layer: L,
    /// Unmaps without a reply whose invalidation failed. Their addresses stay unusable until a
    /// retry succeeds.
    not_invalidated: Vec<NotInvalidated<u64>>,
}

impl<L: DmaOps> Executor<L> {
    pub(super) fn new(layer: L) -> Self {
        Self {
            layer,
            not_invalidated: Vec::new(),
        }
    }

    /// Executes `command`. `None` if the command has no reply.
    pub(super) fn execute(&mut self, command: Command) -> Option<Reply> {
        let layer = &mut self.layer;
        Some(match command {
            Command::Traits => Reply::Traits(layer.space_traits()),
            Command::Reserve(cpus, segments) => Reply::Reserved(layer.reserve(cpus, segments)),
            Command::Attach(index, device) => Reply::Attached(layer.attach(index, device)),
            Command::Detach(index) => Reply::Detached(layer.detach(index)),
            Command::Claim(key, range, buffer) => Reply::Claimed(layer.claim(key, range, buffer)),
            Command::Map(now, key, buffer, pieces) => {
                layer.set_time(now);
                let pieces = pieces.as_slice();
                let mapped = layer.map(key, buffer, pieces);
                Reply::Mapped(mapped.map(|mapped| {
                    let segments = match pieces {
                        [_] => Box::default(),
                        _ => layer
                            .segments()
                            .iter()
                            .take(pieces.len())
                            .copied()
                            .collect(),
                    };
                    (mapped.token, mapped.steps, segments)
                }))
            }
            Command::UnmapLater(now, key, token) => {
                layer.set_time(now);
                if let UnmapOutcome::NotInvalidated(token) = layer.unmap(key, token) {
                    self.not_invalidated.push(token);
                }
                return None;
            }
            Command::Unmap(now, key, token) => {
                layer.set_time(now);
                Reply::Unmapped(layer.unmap(key, token))
            }
            Command::Retry(token) => Reply::Retried(layer.retry_invalidation(token)),
            Command::Tick(now) => {
                layer.set_time(now);
                for token in core::mem::take(&mut self.not_invalidated) {
                    if let Err(token) = layer.retry_invalidation(token) {
                        self.not_invalidated.push(token);
                    }
                }
                layer.tick();
                Reply::Done
            }
            Command::Stop => Reply::Ended,
        })
    }
}
