//! What can go wrong when devices are handed over.

use std::io;

use ringfence_pviommu::backend::RestoreError;
use ringfence_virtio_iommu::SnapshotError;

use crate::MemoryError;

/// Why a device stays where it is.
#[derive(Debug)]
pub enum HandOverBlocker {
    /// A device that keeps something which cannot be handed over: named.
    Keeps(&'static str),
    /// The host gave no further descriptor.
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

/// Why a stream is not taken. Nothing of it was used.
#[derive(Debug)]
#[non_exhaustive]
pub enum StateError {
    /// It does not begin as a stream does.
    NoStream,
    /// Of a version that is not known here.
    Version(u32),
    /// It ends too early.
    Truncated,
    /// Bytes follow its end.
    TrailingBytes(usize),
    /// Its bytes are not those that were written.
    Checksum,
    /// It speaks of more descriptors, or fewer, than came with it.
    Descriptors,
    /// A number that cannot be.
    BadValue {
        /// Of what.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// A descriptor of another kind than it has to be.
    NotA {
        /// What it has to be.
        what: &'static str,
    },
    /// A register that no driver could have brought there.
    Register {
        /// Which.
        what: &'static str,
    },
    /// The guest's memory.
    Memory(MemoryError),
    /// The IOMMU's mappings.
    Iommu(SnapshotError),
    /// The records of the para-virtual IOMMU's mappings.
    Records(RestoreError),
    /// What this process was told does not fit what is handed over: why.
    Unfit(&'static str),
    /// The host refuses something.
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

/// Why devices were not taken over. They are where they were.
#[derive(Debug)]
pub enum TakeOverError {
    /// Nobody answers at the control socket, or no longer.
    Io(io::Error),
    /// The process that has the devices is another user's.
    OtherUser {
        /// That user.
        user: u32,
    },
    /// It took longer than it may.
    TimeOut,
    /// The first process does not give them away: its reason.
    Refused(String),
    /// The first process had gone on with them by the time they were rebuilt here: its reason.
    Kept(String),
    /// What came is no message.
    Message,
    /// What it sent cannot be used.
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
