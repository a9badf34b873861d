//! Format of a snapshot of a device, version 1.
//!
//! Little-endian, without padding. Counts precede their elements.
//!
//! | bytes | content |
//! |---|---|
//! | 8, 4 | the letters `RFVIOMMU`, the version |
//! | 8, 1, 8 | accepted features, field `bypass`, number of dropped events |
//! | 4, then 9 each | endpoints by id: id, state, domain (0 unless attached) |
//! | 4, then 9 each | domains by id: id, kind, number of mappings; each followed by its mappings |
//! | 28 each | mapping, by address: first and last address, physical address, flags |
//! | 4, then 14 each | waiting events, oldest first: endpoint, reason, access, address |
//!
//! States: 0 no access, 1 bypass, 2 attached. Kinds: 0 bypass, 1 mapped, 2 blocked, 3 mapped in
//! lazy mode. Reasons: 0 unknown endpoint, 1 unattached, 2 not mapped, 3 permission, 4 reserved
//! region, 5 blocked. Accesses: 0 read, 1 write.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Access, Iova};

use crate::store::Entry;
use crate::{
    DomainId, EndpointId, RequestError, SinkError, TranslationFault, TranslationFaultReason,
};

const MAGIC: [u8; 8] = *b"RFVIOMMU";
const VERSION: u32 = 1;

/// Reason why a snapshot was rejected. The device is unchanged, except after [`Sink`](Self::Sink):
/// [`restore`](crate::Device::restore) describes its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The device has domains or accepted features. Reset it first.
    NotReset,
    /// The header is not that of a snapshot.
    NoSnapshot,
    /// The snapshot has this unknown version.
    Version(u32),
    /// The snapshot is too short.
    Truncated,
    /// Bytes follow the end of the snapshot.
    TrailingBytes(usize),
    /// An invalid value of a field.
    BadValue {
        /// Name of the field in the message.
        field: &'static str,
        /// The value in the snapshot.
        value: u32,
    },
    /// Accepted features that this device does not offer.
    Features(u64),
    /// An endpoint or domain bypasses the IOMMU, but this device does not allow it.
    Bypass,
    /// The endpoints differ from the device's. The first that differs.
    Endpoint(EndpointId),
    /// A domain is in lazy mode, but this device does not offer that mode.
    Lazy(DomainId),
    /// A domain is out of order, duplicate, missing, or without an endpoint.
    Domain(DomainId),
    /// A domain has mappings although its kind allows none, or they are out of order.
    Mappings(DomainId),
    /// A domain or mapping that no request could have made on this device.
    Refused(RequestError),
    /// More events than the limit allows.
    Events(usize),
    /// Out of host memory.
    OutOfMemory,
    /// The sink refused an operation. If only its `commit` failed, the snapshot is restored.
    Sink(SinkError),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReset => f.write_str("the device was not reset"),
            Self::NoSnapshot => f.write_str("not a snapshot"),
            Self::Version(version) => write!(f, "unknown version {version}"),
            Self::Truncated => f.write_str("the snapshot is truncated"),
            Self::TrailingBytes(bytes) => write!(f, "{bytes} bytes follow the snapshot"),
            Self::BadValue { field, value } => write!(f, "invalid {field}: {value}"),
            Self::Features(features) => write!(f, "features {features:#x} are not offered"),
            Self::Bypass => f.write_str(
                "the snapshot bypasses the IOMMU, but the device does not \
            offer bypass",
            ),
            Self::Endpoint(endpoint) => write!(f, "endpoints differ at {endpoint}"),
            Self::Lazy(domain) => write!(
                f,
                "domain {domain} is in lazy mode, which the device does not offer"
            ),
            Self::Domain(domain) => write!(
                f,
                "domain {domain} is out of order, duplicate, missing, or without an endpoint"
            ),
            Self::Mappings(domain) => write!(
                f,
                "mappings of domain {domain} are out of order, or its kind allows none"
            ),
            Self::Refused(error) => error.fmt(f),
            Self::Events(events) => write!(f, "more events ({events}) than the limit"),
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::Sink(error) => write!(f, "the sink: {error}"),
        }
    }
}

impl core::error::Error for SnapshotError {}

impl From<RequestError> for SnapshotError {
    fn from(error: RequestError) -> Self {
        Self::Refused(error)
    }
}

pub(crate) fn bad_value(field: &'static str, value: u8) -> SnapshotError {
    let value = value.into();
    SnapshotError::BadValue { field, value }
}

/// Encoder of a snapshot.
#[derive(Debug)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn new() -> Self {
        let mut writer = Self(Vec::new());
        writer.0.extend(MAGIC);
        writer.u32(VERSION);
        writer
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Appends a count. The device's limits keep it below 2^32.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    pub(crate) fn entry(&mut self, entry: &Entry) {
        self.u64(entry.start);
        self.u64(entry.last);
        self.u64(entry.physical);
        self.u32(entry.flags);
    }

    pub(crate) fn event(&mut self, denied: &TranslationFault) {
        self.u32(denied.endpoint.get());
        self.u8(match denied.reason {
            TranslationFaultReason::NoEndpoint => 0,
            TranslationFaultReason::Unattached => 1,
            TranslationFaultReason::NotMapped => 2,
            TranslationFaultReason::Permission => 3,
            TranslationFaultReason::Reserved => 4,
            TranslationFaultReason::Blocked => 5,
        });
        self.u8(match denied.access {
            Access::Read => 0,
            Access::Write => 1,
        });
        self.u64(denied.iova.get());
    }
}

/// Decoder of a snapshot.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Checks the header and returns a decoder of the rest.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, SnapshotError> {
        let Some((MAGIC, rest)) = bytes
            .split_first_chunk()
            .map(|(magic, rest)| (*magic, rest))
        else {
            return Err(SnapshotError::NoSnapshot);
        };
        let mut reader = Self(rest);
        match reader.u32()? {
            VERSION => Ok(reader),
            version => Err(SnapshotError::Version(version)),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SnapshotError::Truncated)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, SnapshotError> {
        self.take().map(|[value]| value)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(crate) fn count(&mut self) -> Result<usize, SnapshotError> {
        self.u32().map(|count| count as usize)
    }

    /// Reads a byte that is 0 or 1, the value of `field`.
    pub(crate) fn flag(&mut self, field: &'static str) -> Result<bool, SnapshotError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(bad_value(field, value)),
        }
    }

    pub(crate) fn entry(&mut self) -> Result<Entry, SnapshotError> {
        Ok(Entry {
            start: self.u64()?,
            last: self.u64()?,
            physical: self.u64()?,
            flags: self.u32()?,
        })
    }

    pub(crate) fn event(&mut self) -> Result<TranslationFault, SnapshotError> {
        Ok(TranslationFault {
            endpoint: EndpointId::new(self.u32()?),
            reason: match self.u8()? {
                0 => TranslationFaultReason::NoEndpoint,
                1 => TranslationFaultReason::Unattached,
                2 => TranslationFaultReason::NotMapped,
                3 => TranslationFaultReason::Permission,
                4 => TranslationFaultReason::Reserved,
                5 => TranslationFaultReason::Blocked,
                value => return Err(bad_value("reason of an event", value)),
            },
            access: if self.flag("access of an event")? {
                Access::Write
            } else {
                Access::Read
            },
            iova: Iova::new(self.u64()?),
        })
    }

    pub(crate) fn end(&self) -> Result<(), SnapshotError> {
        match self.0.len() {
            0 => Ok(()),
            bytes => Err(SnapshotError::TrailingBytes(bytes)),
        }
    }
}
