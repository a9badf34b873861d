//! The mapping layer behind tokens.
//!
//! The layer of `ringfence-dma` returns obligations that a caller cannot copy. A C program can copy
//! everything, so this file keeps the obligations and gives the program their tokens.

use std::sync::Mutex;

use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::space::{LeafCachedTable, Paged, Rounding};
use ringfence_dma::{
    Attachment, Cpu, Detached, Dma as MappingLayer, FlushPolicy, Mapping, NotInvalidated, Outcome,
    Platform, Released, Teardown, UnmapReason,
};
use ringfence_iova::{Depot, MagazineLimits, Magazines};
use ringfence_pgtable::{SecondStage, Table};
use ringfence_types::{
    Direction, InvalidationError, Iova, IovaRange, PfnRange, PhysRange, RequesterId,
};

use crate::Status;
use crate::ports::CallerPorts;
use crate::slab::Slab;

type Space = Paged<Magazines<Mutex<Depot>>, LeafCachedTable<SecondStage>>;

/// A buffer in the layer: the token of its mapping, and the caller's number.
#[derive(Debug)]
pub(crate) struct Buffer {
    token: u64,
    cookie: u64,
}

/// The state of a mapping that the program has a token of.
enum Entry {
    /// The map is under way.
    New,
    Live {
        mapping: Mapping<Buffer>,
        attachment: u64,
    },
    /// The entries are cleared, and the invalidation failed.
    NotInvalidated(NotInvalidated<Buffer>),
    /// A burst withholds the buffer.
    Withheld,
}

/// The settings of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) pages: PfnRange,
    pub(crate) format: SecondStage,
}

/// A new attachment.
pub(crate) struct NewAttachment {
    pub(crate) token: u64,
    pub(crate) root: u64,
    pub(crate) domain: u16,
}

/// The layer of one IOMMU, for any policy.
pub(crate) trait LayerOps: Send {
    fn attach(&mut self, device: RequesterId, mask: Iova) -> Result<NewAttachment, Status>;
    fn detach(&mut self, attachment: u64, teardown: Teardown) -> Result<(), Status>;
    fn detach_all(&mut self) -> Result<(), Status>;
    fn map(
        &mut self,
        attachment: u64,
        memory: PhysRange,
        direction: Direction,
        cookie: u64,
    ) -> Result<(u64, Iova), Status>;
    /// Returns the cookie of the buffer; `None` if a burst withholds it.
    fn unmap(&mut self, token: u64) -> Result<Option<u64>, Status>;
    fn end_burst(&mut self, attachment: u64, direction: Direction) -> Result<(), Status>;
    /// Passes on the withheld buffers that were released since the last call.
    fn take_released(&mut self) -> Vec<u64>;
}

struct Layer<F: FlushPolicy<Space, Buffer>> {
    dma: MappingLayer<Space, F, Buffer>,
    cpu: Cpu<Space, F, Buffer>,
    ports: CallerPorts,
    settings: Settings,
    attachments: Slab<Attachment>,
    mappings: Slab<Entry>,
    released: Vec<u64>,
}

/// Creates a layer that invalidates at each unmap.
pub(crate) fn strict(ports: CallerPorts, settings: Settings) -> Box<dyn LayerOps> {
    Box::new(Layer::new(Strict, ports, settings))
}

/// Creates a layer that invalidates at the end of a burst.
pub(crate) fn burst(policy: Burst, ports: CallerPorts, settings: Settings) -> Box<dyn LayerOps> {
    Box::new(Layer::new(policy, ports, settings))
}

/// Creates the space of a new domain.
fn space(
    settings: &Settings,
    ports: &CallerPorts,
    domain: ringfence_types::DomainId,
) -> Result<Space, Status> {
    let addresses = Magazines::new(settings.pages, MagazineLimits::DEFAULT, Mutex::new)?;
    let (memory, frames) = (ports.memory(), ports.frames());
    let table = Table::new(settings.format, domain, memory.coherency(), memory, frames)?;
    Ok(Paged::new(
        addresses,
        LeafCachedTable(table),
        Rounding::Exact,
    ))
}

