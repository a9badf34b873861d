//! State of a device of any kind and its encoding.

use std::os::fd::OwnedFd;

use super::net::NetState;
use crate::iommu::RecordState;
use crate::pviommu::PviommuState;
use crate::riommu::RiommuState;
use crate::saved_state::{
    HandOverBlocker, MAX_STREAM_BYTES, Reader, SaveState, StateError, Writer, wire_numbers,
};

wire_numbers! {
    /// Number of a device in the stream.
    enum StateKind: u8 {
        Iommu = 1,
        PvIommu = 2,
        Rng = 3,
        Net = 4,
        Disk = 5,
        /// A virtio-iommu whose requests are recorded.
        RecordedIommu = 6,
        AssignedDisk = 7,
        SandboxedDisk = 8,
        /// A virtio-iommu that records the DMAs, and maybe the requests.
        TracedIommu = 9,
        Riommu = 10,
    }
}

/// State of a device without its registers, by kind.
#[derive(Debug)]
pub enum DeviceState {
    /// The virtio-iommu with its domains and mappings.
    Iommu {
        /// Snapshot by `ringfence_virtio_iommu::Device::snapshot`.
        snapshot: Vec<u8>,
        /// Record of its requests, if enabled.
        record: Option<RecordState>,
        /// Record of the devices' DMAs, if enabled.
        dmas: Option<RecordState>,
    },
    /// The para-virtual IOMMU.
    PvIommu(PviommuState),
    /// The ring IOMMU. It is not a virtio device.
    Ring(RiommuState),
    /// The entropy device.
    Rng,
    /// The network device.
    Net(Box<NetState>),
    /// A virtio-blk disk that a file backs.
    Blk {
        /// File with the data.
        file: OwnedFd,
        /// True if the driver must not write the disk.
        read_only: bool,
        /// Capacity that the driver knows, in sectors.
        sectors: u64,
        /// Access path to the guest's memory.
        kind: DiskKind,
    },
}

/// Access path of a disk to the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// In-process device, with a software IOMMU or without an IOMMU.
    Plain,
    /// Assigned device: the hardware IOMMU model translates its accesses. Tables, frames and IOTLB
    /// belong to the host; the destination creates new ones.
    Assigned,
    /// Device in a sandbox process. The process belongs to the host; the destination starts and
    /// confines a new one.
    Sandboxed,
}

impl DeviceState {
    fn kind(&self) -> StateKind {
        match self {
            Self::Iommu { dmas: Some(_), .. } => StateKind::TracedIommu,
            Self::Iommu { record: None, .. } => StateKind::Iommu,
            Self::Iommu { .. } => StateKind::RecordedIommu,
            Self::PvIommu(_) => StateKind::PvIommu,
            Self::Ring(_) => StateKind::Riommu,
            Self::Rng => StateKind::Rng,
            Self::Net(_) => StateKind::Net,
            Self::Blk { kind, .. } => match kind {
                DiskKind::Plain => StateKind::Disk,
                DiskKind::Assigned => StateKind::AssignedDisk,
                DiskKind::Sandboxed => StateKind::SandboxedDisk,
            },
        }
    }

    /// Returns the position in the order of devices.
    pub(crate) fn position(&self) -> u8 {
        match self {
            Self::Iommu { .. } => 1,
            Self::PvIommu(_) => 2,
            Self::Ring(_) => 3,
            Self::Rng => 4,
            Self::Net(_) => 5,
            Self::Blk { .. } => 6,
        }
    }

    /// Returns true for an IOMMU.
    pub(crate) fn is_iommu(&self) -> bool {
        matches!(self, Self::Iommu { .. } | Self::PvIommu(_) | Self::Ring(_))
    }

    /// Marks the state as that of an assigned device.
    ///
    /// # Errors
    /// The destination cannot rebuild an assigned device of this kind.
    pub(crate) fn set_assigned(&mut self) -> Result<(), HandOverBlocker> {
        let Self::Blk { kind, .. } = self else {
            return Err(HandOverBlocker::Unsupported(
                "a device with direct access to its hardware IOMMU",
            ));
        };
        *kind = DiskKind::Assigned;
        Ok(())
    }
}

impl SaveState for DeviceState {
    fn encode(self, out: &mut Writer) {
        out.u8(self.kind() as u8);
        match self {
            Self::Iommu {
                snapshot,
                record,
                dmas,
            } => {
                out.blob(&snapshot);
                if dmas.is_some() {
                    out.flag(record.is_some());
                }
                for record in [record, dmas].into_iter().flatten() {
                    record.encode(out);
                }
            }
            Self::PvIommu(state) => state.encode(out),
            Self::Ring(state) => state.encode(out),
            Self::Rng => {}
            Self::Net(state) => state.encode(out),
            Self::Blk {
                file,
                read_only,
                sectors,
                kind: _,
            } => {
                out.fd(file);
                out.flag(read_only);
                out.u64(sectors);
            }
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let number = input.u8()?;
        let kind = StateKind::from_number(number).ok_or(StateError::BadValue {
            what: "device kind",
            value: number.into(),
        })?;
        let disk = |input: &mut Reader<'_>, kind| {
            Ok(Self::Blk {
                file: input.fd()?,
                read_only: input.flag()?,
                sectors: input.u64()?,
                kind,
            })
        };
        match kind {
            StateKind::Iommu | StateKind::RecordedIommu | StateKind::TracedIommu => {
                let snapshot = input.blob("snapshot length", MAX_STREAM_BYTES)?;
                let is_traced = kind == StateKind::TracedIommu;
                let is_recorded = match is_traced {
                    true => input.flag()?,
                    false => kind == StateKind::RecordedIommu,
                };
                let mut record =
                    |is_on: bool| is_on.then(|| RecordState::decode(input)).transpose();
                Ok(Self::Iommu {
                    snapshot,
                    record: record(is_recorded)?,
                    dmas: record(is_traced)?,
                })
            }
            StateKind::PvIommu => PviommuState::decode(input).map(Self::PvIommu),
            StateKind::Riommu => RiommuState::decode(input).map(Self::Ring),
            StateKind::Rng => Ok(Self::Rng),
            StateKind::Net => NetState::decode(input).map(|state| Self::Net(Box::new(state))),
            StateKind::Disk => disk(input, DiskKind::Plain),
            StateKind::AssignedDisk => disk(input, DiskKind::Assigned),
            StateKind::SandboxedDisk => disk(input, DiskKind::Sandboxed),
        }
    }
}
