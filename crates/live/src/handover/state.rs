//! State of a hand-over and its encoding as a stream.
//!
//! | bytes | content |
//! |---|---|
//! | 8, 4, 4 | magic `RFHANDOV`, version, number of descriptors |
//! | 4 | number of devices; the first two descriptors are the metrics and control sockets |
//! | | the devices in the order of [`DeviceState`]'s variants, each at most once |
//! | 4 | CRC-32C of all preceding bytes |
//!
//! A device consists of its kind and device-specific state, its listening socket and its PCI and
//! virtio registers. Its client's session, if any, and the number of completed requests follow.

use std::os::fd::OwnedFd;

use ringfence_pviommu::wire::crc32c;

use super::StateError;
use super::bytes::{Reader, Writer};
use super::client::SessionState;
use super::function::FunctionState;
use super::net::NetState;
use super::record::RecordState;

/// Version of the stream format.
pub const VERSION: u32 = 1;
/// Most bytes of a stream.
pub const MAX_STREAM_BYTES: usize = 64 << 20;
/// Most descriptors that accompany a stream.
pub(super) const MAX_STREAM_FDS: usize = 8192;

const MAGIC: [u8; 8] = *b"RFHANDOV";
const HEADER_BYTES: usize = 16;
const SUM_BYTES: usize = 4;
const MAX_DEVICES: usize = 8;
/// Number of a virtio-iommu whose requests are recorded.
const RECORDED: u8 = 6;
/// Numbers of the kinds of disks.
const DISKS: [(u8, DiskKind); 3] = [
    (5, DiskKind::Plain),
    (7, DiskKind::Assigned),
    (8, DiskKind::Sandboxed),
];

/// State of all devices of a process.
#[derive(Debug)]
pub struct SavedDevices {
    /// Socket that serves the counters.
    pub metrics: OwnedFd,
    /// Socket at which the next destination connects.
    pub control: OwnedFd,
    /// Devices, in the order of [`DeviceState`]'s variants.
    pub devices: Vec<SavedDevice>,
}

/// State of a device, its function and its client.
#[derive(Debug)]
pub struct SavedDevice {
    /// State of the device itself, without its registers.
    pub state: DeviceState,
    /// Socket at which clients connect to the device.
    pub listener: OwnedFd,
    /// PCI and virtio registers.
    pub function: FunctionState,
    /// Session of the connected client, if any.
    pub session: Option<SessionState>,
    /// Number of completed requests.
    pub requests: u64,
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
    },
    /// The para-virtual IOMMU.
    PvIommu(PviommuState),
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

/// State of the para-virtual IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PviommuState {
    /// True if the driver has set `DRIVER_OK`.
    pub running: bool,
    /// Mappings, as a stream of records in the guest's view (`docs/PVIOMMU.md`).
    pub records: Vec<u8>,
    /// Events that the driver has not received.
    pub events: Vec<u8>,
}

impl DeviceState {
    /// Returns the number of the kind in the stream.
    fn kind(&self) -> u8 {
        match self {
            Self::Iommu {
                record: Some(_), ..
            } => RECORDED,
            Self::Blk { kind, .. } => {
                let known = DISKS.iter().find(|(_, known)| known == kind);
                known.map_or(0, |(number, _)| *number)
            }
            _ => self.number(),
        }
    }

    /// Returns the position in the order of devices.
    fn number(&self) -> u8 {
        match self {
            Self::Iommu { .. } => 1,
            Self::PvIommu(_) => 2,
            Self::Rng => 3,
            Self::Net(_) => 4,
            Self::Blk { .. } => 5,
        }
    }
}