impl<F: FlushPolicy<Space, Buffer>> Layer<F> {
    fn new(policy: F, ports: CallerPorts, settings: Settings) -> Self {
        let dma = MappingLayer::new(policy);
        Self {
            cpu: dma.cpu(),
            dma,
            ports,
            settings,
            attachments: Slab::default(),
            mappings: Slab::default(),
            released: Vec::new(),
        }
    }

    fn attachment(&mut self, token: u64) -> Result<Attachment, Status> {
        let found = self.attachments.get_mut(token).copied();
        found.ok_or(Status::StaleToken)
    }

    /// Ends the mapping of a released buffer.
    fn release(&mut self, buffer: Buffer) -> u64 {
        self.mappings.remove(buffer.token);
        buffer.cookie
    }

    fn release_withheld(&mut self, returned: Vec<Buffer>) {
        for buffer in returned {
            let cookie = self.release(buffer);
            self.released.push(cookie);
        }
    }

    /// Replaces the state of the mapping `token`.
    fn set(&mut self, token: u64, entry: Entry) {
        if let Some(slot) = self.mappings.get_mut(token) {
            *slot = entry;
        }
    }

    fn keep_not_invalidated(
        &mut self,
        token: u64,
        _error: InvalidationError,
        kept: NotInvalidated<Buffer>,
    ) -> Status {
        self.set(token, Entry::NotInvalidated(kept));
        Status::Invalidation
    }

    fn unmap_live(
        &mut self,
        token: u64,
        mapping: Mapping<Buffer>,
        attachment: u64,
    ) -> Result<Option<u64>, Status> {
        let (range, direction) = (mapping.range(), mapping.direction());
        let at = match self.attachments.get_mut(attachment) {
            Some(at) => *at,
            None => return self.unmap_detached(token, mapping),
        };
        let (cpu, ports) = (&mut self.cpu, &mut self.ports);
        let reason = match self.dma.unmap_single(cpu, ports, &at, mapping) {
            Ok(outcome) => {
                let buffer = outcome.into_buffer();
                if buffer.is_none() {
                    self.set(token, Entry::Withheld);
                }
                return Ok(buffer.map(|buffer| self.release(buffer)));
            }
            Err(error) => error.reason,
        };
        let (status, kept) = match reason {
            UnmapReason::Detached(buffer) => return Ok(Some(self.release(buffer))),
            UnmapReason::NotFlushed(error, kept) => {
                return Err(self.keep_not_invalidated(token, error, kept));
            }
            UnmapReason::Table(error, kept) => (error.into(), kept),
            UnmapReason::NotAllocated(kept) => (Status::NotAllocated, kept),
            UnmapReason::BurstFull(kept) => (Status::BurstFull, kept),
            UnmapReason::NotAttached(kept)
            | UnmapReason::OtherDomain(_, kept)
            | UnmapReason::OtherRing(_, kept)
            | UnmapReason::TooManyReceived(_, kept)
            | UnmapReason::PartlyUnmapped(_, kept) => (Status::Internal, kept),
            _ => return Err(Status::Internal),
        };
        let live = self.claimed(&at, range, direction, kept.into_buffer(), attachment);
        self.set(token, live);
        Err(status)
    }

    /// Returns the state of a mapping whose unmap was rejected.
    fn claimed(
        &self,
        at: &Attachment,
        range: IovaRange,
        direction: Direction,
        buffer: Buffer,
        attachment: u64,
    ) -> Entry {
        let mapping = Mapping::claim(at, range, direction, buffer);
        Entry::Live {
            mapping,
            attachment,
        }
    }

    /// Ends a mapping whose domain was removed: the detach has invalidated it.
    fn unmap_detached(
        &mut self,
        token: u64,
        mapping: Mapping<Buffer>,
    ) -> Result<Option<u64>, Status> {
        let cookie = mapping.buffer().cookie;
        self.mappings.remove(token);
        Ok(Some(cookie))
    }
}

