//! Profiles of machines: the numbers that sources state about them. A number without a source is
//! absent.

mod builtin;
mod device_side;
mod prices;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::iommu_family::IommuFamily;
use crate::profile::{IotlbPrefetch, Profile, ProfileError};

pub use device_side::DeviceSide;
pub use prices::{Baseline, Operation, Prices};

/// A machine, as its sources describe it. `None` means that no source states the number.
///
/// The TOML form of a profile file; a missing key is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineProfile {
    /// Name, as given to `--profile`.
    pub name: String,
    /// Source of the numbers, in one line.
    pub source: String,
    /// Family of the machine's IOMMU.
    #[serde(default)]
    pub iommu: Option<IommuFamily>,
    /// Base clock in GHz, at which the time-stamp counter runs. Converts times of a source into
    /// cycles.
    #[serde(default)]
    pub clock_ghz: Option<f64>,
    /// Cycles of one IOTLB invalidation, from submission to completion. Added per invalidation
    /// command.
    #[serde(default)]
    pub invalidation_cycles: Option<u64>,
    /// Cycles of a guest's notification of its host and back.
    #[serde(default)]
    pub kick_cycles: Option<u64>,
    /// Cycles of a crossing from a Xen guest into the hypervisor and back.
    #[serde(default)]
    pub hypercall_cycles: Option<u64>,
    /// Cycles that a device waits for an IOTLB miss.
    #[serde(default)]
    pub miss_cycles: Option<u64>,
    /// c of a packet: cycles without protection, per mapping.
    #[serde(default)]
    pub baseline_cycles: Option<f64>,
    /// c of a request of a block device: cycles without protection, per mapping.
    #[serde(default)]
    pub block_request_cycles: Option<f64>,
    /// c of a page of a large transfer: cycles without protection, per page.
    #[serde(default)]
    pub page_cycles: Option<f64>,
    /// True if the page walker snoops the CPU caches.
    #[serde(default)]
    pub coherent: Option<bool>,
    /// IOTLB sets, a power of two.
    #[serde(default)]
    pub iotlb_sets: Option<u32>,
    /// IOTLB ways (entries per set), a power of two.
    #[serde(default)]
    pub iotlb_ways: Option<u32>,
    /// Strategy against IOTLB misses. If the profile lacks this field, the unit prefetches nothing.
    #[serde(default, skip_serializing_if = "IotlbPrefetch::is_none")]
    pub iotlb_prefetch: IotlbPrefetch,
    /// Entries of the page-walk caches of level 1 (upper end of a leaf table), 2 and 3.
    #[serde(default)]
    pub walk_cache_entries: Option<[u32; 3]>,
    /// The device's side.
    #[serde(default)]
    pub device_side: Option<DeviceSide>,
    /// Throughputs that the sources report. No cost is derived from them.
    #[serde(default)]
    pub reported: Vec<Reported>,
    /// Source of each number, by field.
    #[serde(default)]
    pub sources: BTreeMap<String, String>,
}

/// Throughputs of one workload, as reported. `None`: the source does not state it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reported {
    /// Workload and device.
    pub workload: String,
    /// Unit of the numbers.
    pub unit: String,
    /// Throughput without translation.
    #[serde(default)]
    pub none: Option<f64>,
    /// Throughput with deferred invalidation.
    #[serde(default)]
    pub lazy: Option<f64>,
    /// Throughput with an invalidation at each unmap.
    #[serde(default)]
    pub strict: Option<f64>,
    /// Publication that states the numbers.
    pub source: String,
}

/// Names of the fields whose source `sources` may state.
const SOURCED: [&str; 14] = [
    "clock_ghz",
    "invalidation_cycles",
    "kick_cycles",
    "hypercall_cycles",
    "miss_cycles",
    "baseline_cycles",
    "block_request_cycles",
    "page_cycles",
    "coherent",
    "iotlb_sets",
    "iotlb_ways",
    "iotlb_prefetch",
    "walk_cache_entries",
    "device_side",
];

