//! What a front-end asks: a message as a value, or why it is none. Everything here is written for a
//! front-end that lies.

use std::os::fd::OwnedFd;

use ringfence_softiommu::iotlb::{FrameError, Header, IOTLB_BYTES, Region};
use ringfence_types::PhysAddr;

use crate::wire::fields::array_at;
use crate::wire::{Framed, Message};

/// Longest payload that is read. The longest that a front-end has to send is a memory table.
pub const MAX_PAYLOAD_BYTES: u32 = 512;
/// Most regions of a memory table (`VHOST_MEMORY_BASELINE_NREGIONS`).
pub const MAX_REGIONS: usize = 8;
/// Longest configuration (`VHOST_USER_MAX_CONFIG_SIZE`).
const MAX_CONFIG_BYTES: u32 = 256;

/// Requests, under the specification's names.
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

/// Whether whoever sends it waits for more than whether it was done.
pub(super) fn asks(header: &Header) -> bool {
    use number::{GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_VRING_BASE};
    !header.reply
        && matches!(
            header.request,
            GET_FEATURES | GET_PROTOCOL_FEATURES | GET_QUEUE_NUM | GET_VRING_BASE | GET_CONFIG
        )
}

/// Why the stream cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// Another version of the protocol.
    Frame(FrameError),
    /// A payload longer than [`MAX_PAYLOAD_BYTES`].
    Long {
        /// As stated.
        bytes: u32,
    },
}

impl std::fmt::Display for StreamError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Frame(error) => error.fmt(f),
            Self::Long { bytes } => write!(
                f,
                "a payload of {bytes} bytes is longer than {MAX_PAYLOAD_BYTES}"
            ),
        }
    }
}

impl std::error::Error for StreamError {}

impl Framed for Header {
    const BYTES: usize = Self::BYTES;
    type Error = StreamError;

    fn decode_from(bytes: &[u8]) -> Result<Self, StreamError> {
        let short = StreamError::Frame(FrameError::Length(0));
        let header = Self::decode(bytes.first_chunk().ok_or(short)?).map_err(StreamError::Frame)?;
        if header.bytes > MAX_PAYLOAD_BYTES {
            let bytes = header.bytes;
            return Err(StreamError::Long { bytes });
        }
        Ok(header)
    }

    fn message_bytes(&self) -> usize {
        Self::BYTES.saturating_add(self.bytes as usize)
    }
}

/// Why a message is no request. The next one can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// Nothing that was offered.
    Unknown {
        /// Its number.
        request: u32,
    },
    /// A reply, though nothing was asked on this socket.
    NotARequest {
        /// Its number.
        request: u32,
    },
    /// A payload of another size than the request has.
    Length {
        /// Its number.
        request: u32,
        /// Bytes of the payload.
        bytes: usize,
    },
    /// Descriptors missing, or more than belong to it.
    Descriptors {
        /// Its number.
        request: u32,
        /// How many came.
        given: usize,
    },
    /// More regions than [`MAX_REGIONS`], or none.
    Regions {
        /// How many.
        given: u32,
    },
    /// A ring that is to be looked at without being told (no kick), which is not offered.
    Polled {
        /// The ring.
        index: u32,
    },
}

impl std::fmt::Display for RequestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown { request } => write!(f, "request {request} was not offered"),
            Self::NotARequest { request } => {
                write!(f, "a reply to {request}, which nobody asked")
            }
            Self::Length { request, bytes } => {
                write!(f, "request {request} with a payload of {bytes} bytes")
            }
            Self::Descriptors { request, given } => {
                write!(f, "request {request} with {given} descriptors")
            }
            Self::Regions { given } => write!(f, "a memory table of {given} regions"),
            Self::Polled { index } => write!(f, "ring {index} without a kick"),
        }
    }
}

impl std::error::Error for RequestError {}

/// Where a ring's parts are, in the device's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddress {
    /// The descriptor table.
    pub descriptors: u64,
    /// The ring that the driver writes.
    pub available: u64,
    /// The ring that the device writes.
    pub used: u64,
}

/// A region of a memory table, its offset in the file, and the file.
pub type SharedRegion = (Region, u64, OwnedFd);

