//! Tables of rows that nobody has named, and what is there when the meter has taken them away.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::Translations;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Dirty, LeafCache, MapError, MapRequest, Retired, UnmapError};
use ringfence_types::{
    CachedLevels, DomainId, InvalidationError, Pfn, PfnRange, PhysAddr, Unmapped,
};

use super::Kept;
use super::replica::{Hosts, Keeper, Removable};
use super::table::{self, AnyRadix};
use crate::build::{Flat, MakeTable, Reclaimer, ReplayTable, flat, virtio};
use crate::error::LabError;
use crate::hosted::{PviommuTable, VirtioTable, pviommu};
use crate::meter::NullTable;

/// A table that keeps its pages, or none.
pub(super) enum AnyTable {
    None(NullTable),
    Radix(AnyRadix),
    Flat(Flat),
    Virtio(VirtioTable),
    Pviommu(PviommuTable),
}

/// One processor's part of it.
// There is one a domain and processor, and it stays where it is.
#[allow(clippy::large_enum_variant)]
pub(super) enum AnyTableCpu {
    None(()),
    Radix((LeafCache, Dirty)),
    Flat(Dirty),
    Pviommu(<PviommuTable as Translations>::PerCpu),
}

impl Removable for AnyTable {
    type Kind = Kept;

    fn keeper(kind: Kept) -> Option<Keeper> {
        match kind {
            Kept::Plain | Kept::Cached | Kept::Flat => None,
            Kept::Virtio => Some(Keeper::Virtio),
            Kept::Pviommu(_) => Some(Keeper::Pviommu),
        }
    }

    fn last_page(kind: Kept) -> u64 {
        match kind {
            Kept::Plain | Kept::Cached => AnyRadix::LAST_PAGE,
            Kept::Flat => Flat::LAST_PAGE,
            Kept::Virtio => VirtioTable::LAST_PAGE,
            Kept::Pviommu(_) => PviommuTable::LAST_PAGE,
        }
    }

    fn make(
        kind: Kept,
        domain: DomainId,
        coherency: Coherency,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        hosts: &Hosts,
    ) -> Result<(Self, PhysAddr), LabError> {
        Ok(match kind {
            Kept::Plain => {
                let table = table::plain(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Radix(table), root)
            }
            Kept::Cached => {
                let table = table::cached(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Radix(table), root)
            }
            Kept::Flat => {
                let table = flat(domain, coherency, memory, frames, None)?;
                let root = table.root();
                (Self::Flat(table), root)
            }
            Kept::Virtio => {
                let host = hosts.virtio.as_ref();
                let table = virtio(domain, coherency, memory, frames, host)?;
                let root = table.root();
                (Self::Virtio(table), root)
            }
            Kept::Pviommu(who) => {
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

/// What cannot be: a handle of another table.
const fn corrupt(request: &MapRequest) -> MapError {
    MapError::Corrupt { iova: request.iova }
}

impl Translations for AnyTable {
    type PerCpu = AnyTableCpu;
    type Pages = ();

    fn per_cpu(&self) -> AnyTableCpu {
        match self {
            Self::None(_) | Self::Virtio(_) => AnyTableCpu::None(()),
            Self::Radix(table) => AnyTableCpu::Radix(table.per_cpu()),
            Self::Flat(table) => AnyTableCpu::Flat(table.per_cpu()),
            Self::Pviommu(table) => AnyTableCpu::Pviommu(table.per_cpu()),
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
        cpu: &mut AnyTableCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match (self, cpu) {
            (Self::None(table), AnyTableCpu::None(cpu)) => table.map(cpu, platform, request),
            (Self::Radix(table), AnyTableCpu::Radix(cpu)) => table.map(cpu, platform, request),
            (Self::Flat(table), AnyTableCpu::Flat(cpu)) => table.map(cpu, platform, request),
            (Self::Virtio(table), AnyTableCpu::None(cpu)) => table.map(cpu, platform, request),
            (Self::Pviommu(table), AnyTableCpu::Pviommu(cpu)) => table.map(cpu, platform, request),
            _ => Err(corrupt(&request)),
        }
    }

    fn map_deferred<P: Platform>(
        &self,
        cpu: &mut AnyTableCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match (self, cpu) {
            (Self::None(table), AnyTableCpu::None(cpu)) => {
                table.map_deferred(cpu, platform, request)
            }
            (Self::Radix(table), AnyTableCpu::Radix(cpu)) => {
                table.map_deferred(cpu, platform, request)
            }
            (Self::Flat(table), AnyTableCpu::Flat(cpu)) => {
                table.map_deferred(cpu, platform, request)
            }
            (Self::Virtio(table), AnyTableCpu::None(cpu)) => {
                table.map_deferred(cpu, platform, request)
            }
            (Self::Pviommu(table), AnyTableCpu::Pviommu(cpu)) => {
                table.map_deferred(cpu, platform, request)
            }
            _ => Err(corrupt(&request)),
        }
    }

    fn reveal<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        match self {
            Self::None(_) | Self::Radix(_) | Self::Flat(_) => Ok(()),
            Self::Virtio(table) => table.reveal(platform, range),
            Self::Pviommu(table) => table.reveal(platform, range),
        }
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut AnyTableCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        match (self, cpu) {
            (Self::None(table), AnyTableCpu::None(cpu)) => table.unmap(cpu, platform, range),
            (Self::Radix(table), AnyTableCpu::Radix(cpu)) => table.unmap(cpu, platform, range),
            (Self::Flat(table), AnyTableCpu::Flat(cpu)) => table.unmap(cpu, platform, range),
            (Self::Virtio(table), AnyTableCpu::None(cpu)) => table.unmap(cpu, platform, range),
            (Self::Pviommu(table), AnyTableCpu::Pviommu(cpu)) => table.unmap(cpu, platform, range),
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

    fn sync<P: Platform>(&self, cpu: &mut AnyTableCpu, platform: &mut P) {
        match (self, cpu) {
            (Self::Radix(table), AnyTableCpu::Radix(cpu)) => table.sync(cpu, platform),
            (Self::Flat(table), AnyTableCpu::Flat(cpu)) => table.sync(cpu, platform),
            (Self::Virtio(table), AnyTableCpu::None(cpu)) => table.sync(cpu, platform),
            (Self::Pviommu(table), AnyTableCpu::Pviommu(cpu)) => table.sync(cpu, platform),
            _ => {}
        }
    }
}

/// A table that gives empty pages back, or none.
pub(super) enum AnyReclaimer {
    None(NullTable),
    Some(Reclaimer),
}

impl Removable for AnyReclaimer {
    type Kind = MakeTable<Reclaimer>;

    fn keeper(_: Self::Kind) -> Option<Keeper> {
        None
    }

    fn last_page(_: Self::Kind) -> u64 {
        Reclaimer::LAST_PAGE
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

impl Translations for AnyReclaimer {
    type PerCpu = ();
    type Pages = Retired;

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

    fn reveal<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        match self {
            Self::None(_) => Ok(()),
            Self::Some(table) => table.reveal(platform, range),
        }
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, Retired), UnmapError> {
        match self {
            Self::None(table) => {
                let (unmapped, levels, ()) = table.unmap(cpu, platform, range)?;
                Ok((unmapped, levels, Retired::default()))
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
