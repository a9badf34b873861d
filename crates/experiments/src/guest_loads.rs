//! Counts of loads in guests under each IOMMU (X29). The caller boots the guests; this crate boots
//! none.

use serde::Serialize;

/// Process that serves the devices of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Machine {
    /// This program, over vfio-user. Its network device has four queue pairs.
    Ringfence,
    /// QEMU, with its own virtio disk and network card. The card has one queue pair, because
    /// QEMU's datagram link has one queue.
    Qemu,
}

/// End of a device's access to a buffer that its driver has unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Promise {
    /// Never: no IOMMU.
    None,
    /// At the next flush, up to 10 ms later.
    Lazy,
    /// When the cache evicts the mapping.
    Cache,
    /// Before the map returns: the device reaches a copy in the pool, which stays mapped.
    Pool,
    /// At the end of the burst of unmaps.
    Burst,
    /// Before the unmap returns.
    Strict,
}

impl Promise {
    /// Name of the expectation in `guest_count_claims.csv`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lazy => "lazy",
            Self::Cache => "cache",
            Self::Pool => "pool",
            Self::Burst => "burst",
            Self::Strict => "strict",
        }
    }
}

/// A guest's IOMMU with its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Protection {
    /// Name in reports and on the command line.
    pub name: &'static str,
    /// Process that serves the devices.
    pub machine: Machine,
    /// Options of `guest run`.
    pub options: &'static [&'static str],
    /// End of a device's access.
    pub promise: Promise,
    /// Mode of the rIOMMU paper that it stands for.
    pub paper: Option<&'static str>,
}

/// The protections, in the order of reports. The kernel of each guest is stock Linux with
/// `dma-iommu`, except for `pviommu`, `riommu` and `pool`, whose modules are in `kmod`.
pub const PROTECTIONS: &[Protection] = &[
    Protection {
        name: "none",
        machine: Machine::Ringfence,
        options: &["--iommu", "none"],
        promise: Promise::None,
        paper: Some("none"),
    },
    Protection {
        name: "virtio-strict",
        machine: Machine::Ringfence,
        options: &["--strict"],
        promise: Promise::Strict,
        paper: None,
    },
    Protection {
        name: "virtio-lazy",
        machine: Machine::Ringfence,
        options: &["--lazy"],
        promise: Promise::Lazy,
        paper: None,
    },
    Protection {
        name: "pviommu",
        machine: Machine::Ringfence,
        options: &["--iommu", "pviommu", "--module-args", "cache=0"],
        promise: Promise::Strict,
        paper: None,
    },
    Protection {
        name: "pviommu-cache",
        machine: Machine::Ringfence,
        options: &["--iommu", "pviommu", "--module-args", "cache=1"],
        promise: Promise::Cache,
        paper: None,
    },
    Protection {
        name: "riommu-strict",
        machine: Machine::Ringfence,
        options: &["--iommu", "riommu", "--module-args", "mode=strict"],
        promise: Promise::Strict,
        paper: None,
    },
    Protection {
        name: "riommu-burst-paper",
        machine: Machine::Ringfence,
        options: &[
            "--iommu",
            "riommu",
            "--as-published",
            "--module-args",
            "mode=burst-paper",
        ],
        promise: Promise::Burst,
        paper: Some("riommu"),
    },
    Protection {
        name: "riommu-burst",
        machine: Machine::Ringfence,
        options: &["--iommu", "riommu", "--module-args", "mode=burst"],
        promise: Promise::Burst,
        paper: None,
    },
    Protection {
        name: POOL,
        machine: Machine::Ringfence,
        options: &[
            "--strict",
            "--module",
            "pooldma",
            "--module-args",
            "devices=all",
        ],
        promise: Promise::Pool,
        paper: None,
    },
    Protection {
        name: NONE_QEMU,
        machine: Machine::Qemu,
        options: &["--iommu", "none"],
        promise: Promise::None,
        paper: None,
    },
    Protection {
        name: "intel-strict",
        machine: Machine::Qemu,
        options: &["--iommu", "qemu-intel", "--strict"],
        promise: Promise::Strict,
        paper: Some("strict+"),
    },
    Protection {
        name: "intel-lazy",
        machine: Machine::Qemu,
        options: &["--iommu", "qemu-intel", "--lazy"],
        promise: Promise::Lazy,
        paper: Some("defer+"),
    },
    Protection {
        name: "intel-pool",
        machine: Machine::Qemu,
        options: &[
            "--iommu",
            "qemu-intel",
            "--strict",
            "--module",
            "pooldma",
            "--module-args",
            "devices=all",
        ],
        promise: Promise::Pool,
        paper: None,
    },
];

