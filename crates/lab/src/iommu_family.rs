//! Families of IOMMUs that kernels drive with radix tables.

use ringfence_hw::RangeCommands;
use serde::{Deserialize, Serialize};

use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};

/// A family of IOMMUs, as given to `--iommu`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum IommuFamily {
    /// Intel VT-d: second-stage tables.
    #[default]
    #[serde(rename = "vtd")]
    Vtd,
    /// AMD-Vi: host tables ("v1").
    #[serde(rename = "amd")]
    AmdVi,
    /// Arm SMMUv3: stage 1 with a granule of 4 KiB, as Linux uses it.
    #[serde(rename = "smmuv3")]
    Smmuv3,
    /// RISC-V IOMMU: first stage, Sv48.
    #[serde(rename = "riscv")]
    RiscV,
}

impl IommuFamily {
    /// All families, the default first.
    pub const ALL: [Self; 4] = [Self::Vtd, Self::AmdVi, Self::Smmuv3, Self::RiscV];

    /// Returns the name, as given to `--iommu` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vtd => "vtd",
            Self::AmdVi => "amd",
            Self::Smmuv3 => "smmuv3",
            Self::RiscV => "riscv",
        }
    }

    /// Returns true if a table can permit writes without reads. In the other families a device may
    /// read every buffer that it may write.
    pub fn has_write_only_pages(self) -> bool {
        matches!(self, Self::Vtd | Self::AmdVi)
    }

    /// Returns the commands for ranges. `None` for VT-d, whose unit executes requests exactly.
    pub(crate) fn range_commands(self) -> Option<RangeCommands> {
        match self {
            Self::Vtd => None,
            Self::AmdVi => Some(RangeCommands::AmdVi),
            Self::Smmuv3 => Some(RangeCommands::Smmuv3),
            Self::RiscV => Some(RangeCommands::RiscV),
        }
    }
}

impl Mode {
    /// Returns the name of the hardware that translates in this mode on a machine with an IOMMU of
    /// `family`: the family, `calgary` or `riommu`; `none` if none translates.
    pub fn hardware(&self, family: IommuFamily) -> &'static str {
        match self.table {
            TableKind::None => "none",
            TableKind::Flat | TableKind::StaticFlat => "calgary",
            _ if self.has_rings() => "riommu",
            _ => family.name(),
        }
    }

    /// Returns the reason why the mode is not modelled on `family`; `None` if it is.
    pub fn not_on(&self, family: IommuFamily) -> Option<&'static str> {
        use {Alloc as A, FlushKind as F, TableKind as T};
        if family == IommuFamily::Vtd {
            return None;
        }
        match self.hardware(family) {
            "calgary" => return Some("its table is Calgary's"),
            "riommu" => return Some("its tables are the rings of rIOMMU"),
            _ => {}
        }
        if self.owner != Owner::Kernel {
            return Some("the tables of a host are modelled for VT-d only");
        }
        match (self.alloc, self.table, self.flush) {
            (A::Identity, T::None, F::Never)
            | (A::LinuxRcache, T::Radix, F::PerUnmap | F::PerCpuQueue)
            | (A::Magazine, T::CachedRadix, F::PerUnmap | F::Burst)
            | (A::Shadow, T::Radix, F::PerUnmap) => None,
            _ => Some("the combination of its parts is modelled for VT-d only"),
        }
    }
}
