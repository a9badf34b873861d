//! Events: device accesses that the IOMMU blocked.

use ringfence_types::{Access, Iova};

use super::Devid;
use super::words::Reader;

/// Bytes of an event.
pub const EVENT_BYTES: usize = 24;

/// Reason why the IOMMU blocked an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventReason {
    /// The address is not mapped.
    NotMapped,
    /// The page is mapped, but not for this direction.
    Direction,
}

/// A blocked access ("Events").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event {
    /// The device that made the access.
    pub device: Devid,
    /// Read or write.
    pub access: Access,
    /// Reason why the access was blocked.
    pub reason: EventReason,
    /// Address of the first blocked byte.
    pub giova: Iova,
}

impl Event {
    /// Encodes the event for the driver's buffer.
    pub fn encode(&self) -> [u8; EVENT_BYTES] {
        let access: u32 = match self.access {
            Access::Read => 1,
            Access::Write => 2,
        };
        let reason: u32 = match self.reason {
            EventReason::NotMapped => 1,
            EventReason::Direction => 2,
        };
        let words = [
            self.device.get(),
            u64::from(access) | u64::from(reason) << 32,
            self.giova.get(),
        ];
        let mut bytes = [0; EVENT_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes an event; `None` if `access` or `reason` is reserved.
    pub fn decode(bytes: &[u8; EVENT_BYTES]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(Self {
            device: Devid::new(reader.le64()?),
            access: match reader.le32()? {
                1 => Access::Read,
                2 => Access::Write,
                _ => return None,
            },
            reason: match reader.le32()? {
                1 => EventReason::NotMapped,
                2 => EventReason::Direction,
                _ => return None,
            },
            giova: reader.iova()?,
        })
    }
}