/// The row of the module `pooldma` before virtio-iommu.
pub const POOL: &str = "pool";

/// The row of QEMU's devices without an IOMMU.
const NONE_QEMU: &str = "none-qemu";

impl Protection {
    /// Returns the protection with this name.
    pub fn called(name: &str) -> Option<&'static Self> {
        PROTECTIONS.iter().find(|one| one.name == name)
    }

    /// Returns the name of the row with the same devices and without an IOMMU.
    pub const fn baseline(&self) -> &'static str {
        match self.machine {
            Machine::Ringfence => "none",
            Machine::Qemu => NONE_QEMU,
        }
    }
}

/// Bus of the disk in a guest. A guest has one counted disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bus {
    /// A virtio disk and a virtio network card.
    Virtio,
    /// An NVMe disk.
    Nvme,
}

impl Bus {
    /// All buses, in the order in which their guests boot.
    pub const ALL: [Self; 2] = [Self::Virtio, Self::Nvme];
}

/// Work of a guest's driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Direct reads of 4 KiB from a virtio disk, one after the other.
    Read4K,
    /// The same of 128 KiB.
    Read128K,
    /// Datagrams that fill frames, without answers.
    Stream,
    /// Datagrams of one byte, each after the answer to the one before.
    RoundTrip,
    /// As `Read4K`, from an NVMe disk.
    NvmeRead4K,
    /// As `Read128K`, from an NVMe disk.
    NvmeRead128K,
}

impl Load {
    /// All loads, in the order in which a guest runs those of its bus.
    pub const ALL: [Self; 6] = [
        Self::Read4K,
        Self::Read128K,
        Self::Stream,
        Self::RoundTrip,
        Self::NvmeRead4K,
        Self::NvmeRead128K,
    ];

    /// Name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read4K => "read-4k",
            Self::Read128K => "read-128k",
            Self::Stream => "stream",
            Self::RoundTrip => "round-trip",
            Self::NvmeRead4K => "nvme-read-4k",
            Self::NvmeRead128K => "nvme-read-128k",
        }
    }

    /// Returns the load with this name.
    pub fn called(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// The operation that is counted.
    pub const fn operation(self) -> &'static str {
        match self {
            Self::Read4K | Self::Read128K | Self::NvmeRead4K | Self::NvmeRead128K => "read",
            Self::Stream => "datagram",
            Self::RoundTrip => "round trip",
        }
    }

    /// Bus of the guest that runs the load.
    pub const fn bus(self) -> Bus {
        match self {
            Self::Read4K | Self::Read128K | Self::Stream | Self::RoundTrip => Bus::Virtio,
            Self::NvmeRead4K | Self::NvmeRead128K => Bus::Nvme,
        }
    }
}

/// Counts per operation of a load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LoadCounts {
    /// Guest instructions, the median of the rounds. A round has the median of reads or round trips
    /// that waited for the device, or the mean of a stream.
    pub instructions: f64,
    /// Largest less smallest instructions of a round.
    pub spread: f64,
    /// Exits for the IOMMU: accesses to its registers and doorbells.
    pub exits: f64,
    /// Exits for the device's doorbells; `None` for QEMU's own devices, which count none.
    pub device_exits: Option<f64>,
    /// Invalidations that the IOMMU executed; unmap requests of a para-virtual one.
    pub invalidations: f64,
    /// Unmaps of the driver; `None` if no module counts them.
    pub unmaps: Option<f64>,
}

