//! The header of every message (vfio-user specification, "Header").

use super::fields::{u16_at, u32_at};

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 16;

/// Longest accepted message in bytes, including the header. The longest message that a client needs
/// is `VERSION` with its capabilities; `REGION_WRITE` carries at most [`MAX_DATA_BYTES`].
pub const MAX_MESSAGE_BYTES: usize = 8192;

/// Longest payload of a region access in bytes. Announced as `max_data_xfer_size`.
pub const MAX_DATA_BYTES: u32 = 4096;

/// Most file descriptors per message. Announced as `max_msg_fds`.
pub const MAX_FDS: usize = 16;

/// Commands, under the specification's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum VfioUserCommand {
    /// `VFIO_USER_VERSION`: negotiates version and capabilities, as the first message.
    Version = 1,
    /// `VFIO_USER_DMA_MAP`: maps a range for the device's DMA.
    DmaMap = 2,
    /// `VFIO_USER_DMA_UNMAP`: unmaps one range or all ranges.
    DmaUnmap = 3,
    /// `VFIO_USER_DEVICE_GET_INFO`: asks for the numbers of regions and interrupt types.
    DeviceGetInfo = 4,
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`: asks for the size and the flags of a region.
    DeviceGetRegionInfo = 5,
    /// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`: not offered by this server.
    DeviceGetRegionIoFds = 6,
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`: asks for the vectors of an interrupt type.
    DeviceGetIrqInfo = 7,
    /// `VFIO_USER_DEVICE_SET_IRQS`: changes a range of interrupt vectors.
    DeviceSetIrqs = 8,
    /// `VFIO_USER_REGION_READ`: reads bytes of a region.
    RegionRead = 9,
    /// `VFIO_USER_REGION_WRITE`: writes bytes of a region.
    RegionWrite = 10,
    /// `VFIO_USER_DMA_READ`: only from server to client.
    DmaRead = 11,
    /// `VFIO_USER_DMA_WRITE`: only from server to client.
    DmaWrite = 12,
    /// `VFIO_USER_DEVICE_RESET`: resets the device.
    DeviceReset = 13,
}

impl VfioUserCommand {
    /// Returns the command with this number. `None` if the number is unknown.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::DeviceGetInfo,
            5 => Self::DeviceGetRegionInfo,
            6 => Self::DeviceGetRegionIoFds,
            7 => Self::DeviceGetIrqInfo,
            8 => Self::DeviceSetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            11 => Self::DmaRead,
            12 => Self::DmaWrite,
            13 => Self::DeviceReset,
            _ => return None,
        })
    }
}

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A header whose framing alone has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Identifier that the reply repeats.
    pub id: u16,
    /// Command number, which may be unknown.
    pub command: u16,
    /// Length of the whole message in bytes, from [`HEADER_BYTES`] to [`MAX_MESSAGE_BYTES`].
    pub size: usize,
    /// True if the sender wants no reply.
    pub no_reply: bool,
}

/// Reason why the rest of the stream cannot be parsed: the next message boundary is unknown or too
/// far away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FramingError {
    /// The stated size does not cover the header.
    #[error("a message of {size} bytes is shorter than its header")]
    Short {
        /// Size in the header.
        size: u32,
    },
    /// The message is longer than [`MAX_MESSAGE_BYTES`].
    #[error("a message of {size} bytes exceeds {MAX_MESSAGE_BYTES}")]
    Long {
        /// Size in the header.
        size: u32,
    },
    /// The message is not a command. Replies are invalid too, since the server sends no commands.
    #[error("the message is not a command: flags {flags:#x}")]
    NotACommand {
        /// Flags in the header.
        flags: u32,
    },
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// [`FramingError`] if the rest of the stream cannot be parsed.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FramingError> {
        let field = |at| u32_at(bytes, at).unwrap_or(0);
        let (size, flags) = (field(4), field(8));
        if flags & TYPE_MASK != TYPE_COMMAND {
            return Err(FramingError::NotACommand { flags });
        }
        let bytes_of_message = usize::try_from(size).unwrap_or(usize::MAX);
        if bytes_of_message < HEADER_BYTES {
            return Err(FramingError::Short { size });
        }
        if bytes_of_message > MAX_MESSAGE_BYTES {
            return Err(FramingError::Long { size });
        }
        Ok(Self {
            id: u16_at(bytes, 0).unwrap_or(0),
            command: u16_at(bytes, 2).unwrap_or(0),
            size: bytes_of_message,
            no_reply: flags & NO_REPLY != 0,
        })
    }

    /// Builds the complete reply to this command: header and `body`.
    pub fn reply(&self, body: &[u8]) -> Vec<u8> {
        self.encode(TYPE_REPLY, 0, body)
    }

    /// Builds the reply that reports the error number `errno` for this command.
    pub fn error_reply(&self, errno: u32) -> Vec<u8> {
        self.encode(TYPE_REPLY | ERROR, errno, &[])
    }

    fn encode(&self, flags: u32, errno: u32, body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(HEADER_BYTES.saturating_add(body.len())).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.command.to_le_bytes());
        bytes.extend(size.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(errno.to_le_bytes());
        bytes.extend(body);
        bytes
    }
}
