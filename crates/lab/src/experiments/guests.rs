//! What was counted in guests, by whoever can boot some: this crate boots none.

use serde::Serialize;

/// What stands between a guest's devices and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Configuration {
    /// No IOMMU: all of memory is mapped.
    KvmBaseline,
    /// The stock virtio-iommu, its kernel's IOMMU strict.
    VirtioStrict,
    /// The stock virtio-iommu, lazy.
    VirtioLazy,
    /// The para-virtual IOMMU without its cache.
    Pviommu,
    /// With its cache.
    PviommuRtc,
    /// And with the host's pool and pointer.
    PviommuRtcHopt,
    /// With the document's cache, defects included, in place of the repaired one.
    RtcLiteral,
}

impl Configuration {
    /// All, in the order of reports.
    pub const ALL: [Self; 7] = [
        Self::KvmBaseline,
        Self::Pviommu,
        Self::RtcLiteral,
        Self::PviommuRtc,
        Self::PviommuRtcHopt,
        Self::VirtioStrict,
        Self::VirtioLazy,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvmBaseline => "kvm-baseline",
            Self::VirtioStrict => "virtio-strict",
            Self::VirtioLazy => "virtio-lazy",
            Self::Pviommu => "pviommu",
            Self::PviommuRtc => "pviommu+rtc",
            Self::PviommuRtcHopt => "pviommu+rtc+hopt",
            Self::RtcLiteral => "rtc-literal",
        }
    }

    /// Whether it has a defect of the document's, by which accesses are stopped that a driver
    /// meant.
    pub const fn is_as_published(self) -> bool {
        matches!(self, Self::RtcLiteral)
    }

    /// The configuration that is called `name`.
    pub fn called(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// What kind of device a guest has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A device whose accesses the model of the hardware translates, by tables in memory.
    Assigned,
    /// A device in the process that has the guest's memory, behind the software IOMMU.
    Emulated,
    /// A device in a process of its own that has nothing of the guest's memory but what is mapped
    /// for it; in the baseline, which has no such process, one in the process that has all of it.
    Simulated,
    /// A network device with four pairs of queues.
    ManyQueue,
}

impl Kind {
    /// All, in the order of reports.
    pub const ALL: [Self; 4] = [
        Self::Assigned,
        Self::Emulated,
        Self::Simulated,
        Self::ManyQueue,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Emulated => "emulated",
            Self::Simulated => "simulated",
            Self::ManyQueue => "many queues",
        }
    }

    /// Its name as one word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::ManyQueue => "many-queues",
            _ => self.name(),
        }
    }

    /// The kind whose name as one word is `word`.
    pub fn called(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// What it does once, that is counted.
    pub const fn operation(self) -> &'static str {
        match self {
            Self::ManyQueue => "frame sent",
            _ => "4 KiB read",
        }
    }
}

/// What one operation of a device took, of those between two moments of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GuestCounts {
    /// Requests to the IOMMU.
    pub requests: f64,
    /// Exits for its doorbell.
    pub exits: f64,
    /// Exits for the device's own.
    pub device_exits: f64,
    /// Mappings that the guest's driver made; `None` where the guest does not say.
    pub maps: Option<f64>,
    /// Of these, the ones that the cache answered.
    pub hits: Option<f64>,
    /// Guest instructions, the median; `None` where nothing counts them.
    pub instructions: Option<f64>,
    /// Guest instructions of a map and its unmap, the page being one that was mapped before.
    pub map_unmap: f64,
    /// Accesses that the IOMMU stopped since the guest began, of whichever device. None of them
    /// makes any that its driver did not mean.
    pub stopped: f64,
    /// Requests of the device since the guest began whose status could not be written.
    pub unanswered: f64,
    /// What the host did for a device whose pages have frames: behind the para-virtual IOMMU, or
    /// translated by the model of the hardware.
    pub host: Option<HostCounts>,
}

/// What the hardware took to find pages for an operation of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TableWalks {
    /// Walks of the device's table, which the IOTLB did not save.
    pub walks: f64,
    /// Words that these read.
    pub reads: f64,
}

/// What tables in memory took for a device: for an operation, and of frames since the guest began.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HostCounts {
    /// `None` for a device that software finds its pages for.
    pub table: Option<TableWalks>,
    /// Walks of the second stage for the pages of mappings.
    pub lookups: f64,
    /// Of these pages, the ones found through the pointer to the last table, without a walk.
    pub through_pointer: f64,
    /// Frames that pages got, in all.
    pub frames: f64,
    /// Of these, the ones that no pool had ready.
    pub frames_awaited: f64,
}

/// A guest whose device did not do all that it was asked to, since accesses were stopped that its
/// driver meant. All are counted since the guest began.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FalseFaults {
    /// Requests that the device was given.
    pub requests: f64,
    /// Of these, the ones whose status could not be written.
    pub unanswered: f64,
    /// Of these, the ones that ended with an error.
    pub failed: f64,
    /// Accesses that the IOMMU stopped, of whichever device.
    pub stopped: f64,
    /// Guest instructions of a map and its unmap, in which no device takes part.
    pub map_unmap: f64,
}

/// Why nothing was counted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Uncounted {
    /// Nobody asked for it.
    Unasked,
    /// There are no operations to count: a defect of the document's, and what it did.
    FalseFaults(FalseFaults),
    /// Something went wrong, and what.
    Failed(String),
}

/// A device kind in a configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GuestCell {
    /// The device.
    pub kind: Kind,
    /// The IOMMU.
    pub configuration: Configuration,
    /// What was counted, or why nothing was.
    pub counts: Result<GuestCounts, Uncounted>,
}

impl GuestCell {
    /// Guest instructions of a map and its unmap, if they were counted.
    pub const fn map_unmap(&self) -> Option<f64> {
        match &self.counts {
            Ok(counts) => Some(counts.map_unmap),
            Err(Uncounted::FalseFaults(seen)) => Some(seen.map_unmap),
            Err(_) => None,
        }
    }

    /// Whether its guest was booted, or should have been, and nothing came of it.
    pub const fn failed(&self) -> bool {
        matches!(self.counts, Err(Uncounted::Failed(_)))
    }
}

/// What was counted in guests.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Guests {
    /// None was to be booted, and why.
    None(String),
    /// None could be booted, and why.
    Failed(String),
    /// In guests with this kernel.
    Counted {
        /// As the guest calls it.
        kernel: String,
        /// Every kind in every configuration.
        cells: Vec<GuestCell>,
    },
}

impl Guests {
    /// How many cells failed; 1 if all did for one reason.
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
