//! Cost profiles: modelled costs of work that no user program can execute, and the geometry of the
//! modelled hardware.

use std::num::NonZeroU8;

use ringfence_hw::{AdjacentPrefetch, Geometry, GeometryError, PrefetchSide};
use ringfence_pgtable::Coherency;
use serde::{Deserialize, Serialize};

use crate::iommu_family::IommuFamily;
use crate::modes::Owner;

/// Costs and geometry of one platform. Modelled cycles come from the profile; measured cycles are
/// those of the CPU that runs the replay. Reports show the two separately.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name, as given to `--profile`.
    pub name: String,
    /// Source of the numbers.
    pub source: String,
    /// Family of the IOMMU that the replay models.
    #[serde(default)]
    pub iommu: IommuFamily,
    /// Cycles of one IOTLB invalidation, from submission to completion. Added per invalidation
    /// command.
    pub invalidation_cycles: u64,
    /// Cycles of a guest's notification: from the notification to the start of the host's work, and
    /// back. Added per notification, in modes in which a host owns the table. If an older profile
    /// lacks this field, it takes the value of [`r210_2015`](Self::r210_2015).
    #[serde(default = "assumed_kick")]
    pub kick_cycles: u64,
    /// Cycles of a crossing from a Xen guest into the hypervisor and back. Added per crossing, in
    /// modes in which Xen owns the table. If an older profile lacks this field, it takes the value
    /// of [`r210_2015`](Self::r210_2015).
    #[serde(default = "assumed_hypercall")]
    pub hypercall_cycles: u64,
    /// Cycles that a device waits for an IOTLB miss. Reported with the hit rate; not part of the
    /// CPU cost.
    pub miss_cycles: u64,
    /// Cycles of a packet without protection, per mapping: the c of `relative_throughput`.
    pub baseline_cycles: f64,
    /// True if the page walker snoops the CPU caches.
    pub coherent: bool,
    /// IOTLB sets, a power of two.
    pub iotlb_sets: u32,
    /// IOTLB ways (entries per set), a power of two.
    pub iotlb_ways: u32,
    /// Strategy against IOTLB misses. If the profile lacks this field, the unit prefetches nothing.
    #[serde(default, skip_serializing_if = "IotlbPrefetch::is_none")]
    pub iotlb_prefetch: IotlbPrefetch,
    /// Entries of the page-walk caches of level 1 (upper end of a leaf table), 2 and 3. 0 means
    /// that the unit has no such cache; [`validate`](Self::validate) refuses it.
    pub walk_cache_entries: [u32; 3],
}

/// Prefetches into the IOTLB (W11).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IotlbPrefetch {
    /// The unit reads only missed pages.
    #[default]
    None,
    /// At a miss, the unit also reads the next page.
    NextPage,
    /// At a miss, the unit also reads this number of pages that follow.
    NextPages(NonZeroU8),
    /// At a miss, the unit also reads the page before.
    PreviousPage,
    /// The driver names the pages of a buffer after its map, and the unit reads them.
    HintAtMap,
}

impl IotlbPrefetch {
    /// The strategies of W11, no prefetch first.
    pub const ALL: [Self; 4] = [
        Self::None,
        Self::NextPage,
        Self::PreviousPage,
        Self::HintAtMap,
    ];

    /// Returns the name, as in a profile and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::NextPage => "next-page",
            Self::NextPages(_) => "next-pages",
            Self::PreviousPage => "previous-page",
            Self::HintAtMap => "hint-at-map",
        }
    }

    /// Returns true if the unit prefetches nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Returns the prefetch of the unit at each miss.
    pub(crate) fn adjacent(self) -> Option<AdjacentPrefetch> {
        let (side, pages) = match self {
            Self::NextPage => (PrefetchSide::Higher, 1),
            Self::NextPages(pages) => (PrefetchSide::Higher, pages.get()),
            Self::PreviousPage => (PrefetchSide::Lower, 1),
            Self::None | Self::HintAtMap => return None,
        };
        Some(AdjacentPrefetch { side, pages })
    }
}

/// No paper gives the cost of a notification. This is the order of one guest exit and the entry
/// back; waking a host thread costs more.
const ASSUMED_KICK: u64 = 2000;

fn assumed_kick() -> u64 {
    ASSUMED_KICK
}

/// Assumed: no source of this project gives the cost of a hypercall. The number is of the order of
/// an exit and the entry back, whose direct cost is 2000 cycles (Landau, Ben-Yehuda and Gordon,
/// SplitX, WIOV 2011). It was noted from memory as a measurement of Dall et al. (ISCA 2016), and
/// their table was not at hand to check it.
const ASSUMED_HYPERCALL: u64 = 1228;

fn assumed_hypercall() -> u64 {
    ASSUMED_HYPERCALL
}

