//! Counts from guests (X21). The caller boots the guests; this crate boots none.

use serde::Serialize;

/// IOMMU configuration of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Configuration {
    /// No IOMMU: the device can access all of guest memory.
    KvmBaseline,
    /// The stock virtio-iommu, with `iommu.strict=1` in the guest kernel.
    VirtioStrict,
    /// The stock virtio-iommu, with lazy invalidation in the guest kernel.
    VirtioLazy,
    /// The paravirtual IOMMU (PVIOMMU) without its cache.
    Pviommu,
    /// PVIOMMU with its reverse translation cache.
    PviommuRtc,
    /// PVIOMMU with its cache, the host's frame pool and the pointer to the last table.
    PviommuRtcHopt,
    /// PVIOMMU with the cache as published, defects included, instead of the fixed one.
    RtcAsPublished,
}

impl Configuration {
    /// All configurations, in the order of reports.
    pub const ALL: [Self; 7] = [
        Self::KvmBaseline,
        Self::Pviommu,
        Self::RtcAsPublished,
        Self::PviommuRtc,
        Self::PviommuRtcHopt,
        Self::VirtioStrict,
        Self::VirtioLazy,
    ];

    /// Name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvmBaseline => "kvm-baseline",
            Self::VirtioStrict => "virtio-strict",
            Self::VirtioLazy => "virtio-lazy",
            Self::Pviommu => "pviommu",
            Self::PviommuRtc => "pviommu+rtc",
            Self::PviommuRtcHopt => "pviommu+rtc+hopt",
            Self::RtcAsPublished => "rtc-paper",
        }
    }

    /// Returns the cache that runs in the guest; `None` without one. The paper's radix tree and its
    /// queue run in no guest.
    pub const fn cache(self) -> Option<&'static str> {
        match self {
            Self::PviommuRtc | Self::PviommuRtcHopt | Self::RtcAsPublished => {
                Some("the module's hash table")
            }
            _ => None,
        }
    }

    /// True if the configuration has a defect of the published cache, which stops accesses that the
    /// driver intended.
    pub const fn is_as_published(self) -> bool {
        matches!(self, Self::RtcAsPublished)
    }

    /// Returns the configuration with this name.
    pub fn called(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// Kind of a guest's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A device whose accesses the hardware model translates, by tables in memory.
    Assigned,
    /// A device in the process that maps guest memory, behind the software IOMMU.
    Emulated,
    /// A device in a sandboxed process that can access only mapped pages. The baseline has no
    /// sandbox and uses a device in the process that maps guest memory.
    Simulated,
    /// A network device with four queue pairs.
    ManyQueue,
}

impl Kind {
    /// All kinds, in the order of reports.
    pub const ALL: [Self; 4] = [
        Self::Assigned,
        Self::Emulated,
        Self::Simulated,
        Self::ManyQueue,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Emulated => "emulated",
            Self::Simulated => "simulated",
            Self::ManyQueue => "many queues",
        }
    }

    /// Returns the device that runs, and the paper's card that it stands in for. The InfiniBand
    /// card has no stand-in.
    pub const fn device(self, configuration: Configuration) -> &'static str {
        match (self, configuration) {
            (Self::Assigned, _) => "virtio disk behind the VT-d model, in place of the I210",
            (Self::Simulated, Configuration::KvmBaseline) => {
                "virtio disk in the host's process, in place of the E1000"
            }
            (Self::Simulated, _) => "virtio disk in a process of its own, in place of the E1000",
            (Self::Emulated, _) => "virtio disk in the host's process",
            (Self::ManyQueue, _) => "virtio network device of four queue pairs",
        }
    }

    /// Name without spaces, for the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::ManyQueue => "many-queues",
            _ => self.name(),
        }
    }

    /// Returns the kind whose [`word`](Self::word) is `word`.
    pub fn called(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// The operation that is counted.
    pub const fn operation(self) -> &'static str {
        match self {
            Self::ManyQueue => "frame sent",
            _ => "4 KiB read",
        }
    }
}