impl MachineProfile {
    /// Returns a profile that states nothing.
    pub fn unknown(name: impl Into<String>, source: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            source: source.into(),
            iommu: None,
            clock_ghz: None,
            invalidation_cycles: None,
            kick_cycles: None,
            hypercall_cycles: None,
            miss_cycles: None,
            baseline_cycles: None,
            block_request_cycles: None,
            page_cycles: None,
            coherent: None,
            iotlb_sets: None,
            iotlb_ways: None,
            iotlb_prefetch: IotlbPrefetch::None,
            walk_cache_entries: None,
            device_side: None,
            reported: Vec::new(),
            sources: BTreeMap::new(),
        }
    }

    /// Returns the complete profile of a replay. Where this profile states no geometry, the replay
    /// models that of [`Profile::r210_2015`]. Rows take costs from [`prices`](Self::prices), where
    /// unknown costs stay unknown, and never from the result. The replay models VT-d, whatever
    /// the machine has.
    pub fn for_replay(&self) -> Profile {
        let model = Profile::r210_2015();
        Profile {
            name: self.name.clone(),
            source: self.source.clone(),
            iommu: IommuFamily::Vtd,
            invalidation_cycles: self
                .invalidation_cycles
                .unwrap_or(model.invalidation_cycles),
            kick_cycles: self.kick_cycles.unwrap_or(model.kick_cycles),
            hypercall_cycles: self.hypercall_cycles.unwrap_or(model.hypercall_cycles),
            miss_cycles: self.miss_cycles.unwrap_or(model.miss_cycles),
            baseline_cycles: self.baseline_cycles.unwrap_or(model.baseline_cycles),
            coherent: self.coherent.unwrap_or(model.coherent),
            iotlb_sets: self.iotlb_sets.unwrap_or(model.iotlb_sets),
            iotlb_ways: self.iotlb_ways.unwrap_or(model.iotlb_ways),
            iotlb_prefetch: self.iotlb_prefetch,
            walk_cache_entries: self.walk_cache_entries.unwrap_or(model.walk_cache_entries),
        }
    }

    /// Returns the cost of `operation` without protection.
    pub fn baseline(&self, operation: Operation) -> Option<Baseline> {
        match operation {
            Operation::Packet => self.baseline_cycles.map(Baseline::PerMapping),
            Operation::BlockRequest => self.block_request_cycles.map(Baseline::PerMapping),
            Operation::Page => self.page_cycles.map(Baseline::PerPage),
        }
    }

    /// Returns the prices of rows whose driver performs `operation`, with a second ceiling for
    /// `walkers` parallel page walkers.
    pub fn prices(&self, operation: Operation, walkers: u32) -> Prices {
        Prices {
            invalidation_cycles: self.invalidation_cycles,
            kick_cycles: self.kick_cycles,
            hypercall_cycles: self.hypercall_cycles,
            baseline: self.baseline(operation),
            device_side: self.device_side,
            clock_ghz: self.clock_ghz,
            walkers,
        }
    }

    /// Checks every field for a possible value. Callers check before a replay begins.
    ///
    /// # Errors
    /// See [`ProfileError`].
    pub fn validate(&self) -> Result<(), ProfileError> {
        self.for_replay().validate()?;
        if self.iotlb_sets.is_some() != self.iotlb_ways.is_some() {
            return Err(ProfileError::HalfGeometry);
        }
        let reported = self.reported.iter();
        let reported = reported.flat_map(|row| [row.none, row.lazy, row.strict]);
        for (field, value) in [
            ("clock_ghz", self.clock_ghz),
            ("block_request_cycles", self.block_request_cycles),
            ("page_cycles", self.page_cycles),
        ]
        .into_iter()
        .chain(reported.map(|value| ("reported", value)))
        {
            if let Some(value) = value
                && !(value.is_finite() && value > 0.0)
            {
                return Err(ProfileError::OutOfRange { field, value });
            }
        }
        if let Some(device_side) = &self.device_side {
            device_side.validate()?;
        }
        match self.sources.keys().find(|key| !SOURCED.contains(&&***key)) {
            Some(field) => Err(ProfileError::NoSuchField(field.clone())),
            None => Ok(()),
        }
    }
}

impl From<Profile> for MachineProfile {
    fn from(profile: Profile) -> Self {
        Self {
            iommu: Some(profile.iommu),
            invalidation_cycles: Some(profile.invalidation_cycles),
            kick_cycles: Some(profile.kick_cycles),
            hypercall_cycles: Some(profile.hypercall_cycles),
            miss_cycles: Some(profile.miss_cycles),
            baseline_cycles: Some(profile.baseline_cycles),
            coherent: Some(profile.coherent),
            iotlb_sets: Some(profile.iotlb_sets),
            iotlb_ways: Some(profile.iotlb_ways),
            iotlb_prefetch: profile.iotlb_prefetch,
            walk_cache_entries: Some(profile.walk_cache_entries),
            ..Self::unknown(profile.name, profile.source)
        }
    }
}

#[cfg(test)]
mod tests;
