//! Tables of user-composed modes, and their stubs in the meter.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, DirtyLines, LeafCache, MapError, MapRequest, UnlinkedTables, UnmapError,
};
use ringfence_types::{
    CachedLevels, DomainId, InvalidationError, Pfn, PfnRange, PhysAddr, Unmapped,
};

use super::TableBackend;
use super::table::{self, DynRadix};
use super::timed_replay::{Hosts, OptionalTable, TableHost};
use crate::error::LabError;
use crate::guest::{PviommuTable, VirtioTable, pviommu};
use crate::meter::NullTable;
use crate::mode_dispatch::{
    FlatTable, MakeTable, ReclaimingRadix, ReplayTable, flat_table, virtio_table,
};

/// A table that keeps its table pages, or the stub.
pub(super) enum DynTable {
    None(NullTable),
    Radix(DynRadix),
    Flat(FlatTable),
    Virtio(VirtioTable),
    Pviommu(PviommuTable),
}

/// The per-CPU part of a table.
// One per domain and CPU, and it never moves.
#[allow(clippy::large_enum_variant)]
pub(super) enum DynTableCpu {
    None(()),
    Radix((LeafCache, DirtyLines)),
    Flat(DirtyLines),
    Pviommu(<PviommuTable as IoPageTable>::PerCpu),
}

impl OptionalTable for DynTable {
    type Kind = TableBackend;

    fn host(kind: TableBackend) -> Option<TableHost> {
        match kind {
            TableBackend::Plain | TableBackend::Cached | TableBackend::Flat => None,
            TableBackend::Virtio => Some(TableHost::Virtio),
            TableBackend::Pviommu(_) => Some(TableHost::Pviommu),
        }
    }

    fn last_page(kind: TableBackend) -> u64 {
        match kind {
            TableBackend::Plain | TableBackend::Cached => DynRadix::LAST_PAGE,
            TableBackend::Flat => FlatTable::LAST_PAGE,
            TableBackend::Virtio => VirtioTable::LAST_PAGE,
            TableBackend::Pviommu(_) => PviommuTable::LAST_PAGE,
        }
    }

    fn make(
        kind: TableBackend,
        domain: DomainId,
        coherency: Coherency,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        hosts: &Hosts,
    ) -> Result<(Self, PhysAddr), LabError> {
        Ok(match kind {
            TableBackend::Plain => {
                let table = table::plain(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Radix(table), root)
            }
            TableBackend::Cached => {
                let table = table::cached(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Radix(table), root)
            }
            TableBackend::Flat => {
                let table = flat_table(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Flat(table), root)
            }
            TableBackend::Virtio => {
                let host = hosts.virtio.as_ref();
                let table = virtio_table(domain, coherency, memory, frames, host)?;
                let root = table.root();
                (Self::Virtio(table), root)
            }
            TableBackend::Pviommu(who) => {
                let host = hosts.pviommu.as_ref();
                let table = pviommu(who)(domain, coherency, memory, frames, host)?;
                let root = table.root();
                (Self::Pviommu(table), root)
            }
        })
    }

    fn none(domain: DomainId) -> Self {
        Self::None(NullTable(domain))
    }
}

/// Returns the error for a handle of another table, which is impossible.
const fn corrupt(request: &MapRequest) -> MapError {
    MapError::Corrupt { iova: request.iova }
}

impl IoPageTable for DynTable {
    type PerCpu = DynTableCpu;
    type Pages = ();

    fn per_cpu(&self) -> DynTableCpu {
        match self {
            Self::None(_) | Self::Virtio(_) => DynTableCpu::None(()),
            Self::Radix(table) => DynTableCpu::Radix(table.per_cpu()),
            Self::Flat(table) => DynTableCpu::Flat(table.per_cpu()),
            Self::Pviommu(table) => DynTableCpu::Pviommu(table.per_cpu()),
        }
    }