impl<F> LayerOps for Layer<F>
where
    F: FlushPolicy<Space, Buffer, PerCpu: Send, PerDomain: Send> + Send,
{
    fn attach(&mut self, device: RequesterId, mask: Iova) -> Result<NewAttachment, Status> {
        let (settings, ports) = (&self.settings, &self.ports);
        let at = self
            .dma
            .attach(device, mask, |domain| space(settings, ports, domain))?;
        let root = self.dma.space(&at).map(|space| space.table().0.root());
        Ok(NewAttachment {
            token: self.attachments.insert(at).ok_or(Status::TooMany)?,
            root: root.ok_or(Status::Internal)?.get(),
            domain: at.domain().get(),
        })
    }

    fn detach(&mut self, attachment: u64, teardown: Teardown) -> Result<(), Status> {
        let at = self.attachment(attachment)?;
        let mut returned = Vec::new();
        let (cpu, ports) = (&mut self.cpu, &mut self.ports);
        let disconnect = |ports: &mut CallerPorts| ports.disconnect(at.device());
        let each = |buffer| returned.push(buffer);
        let detached = self.dma.detach(cpu, ports, &at, teardown, disconnect, each);
        self.release_withheld(returned);
        let detached = detached?;
        self.attachments.remove(attachment);
        let Some(Detached { space, proof }) = detached else {
            return Ok(());
        };
        let (memory, frames) = (self.ports.memory(), self.ports.frames());
        let destroyed = space.into_table().0.destroy(memory, frames, &proof);
        destroyed.map_err(|_| Status::Internal)
    }

    fn detach_all(&mut self) -> Result<(), Status> {
        while let Some(attachment) = self.attachments.find(|_| true) {
            self.detach(attachment, Teardown::Forced)?;
        }
        Ok(())
    }

    fn map(
        &mut self,
        attachment: u64,
        memory: PhysRange,
        direction: Direction,
        cookie: u64,
    ) -> Result<(u64, Iova), Status> {
        let at = self.attachment(attachment)?;
        let token = self.mappings.insert(Entry::New).ok_or(Status::TooMany)?;
        let buffer = Buffer { token, cookie };
        let (cpu, ports) = (&mut self.cpu, &mut self.ports);
        let mapped = self
            .dma
            .map_single(cpu, ports, &at, buffer, memory, direction);
        match mapped {
            Ok((mapping, _)) => {
                let iova = mapping.iova();
                let live = Entry::Live {
                    mapping,
                    attachment,
                };
                self.set(token, live);
                Ok((token, iova))
            }
            Err((buffer, error)) => {
                self.release(buffer);
                Err(error.reason.into())
            }
        }
    }

    fn unmap(&mut self, token: u64) -> Result<Option<u64>, Status> {
        let entry = self.mappings.get_mut(token).ok_or(Status::StaleToken)?;
        match core::mem::replace(entry, Entry::New) {
            Entry::Live {
                mapping,
                attachment,
            } => self.unmap_live(token, mapping, attachment),
            Entry::NotInvalidated(kept) => {
                let (cpu, ports) = (&mut self.cpu, &mut self.ports);
                match self.dma.retry_invalidation(cpu, ports, kept) {
                    Ok(Released(buffer)) => Ok(Some(self.release(buffer))),
                    Err((error, kept)) => Err(self.keep_not_invalidated(token, error, kept)),
                }
            }
            Entry::Withheld => {
                *entry = Entry::Withheld;
                Err(Status::AlreadyUnmapped)
            }
            Entry::New => Err(Status::Internal),
        }
    }

    fn end_burst(&mut self, attachment: u64, direction: Direction) -> Result<(), Status> {
        let at = self.attachment(attachment)?;
        let mut returned = Vec::new();
        let (cpu, ports) = (&mut self.cpu, &mut self.ports);
        let each = |buffer| returned.push(buffer);
        let ended = self.dma.end_burst(cpu, ports, &at, direction, each);
        self.release_withheld(returned);
        Ok(ended?)
    }

    fn take_released(&mut self) -> Vec<u64> {
        core::mem::take(&mut self.released)
    }
}
