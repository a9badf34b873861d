//! The host's tables, as the virtio-iommu device updates them.

use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, DirtyLines, Levels, MapError, MapRequest, SecondStage, Table};
use ringfence_types::{CachedLevels, DomainId, Invalidation, IovaRange, PfnRange, PhysAddr};
use ringfence_virtio_iommu::{
    DomainId as VirtioDomain, EndpointId, Mapping, Sink, SinkError, SinkHandle,
};

use super::HostUnit;

/// A second-stage table for each domain. Guest-physical addresses equal physical ones, because the
/// platform has one guest.
#[derive(Debug)]
pub(super) struct DomainTables {
    memory: Rc<Arena>,
    frames: Rc<Frames<Rc<Arena>>>,
    coherency: Coherency,
    pub(super) unit: HostUnit,
    /// Tables by domain number, which counts up from 1.
    tables: Vec<Option<DomainTable>>,
    dirty: DirtyLines,
    /// Ranges unmapped in this batch, which the unit may still cache; none of domains in lazy mode.
    unmapped: Vec<(DomainId, PfnRange, CachedLevels)>,
    /// Flushed and destroyed domains, whose translations the unit must drop in this batch.
    to_flush: Vec<DomainId>,
}

/// The table of a domain.
#[derive(Debug)]
struct DomainTable {
    table: Table<SecondStage>,
    /// True if the unit may keep unmapped translations until a flush of the domain.
    lazy: bool,
}

/// Returns the unit's domain number; a guest in a replay has at most 2^16 domains.
fn number(domain: VirtioDomain) -> Option<DomainId> {
    u16::try_from(domain.get()).ok().map(DomainId::new)
}

/// Converts the error of a map to the error of the sink.
fn refused(error: MapError, range: IovaRange) -> SinkError {
    match error {
        MapError::OutOfFrames => SinkError::OutOfMemory,
        MapError::PhysicalBeyondWidth { .. } => SinkError::BadAddress(range),
        _ => SinkError::Failed,
    }
}

impl DomainTables {
    pub(super) fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit,
    ) -> Self {
        Self {
            memory: Rc::clone(memory),
            frames: Rc::clone(frames),
            coherency,
            unit,
            tables: Vec::new(),
            dirty: DirtyLines::new(),
            unmapped: Vec::new(),
            to_flush: Vec::new(),
        }
    }

    /// Creates a domain with an empty table.
    fn create_domain(&mut self, domain: VirtioDomain, lazy: bool) -> Result<(), SinkError> {
        let id = number(domain).ok_or(SinkError::Unsupported)?;
        let format = SecondStage::new(Levels::Four);
        let table = Table::new(format, id, self.coherency, &*self.memory, &*self.frames)
            .map_err(|_| SinkError::OutOfMemory)?;
        let at = domain.get() as usize;
        if self.tables.len() <= at {
            self.tables.resize_with(at + 1, || None);
        }
        self.tables[at] = Some(DomainTable { table, lazy });
        Ok(())
    }

    #[inline]
    fn table(&self, domain: VirtioDomain) -> Result<&Table<SecondStage>, SinkError> {
        let found = self.tables.get(domain.get() as usize);
        let found = found.and_then(Option::as_ref).ok_or(SinkError::Failed)?;
        Ok(&found.table)
    }

    /// Returns the root of a domain's table.
    pub(super) fn root(&self, domain: VirtioDomain) -> Option<PhysAddr> {
        self.table(domain).ok().map(Table::root)
    }

    /// Returns true if a domain has no mappings.
    pub(super) fn is_empty(&self, domain: VirtioDomain) -> bool {
        self.table(domain)
            .map_or(true, |table| table.is_empty(&*self.memory))
    }
}

impl SinkHandle for DomainTables {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for DomainTables {
    fn create(&mut self, domain: VirtioDomain) -> Result<(), SinkError> {
        self.create_domain(domain, false)
    }

    fn create_lazy(&mut self, domain: VirtioDomain) -> Result<(), SinkError> {
        self.create_domain(domain, true)
    }

    fn iotlb_flush(&mut self, domain: VirtioDomain) -> Result<(), SinkError> {
        let id = number(domain).ok_or(SinkError::Failed)?;
        if !self.to_flush.contains(&id) {
            self.to_flush.push(id);
        }
        Ok(())
    }

    /// Drops the table when the last endpoint detaches, and invalidates the domain, whose number a
    /// new domain may get. The table's frames stay allocated until the replay ends.
    fn destroy(&mut self, domain: VirtioDomain) {
        if let Some(table) = self.tables.get_mut(domain.get() as usize) {
            *table = None;
        }
        if let Some(id) = number(domain)
            && !self.to_flush.contains(&id)
        {
            self.to_flush.push(id);
        }
    }

    /// Only checks the domain. The platform directs the device's accesses right afterwards.
    fn attach(
        &mut self,
        _endpoint: EndpointId,
        domain: VirtioDomain,
        _mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        self.table(domain).map(drop)
    }

    fn bypass(&mut self, _endpoint: EndpointId) -> Result<(), SinkError> {
        Err(SinkError::Unsupported)
    }

    /// The platform has cleared the context entry of an endpoint that leaves its domain.
    fn block(&mut self, _endpoint: EndpointId) {}

    #[inline]
    fn map(&mut self, domain: VirtioDomain, mapping: &Mapping) -> Result<(), SinkError> {
        let request = MapRequest {
            iova: mapping.iova.start(),
            pa: mapping.physical,
            pages: PfnRange::covering(&mapping.iova).pages(),
            permissions: mapping.permissions,
        };
        let table = self.table(domain)?;
        table
            .map(&*self.memory, &*self.frames, request)
            .map_err(|error| refused(error, mapping.iova))
    }

    #[inline]
    fn unmap(&mut self, domain: VirtioDomain, mapping: &Mapping) -> Result<(), SinkError> {
        let id = number(domain).ok_or(SinkError::Failed)?;
        let range = PfnRange::covering(&mapping.iova);
        let found = self.tables.get(domain.get() as usize);
        let found = found.and_then(Option::as_ref).ok_or(SinkError::Failed)?;
        let (_, levels) = found
            .table
            .unmap_nosync(&*self.memory, range, &mut self.dirty)
            .map_err(|_| SinkError::Failed)?;
        if found.lazy {
            return Ok(());
        }
        // The driver maps the segments of a list one by one and unmaps them together: join them
        // into one range for the invalidation.
        match self.unmapped.last_mut() {
            Some((last, run, of)) if *last == id && run.hi().get() + 1 == range.lo().get() => {
                if let Some(joined) = PfnRange::inclusive(run.lo(), range.hi()) {
                    *run = joined;
                }
                *of = (*of).max(levels);
            }
            _ => self.unmapped.push((id, range, levels)),
        }
        Ok(())
    }

    /// Writes the cleared entries back. Then invalidates each flushed domain, and each run of pages
    /// once, before the guest sees the completion.
    #[inline]
    fn commit(&mut self) -> Result<(), SinkError> {
        self.dirty.sync(&*self.memory);
        while let Some(domain) = self.to_flush.last().copied() {
            self.unit
                .invalidate(Invalidation::Domain(domain))
                .map_err(|_| SinkError::CommitFailed)?;
            self.to_flush.pop();
        }
        while let Some((domain, range, levels)) = self.unmapped.last().copied() {
            let request = Invalidation::Pages {
                domain,
                range,
                levels,
            };
            self.unit
                .invalidate(request)
                .map_err(|_| SinkError::CommitFailed)?;
            self.unmapped.pop();
        }
        Ok(())
    }
}
