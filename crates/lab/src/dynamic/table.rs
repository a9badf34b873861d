//! The enum-dispatched radix table.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, DirtyLines, LeafCache, MapError, MapRequest, UnmapError};
use ringfence_types::{CachedLevels, DomainId, Pfn, PfnRange, PhysAddr, Unmapped};

use crate::error::LabError;
use crate::hardware::Vtd;
use crate::mode_dispatch::{LeafCachedRadix, PlainRadix, ReplayTable};

/// A radix table that keeps its table pages, with or without a leaf cache.
pub(super) enum DynRadix {
    Plain(PlainRadix),
    Cached(LeafCachedRadix),
}

pub(super) fn plain(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    host: Option<&()>,
) -> Result<DynRadix, LabError> {
    crate::mode_dispatch::plain_radix(domain, coherency, memory, frames, host).map(DynRadix::Plain)
}

pub(super) fn cached(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    host: Option<&()>,
) -> Result<DynRadix, LabError> {
    crate::mode_dispatch::leaf_cached_radix(domain, coherency, memory, frames, host)
        .map(DynRadix::Cached)
}

impl ReplayTable for DynRadix {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        match self {
            Self::Plain(table) => table.root(),
            Self::Cached(table) => table.root(),
        }
    }
}

impl IoPageTable for DynRadix {
    /// The leaf cache stays empty for a plain table.
    type PerCpu = (LeafCache, DirtyLines);
    type Pages = ();

    fn per_cpu(&self) -> (LeafCache, DirtyLines) {
        match self {
            Self::Plain(table) => (table.0.leaf_cache(), table.per_cpu()),
            Self::Cached(table) => table.per_cpu(),
        }
    }

    fn domain(&self) -> DomainId {
        match self {
            Self::Plain(table) => table.domain(),
            Self::Cached(table) => table.domain(),
        }
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut (LeafCache, DirtyLines),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match self {
            Self::Plain(table) => table.map(&mut cpu.1, platform, request),
            Self::Cached(table) => table.map(cpu, platform, request),
        }
    }

    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut (LeafCache, DirtyLines),
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        match self {
            Self::Plain(table) => table.map_nosync(&mut cpu.1, platform, request),
            Self::Cached(table) => table.map_nosync(cpu, platform, request),
        }
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut (LeafCache, DirtyLines),
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        match self {
            Self::Plain(table) => table.unmap(&mut cpu.1, platform, range),
            Self::Cached(table) => table.unmap(cpu, platform, range),
        }
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        match self {
            Self::Plain(table) => table.is_mapped(platform, page),
            Self::Cached(table) => table.is_mapped(platform, page),
        }
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        match self {
            Self::Plain(table) => table.is_empty(platform),
            Self::Cached(table) => table.is_empty(platform),
        }
    }

    fn sync<P: Platform>(&self, cpu: &mut (LeafCache, DirtyLines), platform: &mut P) {
        match self {
            Self::Plain(table) => table.sync(&mut cpu.1, platform),
            Self::Cached(table) => table.sync(cpu, platform),
        }
    }
}