impl Profile {
    /// The machine of the rIOMMU and EIOVAR papers: Dell R210, Xeon E3-1220 at 3.1 GHz, Mellanox 40
    /// Gb/s.
    ///
    /// - Invalidation: about 2150 cycles (rIOMMU section 5.1; Table 1 prints 2127 to 2135).
    /// - Miss: 1532 cycles (section 5.3).
    /// - c: half of the 1816 cycles of a packet with two mappings and no protection (Fig. 7).
    /// - Page walks do not snoop (section 3.2).
    ///
    /// The papers print neither the IOTLB and walk-cache geometry nor the cost of a guest's
    /// notification. These values are assumptions; every report prints them.
    pub fn r210_2015() -> Self {
        Self {
            name: "r210-2015".into(),
            source: "rIOMMU (ASPLOS'15) Table 1, sections 5.1 and 5.3, Fig. 7; geometry and kicks \
                assumed"
                .into(),
            iommu: IommuFamily::Vtd,
            invalidation_cycles: 2150,
            kick_cycles: ASSUMED_KICK,
            hypercall_cycles: ASSUMED_HYPERCALL,
            miss_cycles: 1532,
            baseline_cycles: 908.0,
            coherent: false,
            iotlb_sets: 16,
            iotlb_ways: 4,
            iotlb_prefetch: IotlbPrefetch::None,
            walk_cache_entries: [32, 16, 4],
        }
    }

    /// Checks every field for a possible value. Callers check before a replay begins.
    ///
    /// # Errors
    /// See [`ProfileError`].
    pub fn validate(&self) -> Result<(), ProfileError> {
        if self.name.is_empty() {
            return Err(ProfileError::NoName);
        }
        for (field, cycles) in [
            ("invalidation_cycles", self.invalidation_cycles),
            ("kick_cycles", self.kick_cycles),
            ("hypercall_cycles", self.hypercall_cycles),
            ("miss_cycles", self.miss_cycles),
        ] {
            if cycles > MAX_CYCLES {
                return Err(ProfileError::TooManyCycles { field, cycles });
            }
        }
        if !(self.baseline_cycles.is_finite() && self.baseline_cycles > 0.0) {
            return Err(ProfileError::NotPositive(self.baseline_cycles));
        }
        let geometry = |cache, sets, ways| {
            Geometry::new(sets, ways)
                .map(drop)
                .map_err(|source| ProfileError::Geometry { cache, source })
        };
        geometry("iotlb", self.iotlb_sets, self.iotlb_ways)?;
        let [one, two, three] = self.walk_cache_entries;
        geometry("walk_cache level 1", 1, one)?;
        geometry("walk_cache level 2", 1, two)?;
        geometry("walk_cache level 3", 1, three)
    }

    /// Returns the cycles of a crossing to the owner of the table.
    pub fn crossing_cycles(&self, owner: Owner) -> u64 {
        if owner.is_xen() {
            self.hypercall_cycles
        } else {
            self.kick_cycles
        }
    }

    /// Returns the page walker's coherency, for the tables.
    pub fn coherency(&self) -> Coherency {
        if self.coherent {
            Coherency::Coherent
        } else {
            Coherency::NonCoherent
        }
    }
}

/// About a second at the clock of today's fastest CPUs. A larger value is a typing error.
const MAX_CYCLES: u64 = 10_000_000_000;

/// The reason why a profile is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The name is empty: reports could not name the profile.
    #[error("the profile has no name")]
    NoName,
    /// A cost exceeds `MAX_CYCLES`.
    #[error("{field} = {cycles}: more than {MAX_CYCLES} cycles")]
    TooManyCycles {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        cycles: u64,
    },
    /// `baseline_cycles` is not above 0, or not a finite number.
    #[error("baseline_cycles = {0}: must be above 0")]
    NotPositive(f64),
    /// A number is not finite, not above 0, or implausibly large.
    #[error("{field} = {value}: must be above 0 and plausible")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: f64,
    },
    /// The profile gives only one of the two numbers of the IOTLB.
    #[error("iotlb_sets and iotlb_ways: give both, or neither")]
    HalfGeometry,
    /// `sources` names a field that a profile does not have.
    #[error("sources.{0}: a profile has no such number")]
    NoSuchField(String),
    /// A cache has an invalid geometry.
    #[error("{cache}: {source}")]
    Geometry {
        /// Name of the cache.
        cache: &'static str,
        /// The reason why the geometry is invalid.
        source: GeometryError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_has_the_published_costs() {
        let profile = Profile::r210_2015();
        // rIOMMU, Table 1: an unmap's invalidation takes 2127 to 2135 cycles; section 5.1
        // waits 2150. Section 5.3: a miss takes 1532.
        assert_eq!(profile.invalidation_cycles, 2150);
        assert_eq!(profile.miss_cycles, 1532);
        // Fig. 7: 1816 cycles per packet, two mappings per packet.
        assert!((2.0 * profile.baseline_cycles - 1816.0).abs() < f64::EPSILON);
    }

    #[test]
    fn the_bundled_profile_is_possible_and_slips_are_not() {
        assert_eq!(Profile::r210_2015().validate(), Ok(()));
        let slips: [fn(&mut Profile); 9] = [
            |p| p.name.clear(),
            |p| p.invalidation_cycles = u64::MAX,
            |p| p.kick_cycles = u64::MAX,
            |p| p.hypercall_cycles = u64::MAX,
            |p| p.baseline_cycles = 0.0,
            |p| p.baseline_cycles = f64::NAN,
            |p| p.iotlb_sets = 3,
            |p| p.iotlb_ways = 1 << 30,
            |p| p.walk_cache_entries[1] = 0,
        ];
        for (index, slip) in slips.iter().enumerate() {
            let mut profile = Profile::r210_2015();
            slip(&mut profile);
            assert!(profile.validate().is_err(), "slip {index}");
        }
    }
}
