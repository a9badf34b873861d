//! Requests of a client: a message's command and body as a value, or the reason why it is invalid.

use std::os::fd::OwnedFd;

use ringfence_types::{Iova, IovaRange};

use super::fields::{u16_at, u32_at, u64_at};
use super::header::{MAX_DATA_BYTES, VfioUserCommand};
use super::inbox::Message;

/// A well-formed request. The session decides if it is valid for the device.
#[derive(Debug)]
#[non_exhaustive]
pub enum VfioUserRequest {
    /// `VERSION`: proposes a version; only the first message may do so.
    Version {
        /// The client's major version.
        major: u16,
        /// The client's minor version.
        minor: u16,
    },
    /// `DMA_MAP`: maps a range for the device's DMA.
    DmaMap {
        /// Addresses of the range in the device's view. They are guest-physical if QEMU emulates no
        /// IOMMU for the guest.
        range: IovaRange,
        /// True if the device may read the range.
        readable: bool,
        /// True if the device may write the range.
        writable: bool,
        /// Offset of the range in the file, in bytes.
        offset: u64,
        /// File of the memory. `None` if only the client can access the memory.
        file: Option<OwnedFd>,
    },
    /// `DMA_UNMAP`: unmaps one range or all ranges.
    DmaUnmap {
        /// Range to unmap. `None` to unmap everything.
        range: Option<IovaRange>,
        /// Flags, which the reply repeats.
        flags: u32,
    },
    /// `DEVICE_GET_INFO`: asks for the numbers of regions and interrupt kinds.
    DeviceInfo,
    /// `DEVICE_GET_REGION_INFO`: asks for the size and the flags of a region.
    RegionInfo {
        /// Index of the region.
        index: u32,
    },
    /// `DEVICE_GET_IRQ_INFO`: asks for the vectors of an interrupt kind.
    IrqInfo {
        /// Index of the interrupt kind.
        index: u32,
    },
    /// `DEVICE_SET_IRQS`: changes a range of interrupt vectors.
    SetIrqs(SetIrqs),
    /// `REGION_READ`: reads bytes of a region.
    RegionRead {
        /// Index of the region.
        region: u32,
        /// Offset in the region, in bytes.
        offset: u64,
        /// Bytes to read, at most [`MAX_DATA_BYTES`].
        count: u32,
    },
    /// `REGION_WRITE`: writes bytes of a region.
    RegionWrite {
        /// Index of the region.
        region: u32,
        /// Offset in the region, in bytes.
        offset: u64,
        /// Bytes to write, at most [`MAX_DATA_BYTES`].
        data: Vec<u8>,
    },
    /// `DEVICE_RESET`: resets the device.
    Reset,
}

/// `DEVICE_SET_IRQS`: changes a range of interrupt vectors.
#[derive(Debug)]
pub struct SetIrqs {
    /// Index of the interrupt kind.
    pub index: u32,
    /// First vector of the range.
    pub start: u32,
    /// Number of vectors. 0 with [`IrqAction::Trigger`] and [`IrqData::None`] disables all vectors.
    pub count: u32,
    /// Action for the vectors.
    pub action: IrqAction,
    /// Data of the action.
    pub data: IrqData,
}

/// Action for a range of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Masks the vectors.
    Mask,
    /// Unmasks the vectors.
    Unmask,
    /// Sets the vectors' eventfds, or signals the vectors.
    Trigger,
}

/// Data of `DEVICE_SET_IRQS`.
#[derive(Debug)]
pub enum IrqData {
    /// No data: the action applies to every vector of the range.
    None,
    /// One byte per vector.
    Bools(Vec<u8>),
    /// One eventfd per vector. An empty list removes the vectors' eventfds.
    Events(Vec<OwnedFd>),
}

/// Reason why a message is not a valid request. The stream remains usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The command number is unknown.
    #[error("unknown command {command}")]
    UnknownCommand {
        /// Command number in the message's header.
        command: u16,
    },
    /// The command is sent only by a server, or is not offered.
    #[error("{command:?} is not supported")]
    Unsupported {
        /// Command of the refused message.
        command: VfioUserCommand,
    },
    /// The body has the wrong length for the command and its fields.
    #[error("{command:?} has a body of {bytes} bytes")]
    Length {
        /// Command of the message.
        command: VfioUserCommand,
        /// Length of the body in bytes.
        bytes: usize,
    },
    /// The message has the wrong number of descriptors for its command.
    #[error("{command:?} has a wrong number of descriptors")]
    Descriptors {
        /// Command of the message.
        command: VfioUserCommand,
    },
    /// The flags are unknown or contradict each other.
    #[error("{command:?} has invalid flags {flags:#x}")]
    Flags {
        /// Command of the message.
        command: VfioUserCommand,
        /// Flags of the message, as received.
        flags: u32,
    },
    /// The range is empty or exceeds the address space.
    #[error("invalid range: {size:#x} bytes at {start}")]
    Range {
        /// First address of the range.
        start: Iova,
        /// Size of the range in bytes.
        size: u64,
    },
    /// The access carries more than [`MAX_DATA_BYTES`].
    #[error("an access of {count} bytes exceeds {MAX_DATA_BYTES}")]
    TooMuchData {
        /// Bytes of the access.
        count: u32,
    },
}

