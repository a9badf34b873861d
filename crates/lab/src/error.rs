//! The errors of replays and experiments.

use std::fmt;

use ringfence_devices::nic::TestbedError;
use ringfence_dma::ring::RingError;
use ringfence_hw::GeometryError;
use ringfence_iova::AllocError;
use ringfence_memory::ArenaError;
use ringfence_pgtable::{MapError, TableError};
use ringfence_trace::TraceError;
use ringfence_types::Iova;

use crate::compose::hint;
use crate::modes::Mode;

/// The reason why a replay or an experiment failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum LabError {
    /// The arena could not be reserved.
    Arena(ArenaError),
    /// A table could not be allocated.
    Table(TableError),
    /// The rings of a device could not be laid out in memory.
    Rings(RingError),
    /// The static table could not be filled.
    Static(MapError),
    /// An allocator could not be created.
    Alloc(AllocError),
    /// The profile gives an invalid IOTLB or walk-cache geometry.
    Geometry(GeometryError),
    /// The trace is malformed or cannot be read.
    Trace(TraceError),
    /// No mode has this name.
    NoSuchMode(String),
    /// The mode is consistent, but no types implement it.
    NotBuilt(String),
    /// The trace does not name the device.
    NoSuchDevice {
        /// Name that the caller gave.
        name: String,
        /// Name of the trace.
        trace: String,
        /// Devices that the trace names.
        known: Vec<String>,
    },
    /// The simulated NIC workload failed.
    Station(TestbedError),
    /// More devices map memory than there are domains.
    TooManyDevices,
    /// More devices map memory than the hardware of modes with a flat table has buses. Each device
    /// needs a bus of its own.
    TooFewBuses {
        /// Number of buses.
        limit: usize,
    },
    /// The mode is behind the para-virtual IOMMU, whose host cannot list all devices of the trace.
    UnlistedDevice {
        /// Number of devices that the host lists.
        limit: usize,
    },
    /// More devices map memory than [`ReplayLimits::devices`](crate::ReplayLimits::devices) allows.
    DeviceLimit {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// More buffers are alive on one page than
    /// [`ReplayLimits::buffers_on_a_page`](crate::ReplayLimits::buffers_on_a_page) allows.
    CrowdedPage {
        /// The device's name.
        device: String,
        /// First address of the page.
        page: Iova,
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// The searches of a mode's allocator visit more ranges than
    /// [`ReplayLimits::search`](crate::ReplayLimits::search) allows.
    LongSearch {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// The product of the numbers of devices and CPUs that map memory exceeds
    /// [`ReplayLimits::device_cpus`](crate::ReplayLimits::device_cpus).
    DeviceCpus {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// While the trace is quiet, the caches of all devices have more cycle ends than
    /// [`ReplayLimits::cycle_ends`](crate::ReplayLimits::cycle_ends) allows.
    CycleEnds {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// A mode's cache keeps more mappings than [`ReplayLimits::kept`](crate::ReplayLimits::kept)
    /// allows.
    Kept {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// A defect of Ringfence.
    Internal(&'static str),
}

impl fmt::Display for LabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arena(e) => write!(f, "no memory for the replay: {e}"),
            Self::Table(e) => e.fmt(f),
            Self::Rings(e) => e.fmt(f),
            Self::Static(e) => write!(f, "cannot map all memory: {e}"),
            Self::Alloc(e) => e.fmt(f),
            Self::Geometry(e) => e.fmt(f),
            Self::Trace(e) => e.fmt(f),
            Self::NoSuchMode(name) => {
                let known: Vec<String> = Mode::named().into_iter().map(|mode| mode.name).collect();
                let hint = hint(name, &known);
                write!(
                    f,
                    "no mode is named {name:?}; {hint}the modes are {}",
                    known.join(", ")
                )
            }
            Self::NotBuilt(name) => write!(f, "mode {name} is not built into this program"),
            Self::NoSuchDevice { name, trace, known } => {
                write!(f, "{trace} names no device {name:?}; ")?;
                match known.as_slice() {
                    [] => f.write_str("it names no device"),
                    known => write!(f, "{}it names {}", hint(name, known), known.join(", ")),
                }
            }
            Self::Station(e) => e.fmt(f),
            Self::TooManyDevices => f.write_str(
                "the trace has more devices than the IOMMU has \
            domains",
            ),
            Self::TooFewBuses { limit } => write!(
                f,
                "the trace maps memory for more than {limit} devices, the number of buses of modes \
                with `table=flat` (Calgary); select devices with `--device`, or other modes with \
                `--modes`"
            ),
            Self::UnlistedDevice { limit } => write!(
                f,
                "the trace maps memory for more than {limit} devices, the maximum of the \
                para-virtual IOMMU (modes `pviommu*` and `rtc-paper`); select devices with \
                `--device`, or other modes with `--modes`"
            ),
            Self::DeviceLimit { limit } => write!(
                f,
                "the trace maps memory for more than {limit} devices; select devices with \
                `--device`, or raise the limit with `--max-devices`"
            ),
            Self::CrowdedPage {
                device,
                page,
                limit,
            } => write!(
                f,
                "more than {limit} buffers of {device} are alive on the page at {page}; \
                 `--max-page-buffers` raises this limit"
            ),
            Self::LongSearch { limit } => write!(
                f,
                "the allocator of a mode visits more than {limit} ranges in its searches; \
                `--max-search` raises this limit"
            ),
            Self::DeviceCpus { limit } => write!(
                f,
                "the product of the numbers of devices and CPUs that map memory exceeds {limit}; \
                select devices with `--device`, or raise the limit with `--max-device-cpus`"
            ),
            Self::CycleEnds { limit } => write!(
                f,
                "the caches of the devices have more than {limit} ends of cycles in the gaps of \
                the trace; `--max-cycle-ends` raises this limit"
            ),
            Self::Kept { limit } => write!(
                f,
                "the cache of a mode keeps more than {limit} mappings; `--max-kept` raises this \
                 limit"
            ),
            Self::Internal(what) => write!(f, "defect in ringfence: {what}"),
        }
    }
}

impl std::error::Error for LabError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Trace(e) => e.source(),
            _ => None,
        }
    }
}

impl From<ArenaError> for LabError {
    fn from(e: ArenaError) -> Self {
        Self::Arena(e)
    }
}

impl From<TableError> for LabError {
    fn from(e: TableError) -> Self {
        Self::Table(e)
    }
}

impl From<MapError> for LabError {
    fn from(e: MapError) -> Self {
        Self::Static(e)
    }
}

impl From<AllocError> for LabError {
    fn from(e: AllocError) -> Self {
        Self::Alloc(e)
    }
}

impl From<GeometryError> for LabError {
    fn from(e: GeometryError) -> Self {
        Self::Geometry(e)
    }
}

impl From<TraceError> for LabError {
    fn from(e: TraceError) -> Self {
        Self::Trace(e)
    }
}

impl From<RingError> for LabError {
    fn from(e: RingError) -> Self {
        Self::Rings(e)
    }
}
