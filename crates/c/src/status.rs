//! Status codes and their texts.

use core::ffi::c_char;

use ringfence_dma::{AttachError, DetachError, MapReason};
use ringfence_iova::AllocError;
use ringfence_pgtable::{MapError, TableError, UnmapError};
use ringfence_softiommu::iotlb::{IotlbError, MessageError, RegionError};
use ringfence_softiommu::{DomainMapReason, IommuError};
use ringfence_types::InvalidationError;

/// The result of a call. The numbers never change their meaning; later versions add numbers.
/// After any result but `OK` and `WITHHELD`, the object is unchanged unless the function states
/// otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// The unmap succeeded. The layer keeps the buffer until the burst ends.
    Withheld = 1,
    /// A pointer argument is NULL.
    NullPointer = -1,
    /// The field `size` of a structure is not the structure's size.
    StructSize = -2,
    /// An argument has a value that the function does not accept.
    InvalidArgument = -3,
    /// An address or a length is not aligned.
    Misaligned = -4,
    /// A token names no live object: it was used up, or never existed.
    StaleToken = -5,
    /// Another call on the layer is in progress, in another thread or below this one. A destroy of
    /// an IOTLB returns it too.
    Busy = -6,
    /// Internal error. A layer or an IOTLB accepts no further calls but destroy.
    Internal = -7,
    /// The process is out of memory.
    OutOfMemory = -8,
    /// No free range of addresses fits the request.
    Exhausted = -16,
    /// The allocator must not reuse addresses before a flush of the domain.
    NeedsFlush = -17,
    /// The range is not allocated, or not with this start and length.
    NotAllocated = -18,
    /// A callback returned no frame, or one that the table cannot use.
    OutOfFrames = -32,
    /// A table lies outside the memory of the callback `address`.
    TableMemory = -33,
    /// A page of the range is already mapped.
    AlreadyMapped = -34,
    /// A page of the range is not mapped.
    NotMapped = -35,
    /// An address lies beyond the width of the table.
    BeyondWidth = -36,
    /// The range covers only a part of a larger page.
    WouldSplit = -37,
    /// A table entry has a value that the library never writes.
    Corrupt = -38,
    /// The invalidation failed. The device may still reach the memory.
    Invalidation = -48,
    /// The buffer is already unmapped, and waits for the end of its burst.
    AlreadyUnmapped = -49,
    /// The burst withholds its maximum of buffers. End it, and try again.
    BurstFull = -50,
    /// The device is not attached, or its domain was removed.
    NotAttached = -51,
    /// The device is already attached.
    AlreadyAttached = -52,
    /// The domain has live mappings.
    MappingsLive = -53,
    /// The limit of domains, readers, misses, regions or tables is reached.
    TooMany = -54,
    /// A map failed half-way, and undoing it failed too: the device may reach the memory.
    RollbackFailed = -55,
    /// The access is not permitted, or a part of it is not translated.
    Fault = -64,
    /// The message is malformed, or only a back-end sends it.
    BadMessage = -65,
    /// The memory lies outside the shared regions.
    NotShared = -66,
    /// The fault is not a missing translation or permission.
    NotAMiss = -67,
}

impl Status {
    fn text(self) -> &'static core::ffi::CStr {
        match self {
            Self::Ok => c"success",
            Self::Withheld => c"unmapped; the buffer is withheld until its burst ends",
            Self::NullPointer => c"a pointer argument is NULL",
            Self::StructSize => c"the size field of a structure is not the structure's size",
            Self::InvalidArgument => c"an argument has an invalid value",
            Self::Misaligned => c"an address or a length is not aligned",
            Self::StaleToken => c"the token names no object of this layer",
            Self::Busy => c"another call on the object is in progress",
            Self::Internal => c"internal error; destroy the object",
            Self::OutOfMemory => c"out of memory",
            Self::Exhausted => c"no free range of addresses fits the request",
            Self::NeedsFlush => c"the domain must be flushed before addresses are reused",
            Self::NotAllocated => c"no allocated range of that start and length",
            Self::OutOfFrames => c"out of usable frames for tables",
            Self::TableMemory => c"a table lies outside the memory of the callbacks",
            Self::AlreadyMapped => c"a page of the range is already mapped",
            Self::NotMapped => c"a page of the range is not mapped",
            Self::BeyondWidth => c"an address lies beyond the width of the table",
            Self::WouldSplit => c"the range covers only a part of a larger page",
            Self::Corrupt => c"a table entry is corrupt",
            Self::Invalidation => c"the invalidation failed; the device may still reach the memory",
            Self::AlreadyUnmapped => c"already unmapped; the buffer waits for the end of its burst",
            Self::BurstFull => c"the burst withholds its maximum of buffers; end it first",
            Self::NotAttached => c"the device is not attached",
            Self::AlreadyAttached => c"the device is already attached",
            Self::MappingsLive => c"the domain has live mappings",
            Self::TooMany => c"a limit on the number of objects is reached",
            Self::RollbackFailed => c"undoing a failed map failed; the device may reach the memory",
            Self::Fault => c"the access is not translated or not permitted",
            Self::BadMessage => c"the message is malformed or not for a back-end",
            Self::NotShared => c"the memory lies outside the shared regions",
            Self::NotAMiss => c"the fault is not a missing translation",
        }
    }

    /// All codes, for the lookup of a number.
    const ALL: [Self; 32] = [
        Self::Ok,
        Self::Withheld,
        Self::NullPointer,
        Self::StructSize,
        Self::InvalidArgument,
        Self::Misaligned,
        Self::StaleToken,
        Self::Busy,
        Self::Internal,
        Self::OutOfMemory,
        Self::Exhausted,
        Self::NeedsFlush,
        Self::NotAllocated,
        Self::OutOfFrames,
        Self::TableMemory,
        Self::AlreadyMapped,
        Self::NotMapped,
        Self::BeyondWidth,
        Self::WouldSplit,
        Self::Corrupt,
        Self::Invalidation,
        Self::AlreadyUnmapped,
        Self::BurstFull,
        Self::NotAttached,
        Self::AlreadyAttached,
        Self::MappingsLive,
        Self::TooMany,
        Self::RollbackFailed,
        Self::Fault,
        Self::BadMessage,
        Self::NotShared,
        Self::NotAMiss,
    ];
}