    fn domain(&self) -> DomainId {
        match self {
            Self::None(table) => table.domain(),
            Self::Radix(table) => table.domain(),
            Self::Flat(table) => table.domain(),
            Self::Virtio(table) => table.domain(),
            Self::Pviommu(table) => table.domain(),
        }
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut DynTableCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match (self, cpu) {
            (Self::None(table), DynTableCpu::None(cpu)) => table.map(cpu, platform, request),
            (Self::Radix(table), DynTableCpu::Radix(cpu)) => table.map(cpu, platform, request),
            (Self::Flat(table), DynTableCpu::Flat(cpu)) => table.map(cpu, platform, request),
            (Self::Virtio(table), DynTableCpu::None(cpu)) => table.map(cpu, platform, request),
            (Self::Pviommu(table), DynTableCpu::Pviommu(cpu)) => table.map(cpu, platform, request),
            _ => Err(corrupt(&request)),
        }
    }

    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut DynTableCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match (self, cpu) {
            (Self::None(table), DynTableCpu::None(cpu)) => table.map_nosync(cpu, platform, request),
            (Self::Radix(table), DynTableCpu::Radix(cpu)) => {
                table.map_nosync(cpu, platform, request)
            }
            (Self::Flat(table), DynTableCpu::Flat(cpu)) => table.map_nosync(cpu, platform, request),
            (Self::Virtio(table), DynTableCpu::None(cpu)) => {
                table.map_nosync(cpu, platform, request)
            }
            (Self::Pviommu(table), DynTableCpu::Pviommu(cpu)) => {
                table.map_nosync(cpu, platform, request)
            }
            _ => Err(corrupt(&request)),
        }
    }

    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        match self {
            Self::None(_) | Self::Radix(_) | Self::Flat(_) => Ok(()),
            Self::Virtio(table) => table.iotlb_sync_map(platform, range),
            Self::Pviommu(table) => table.iotlb_sync_map(platform, range),
        }
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut DynTableCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        match (self, cpu) {
            (Self::None(table), DynTableCpu::None(cpu)) => table.unmap(cpu, platform, range),
            (Self::Radix(table), DynTableCpu::Radix(cpu)) => table.unmap(cpu, platform, range),
            (Self::Flat(table), DynTableCpu::Flat(cpu)) => table.unmap(cpu, platform, range),
            (Self::Virtio(table), DynTableCpu::None(cpu)) => table.unmap(cpu, platform, range),
            (Self::Pviommu(table), DynTableCpu::Pviommu(cpu)) => table.unmap(cpu, platform, range),
            _ => Err(UnmapError::Corrupt {
                iova: range.lo().iova(),
            }),
        }
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        match self {
            Self::None(table) => table.is_mapped(platform, page),
            Self::Radix(table) => table.is_mapped(platform, page),
            Self::Flat(table) => table.is_mapped(platform, page),
            Self::Virtio(table) => table.is_mapped(platform, page),
            Self::Pviommu(table) => table.is_mapped(platform, page),
        }
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        match self {
            Self::None(table) => table.is_empty(platform),
            Self::Radix(table) => table.is_empty(platform),
            Self::Flat(table) => table.is_empty(platform),
            Self::Virtio(table) => table.is_empty(platform),
            Self::Pviommu(table) => table.is_empty(platform),
        }
    }

    fn sync<P: Platform>(&self, cpu: &mut DynTableCpu, platform: &mut P) {
        match (self, cpu) {
            (Self::Radix(table), DynTableCpu::Radix(cpu)) => table.sync(cpu, platform),
            (Self::Flat(table), DynTableCpu::Flat(cpu)) => table.sync(cpu, platform),
            (Self::Virtio(table), DynTableCpu::None(cpu)) => table.sync(cpu, platform),
            (Self::Pviommu(table), DynTableCpu::Pviommu(cpu)) => table.sync(cpu, platform),
            _ => {}
        }
    }
}

/// A table that frees empty table pages, or the stub.
pub(super) enum DynReclaimingTable {
    None(NullTable),
    Some(ReclaimingRadix),
}

impl OptionalTable for DynReclaimingTable {
    type Kind = MakeTable<ReclaimingRadix>;

    fn host(_: Self::Kind) -> Option<TableHost> {
        None
    }

    fn last_page(_: Self::Kind) -> u64 {
        ReclaimingRadix::LAST_PAGE
    }

    fn make(
        kind: Self::Kind,
        domain: DomainId,
        coherency: Coherency,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        _: &Hosts,
    ) -> Result<(Self, PhysAddr), LabError> {
        let table = kind(domain, coherency, memory, frames, None)?;
        let root = ReplayTable::root(&table);
        Ok((Self::Some(table), root))
    }

    fn none(domain: DomainId) -> Self {
        Self::None(NullTable(domain))
    }
}

impl IoPageTable for DynReclaimingTable {
    type PerCpu = ();
    type Pages = UnlinkedTables;

    fn per_cpu(&self) {}

    fn domain(&self) -> DomainId {
        match self {
            Self::None(table) => table.domain(),
            Self::Some(table) => table.domain(),
        }
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match self {
            Self::None(table) => table.map(cpu, platform, request),
            Self::Some(table) => table.map(cpu, platform, request),
        }
    }

    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        match self {
            Self::None(_) => Ok(()),
            Self::Some(table) => table.iotlb_sync_map(platform, range),
        }
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, UnlinkedTables), UnmapError> {
        match self {
            Self::None(table) => {
                let (unmapped, levels, ()) = table.unmap(cpu, platform, range)?;
                Ok((unmapped, levels, UnlinkedTables::default()))
            }
            Self::Some(table) => table.unmap(cpu, platform, range),
        }
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        match self {
            Self::None(table) => table.is_mapped(platform, page),
            Self::Some(table) => table.is_mapped(platform, page),
        }
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        match self {
            Self::None(table) => table.is_empty(platform),
            Self::Some(table) => table.is_empty(platform),
        }
    }

    fn sync<P: Platform>(&self, cpu: &mut (), platform: &mut P) {
        if let Self::Some(table) = self {
            table.sync(cpu, platform);
        }
    }
}