impl SavedDevices {
    /// Encodes the state as bytes and their descriptors, in this order.
    pub fn encode(self) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut out = Writer::default();
        out.bytes.extend(MAGIC);
        out.u32(VERSION);
        out.u32(0);
        out.fd(self.metrics);
        out.fd(self.control);
        out.count(self.devices.len());
        for device in self.devices {
            device.encode(&mut out);
        }
        let Writer { mut bytes, fds } = out;
        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
        if let Some(place) = bytes.get_mut(HEADER_BYTES - 4..HEADER_BYTES) {
            place.copy_from_slice(&count.to_le_bytes());
        }
        let sum = crc32c(&bytes);
        bytes.extend(sum.to_le_bytes());
        (bytes, fds)
    }

    /// Decodes a stream.
    ///
    /// # Errors
    /// [`StateError`]; no part of the stream may be used. Each device validates its own state
    /// later.
    pub fn decode(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Self, StateError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(StateError::NoStream);
        }
        let (body, sum) = bytes
            .split_last_chunk::<SUM_BYTES>()
            .ok_or(StateError::Truncated)?;
        let mut input = Reader {
            bytes: body.get(MAGIC.len()..).ok_or(StateError::Truncated)?,
            fds: fds.into_iter(),
        };
        let version = input.u32()?;
        let count = input.u32()?;
        if u32::from_le_bytes(*sum) != crc32c(body) {
            return Err(StateError::Checksum);
        }
        if version != VERSION {
            return Err(StateError::Version(version));
        }
        if u32::try_from(input.fds.len()) != Ok(count) {
            return Err(StateError::Descriptors);
        }
        let metrics = input.fd()?;
        let control = input.fd()?;
        let count = input.count("devices", MAX_DEVICES)?;
        let mut devices: Vec<SavedDevice> = Vec::new();
        for _ in 0..count {
            let device = SavedDevice::decode(&mut input)?;
            let number = device.state.number();
            if devices.last().is_some_and(|d| d.state.number() >= number) {
                return Err(StateError::BadValue {
                    what: "order of devices",
                    value: number.into(),
                });
            }
            devices.push(device);
        }
        if !input.bytes.is_empty() {
            return Err(StateError::TrailingBytes(input.bytes.len()));
        }
        if input.fds.len() > 0 {
            return Err(StateError::Descriptors);
        }
        Ok(Self {
            metrics,
            control,
            devices,
        })
    }

    /// Returns the number of requests that the devices completed, without those of the IOMMU.
    pub fn requests(&self) -> u64 {
        let devices = self.devices.iter();
        let devices = devices.filter(|device| {
            !matches!(
                device.state,
                DeviceState::Iommu { .. } | DeviceState::PvIommu(_)
            )
        });
        devices.fold(0, |sum, device| sum.wrapping_add(device.requests))
    }
}

impl SavedDevice {
    fn encode(self, out: &mut Writer) {
        out.u8(self.state.kind());
        match self.state {
            DeviceState::Iommu { snapshot, record } => {
                out.blob(&snapshot);
                if let Some(record) = record {
                    record.encode(out);
                }
            }
            DeviceState::PvIommu(state) => {
                out.flag(state.running);
                out.blob(&state.records);
                out.blob(&state.events);
            }
            DeviceState::Rng => {}
            DeviceState::Net(state) => state.encode(out),
            DeviceState::Blk {
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
        out.fd(self.listener);
        self.function.encode(out);
        out.flag(self.session.is_some());
        if let Some(session) = self.session {
            session.encode(out);
        }
        out.u64(self.requests);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let own = match input.u8()? {
            kind @ (1 | RECORDED) => DeviceState::Iommu {
                snapshot: input.blob("bytes of a snapshot", MAX_STREAM_BYTES)?,
                record: if kind == RECORDED {
                    Some(RecordState::decode(input)?)
                } else {
                    None
                },
            },
            2 => DeviceState::PvIommu(PviommuState {
                running: input.flag()?,
                records: input.blob("bytes of records", MAX_STREAM_BYTES)?,
                events: input.blob("bytes of events", MAX_STREAM_BYTES)?,
            }),
            3 => DeviceState::Rng,
            4 => DeviceState::Net(Box::new(NetState::decode(input)?)),
            number => {
                let known = DISKS.iter().find(|(known, _)| *known == number);
                let (_, kind) = known.ok_or(StateError::BadValue {
                    what: "kind of device",
                    value: number.into(),
                })?;
                DeviceState::Blk {
                    file: input.fd()?,
                    read_only: input.flag()?,
                    sectors: input.u64()?,
                    kind: *kind,
                }
            }
        };
        Ok(Self {
            state: own,
            listener: input.fd()?,
            function: FunctionState::decode(input)?,
            session: if input.flag()? {
                Some(SessionState::decode(input)?)
            } else {
                None
            },
            requests: input.u64()?,
        })
    }
}
