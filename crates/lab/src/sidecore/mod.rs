//! Maps and unmaps on another core (the sidecore of Amit et al.; EIOVAR section 8).
//!
//! ```text
//!   I/O core                         SPSC queues                sidecore
//!   map       -> Command::Map        ──────────────►  allocate, install the translation
//!             <- waits for the reply ◄──────────────
//!   unmap     -> UnmapLater          ──────────────►  clear, invalidate, free
//!             <- returns at once: the device may still reach the buffer
//! ```
//! A map needs its address, so it waits. An unmap waits only in `sidecore-strict`. The sidecore
//! executes commands in order, so a map gets no address whose unmap is still queued.
//!
//! The layer behind the queue is the same as in other modes. Timed replays run a real
//! [thread](ThreadLink). Oracle replays run [`LateLink`], which delays unmaps for as long as the
//! queue allows.

mod command;
mod link;
mod queue;

pub use command::{Command, Pieces, Reply};
pub use link::{LateLink, Link, ThreadLink};
pub use queue::{Consumer, Producer, queue};

use ringfence_dma::{DmaSegment, MapError, MapReason, NotInvalidated};
use ringfence_trace::DeviceIndex;
use ringfence_types::{DomainId, IovaRange, Nanos, PfnRange, PhysRange, RequesterId};

use crate::error::LabError;
use crate::layer::{
    ContextTarget, DmaOps, Mapped, MappingToken, OpKey, Refusal, SpaceTraits, UnmapOutcome,
};
use crate::modes::{FlushKind, Mode};

/// Maximum number of unmaps that wait for the sidecore.
pub const QUEUED_UNMAPS: usize = 64;

/// The moment at which an unmap returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapWait {
    /// After its invalidation has completed.
    Waits,
    /// At once, before the sidecore has executed it.
    Returns,
}

impl UnmapWait {
    /// Returns the moment at which unmaps of `mode`, which has a sidecore, return.
    pub(crate) const fn of(mode: &Mode) -> Self {
        match mode.flush {
            FlushKind::Async => Self::Returns,
            _ => Self::Waits,
        }
    }
}

/// A layer whose operations another core executes.
#[derive(Debug)]
pub struct Sidecore<K> {
    link: K,
    wait: UnmapWait,
    traits: SpaceTraits,
    now: Nanos,
    /// Domains of the attached devices.
    domains: Vec<Option<DomainId>>,
    segments: Vec<DmaSegment>,
}

impl<L: DmaOps> Sidecore<LateLink<L>> {
    /// Creates a sidecore in the caller's thread, which delays unmaps.
    pub fn late(layer: L, wait: UnmapWait) -> Self {
        Self::with_traits(layer.space_traits(), LateLink::new(layer), wait)
    }
}

impl<K: Link> Sidecore<K> {
    fn with_traits(traits: SpaceTraits, link: K, wait: UnmapWait) -> Self {
        Self {
            link,
            wait,
            traits,
            now: Nanos(0),
            domains: Vec::new(),
            segments: Vec::new(),
        }
    }

    fn domain(&self, device: DeviceIndex) -> Option<DomainId> {
        self.domains.get(device.index()).copied().flatten()
    }

    /// Creates the layer whose operations the sidecore behind `link` executes.
    ///
    /// # Errors
    /// The sidecore has ended.
    pub fn new(mut link: K, wait: UnmapWait) -> Result<Self, LabError> {
        let Ok(Reply::Traits(traits)) = link.call(Command::Traits) else {
            return Err(LabError::Internal("start of the sidecore"));
        };
        Ok(Self::with_traits(traits, link, wait))
    }
}

impl<K: Link> DmaOps for Sidecore<K> {
    fn space_traits(&self) -> SpaceTraits {
        self.traits
    }

    fn set_time(&mut self, now: Nanos) {
        self.now = now;
    }

    fn reserve(&mut self, cpus: usize, segments: usize) -> Result<(), LabError> {
        match self.link.call(Command::Reserve(cpus, segments)) {
            Ok(Reply::Reserved(done)) => done,
            _ => Err(LabError::Internal("sidecore")),
        }
    }

