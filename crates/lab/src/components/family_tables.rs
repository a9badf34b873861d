//! The radix tables of the families beside VT-d.

use std::rc::Rc;

use ringfence_dma::space::{LeafCachedTable, PlainTable};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Table};
use ringfence_types::{DomainId, PageSize, PhysAddr};

use super::{FamilyFormat, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::hardware::FamilyIommu;
use crate::iommu_family::IommuFamily;

pub(crate) type FamilyRadix = PlainTable<FamilyFormat>;
pub(crate) type FamilyCachedRadix = LeafCachedTable<FamilyFormat>;

/// Sv48 sign-extends addresses: its lower half ends at 2^47.
const LAST_PAGE_47_BIT: u64 = (1 << 35) - 1;

impl ReplayTable for FamilyRadix {
    type Hardware = FamilyIommu;
    const LAST_PAGE: u64 = LAST_PAGE_47_BIT;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn coherency(&self) -> Option<Coherency> {
        Some(self.0.coherency())
    }
}

impl ReplayTable for FamilyCachedRadix {
    type Hardware = FamilyIommu;
    const LAST_PAGE: u64 = LAST_PAGE_47_BIT;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn coherency(&self) -> Option<Coherency> {
        Some(self.0.coherency())
    }
}

fn radix(
    of: (IommuFamily, PageSize),
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
) -> Result<Table<FamilyFormat>, LabError> {
    let format = FamilyFormat::new(of.0, of.1);
    let format = format.ok_or(LabError::Internal("a format of VT-d"))?;
    Ok(Table::new(format, domain, coherency, memory, frames)?)
}

/// Returns the constructor of `$family` and `$size`. A constructor is a function without state, so
/// each pair has its own.
macro_rules! constructor {
    ($table:path, $family:expr, $size:expr) => {
        match $family {
            IommuFamily::Vtd => |_, _, _, _, _| Err(LabError::Internal("a table of VT-d")),
            IommuFamily::AmdVi => constructor!(@ $table, AmdVi, $size),
            IommuFamily::Smmuv3 => constructor!(@ $table, Smmuv3, $size),
            IommuFamily::RiscV => constructor!(@ $table, RiscV, $size),
        }
    };
    (@ $table:path, $of:ident, $size:expr) => {
        match $size {
            PageSize::Size4K => constructor!(@@ $table, $of, Size4K),
            PageSize::Size64K => constructor!(@@ $table, $of, Size64K),
            _ => constructor!(@@ $table, $of, Size2M),
        }
    };
    (@@ $table:path, $of:ident, $largest:ident) => {
        |domain, coherency, memory, frames, _| {
            let of = (IommuFamily::$of, PageSize::$largest);
            radix(of, domain, coherency, memory, frames).map($table)
        }
    };
}

/// Returns the constructor of tables of `family` without a leaf cache, with leaves of up to `size`.
pub(crate) fn family_radix(family: IommuFamily, size: PageSize) -> MakeTable<FamilyRadix> {
    constructor!(PlainTable, family, size)
}

/// The same with a leaf cache.
pub(crate) fn family_cached_radix(
    family: IommuFamily,
    size: PageSize,
) -> MakeTable<FamilyCachedRadix> {
    constructor!(LeafCachedTable, family, size)
}