/// A request of the right form.
#[derive(Debug)]
pub enum VhostUserRequest {
    /// Which features there are.
    GetFeatures,
    /// Which ones the driver and the front-end take.
    SetFeatures(u64),
    /// Which features of the protocol there are.
    GetProtocolFeatures,
    /// Which ones the front-end takes.
    SetProtocolFeatures(u64),
    /// How many rings there are.
    GetQueueNum,
    /// A conversation begins.
    SetOwner,
    /// It ends; no ring goes on.
    ResetOwner,
    /// The guest's memory.
    SetMemTable(Vec<SharedRegion>),
    /// Where the back-end asks for translations.
    SetBackendChannel(OwnedFd),
    /// How many descriptors a ring has.
    SetVringNum {
        /// The ring.
        index: u32,
        /// Descriptors.
        size: u32,
    },
    /// Where it is.
    SetVringAddr {
        /// The ring.
        index: u32,
        /// Where.
        address: VringAddress,
    },
    /// Where in it to go on.
    SetVringBase {
        /// The ring.
        index: u32,
        /// The next entry to be taken.
        base: u32,
    },
    /// Stop, and say where.
    GetVringBase {
        /// The ring.
        index: u32,
    },
    /// How the device is told of what is available.
    SetVringKick {
        /// The ring.
        index: u32,
        /// An eventfd.
        event: OwnedFd,
    },
    /// How the driver is told of what was used; none: it is not.
    SetVringCall {
        /// The ring.
        index: u32,
        /// An eventfd.
        event: Option<OwnedFd>,
    },
    /// How the front-end is told that a ring is broken; none: it is not.
    SetVringErr {
        /// The ring.
        index: u32,
        /// An eventfd.
        event: Option<OwnedFd>,
    },
    /// Whether the ring may go on.
    SetVringEnable {
        /// The ring.
        index: u32,
        /// Whether it may.
        on: bool,
    },
    /// Something about the device's addresses.
    Iotlb([u8; IOTLB_BYTES]),
    /// A part of the device's configuration.
    GetConfig {
        /// Where it begins.
        offset: u32,
        /// Bytes, at most 256.
        bytes: u32,
        /// Flags, which the reply repeats.
        flags: u32,
    },
}

impl VhostUserRequest {
    /// Reads a message.
    ///
    /// # Errors
    /// [`RequestError`]; the descriptors that came with it are closed.
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

/// A message that is being read.
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

    fn bare(&self, request: VhostUserRequest) -> Result<VhostUserRequest, RequestError> {
        self.of_length(0)?;
        Ok(request)
    }

    fn of_length(&self, bytes: usize) -> Result<(), RequestError> {
        (self.body.len() == bytes)
            .then_some(())
            .ok_or(self.length())
    }

    /// 32 bits at `at`, in the host's order as all of this protocol.
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

    /// `struct vhost_vring_state`: a ring and a number.
    fn state(&self) -> Result<(u32, u32), RequestError> {
        self.of_length(8)?;
        Ok((self.half(0)?, self.half(4)?))
    }

    /// `struct vhost_vring_addr`. Its flags and its last field are about a log of what was written,
    /// which is not offered.
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

    /// The one descriptor that belongs to it, and nothing else.
    fn only(&self, fds: Vec<OwnedFd>) -> Result<OwnedFd, RequestError> {
        self.of_length(0)?;
        let given = fds.len();
        let mut fds = fds.into_iter();
        match (fds.next(), given) {
            (Some(fd), 1) => Ok(fd),
            _ => Err(RequestError::Descriptors {
                request: self.request,
                given,
            }),
        }
    }

    /// A ring, and its eventfd unless bit 8 says that there is none.
    fn event(&self, fds: Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>), RequestError> {
        const INDEX: u64 = 0xff;
        const NONE: u64 = 1 << 8;
        let word = self.word()?;
        let given = fds.len();
        if given != usize::from(word & NONE == 0) {
            return Err(RequestError::Descriptors {
                request: self.request,
                given,
            });
        }
        // Eight bits.
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
            return Err(RequestError::Descriptors {
                request: self.request,
                given: fds.len(),
            });
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