    fn is_attached(&self, index: DeviceIndex) -> bool {
        self.domain(index).is_some()
    }

    fn attach(
        &mut self,
        index: DeviceIndex,
        device: RequesterId,
    ) -> Result<(DomainId, ContextTarget), LabError> {
        let reply = self.link.call(Command::Attach(index, device));
        let Ok(Reply::Attached(attached)) = reply else {
            return Err(LabError::Internal("sidecore"));
        };
        if let Ok((domain, _)) = attached {
            if self.domains.len() <= index.index() {
                self.domains.resize(index.index() + 1, None);
            }
            self.domains[index.index()] = Some(domain);
        }
        attached
    }

    fn detach(&mut self, index: DeviceIndex) -> Result<(), LabError> {
        let Ok(Reply::Detached(detached)) = self.link.call(Command::Detach(index)) else {
            return Err(LabError::Internal("sidecore"));
        };
        if let Some(domain) = self.domains.get_mut(index.index()) {
            *domain = None;
        }
        detached
    }

    fn claim(&mut self, key: OpKey, range: IovaRange, buffer: u64) -> Option<MappingToken> {
        match self.link.call(Command::Claim(key, range, buffer)) {
            Ok(Reply::Claimed(token)) => token,
            _ => None,
        }
    }

    fn map(&mut self, key: OpKey, buffer: u64, pieces: &[PhysRange]) -> Result<Mapped, MapError> {
        let command = Command::Map(self.now, key, buffer, Pieces::of(pieces));
        match self.link.call(command) {
            Ok(Reply::Mapped(Ok((token, steps, segments)))) => {
                self.segments.clear();
                self.segments.extend_from_slice(&segments);
                Ok(Mapped { token, steps })
            }
            Ok(Reply::Mapped(Err(error))) => Err(error),
            _ => Err(MapError {
                device: RequesterId::new(key.device.0),
                buffer: None,
                reason: MapReason::NotAttached,
            }),
        }
    }

    fn segments(&self) -> &[DmaSegment] {
        &self.segments
    }

    fn each_reserved(
        &self,
        _: OpKey,
        token: &MappingToken,
        _: usize,
        each: &mut dyn FnMut(Option<PfnRange>),
    ) {
        each(token.range().map(|range| PfnRange::covering(&range)));
    }

    fn unmap(&mut self, key: OpKey, token: MappingToken) -> UnmapOutcome {
        let Some(buffer) = token.buffer() else {
            return UnmapOutcome::Refused(Refusal::Other);
        };
        // The sidecore refuses such an unmap, but only after the driver has the buffer back.
        if token.domain() != self.domain(key.device) {
            return UnmapOutcome::Refused(Refusal::OtherOwner);
        }
        match self.wait {
            UnmapWait::Returns => {
                let stale = true;
                match self.link.send(Command::UnmapLater(self.now, key, token)) {
                    Ok(()) => UnmapOutcome::Returned { buffer, stale },
                    Err(_) => UnmapOutcome::Refused(Refusal::Other),
                }
            }
            UnmapWait::Waits => match self.link.call(Command::Unmap(self.now, key, token)) {
                Ok(Reply::Unmapped(outcome)) => outcome,
                _ => UnmapOutcome::Refused(Refusal::Other),
            },
        }
    }

    fn unmaps_later(&self) -> bool {
        self.wait == UnmapWait::Returns
    }

    fn retry_invalidation(
        &mut self,
        token: NotInvalidated<u64>,
    ) -> Result<u64, NotInvalidated<u64>> {
        match self.link.call(Command::Retry(token)) {
            Ok(Reply::Retried(result)) => result,
            // The sidecore has ended.
            Err(Command::Retry(token)) => Err(token),
            other => unreachable!("{other:?} for a retry"),
        }
    }

    fn end_burst(&mut self, _: OpKey, _: Option<&mut Vec<u64>>) {
        // The layer behind the queue withholds nothing.
    }

    fn sync_map(&mut self, _: OpKey) {
        // Only rings write entries back here, and no ring is behind a sidecore. A map has returned
        // after its entries were written back.
    }

    fn tick(&mut self) {
        let _ = self.link.call(Command::Tick(self.now));
    }
}
