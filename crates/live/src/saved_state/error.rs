//! Reasons why a state cannot be saved or restored.

use std::io;

use ringfence_pviommu::backend::RestoreError;
use ringfence_types::IovaRange;
use ringfence_virtio_iommu::SnapshotError;

use crate::MemoryError;

/// Reason for which a device cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub enum HandOverBlocker {
    /// The device has state that cannot be handed over; the text names it.
    #[error("cannot hand over {0}")]
    Unsupported(&'static str),
    /// A killed process that is stuck in the kernel still has memory of a refused unmap.
    #[error(
        "the unmap of {range} is incomplete: a killed sandbox process is stuck in the kernel; \
         retry when it has exited"
    )]
    UnmapPending {
        /// First such range of the client.
        range: IovaRange,
    },
    /// The killed process of a sandboxed disk is stuck in the kernel.
    #[error("the killed sandbox process is stuck in the kernel; retry when it has exited")]
    ProcessStuck,
    /// The host has no free descriptors.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Error of an invalid stream. No part of the stream was used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The stream does not begin with the magic number.
    #[error("not a hand-over stream")]
    NoStream,
    /// The version is not supported.
    #[error("unsupported stream version {0}")]
    Version(u32),
    /// The stream ends too early.
    #[error("truncated stream")]
    Truncated,
    /// This many bytes follow the end.
    #[error("{0} bytes follow the end of the stream")]
    TrailingBytes(usize),
    /// The checksum does not match.
    #[error("wrong checksum")]
    Checksum,
    /// The stream refers to more or fewer descriptors than came with it.
    #[error("too few or too many descriptors")]
    Descriptors,
    /// A value is out of range.
    #[error("invalid {what}: {value}")]
    BadValue {
        /// Name of the value.
        what: &'static str,
        /// The invalid value.
        value: u64,
    },
    /// A descriptor has the wrong type.
    #[error("a descriptor is not a {what}")]
    NotA {
        /// The required type.
        what: &'static str,
    },
    /// No driver could have produced this register value.
    #[error("invalid {what}: no driver can set this value")]
    Register {
        /// Name of the register.
        what: &'static str,
    },
    /// The guest's memory could not be mapped.
    #[error(transparent)]
    Memory(MemoryError),
    /// The mappings of the virtio-iommu are invalid.
    #[error(transparent)]
    Iommu(SnapshotError),
    /// The mapping records of the para-virtual IOMMU are invalid.
    #[error(transparent)]
    Records(RestoreError),
    /// The state does not fit the options of this process, for the given reason.
    #[error("{0}")]
    Unfit(&'static str),
    /// A system call failed.
    #[error(transparent)]
    Host(#[from] io::Error),
}
