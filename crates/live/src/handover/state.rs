//! What has to cross, and the stream that it crosses in.
//!
//! | bytes | what |
//! |---|---|
//! | 8, 4, 4 | the letters `RFHANDOV`, the version, the number of descriptors beside it |
//! | | the devices in the order of [`Own`]'s variants, each at most once |
//! | 4 | the CRC-32C of all bytes before |
//!
//! Of a device: what kind it is and what only it has; its listening socket; the registers of the PCI function and of virtio; the client's
//! conversation, if there is one; how many requests it has completed.

use std::os::fd::OwnedFd;

use ringfence_pviommu::wire::crc32c;
use ringfence_types::{Iova, IovaRange};
use virtio_queue::QueueState;

use super::StateError;
use super::bytes::{Reader, Writer};
use super::net::NetState;
use super::record::RecordState;
use crate::memory::MAX_RANGES;
use crate::wire::{MAX_FDS, MAX_MESSAGE_BYTES};

/// The version of the stream.
pub const VERSION: u32 = 1;
/// The longest stream that is read.
pub const MAX_STREAM_BYTES: usize = 64 << 20;
/// Most descriptors beside a stream.
pub(super) const MAX_STREAM_FDS: usize = 8192;

const MAGIC: [u8; 8] = *b"RFHANDOV";
const HEADER_BYTES: usize = 16;
const SUM_BYTES: usize = 4;
/// Bytes of a conventional configuration space.
const CONFIG_BYTES: usize = 256;
const MAX_DEVICES: usize = 8;
/// A virtio-iommu whose requests are written down.
const RECORDED: u8 = 6;
const MAX_QUEUES: usize = 64;
const MAX_VECTORS: usize = MAX_QUEUES + 1;

/// All of one process's devices.
#[derive(Debug)]
pub struct Handed {
    /// Where the counters are answered.
    pub metrics: OwnedFd,
    /// Where the next process comes.
    pub control: OwnedFd,
    /// In the order of [`Own`]'s variants.
    pub devices: Vec<HandedDevice>,
}

/// A device, its function and its client.
#[derive(Debug)]
pub struct HandedDevice {
    /// What it is.
    pub own: Own,
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
pub enum Own {
    /// The virtio-iommu: its snapshot.
    Iommu {
        /// As `ringfence_virtio_iommu::Device::snapshot` makes it.
        snapshot: Vec<u8>,
        /// Where its requests are written down, if they are.
        record: Option<RecordState>,
    },
    /// The para-virtual IOMMU.
    PvIommu(PvState),
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
    },
}

/// What the para-virtual IOMMU has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PvState {
    /// The driver has begun.
    pub running: bool,
    /// The mappings, as a stream of records in the guest's view (`docs/PVIOMMU.md`).
    pub records: Vec<u8>,
    /// Events that the driver has not been told of.
    pub events: Vec<u8>,
}

