//! Results of a comparison of addresses.

use std::fmt;

use ringfence_trace::Summary;
use serde::{Serialize, Serializer};

use super::TraceBegin;

/// The result for one trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Agreement {
    /// The conclusion from the compared addresses.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Allocations of I/O virtual addresses whose device the trace shows.
    pub allocations: u64,
    /// Those of `allocations` whose address the trace determines.
    pub compared: u64,
    /// Those of `compared` for which the model returns the recorded address.
    pub agreeing: u64,
    /// Allocations whose device the trace does not show; not part of `allocations`.
    pub unattributed: u64,
    /// The first allocation for which the model returns another address.
    pub first_difference: Option<Difference>,
    /// Devices with allocations, in order of appearance.
    pub devices: Vec<DeviceAgreement>,
}

/// The conclusion of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The model returns the recorded address for every compared allocation.
    Agrees,
    /// The model returns another address for at least one allocation.
    Differs,
    /// The trace does not allow a conclusion.
    Inconclusive(InconclusiveReason),
}

impl Verdict {
    /// Returns the name in JSON.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Differs => "differs",
            Self::Inconclusive(_) => "inconclusive",
        }
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form {
            verdict: &'static str,
            reason: Option<String>,
        }
        let reason = match self {
            Self::Inconclusive(reason) => Some(reason.to_string()),
            Self::Agrees | Self::Differs => None,
        };
        let verdict = self.name();
        Form { verdict, reason }.serialize(serializer)
    }
}

/// The reason why a trace allows no conclusion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InconclusiveReason {
    /// The kernel lost events.
    LostEvents(u64),
    /// A lenient reader skipped lines.
    MalformedLines(u64),
    /// The trace shows no allocation of an I/O virtual address.
    NoAddresses,
    /// The trace shows allocations, but not their devices.
    NoDevices,
    /// The trace determines no address: see the reasons of the devices.
    NothingDetermined,
    /// This line unmaps a range that the trace does not map: its domain is older than the trace.
    EarlierMapping(u64),
    /// There is a difference, and nothing shows that the domains had no mappings before the trace.
    UnknownBegin,
}

impl fmt::Display for InconclusiveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LostEvents(count) => write!(f, "the kernel lost {count} events"),
            Self::MalformedLines(count) => write!(f, "{count} malformed lines were skipped"),
            Self::NoAddresses => f.write_str(
                "the trace has no iommu:map events of a driver: the host's IOMMU was off, the \
                 events were not recorded, or the file is Parquet",
            ),
            Self::NoDevices => f.write_str("no dma:* event shows the devices of the addresses"),
            Self::NothingDetermined => f.write_str("the trace determines no address"),
            Self::EarlierMapping(line) => write!(
                f,
                "line {line} unmaps a range that the trace does not map, so the trace begins \
                 after its domain's first mappings"
            ),
            Self::UnknownBegin => f.write_str(
                "nothing shows that the trace begins before the first mappings of its domains, \
                 which earlier mappings change; --from-boot asserts that it does",
            ),
        }
    }
}

/// An allocation for which the model returns another address than the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Line of the first `iommu:map` event, from 1.
    pub line: u64,
    /// Number of the allocation in the trace, from 1.
    pub allocation: u64,
    /// Name of the device.
    pub device: String,
    /// The CPU that allocated.
    pub cpu: u16,
    /// Size in pages.
    pub pages: u64,
    /// The recorded address.
    pub recorded: u64,
    /// The model's address; `None` if it has no free range.
    pub model: Option<u64>,
}

/// The result for one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceAgreement {
    /// Name of the device.
    pub name: String,
    /// Allocations of the device.
    pub allocations: u64,
    /// Those whose address the trace determines.
    pub compared: u64,
    /// Those for which the model returns the recorded address.
    pub agreeing: u64,
    /// The position from which on the trace does not determine the device's addresses.
    pub stop: Option<Stop>,
}

/// The position from which on a trace does not determine a device's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Stop {
    /// Line of the first allocation that was not compared.
    pub line: u64,
    /// The property of the kernel or the host that the trace does not show.
    pub reason: StopReason,
}

/// The reason why a trace does not determine an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum StopReason {
    /// The addresses below the MSI window depend on the windows of the PCI host bridge.
    PciWindows,
    /// The addresses above 4 GiB depend on the device's DMA mask.
    #[serde(rename = "above-4-gib")]
    Above4GiB,
    /// The depot holds more magazines of a class than the trace shows CPUs. A timer of the kernel,
    /// which the trace does not show, then frees magazines (`iova_depot_work_func`).
    DepotTimer,
    /// Lazy mode: a freed range may have come back from a flush queue, which a timer of the kernel
    /// empties (`fq_flush_timeout`).
    LazyFlush,
    /// The allocated range is mapped already, so the trace lacks its unmap.
    MissingUnmap,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PciWindows => {
                "addresses below the MSI window depend on the PCI host bridge; --reserved names \
                 its windows"
            }
            Self::Above4GiB => "addresses above 4 GiB depend on the device's DMA mask",
            Self::LazyFlush => "a timer of the kernel empties the flush queues of lazy mode",
            Self::MissingUnmap => "the trace maps a range twice and lacks the unmap in between",
            Self::DepotTimer => "a timer of the kernel trims the depot of free ranges",
        })
    }
}

impl Agreement {
    /// Returns the conclusion. `unknown_free` is the first line that unmaps a range that the trace
    /// does not map.
    pub(super) fn judge(
        &self,
        summary: &Summary,
        begin: TraceBegin,
        unknown_free: Option<u64>,
    ) -> Verdict {
        let differs = self.agreeing < self.compared;
        Verdict::Inconclusive(match unknown_free {
            _ if summary.lost > 0 => InconclusiveReason::LostEvents(summary.lost),
            _ if summary.malformed > 0 => InconclusiveReason::MalformedLines(summary.malformed),
            _ if self.allocations == 0 && self.unattributed == 0 => InconclusiveReason::NoAddresses,
            _ if self.allocations == 0 => InconclusiveReason::NoDevices,
            _ if self.compared == 0 => InconclusiveReason::NothingDetermined,
            _ if !differs => return Verdict::Agrees,
            _ if begin == TraceBegin::BeforeMappings => return Verdict::Differs,
            Some(line) => InconclusiveReason::EarlierMapping(line),
            None => InconclusiveReason::UnknownBegin,
        })
    }
}