impl RequestError {
    /// Returns the error number of the reply.
    pub fn errno(&self) -> u32 {
        match self {
            Self::UnknownCommand { .. } | Self::Unsupported { .. } => errno::ENOTSUP,
            Self::TooMuchData { .. } => errno::E2BIG,
            _ => errno::EINVAL,
        }
    }
}

/// Linux error numbers; the specification names no others.
pub mod errno {
    /// No such file; here, no such range.
    pub const ENOENT: u32 = 2;
    /// The list is too long.
    pub const E2BIG: u32 = 7;
    /// Not enough memory; here, the range cannot be locked.
    pub const ENOMEM: u32 = 12;
    /// Access denied; here, the file is unsealed or on hugetlbfs.
    pub const EACCES: u32 = 13;
    /// Busy; here, a device that cannot be stopped, or whose killed process still has pages of the
    /// range.
    pub const EBUSY: u32 = 16;
    /// The object exists.
    pub const EEXIST: u32 = 17;
    /// Invalid argument or malformed request.
    pub const EINVAL: u32 = 22;
    /// No space left.
    pub const ENOSPC: u32 = 28;
    /// Not supported; here, a command or an interrupt action that the server does not offer.
    pub const ENOTSUP: u32 = 95;
}

const DMA_READ: u32 = 1;
const DMA_WRITE: u32 = 2;
/// `VFIO_DMA_UNMAP_FLAG_ALL` (Linux, include/uapi/linux/vfio.h): unmaps all addresses; start and
/// size must be 0. QEMU's client (hw/vfio-user/container.c) sends the flags of Linux.
const UNMAP_ALL: u32 = 1 << 1;

const IRQ_NONE: u32 = 1;
const IRQ_BOOL: u32 = 2;
const IRQ_EVENTFD: u32 = 4;
const IRQ_MASK: u32 = 8;
const IRQ_UNMASK: u32 = 16;
const IRQ_TRIGGER: u32 = 32;

impl VfioUserRequest {
    /// Parses `message`.
    ///
    /// # Errors
    /// [`RequestError`]. The reply carries [`RequestError::errno`], and the stream remains usable.
    pub fn parse(message: Message) -> Result<Self, RequestError> {
        let number = message.header.command;
        let Some(command) = VfioUserCommand::from_number(number) else {
            return Err(RequestError::UnknownCommand { command: number });
        };
        let mut parts = Parts {
            command,
            body: message.body,
            fds: message.fds,
        };
        if message.too_many_fds {
            return Err(RequestError::Descriptors { command });
        }
        if !matches!(
            command,
            VfioUserCommand::DmaMap | VfioUserCommand::DeviceSetIrqs
        ) {
            parts.without_fds()?;
        }
        match command {
            VfioUserCommand::Version => parts.version(),
            VfioUserCommand::DmaMap => parts.dma_map(),
            VfioUserCommand::DmaUnmap => parts.dma_unmap(),
            VfioUserCommand::DeviceGetInfo => parts.exactly(16).map(|()| Self::DeviceInfo),
            VfioUserCommand::DeviceGetRegionInfo => {
                parts.exactly(32)?;
                Ok(Self::RegionInfo {
                    index: parts.u32_at(8)?,
                })
            }
            VfioUserCommand::DeviceGetIrqInfo => {
                parts.exactly(16)?;
                Ok(Self::IrqInfo {
                    index: parts.u32_at(8)?,
                })
            }
            VfioUserCommand::DeviceSetIrqs => parts.set_irqs().map(Self::SetIrqs),
            VfioUserCommand::RegionRead => parts.region_read(),
            VfioUserCommand::RegionWrite => parts.region_write(),
            VfioUserCommand::DeviceReset => parts.exactly(0).map(|()| Self::Reset),
            VfioUserCommand::DeviceGetRegionIoFds
            | VfioUserCommand::DmaRead
            | VfioUserCommand::DmaWrite => Err(RequestError::Unsupported { command }),
        }
    }
}

