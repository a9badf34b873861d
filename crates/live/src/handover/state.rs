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
//! virtio registers; the ring IOMMU has no virtio registers. Its client's session, if any, and the
//! number of completed requests follow.

use std::os::fd::OwnedFd;

use ringfence_pviommu::wire::crc32c;

use super::client::SessionState;
use crate::pci::PlainState;
use crate::saved_state::{Reader, SaveState, StateError, Writer};
use crate::virtio::{CommonState, DeviceState, VirtioState};

/// Version of the stream format.
pub const VERSION: u32 = 1;
/// Most descriptors that accompany a stream.
pub(super) const MAX_STREAM_FDS: usize = 8192;

const MAGIC: [u8; 8] = *b"RFHANDOV";
const HEADER_BYTES: usize = 16;
const SUM_BYTES: usize = 4;
const MAX_DEVICES: usize = 8;
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

/// Registers of a device's function.
#[derive(Debug)]
pub enum FunctionState {
    /// A virtio device.
    Virtio(VirtioState),
    /// A function without virtio's registers: the ring IOMMU.
    Plain(PlainState),
}

impl FunctionState {
    /// Returns virtio's common configuration; `None` for another function.
    pub fn common_mut(&mut self) -> Option<&mut CommonState> {
        match self {
            Self::Virtio(state) => Some(&mut state.common),
            Self::Plain(_) => None,
        }
    }

    fn encode(self, out: &mut Writer) {
        match self {
            Self::Virtio(state) => state.encode(out),
            Self::Plain(state) => state.encode(out),
        }
    }

    /// Reads the registers of a device of the kind of `state`.
    fn decode(state: &DeviceState, input: &mut Reader<'_>) -> Result<Self, StateError> {
        match state {
            DeviceState::Ring(_) => PlainState::decode(input).map(Self::Plain),
            _ => VirtioState::decode(input).map(Self::Virtio),
        }
    }
}

/// State of a device, its function and its client.
#[derive(Debug)]
pub struct SavedDevice {
    /// State of the device itself, without its registers.
    pub state: DeviceState,
    /// Socket at which clients connect to the device.
    pub listener: OwnedFd,
    /// PCI registers, and virtio's.
    pub function: FunctionState,
    /// Session of the connected client, if any.
    pub session: Option<SessionState>,
    /// Number of completed requests.
    pub requests: u64,
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
        out.list(self.devices);
        let Writer { mut bytes, fds } = out;
        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
        if let Some(field) = bytes.get_mut(HEADER_BYTES - 4..HEADER_BYTES) {
            field.copy_from_slice(&count.to_le_bytes());
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
            let number = device.state.position();
            if devices.last().is_some_and(|d| d.state.position() >= number) {
                return Err(StateError::BadValue {
                    what: "device order",
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
        let devices = devices.filter(|device| !device.state.is_iommu());
        devices.fold(0, |sum, device| sum.wrapping_add(device.requests))
    }
}

impl SaveState for SavedDevice {
    fn encode(self, out: &mut Writer) {
        self.state.encode(out);
        self.listener.encode(out);
        self.function.encode(out);
        self.session.encode(out);
        self.requests.encode(out);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let state = DeviceState::decode(input)?;
        Ok(Self {
            listener: SaveState::decode(input)?,
            function: FunctionState::decode(&state, input)?,
            session: SaveState::decode(input)?,
            requests: SaveState::decode(input)?,
            state,
        })
    }
}
