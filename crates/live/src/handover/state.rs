//! What has to cross, and the stream that it crosses in.
//!
//! | bytes | what |
//! |---|---|
//! | 8, 4, 4 | the letters `RFHANDOV`, the version, the number of descriptors beside it |
//! | | the devices in the order of [`DeviceState`]'s variants, each at most once |
//! | 4 | the CRC-32C of all bytes before |
//!
//! Of a device: what kind it is and what only it has; its listening socket; the registers of the
//! PCI function and of virtio; the client's conversation, if there is one; how many requests it has
//! completed.

use std::os::fd::OwnedFd;

use ringfence_pviommu::wire::crc32c;

use super::StateError;
use super::bytes::{Reader, Writer};
use super::client::SessionState;
use super::function::FunctionState;
use super::net::NetState;
use super::record::RecordState;

/// The version of the stream.
pub const VERSION: u32 = 1;
/// The longest stream that is read.
pub const MAX_STREAM_BYTES: usize = 64 << 20;
/// Most descriptors beside a stream.
pub(super) const MAX_STREAM_FDS: usize = 8192;

const MAGIC: [u8; 8] = *b"RFHANDOV";
const HEADER_BYTES: usize = 16;
const SUM_BYTES: usize = 4;
const MAX_DEVICES: usize = 8;
/// A virtio-iommu whose requests are written down.
const RECORDED: u8 = 6;
/// A disk, by its kind.
const DISKS: [(u8, DiskKind); 3] = [
    (5, DiskKind::Plain),
    (7, DiskKind::Assigned),
    (8, DiskKind::Sandboxed),
];

/// All of one process's devices.
#[derive(Debug)]
pub struct SavedDevices {
    /// Where the counters are answered.
    pub metrics: OwnedFd,
    /// Where the next process comes.
    pub control: OwnedFd,
    /// In the order of [`DeviceState`]'s variants.
    pub devices: Vec<SavedDevice>,
}

/// A device, its function and its client.
#[derive(Debug)]
pub struct SavedDevice {
    /// What it is.
    pub state: DeviceState,
    /// Where it listens.
    pub listener: OwnedFd,
    /// The registers.
    pub function: FunctionState,
    /// The client's conversation.
    pub session: Option<SessionState>,
    /// Requests completed.
    pub requests: u64,
}

/// What only this kind of device has.
#[derive(Debug)]
pub enum DeviceState {
    /// The virtio-iommu: its snapshot.
    Iommu {
        /// As `ringfence_virtio_iommu::Device::snapshot` makes it.
        snapshot: Vec<u8>,
        /// Where its requests are written down, if they are.
        record: Option<RecordState>,
    },
    /// The para-virtual IOMMU.
    PvIommu(PviommuState),
    /// The entropy device.
    Rng,
    /// The network device.
    Net(Box<NetState>),
    /// The disk.
    Blk {
        /// Its file.
        file: OwnedFd,
        /// It cannot be written.
        read_only: bool,
        /// Its size as the driver knows it.
        sectors: u64,
        /// How it reaches the guest's memory.
        kind: DiskKind,
    },
}

/// How a disk reaches the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// Software translates for it, or nothing does.
    Plain,
    /// The model of the hardware translates its accesses. Tables, frames and what the hardware
    /// remembers are the host's, and made anew.
    Assigned,
    /// It is a process of its own, which has what is mapped for it. The process, and its
    /// confinement, are the host's, and made anew.
    Sandboxed,
}

/// What the para-virtual IOMMU has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PviommuState {
    /// The driver has begun.
    pub running: bool,
    /// The mappings, as a stream of records in the guest's view (`docs/PVIOMMU.md`).
    pub records: Vec<u8>,
    /// Events that the driver has not been told of.
    pub events: Vec<u8>,
}

impl DeviceState {
    /// How the stream calls it.
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

    /// Its place in the order.
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
    /// The stream: bytes, and the descriptors that go with them, in this order.
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

    /// Reads a stream.
    ///
    /// # Errors
    /// [`StateError`]; nothing of it may be used. What the devices it tells of can be is for them
    /// to say.
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

    /// Requests that the devices have completed, the IOMMU's aside.
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
