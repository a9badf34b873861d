//! Requests of a front-end: parsed messages, or the reason why a message is invalid. The parser
//! trusts no field.

use std::os::fd::OwnedFd;

use ringfence_softiommu::iotlb::{FrameError, Header, IOTLB_BYTES, Region};
use ringfence_types::PhysAddr;
use ringfence_vfio_user::fields::array_at;
use ringfence_vfio_user::{Framing, Message};

/// Longest accepted payload in bytes. The longest payload that a front-end needs is a memory table.
pub const MAX_PAYLOAD_BYTES: u32 = 512;
/// Most regions of a memory table (`VHOST_MEMORY_BASELINE_NREGIONS`).
pub const MAX_REGIONS: usize = 8;
/// Longest configuration in bytes (`VHOST_USER_MAX_CONFIG_SIZE`).
const MAX_CONFIG_BYTES: u32 = 256;

/// Request numbers, under the specification's names.
mod number {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const GET_QUEUE_NUM: u32 = 17;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(super) const IOTLB_MSG: u32 = 22;
    pub(super) const GET_CONFIG: u32 = 24;
}

/// Returns true if the sender waits for data, not only for an acknowledgement.
pub(super) fn asks(header: &Header) -> bool {
    use number::{GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_VRING_BASE};
    !header.reply
        && matches!(
            header.request,
            GET_FEATURES | GET_PROTOCOL_FEATURES | GET_QUEUE_NUM | GET_VRING_BASE | GET_CONFIG
        )
}

/// Reason why the rest of the stream cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The header has another protocol version.
    #[error(transparent)]
    Frame(FrameError),
    /// The payload exceeds [`MAX_PAYLOAD_BYTES`].
    #[error("a payload of {bytes} bytes exceeds {MAX_PAYLOAD_BYTES}")]
    Long {
        /// Payload length in the header.
        bytes: u32,
    },
}

/// The framing of vhost-user.
#[derive(Debug)]
pub enum VhostUser {}

impl Framing for VhostUser {
    const HEADER_BYTES: usize = Header::BYTES;
    type Header = Header;
    type Error = StreamError;

    fn decode(bytes: &[u8]) -> Result<Header, StreamError> {
        let short = StreamError::Frame(FrameError::Length(0));
        let header = bytes.first_chunk().ok_or(short)?;
        let header = Header::decode(header).map_err(StreamError::Frame)?;
        if header.bytes > MAX_PAYLOAD_BYTES {
            let bytes = header.bytes;
            return Err(StreamError::Long { bytes });
        }
        Ok(header)
    }

    fn message_bytes(header: &Header) -> usize {
        Header::BYTES.saturating_add(header.bytes as usize)
    }
}

/// Reason why a message is not a valid request. The stream remains usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request was not offered.
    #[error("request {request} was not offered")]
    Unknown {
        /// Request number in the message's header.
        request: u32,
    },
    /// The message is a reply, but this socket carries no requests of the back-end.
    #[error("unexpected reply to request {request}")]
    NotARequest {
        /// Request number in the message's header.
        request: u32,
    },
    /// The payload has the wrong length for the request.
    #[error("request {request} has a payload of {bytes} bytes")]
    Length {
        /// Request number in the message's header.
        request: u32,
        /// Payload length in bytes.
        bytes: usize,
    },
    /// The message has too few or too many descriptors.
    #[error("request {request} has {given} descriptors")]
    Descriptors {
        /// Request number in the message's header.
        request: u32,
        /// Number of descriptors received.
        given: usize,
    },
    /// The memory table is empty or has more than [`MAX_REGIONS`] regions.
    #[error("the memory table has {given} regions, not 1 to {MAX_REGIONS}")]
    Regions {
        /// Number of regions.
        given: u32,
    },
    /// The ring is to be polled without a kick eventfd, which is not supported.
    #[error("ring {index} has no kick eventfd")]
    Polled {
        /// Index of the ring.
        index: u32,
    },
}

/// IOVAs of a ring's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddress {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring, which the driver writes.
    pub available: u64,
    /// The used ring, which the device writes.
    pub used: u64,
}

/// A region of a memory table, its offset in the file in bytes, and the file.
pub type SharedRegion = (Region, u64, OwnedFd);

