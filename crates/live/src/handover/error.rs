//! Errors of a hand-over.

use std::io;

use ringfence_pviommu::backend::RestoreError;
use ringfence_virtio_iommu::SnapshotError;

use crate::MemoryError;

/// Reason for which a device cannot be handed over.
#[derive(Debug)]
pub enum HandOverBlocker {
    /// The device has state that cannot be handed over; the text names it.
    Keeps(&'static str),
    /// The host has no free descriptors.
    Host(io::Error),
}

impl std::fmt::Display for HandOverBlocker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Keeps(what) => write!(f, "{what} cannot be handed over"),
            Self::Host(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for HandOverBlocker {}

impl From<io::Error> for HandOverBlocker {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

/// Error of an invalid stream. No part of the stream was used.
#[derive(Debug)]
#[non_exhaustive]
pub enum StateError {
    /// The stream does not begin with the magic number.
    NoStream,
    /// The version is not supported.
    Version(u32),
    /// The stream ends too early.
    Truncated,
    /// This many bytes follow the end.
    TrailingBytes(usize),
    /// The checksum does not match.
    Checksum,
    /// The stream refers to more or fewer descriptors than came with it.
    Descriptors,
    /// A value is out of range.
    BadValue {
        /// Name of the value.
        what: &'static str,
        /// The invalid value.
        value: u64,
    },
    /// A descriptor has the wrong type.
    NotA {
        /// The required type.
        what: &'static str,
    },
    /// No driver could have produced this register value.
    Register {
        /// Name of the register.
        what: &'static str,
    },
    /// The guest's memory could not be mapped.
    Memory(MemoryError),
    /// The mappings of the virtio-iommu are invalid.
    Iommu(SnapshotError),
    /// The mapping records of the para-virtual IOMMU are invalid.
    Records(RestoreError),
    /// The state does not fit the options of this process, for the given reason.
    Unfit(&'static str),
    /// A system call failed.
    Host(io::Error),
}

impl std::fmt::Display for StateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoStream => f.write_str("not the state of devices"),
            Self::Version(version) => write!(f, "state of version {version}"),
            Self::Truncated => f.write_str("the state ends too early"),
            Self::TrailingBytes(bytes) => write!(f, "{bytes} bytes follow the state"),
            Self::Checksum => f.write_str("the state was changed on its way"),
            Self::Descriptors => f.write_str("descriptors are missing, or too many"),
            Self::BadValue { what, value } => write!(f, "{what}: {value} cannot be"),
            Self::NotA { what } => write!(f, "a descriptor is no {what}"),
            Self::Register { what } => write!(f, "{what}: no driver could have set that"),
            Self::Memory(error) => error.fmt(f),
            Self::Iommu(error) => error.fmt(f),
            Self::Records(error) => error.fmt(f),
            Self::Unfit(why) => f.write_str(why),
            Self::Host(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}

impl From<io::Error> for StateError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

/// Error of a take-over.
#[derive(Debug)]
pub enum TakeOverError {
    /// The source does not answer, or has closed the connection.
    Io(io::Error),
    /// Another user owns the process that serves the devices.
    OtherUser {
        /// ID of that user.
        user: u32,
    },
    /// A reply did not arrive in time.
    TimeOut,
    /// The source refused to hand the devices over, for the given reason.
    Refused(String),
    /// The source did not release the devices, for the given reason, and has resumed them.
    Kept(String),
    /// The source released the devices but cannot stop one of them, for the given reason. No
    /// process serves the devices.
    Orphaned(String),
    /// The source sent a malformed or unexpected message.
    Message,
    /// The state that the source sent is invalid.
    State(StateError),
}

impl std::fmt::Display for TakeOverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::OtherUser { user } => {
                write!(f, "the process that has the devices belongs to user {user}")
            }
            Self::TimeOut => f.write_str("no answer in time"),
            Self::Refused(why) => write!(f, "not handed over: {why}"),
            Self::Kept(why) => write!(f, "kept: {why}"),
            Self::Orphaned(why) => write!(f, "nobody has the devices: {why}"),
            Self::Message => f.write_str("what came is no message of a hand-over"),
            Self::State(error) => write!(f, "what was handed over: {error}"),
        }
    }
}

impl std::error::Error for TakeOverError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::State(error) => Some(error),
            _ => None,
        }
    }
}

impl From<StateError> for TakeOverError {
    fn from(error: StateError) -> Self {
        Self::State(error)
    }
}

impl From<io::Error> for TakeOverError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