struct Parts {
    command: VfioUserCommand,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Parts {
    fn length(&self) -> RequestError {
        self.length_of(self.body.len())
    }

    fn length_of(&self, bytes: usize) -> RequestError {
        let command = self.command;
        RequestError::Length { command, bytes }
    }

    fn descriptors(&self) -> RequestError {
        let command = self.command;
        RequestError::Descriptors { command }
    }

    fn exactly(&self, bytes: usize) -> Result<(), RequestError> {
        if self.body.len() == bytes {
            Ok(())
        } else {
            Err(self.length())
        }
    }

    fn without_fds(&self) -> Result<(), RequestError> {
        if self.fds.is_empty() {
            Ok(())
        } else {
            Err(self.descriptors())
        }
    }

    fn u32_at(&self, at: usize) -> Result<u32, RequestError> {
        u32_at(&self.body, at).ok_or_else(|| self.length())
    }

    fn u64_at(&self, at: usize) -> Result<u64, RequestError> {
        u64_at(&self.body, at).ok_or_else(|| self.length())
    }

    fn range(&self, start_at: usize, size_at: usize) -> Result<IovaRange, RequestError> {
        let (start, size) = (Iova::new(self.u64_at(start_at)?), self.u64_at(size_at)?);
        IovaRange::new(start, size).ok_or(RequestError::Range { start, size })
    }

    /// Parses the versions. The client's capabilities, a JSON string, are ignored: this server
    /// needs none.
    fn version(&self) -> Result<VfioUserRequest, RequestError> {
        let field = |at| u16_at(&self.body, at).ok_or_else(|| self.length());
        Ok(VfioUserRequest::Version {
            major: field(0)?,
            minor: field(2)?,
        })
    }

    fn dma_map(&mut self) -> Result<VfioUserRequest, RequestError> {
        self.exactly(32)?;
        if self.fds.len() > 1 {
            return Err(self.descriptors());
        }
        let flags = self.u32_at(4)?;
        if flags & !(DMA_READ | DMA_WRITE) != 0 {
            return Err(self.flags(flags));
        }
        Ok(VfioUserRequest::DmaMap {
            range: self.range(16, 24)?,
            readable: flags & DMA_READ != 0,
            writable: flags & DMA_WRITE != 0,
            offset: self.u64_at(8)?,
            file: self.fds.pop(),
        })
    }

    fn dma_unmap(&self) -> Result<VfioUserRequest, RequestError> {
        self.exactly(24)?;
        let flags = self.u32_at(4)?;
        let range = match flags {
            0 => Some(self.range(8, 16)?),
            UNMAP_ALL => {
                let (start, size) = (Iova::new(self.u64_at(8)?), self.u64_at(16)?);
                if start.get() != 0 || size != 0 {
                    return Err(RequestError::Range { start, size });
                }
                None
            }
            _ => return Err(self.flags(flags)),
        };
        Ok(VfioUserRequest::DmaUnmap { range, flags })
    }

    fn set_irqs(&mut self) -> Result<SetIrqs, RequestError> {
        const FIXED: usize = 20;
        let flags = self.u32_at(4)?;
        let count = self.u32_at(16)?;
        let action = match flags & !(IRQ_NONE | IRQ_BOOL | IRQ_EVENTFD) {
            IRQ_MASK => IrqAction::Mask,
            IRQ_UNMASK => IrqAction::Unmask,
            IRQ_TRIGGER => IrqAction::Trigger,
            _ => return Err(self.flags(flags)),
        };
        let kind = flags & (IRQ_NONE | IRQ_BOOL | IRQ_EVENTFD);
        if kind != IRQ_EVENTFD {
            self.without_fds()?;
        }
        let data = match kind {
            IRQ_NONE => {
                self.exactly(FIXED)?;
                IrqData::None
            }
            IRQ_BOOL => {
                let bools = self.body.split_off(FIXED.min(self.body.len()));
                if u32::try_from(bools.len()) != Ok(count) {
                    return Err(self.length_of(FIXED.saturating_add(bools.len())));
                }
                IrqData::Bools(bools)
            }
            IRQ_EVENTFD => {
                self.exactly(FIXED)?;
                let fds = std::mem::take(&mut self.fds);
                if !fds.is_empty() && u32::try_from(fds.len()) != Ok(count) {
                    return Err(self.descriptors());
                }
                IrqData::Events(fds)
            }
            _ => return Err(self.flags(flags)),
        };
        Ok(SetIrqs {
            index: self.u32_at(8)?,
            start: self.u32_at(12)?,
            count,
            action,
            data,
        })
    }

    fn region_read(&self) -> Result<VfioUserRequest, RequestError> {
        self.exactly(16)?;
        Ok(VfioUserRequest::RegionRead {
            offset: self.u64_at(0)?,
            region: self.u32_at(8)?,
            count: self.count(12)?,
        })
    }

    fn region_write(&mut self) -> Result<VfioUserRequest, RequestError> {
        const FIXED: usize = 16;
        let (offset, region) = (self.u64_at(0)?, self.u32_at(8)?);
        let count = self.count(12)?;
        let data = self.body.split_off(FIXED.min(self.body.len()));
        if u32::try_from(data.len()) != Ok(count) {
            return Err(self.length_of(FIXED.saturating_add(data.len())));
        }
        Ok(VfioUserRequest::RegionWrite {
            region,
            offset,
            data,
        })
    }

    fn count(&self, at: usize) -> Result<u32, RequestError> {
        let count = self.u32_at(at)?;
        if count > MAX_DATA_BYTES {
            return Err(RequestError::TooMuchData { count });
        }
        Ok(count)
    }

    fn flags(&self, flags: u32) -> RequestError {
        RequestError::Flags {
            command: self.command,
            flags,
        }
    }
}