/// A well-formed request.
#[derive(Debug)]
pub enum VhostUserRequest {
    /// Reads the offered device features.
    GetFeatures,
    /// Sets the device features that the driver and the front-end accept.
    SetFeatures(u64),
    /// Reads the offered protocol features.
    GetProtocolFeatures,
    /// Sets the protocol features that the front-end accepts.
    SetProtocolFeatures(u64),
    /// Reads the number of rings.
    GetQueueNum,
    /// Starts the session.
    SetOwner,
    /// Ends the session: stops all rings and resets their settings.
    ResetOwner,
    /// Sets the guest's memory.
    SetMemTable(Vec<SharedRegion>),
    /// Sets the channel on which the back-end sends IOTLB misses.
    SetBackendChannel(OwnedFd),
    /// Sets the size of a ring.
    SetVringNum {
        /// Index of the ring.
        index: u32,
        /// Number of descriptors.
        size: u32,
    },
    /// Sets the addresses of a ring.
    SetVringAddr {
        /// Index of the ring.
        index: u32,
        /// Addresses of its parts.
        address: VringAddress,
    },
    /// Sets the index at which a ring continues.
    SetVringBase {
        /// Index of the ring.
        index: u32,
        /// Index of the next available entry.
        base: u32,
    },
    /// Stops a ring and reads the index of its next available entry.
    GetVringBase {
        /// Index of the ring.
        index: u32,
    },
    /// Sets the eventfd by which the driver announces available buffers.
    SetVringKick {
        /// Index of the ring.
        index: u32,
        /// Eventfd of the kick.
        event: OwnedFd,
    },
    /// Sets the eventfd by which the device announces used buffers.
    SetVringCall {
        /// Index of the ring.
        index: u32,
        /// Eventfd of the call. `None` if the driver wants no interrupts.
        event: Option<OwnedFd>,
    },
    /// Sets the eventfd that reports a broken ring.
    SetVringErr {
        /// Index of the ring.
        index: u32,
        /// Eventfd of the error. `None` if the front-end wants no reports.
        event: Option<OwnedFd>,
    },
    /// Enables or disables a ring.
    SetVringEnable {
        /// Index of the ring.
        index: u32,
        /// True if the ring may run.
        on: bool,
    },
    /// Updates or invalidates a translation in the IOTLB.
    Iotlb([u8; IOTLB_BYTES]),
    /// Reads a part of the device's configuration space.
    GetConfig {
        /// Offset of the part.
        offset: u32,
        /// Length in bytes, at most 256.
        bytes: u32,
        /// Flags, which the reply repeats.
        flags: u32,
    },
}

impl VhostUserRequest {
    /// Parses a message.
    ///
    /// # Errors
    /// [`RequestError`]; the message's descriptors are closed.
    pub fn parse(message: Message<Header>) -> Result<Self, RequestError> {
        let Message {
            header,
            body,
            fds,
            too_many_fds,
        } = message;
        let request = header.request;
        if header.reply {
            return Err(RequestError::NotARequest { request });
        }
        let parts = Parts {
            request,
            body: &body,
        };
        if too_many_fds {
            let given = fds.len().saturating_add(1);
            return Err(RequestError::Descriptors { request, given });
        }
        match request {
            number::SET_MEM_TABLE => return parts.memory(fds),
            number::SET_BACKEND_REQ_FD => return parts.only(fds).map(Self::SetBackendChannel),
            number::SET_VRING_KICK => {
                let (index, event) = parts.event(fds)?;
                let event = event.ok_or(RequestError::Polled { index })?;
                return Ok(Self::SetVringKick { index, event });
            }
            number::SET_VRING_CALL => {
                let (index, event) = parts.event(fds)?;
                return Ok(Self::SetVringCall { index, event });
            }
            number::SET_VRING_ERR => {
                let (index, event) = parts.event(fds)?;
                return Ok(Self::SetVringErr { index, event });
            }
            _ => {}
        }
        if !fds.is_empty() {
            let given = fds.len();
            return Err(RequestError::Descriptors { request, given });
        }
        parts.plain()
    }
}

/// A message being parsed.
struct Parts<'a> {
    request: u32,
    body: &'a [u8],
}