/// Returns the English text of a status. The string is static. A number that is no status has a
/// text too.
#[unsafe(no_mangle)]
pub extern "C" fn ringfence_status_text(status: i32) -> *const c_char {
    let known = Status::ALL
        .into_iter()
        .find(|known| *known as i32 == status);
    known.map_or(c"unknown status", Status::text).as_ptr()
}

impl From<AllocError> for Status {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::Exhausted { .. } => Self::Exhausted,
            AllocError::BadRequest { .. } => Self::InvalidArgument,
            AllocError::NeedsFlush => Self::NeedsFlush,
            AllocError::OutOfMemory => Self::OutOfMemory,
            _ => Self::Internal,
        }
    }
}

impl From<TableError> for Status {
    fn from(error: TableError) -> Self {
        match error {
            TableError::OutOfFrames | TableError::FrameSize => Self::OutOfFrames,
            TableError::Memory => Self::TableMemory,
            _ => Self::Internal,
        }
    }
}

impl From<MapError> for Status {
    fn from(error: MapError) -> Self {
        match error {
            MapError::Empty => Self::InvalidArgument,
            MapError::Misaligned => Self::Misaligned,
            MapError::BeyondWidth { .. } | MapError::PhysicalBeyondWidth { .. } => {
                Self::BeyondWidth
            }
            MapError::AlreadyMapped { .. } => Self::AlreadyMapped,
            MapError::OutOfFrames => Self::OutOfFrames,
            MapError::Corrupt { .. } => Self::Corrupt,
            _ => Self::Internal,
        }
    }
}

impl From<UnmapError> for Status {
    fn from(error: UnmapError) -> Self {
        match error {
            UnmapError::NotMapped { .. } => Self::NotMapped,
            UnmapError::BeyondWidth { .. } => Self::BeyondWidth,
            UnmapError::WouldSplit { .. } => Self::WouldSplit,
            UnmapError::Corrupt { .. } => Self::Corrupt,
            _ => Self::Internal,
        }
    }
}

impl From<InvalidationError> for Status {
    fn from(_: InvalidationError) -> Self {
        Self::Invalidation
    }
}

impl From<MapReason> for Status {
    fn from(reason: MapReason) -> Self {
        match reason {
            MapReason::Alloc(error) => error.into(),
            MapReason::Table(error) => error.into(),
            MapReason::Flush(error) => error.into(),
            MapReason::TooLarge => Self::InvalidArgument,
            MapReason::NotAttached => Self::NotAttached,
            MapReason::OutOfMemory => Self::OutOfMemory,
            MapReason::RollbackFailed(_) => Self::RollbackFailed,
            _ => Self::Internal,
        }
    }
}

impl<E: Into<Self>> From<AttachError<E>> for Status {
    fn from(error: AttachError<E>) -> Self {
        match error {
            AttachError::TooManyDomains => Self::TooMany,
            AttachError::Space(error) => error.into(),
            AttachError::BadMask => Self::InvalidArgument,
            AttachError::Attached(_) => Self::AlreadyAttached,
            AttachError::NoSuchDomain => Self::NotAttached,
            _ => Self::Internal,
        }
    }
}

impl From<DetachError> for Status {
    fn from(error: DetachError) -> Self {
        match error {
            DetachError::NotAttached(_) => Self::NotAttached,
            DetachError::MappingsLive(_) => Self::MappingsLive,
            DetachError::NotFlushed(..) => Self::Invalidation,
            _ => Self::Internal,
        }
    }
}

impl From<RegionError> for Status {
    fn from(error: RegionError) -> Self {
        match error {
            RegionError::TooMany { .. } => Self::TooMany,
            RegionError::Wraps { .. } | RegionError::Overlap { .. } => Self::InvalidArgument,
        }
    }
}

impl From<MessageError> for Status {
    fn from(_: MessageError) -> Self {
        Self::BadMessage
    }
}

impl From<IommuError> for Status {
    fn from(error: IommuError) -> Self {
        match error {
            IommuError::TooManyReaders(_) => Self::TooMany,
            IommuError::NoMemory(_) => Self::OutOfMemory,
            IommuError::ReadSectionOpen(_) => Self::Busy,
            _ => Self::Internal,
        }
    }
}

impl From<IotlbError> for Status {
    fn from(error: IotlbError) -> Self {
        match error {
            IotlbError::NotForUs => Self::BadMessage,
            IotlbError::NotShared { .. } => Self::NotShared,
            IotlbError::NoPage { .. } => Self::Misaligned,
            IotlbError::Map(error) => match error.reason {
                DomainMapReason::BeyondWidth => Self::BeyondWidth,
                DomainMapReason::OutOfTables => Self::TooMany,
                _ => Self::Internal,
            },
            IotlbError::NotAMiss(_) => Self::NotAMiss,
            IotlbError::TooManyMisses => Self::TooMany,
            IotlbError::NoMiss => Self::StaleToken,
            IotlbError::Unit(error) => error.into(),
            IotlbError::ReadSectionOpen(_) => Self::Busy,
            _ => Self::Internal,
        }
    }
}