impl Own {
    /// How the stream calls it.
    fn kind(&self) -> u8 {
        match self {
            Self::Iommu {
                record: Some(_), ..
            } => RECORDED,
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

/// The registers of a function.
#[derive(Debug)]
pub struct FunctionState {
    /// Configuration space.
    pub config: [u8; CONFIG_BYTES],
    /// Interrupt status.
    pub isr: u8,
    /// The descriptors of the vectors.
    pub vectors: Vec<Option<OwnedFd>>,
    /// Virtio's own.
    pub common: CommonState,
}

/// The common configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonState {
    /// Features that are offered.
    pub offered: u64,
    /// And those the driver accepted.
    pub accepted: u64,
    /// Which half of the first is read.
    pub offered_select: u32,
    /// Which half of the second is written.
    pub accepted_select: u32,
    /// Vector of changes of the configuration.
    pub config_vector: u16,
    /// Status.
    pub status: u8,
    /// The queue whose registers are seen.
    pub selected: u16,
    /// The queues.
    pub queues: Vec<QueueSlot>,
}

/// A queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSlot {
    /// Its registers and how far the device is in its rings.
    pub queue: QueueState,
    /// Its vector.
    pub vector: u16,
    /// There is work left that nobody will ring for.
    pub unfinished: bool,
}

/// A client's conversation.
#[derive(Debug)]
pub struct SessionState {
    /// Its socket.
    pub stream: OwnedFd,
    /// The version was agreed on.
    pub agreed: bool,
    /// The part of a message that was read,
    pub bytes: Vec<u8>,
    /// the descriptors that came with it,
    pub fds: Vec<OwnedFd>,
    /// and whether there were more than a message may have.
    pub too_many_fds: bool,
    /// The guest's memory.
    pub ranges: Vec<RangeState>,
}

/// A range of the guest's memory.
#[derive(Debug)]
pub struct RangeState {
    /// Guest-physical.
    pub range: IovaRange,
    /// Offset in the file.
    pub offset: u64,
    /// The file; none: the range is out of reach.
    pub file: Option<OwnedFd>,
}

impl Handed {
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
    /// [`StateError`]; nothing of it may be used. What the devices it tells of can be is for them to say.
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
        let mut devices: Vec<HandedDevice> = Vec::new();
        for _ in 0..count {
            let device = HandedDevice::decode(&mut input)?;
            let number = device.own.number();
            if devices.last().is_some_and(|d| d.own.number() >= number) {
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
        let devices =
            devices.filter(|device| !matches!(device.own, Own::Iommu { .. } | Own::PvIommu(_)));
        devices.fold(0, |sum, device| sum.wrapping_add(device.requests))
    }
}

impl HandedDevice {
    fn encode(self, out: &mut Writer) {
        out.u8(self.own.kind());
        match self.own {
            Own::Iommu { snapshot, record } => {
                out.blob(&snapshot);
                if let Some(record) = record {
                    record.encode(out);
                }
            }
            Own::PvIommu(state) => {
                out.flag(state.running);
                out.blob(&state.records);
                out.blob(&state.events);
            }
            Own::Rng => {}
            Own::Net(state) => state.encode(out),
            Own::Blk {
                file,
                read_only,
                sectors,
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
            kind @ (1 | RECORDED) => Own::Iommu {
                snapshot: input.blob("bytes of a snapshot", MAX_STREAM_BYTES)?,
                record: if kind == RECORDED {
                    Some(RecordState::decode(input)?)
                } else {
                    None
                },
            },
            2 => Own::PvIommu(PvState {
                running: input.flag()?,
                records: input.blob("bytes of records", MAX_STREAM_BYTES)?,
                events: input.blob("bytes of events", MAX_STREAM_BYTES)?,
            }),
            3 => Own::Rng,
            4 => Own::Net(Box::new(NetState::decode(input)?)),
            5 => Own::Blk {
                file: input.fd()?,
                read_only: input.flag()?,
                sectors: input.u64()?,
            },
            kind => {
                return Err(StateError::BadValue {
                    what: "kind of device",
                    value: kind.into(),
                });
            }
        };
        Ok(Self {
            own,
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

impl FunctionState {
    fn encode(self, out: &mut Writer) {
        out.bytes.extend(self.config);
        out.u8(self.isr);
        out.count(self.vectors.len());
        self.vectors.into_iter().for_each(|fd| out.maybe_fd(fd));
        self.common.encode(out);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            config: input.take()?,
            isr: input.u8()?,
            vectors: (0..input.count("vectors", MAX_VECTORS)?)
                .map(|_| input.maybe_fd())
                .collect::<Result<_, _>>()?,
            common: CommonState::decode(input)?,
        })
    }
}

impl CommonState {
    fn encode(&self, out: &mut Writer) {
        out.u64(self.offered);
        out.u64(self.accepted);
        out.u32(self.offered_select);
        out.u32(self.accepted_select);
        out.u16(self.config_vector);
        out.u8(self.status);
        out.u16(self.selected);
        out.count(self.queues.len());
        for slot in &self.queues {
            let queue = &slot.queue;
            for short in [
                queue.max_size,
                queue.size,
                queue.next_avail,
                queue.next_used,
                slot.vector,
            ] {
                out.u16(short);
            }
            for long in [queue.desc_table, queue.avail_ring, queue.used_ring] {
                out.u64(long);
            }
            out.flag(queue.ready);
            out.flag(queue.event_idx_enabled);
            out.flag(slot.unfinished);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            offered: input.u64()?,
            accepted: input.u64()?,
            offered_select: input.u32()?,
            accepted_select: input.u32()?,
            config_vector: input.u16()?,
            status: input.u8()?,
            selected: input.u16()?,
            queues: (0..input.count("queues", MAX_QUEUES)?)
                .map(|_| QueueSlot::decode(input))
                .collect::<Result<_, _>>()?,
        })
    }
}

impl QueueSlot {
    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let [max_size, size, next_avail, next_used, vector] = [
            input.u16()?,
            input.u16()?,
            input.u16()?,
            input.u16()?,
            input.u16()?,
        ];
        let [desc_table, avail_ring, used_ring] = [input.u64()?, input.u64()?, input.u64()?];
        Ok(Self {
            queue: QueueState {
                max_size,
                next_avail,
                next_used,
                size,
                desc_table,
                avail_ring,
                used_ring,
                ready: input.flag()?,
                event_idx_enabled: input.flag()?,
            },
            vector,
            unfinished: input.flag()?,
        })
    }
}

impl SessionState {
    fn encode(self, out: &mut Writer) {
        out.fd(self.stream);
        out.flag(self.agreed);
        out.blob(&self.bytes);
        out.count(self.fds.len());
        self.fds.into_iter().for_each(|fd| out.fd(fd));
        out.flag(self.too_many_fds);
        out.count(self.ranges.len());
        for range in self.ranges {
            out.u64(range.range.start().get());
            out.u64(range.range.bytes());
            out.u64(range.offset);
            out.maybe_fd(range.file);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            stream: input.fd()?,
            agreed: input.flag()?,
            bytes: input.blob("bytes of a message", MAX_MESSAGE_BYTES)?,
            fds: (0..input.count("descriptors of a message", MAX_FDS)?)
                .map(|_| input.fd())
                .collect::<Result<_, _>>()?,
            too_many_fds: input.flag()?,
            ranges: (0..input.count("ranges", MAX_RANGES)?)
                .map(|_| RangeState::decode(input))
                .collect::<Result<_, _>>()?,
        })
    }
}

impl RangeState {
    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let (start, bytes) = (input.u64()?, input.u64()?);
        let range = IovaRange::new(Iova::new(start), bytes);
        let range = range.ok_or(StateError::BadValue {
            what: "bytes of a range",
            value: bytes,
        })?;
        let (offset, file) = (input.u64()?, input.maybe_fd()?);
        if file.is_none() && offset != 0 {
            return Err(StateError::BadValue {
                what: "offset of a range without a file",
                value: offset,
            });
        }
        Ok(Self {
            range,
            offset,
            file,
        })
    }
}