impl Parts<'_> {
    fn plain(&self) -> Result<VhostUserRequest, RequestError> {
        let request = self.request;
        Ok(match request {
            number::GET_FEATURES => self.bare(VhostUserRequest::GetFeatures)?,
            number::SET_FEATURES => VhostUserRequest::SetFeatures(self.word()?),
            number::GET_PROTOCOL_FEATURES => self.bare(VhostUserRequest::GetProtocolFeatures)?,
            number::SET_PROTOCOL_FEATURES => VhostUserRequest::SetProtocolFeatures(self.word()?),
            number::GET_QUEUE_NUM => self.bare(VhostUserRequest::GetQueueNum)?,
            number::SET_OWNER => self.bare(VhostUserRequest::SetOwner)?,
            number::RESET_OWNER => self.bare(VhostUserRequest::ResetOwner)?,
            number::SET_VRING_NUM => {
                let (index, size) = self.state()?;
                VhostUserRequest::SetVringNum { index, size }
            }
            number::SET_VRING_BASE => {
                let (index, base) = self.state()?;
                VhostUserRequest::SetVringBase { index, base }
            }
            number::GET_VRING_BASE => {
                let (index, _) = self.state()?;
                VhostUserRequest::GetVringBase { index }
            }
            number::SET_VRING_ENABLE => {
                let (index, on) = self.state()?;
                let on = on != 0;
                VhostUserRequest::SetVringEnable { index, on }
            }
            number::SET_VRING_ADDR => self.address()?,
            number::IOTLB_MSG => {
                let bytes = self.body.first_chunk().copied();
                VhostUserRequest::Iotlb(
                    bytes
                        .filter(|_| self.body.len() == IOTLB_BYTES)
                        .ok_or(self.length())?,
                )
            }
            number::GET_CONFIG => self.config()?,
            _ => return Err(RequestError::Unknown { request }),
        })
    }

    fn length(&self) -> RequestError {
        RequestError::Length {
            request: self.request,
            bytes: self.body.len(),
        }
    }

    fn descriptors(&self, given: usize) -> RequestError {
        let request = self.request;
        RequestError::Descriptors { request, given }
    }

    fn bare(&self, request: VhostUserRequest) -> Result<VhostUserRequest, RequestError> {
        self.of_length(0)?;
        Ok(request)
    }

    fn of_length(&self, bytes: usize) -> Result<(), RequestError> {
        (self.body.len() == bytes)
            .then_some(())
            .ok_or(self.length())
    }

    /// Reads 32 bits at `at` in host byte order, which the whole protocol uses.
    fn half(&self, at: usize) -> Result<u32, RequestError> {
        let bytes = array_at(self.body, at).ok_or(self.length())?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn long(&self, at: usize) -> Result<u64, RequestError> {
        let bytes = array_at(self.body, at).ok_or(self.length())?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn word(&self) -> Result<u64, RequestError> {
        self.of_length(8)?;
        self.long(0)
    }

    /// Parses `struct vhost_vring_state`: a ring index and a number.
    fn state(&self) -> Result<(u32, u32), RequestError> {
        self.of_length(8)?;
        Ok((self.half(0)?, self.half(4)?))
    }

    /// Parses `struct vhost_vring_addr`. Its flags and its last field concern the dirty log, which
    /// is not offered.
    fn address(&self) -> Result<VhostUserRequest, RequestError> {
        self.of_length(40)?;
        Ok(VhostUserRequest::SetVringAddr {
            index: self.half(0)?,
            address: VringAddress {
                descriptors: self.long(8)?,
                used: self.long(16)?,
                available: self.long(24)?,
            },
        })
    }

    fn config(&self) -> Result<VhostUserRequest, RequestError> {
        let (offset, bytes, flags) = (self.half(0)?, self.half(4)?, self.half(8)?);
        let whole = 12_usize.checked_add(bytes as usize);
        if bytes > MAX_CONFIG_BYTES || whole != Some(self.body.len()) {
            return Err(self.length());
        }
        Ok(VhostUserRequest::GetConfig {
            offset,
            bytes,
            flags,
        })
    }

    /// Returns the message's only descriptor; the payload must be empty.
    fn only(&self, fds: Vec<OwnedFd>) -> Result<OwnedFd, RequestError> {
        self.of_length(0)?;
        let given = fds.len();
        let mut fds = fds.into_iter();
        match (fds.next(), given) {
            (Some(fd), 1) => Ok(fd),
            _ => Err(self.descriptors(given)),
        }
    }

    /// Returns the ring index and its eventfd. Bit 8 of the word means that the message has no
    /// eventfd.
    fn event(&self, fds: Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>), RequestError> {
        const INDEX: u64 = 0xff;
        const NONE: u64 = 1 << 8;
        let word = self.word()?;
        let given = fds.len();
        if given != usize::from(word & NONE == 0) {
            return Err(self.descriptors(given));
        }
        // The mask leaves eight bits.
        Ok(((word & INDEX) as u32, fds.into_iter().next()))
    }

    fn memory(&self, fds: Vec<OwnedFd>) -> Result<VhostUserRequest, RequestError> {
        const REGION_BYTES: usize = 32;
        let given = self.half(0)?;
        let count = usize::try_from(given).unwrap_or(usize::MAX);
        if count == 0 || count > MAX_REGIONS {
            return Err(RequestError::Regions { given });
        }
        self.of_length(8 + count * REGION_BYTES)?;
        if fds.len() != count {
            return Err(self.descriptors(fds.len()));
        }
        let mut shared = Vec::new();
        for (at, fd) in fds.into_iter().enumerate() {
            let at = 8 + at * REGION_BYTES;
            let region = Region {
                memory: PhysAddr::new(self.long(at)?),
                bytes: self.long(at + 8)?,
                user: self.long(at + 16)?,
            };
            shared.push((region, self.long(at + 24)?, fd));
        }
        Ok(VhostUserRequest::SetMemTable(shared))
    }
}
