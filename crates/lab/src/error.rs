//! The errors of replays and experiments.

use std::error::Error;

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
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The arena could not be reserved.
    #[error("no memory for the replay: {0}")]
    Arena(#[from] ArenaError),
    /// A table could not be allocated.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The rings of a device could not be laid out in memory.
    #[error(transparent)]
    Rings(#[from] RingError),
    /// A table could not map a buffer.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The static table could not be filled.
    #[error("cannot map all memory: {0}")]
    Static(#[source] MapError),
    /// An allocator could not be created.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The profile gives an invalid IOTLB or walk-cache geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The trace is malformed or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No mode has this name.
    #[error("no mode is named {0:?}; {known}", known = known_modes(.0))]
    NoSuchMode(String),
    /// The mode is consistent, but no types implement it.
    #[error("mode {0} is not built into this program")]
    NotBuilt(String),
    /// The trace does not name the device.
    #[error("{trace} names no device {name:?}{}", known_devices(name, known))]
    NoSuchDevice {
        /// Name that the caller gave.
        name: String,
        /// Name of the trace.
        trace: String,
        /// Devices that the trace names.
        known: Vec<String>,
    },
    /// The simulated NIC workload failed.
    #[error(transparent)]
    Testbed(TestbedError),
    /// The layer of a timed replay refused maps, so its cycles count for nothing.
    #[error("{count} maps refused while cycles were measured: {first}")]
    RefusedMaps {
        /// Number of refused maps.
        count: u64,
        /// Error of the first refused map.
        first: ringfence_dma::MapError,
    },
    /// More devices map memory than there are domains.
    #[error(
        "the trace has more devices than the IOMMU has domains; select devices with `--device`"
    )]
    TooManyDevices,
    /// More devices map memory than the hardware of modes with a flat table has buses. Each device
    /// needs a separate bus.
    #[error(
        "the trace maps memory for more than {limit} devices, the number of buses of \
        modes with `table=flat` (Calgary); select devices with `--device`, or other modes with \
        `--modes`"
    )]
    TooFewBuses {
        /// Number of buses.
        limit: usize,
    },
    /// The mode is behind the para-virtual IOMMU, whose host cannot list all devices of the trace.
    #[error(
        "the trace maps memory for more than {limit} devices, the maximum of the \
        para-virtual IOMMU (modes `pviommu*` and `rtc-paper`); select devices with `--device`, or \
        other modes with `--modes`"
    )]
    UnlistedDevice {
        /// Number of devices that the host lists.
        limit: usize,
    },
    /// More devices map memory than [`ReplayLimits::devices`](crate::ReplayLimits::devices) allows.
    #[error(
        "the trace maps memory for more than {limit} devices; select devices with \
        `--device`, or raise the limit with `--max-devices`"
    )]
    DeviceLimit {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// Pages that `--frames contiguous` moved split the buffers of the trace.
    #[error(
        "moved pages split the buffers of the trace into more than {limit} additional pieces; \
        use `--frames recorded`"
    )]
    SplitBuffers {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// More buffers are alive on one page than
    /// [`ReplayLimits::buffers_on_a_page`](crate::ReplayLimits::buffers_on_a_page) allows.
    #[error(
        "more than {limit} buffers of {device} are alive on the page at {page}; \
        `--max-page-buffers` raises this limit"
    )]
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
    #[error(
        "the allocator of a mode visits more than {limit} ranges in its searches; \
        `--max-search` raises this limit"
    )]
    LongSearch {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// The product of the numbers of devices and CPUs that map memory exceeds
    /// [`ReplayLimits::device_cpus`](crate::ReplayLimits::device_cpus).
    #[error(
        "the product of the numbers of devices and CPUs that map memory exceeds {limit}; select \
        devices with `--device`, or raise the limit with `--max-device-cpus`"
    )]
    DeviceCpus {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// While the trace is quiet, the caches of all devices have more cycle ends than
    /// [`ReplayLimits::cycle_ends`](crate::ReplayLimits::cycle_ends) allows.
    #[error(
        "the caches of the devices have more than {limit} ends of cycles in the gaps of the \
        trace; `--max-cycle-ends` raises this limit"
    )]
    CycleEnds {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// The devices of a trace map and access more pages than an experiment feeds to prefetchers.
    #[error(
        "the trace maps and accesses more than {limit} pages, 1048576 and 256 for each line: too \
        many for X07; leave its large mappings out"
    )]
    StreamPages {
        /// The limit that the trace exceeds.
        limit: u64,
    },
    /// More devices of a trace map memory than an experiment measures.
    #[error("the trace maps memory for more than {limit} devices: too many for X07")]
    StreamDevices {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// A mode's cache keeps more mappings than [`ReplayLimits::kept`](crate::ReplayLimits::kept)
    /// allows.
    #[error(
        "the cache of a mode keeps more than {limit} mappings; `--max-kept` raises this \
        limit"
    )]
    Kept {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// More ranges of I/O virtual addresses are live at once than a comparison with the kernel's
    /// addresses keeps.
    #[error("more than {limit} ranges of I/O virtual addresses are live at once")]
    LiveRanges {
        /// The limit that the trace exceeds.
        limit: usize,
    },
    /// Xen refuses a hypercall that it must perform: a defect of Ringfence.
    #[error("defect in ringfence: Xen refuses {call}: {reason}")]
    RefusedHypercall {
        /// The hypercall with its arguments.
        call: String,
        /// Error of the hypercall.
        reason: Box<dyn Error + Send + Sync>,
    },
    /// The context entries of the modelled hardware permit no device TLB.
    #[error("this hardware permits no device TLB")]
    NoDeviceTlb,
    /// A defect of Ringfence.
    #[error("defect in ringfence: {0}")]
    Internal(&'static str),
}

/// Returns the advice for an unknown mode.
fn known_modes(name: &str) -> String {
    let known: Vec<String> = Mode::named().into_iter().map(|mode| mode.name).collect();
    format!("{}the modes are {}", hint(name, &known), known.join(", "))
}

/// Returns the rest of the message of an unknown device: the advice.
fn known_devices(name: &str, known: &[String]) -> String {
    match known {
        [] => ", and no other".into(),
        known => format!("; {}it names {}", hint(name, known), known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_device_has_advice() {
        for (known, wanted) in [
            (&[][..], "t.txt names no device \"eth1\", and no other"),
            (
                &["eth0", "nvme0"],
                "t.txt names no device \"eth1\"; did you mean eth0? it names eth0, nvme0",
            ),
            (&["tape"], "t.txt names no device \"eth1\"; it names tape"),
        ] {
            let error = LabError::NoSuchDevice {
                name: "eth1".into(),
                trace: "t.txt".into(),
                known: known.iter().map(|name| (*name).to_owned()).collect(),
            };
            assert_eq!(error.to_string(), wanted);
        }
    }
}