/// Accesses of the disk to a buffer that its driver had unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StaleAccesses {
    /// Accesses that the disk tried.
    pub tried: u32,
    /// Accesses that reached memory.
    pub reached: u32,
}

/// Counts of one guest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GuestLoads {
    /// Guest instructions of a map and an unmap of one page.
    pub map_unmap: f64,
    /// The same without the copy; `None` for an IOMMU without copies.
    pub uncopied: Option<f64>,
    /// Accesses after an unmap; `None` if the disk tried none.
    pub exposure: Option<StaleAccesses>,
    /// The loads that ran.
    pub loads: Vec<(Load, LoadCounts)>,
}

impl GuestLoads {
    /// Returns the counts of a load that ran.
    pub fn load(&self, load: Load) -> Option<&LoadCounts> {
        let found = self.loads.iter().find(|(one, _)| *one == load);
        found.map(|(_, counts)| counts)
    }
}

/// A guest of one protection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadGuest {
    /// The IOMMU and its options.
    pub protection: &'static Protection,
    /// The counts, or the reason for their absence.
    pub counts: Result<GuestLoads, String>,
}

/// Guests with one kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelLoads {
    /// Kernel version as the guest reports it.
    pub kernel: String,
    /// The guests that were requested.
    pub guests: Vec<LoadGuest>,
}

impl KernelLoads {
    /// Returns the counts of a protection's guest.
    pub fn of(&self, name: &str) -> Option<&GuestLoads> {
        let guest = self.guests.iter().find(|one| one.protection.name == name)?;
        guest.counts.as_ref().ok()
    }
}

/// Counts of loads in guests.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Loads {
    /// No guest was to be booted, with the reason.
    None(String),
    /// No guest could be booted, with the reason.
    Failed(String),
    /// Counts, kernel by kernel.
    Counted(Vec<KernelLoads>),
}

impl Loads {
    /// Returns the number of failed guests; 1 if no guest could be booted.
    pub fn failed(&self) -> usize {
        match self {
            Self::None(_) => 0,
            Self::Failed(_) => 1,
            Self::Counted(kernels) => {
                let guests = kernels.iter().flat_map(|kernel| &kernel.guests);
                guests.filter(|guest| guest.counts.is_err()).count()
            }
        }
    }
}

impl Default for Loads {
    fn default() -> Self {
        Self::None("no guest was booted".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protections_and_loads_are_found_by_their_names() {
        for (at, one) in PROTECTIONS.iter().enumerate() {
            assert_eq!(Protection::called(one.name), Some(one));
            let baseline = Protection::called(one.baseline()).unwrap();
            assert_eq!(baseline.machine, one.machine, "{}", one.name);
            assert_eq!(baseline.promise, Promise::None);
            let same = PROTECTIONS
                .iter()
                .filter(|other| other.options == one.options);
            // QEMU's devices have options of their own.
            assert!(same.count() == 1 || one.promise == Promise::None, "{at}");
        }
        for load in Load::ALL {
            assert_eq!(Load::called(load.name()), Some(load));
        }
        assert_eq!(Protection::called("strict"), None);
        assert_eq!(Load::called("read"), None);
    }

    /// Each mode of the paper has one row.
    #[test]
    fn modes_of_the_paper_have_one_counterpart() {
        for (mode, name) in [
            ("none", "none"),
            ("riommu", "riommu-burst-paper"),
            ("strict+", "intel-strict"),
            ("defer+", "intel-lazy"),
        ] {
            let rows = PROTECTIONS.iter().filter(|one| one.paper == Some(mode));
            assert_eq!(rows.map(|one| one.name).collect::<Vec<_>>(), [name]);
        }
    }
}