/// Counts per operation of a device, from the difference of two samples of a guest. Fields that say
/// so count from the guest's start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GuestCounts {
    /// IOMMU requests per operation.
    pub requests: f64,
    /// Exits for the IOMMU's doorbell, per operation.
    pub exits: f64,
    /// Exits for the device's doorbell, per operation.
    pub device_exits: f64,
    /// Mappings by the guest's driver, per operation; `None` if the guest does not report them.
    pub maps: Option<f64>,
    /// Mappings that the cache answered, per operation; `None` if the guest does not report them.
    pub hits: Option<f64>,
    /// Guest instructions per operation, the median; `None` if they were not counted.
    pub instructions: Option<f64>,
    /// Guest instructions of a map and an unmap of a page that was mapped before.
    pub map_unmap: f64,
    /// Accesses of any device that the IOMMU stopped since the guest's start. The drivers intended
    /// all of them: only a cache as published causes any.
    pub stopped: f64,
    /// Requests of the device since the guest's start whose status it could not write.
    pub unanswered: f64,
    /// Host work for a device whose pages have frames: a device behind the paravirtual IOMMU, or
    /// one that the hardware model translates. `None` for other devices.
    pub host: Option<HostCounts>,
}

/// Page walks of the hardware model, per operation of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TableWalks {
    /// Walks of the device's table: IOTLB misses.
    pub walks: f64,
    /// Words that the walks read.
    pub reads: f64,
}

/// Host work on tables in memory for a device. `frames` and `frames_awaited` count from the guest's
/// start, the other fields per operation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HostCounts {
    /// Hardware walks; `None` for a device whose accesses software translates.
    pub table: Option<TableWalks>,
    /// Walks of the second-stage table for the pages of mappings.
    pub lookups: f64,
    /// Pages of mappings found through the pointer to the last table, without a walk.
    pub through_pointer: f64,
    /// Frames allocated for pages since the guest's start.
    pub frames: f64,
    /// Subset of `frames` that the host had to allocate because no pool had one ready.
    pub frames_awaited: f64,
}

/// Counts of a guest whose device could not complete its requests because the IOMMU stopped
/// accesses that the driver intended. All counts begin with the guest's start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FalseFaults {
    /// Requests to the device.
    pub requests: f64,
    /// Requests whose status the device could not write.
    pub unanswered: f64,
    /// Requests that failed with an error.
    pub failed: f64,
    /// Accesses of any device that the IOMMU stopped.
    pub stopped: f64,
    /// Guest instructions of a map and an unmap, without any device access.
    pub map_unmap: f64,
}

/// Reason for missing counts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Uncounted {
    /// The caller did not ask for this cell.
    Unasked,
    /// A defect of the published cache keeps operations from completing; carries its effects.
    FalseFaults(FalseFaults),
    /// The run failed, with the reason.
    Failed(String),
}

/// A device kind in a configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GuestCell {
    /// Kind of the guest's device.
    pub kind: Kind,
    /// The IOMMU configuration.
    pub configuration: Configuration,
    /// The counts, or the reason for their absence.
    pub counts: Result<GuestCounts, Uncounted>,
}

impl GuestCell {
    /// Guest instructions of a map and an unmap; `None` if they were not counted.
    pub const fn map_unmap(&self) -> Option<f64> {
        match &self.counts {
            Ok(counts) => Some(counts.map_unmap),
            Err(Uncounted::FalseFaults(seen)) => Some(seen.map_unmap),
            Err(_) => None,
        }
    }

    /// Returns true if the guest was to be booted but its run failed.
    pub const fn failed(&self) -> bool {
        matches!(self.counts, Err(Uncounted::Failed(_)))
    }
}

/// Counts from guests.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Guests {
    /// No guest was to be booted, with the reason.
    None(String),
    /// No guest could be booted, with the reason.
    Failed(String),
    /// Counts from guests with this kernel.
    Counted {
        /// Kernel version as the guest reports it.
        kernel: String,
        /// Every kind in every configuration.
        cells: Vec<GuestCell>,
    },
}

impl Guests {
    /// Returns the number of failed cells; 1 if no guest could be booted.
    pub fn failed(&self) -> usize {
        match self {
            Self::None(_) => 0,
            Self::Failed(_) => 1,
            Self::Counted { cells, .. } => cells.iter().filter(|cell| cell.failed()).count(),
        }
    }
}

impl Default for Guests {
    fn default() -> Self {
        Self::None("no guest was booted".into())
    }
}
