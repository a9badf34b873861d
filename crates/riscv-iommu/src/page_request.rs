//! Records of the page-request queue (specification 1.0, section "Page-Request-Queue").

use ringfence_types::{Iova, RequesterId};

use crate::queue::Loss;

const PV: u64 = 1 << 32;
const PRIV: u64 = 1 << 33;
const EXEC: u64 = 1 << 34;
/// Reserved bits of the first doubleword: 0 to 11 and 35 to 39.
const RESERVED: u64 = 0xf8_0000_0fff;
const R: u64 = 1;
const W: u64 = 1 << 1;
const L: u64 = 1 << 2;

/// A decoded page request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRequest {
    /// Device id: the requester ID in bits 0 to 15, the segment above.
    pub device_id: u32,
    /// Process id, if the message had one.
    pub process: Option<u32>,
    /// The device asks for supervisor privilege.
    pub privileged: bool,
    /// The device asks for the right to execute.
    pub execute: bool,
    /// The device asks for the right to read (R).
    pub read: bool,
    /// The device asks for the right to write (W).
    pub write: bool,
    /// The last request of its group (L). The device waits for a response.
    pub last: bool,
    /// Page request group index, 9 bits.
    pub group: u16,
    /// Address of the page.
    pub page: Iova,
    /// The two doublewords.
    pub raw: [u64; 2],
}

impl PageRequest {
    /// Decodes a record. `None` if a reserved bit is set.
    pub const fn decode(raw: [u64; 2]) -> Option<Self> {
        let [header, payload] = raw;
        if header & RESERVED != 0 {
            return None;
        }
        let process = if header & PV != 0 {
            Some((header >> 12 & 0xf_ffff) as u32)
        } else {
            None
        };
        Some(Self {
            device_id: (header >> 40) as u32,
            process,
            privileged: header & PRIV != 0,
            execute: header & EXEC != 0,
            read: payload & R != 0,
            write: payload & W != 0,
            last: payload & L != 0,
            group: (payload >> 3 & 0x1ff) as u16,
            page: Iova::new(payload & !0xfff),
            raw,
        })
    }

    /// Returns the requester ID of the device.
    pub const fn requester(&self) -> RequesterId {
        RequesterId::new(self.device_id as u16)
    }

    /// Returns true if the message is a "Stop Marker": the device has stopped using the process id,
    /// and expects no response.
    pub const fn is_stop_marker(&self) -> bool {
        !self.read && !self.write && self.last
    }
}

/// Response to a group of page requests (PCI Express Base Specification, "Page Request Group
/// Response Message", response codes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PageResponse {
    /// The pages are present.
    Success = 0b0000,
    /// A page does not exist, or the device may not access it.
    InvalidRequest = 0b0001,
    /// The device must not send further page requests.
    Failure = 0b1111,
}

/// An entry of the page-request queue, or the loss of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageRequestEvent {
    /// A page request or a stop marker.
    Request(PageRequest),
    /// A record with a reserved bit set.
    Malformed([u64; 2]),
    /// The unit discarded requests. Groups may be incomplete.
    Lost(Loss),
}
