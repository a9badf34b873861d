//! Page requests and page group responses (PCI Express Base Specification, section 10.4; VT-d
//! specification, section 7.4.1 "Page request descriptor").

use ringfence_types::{Permissions, Pfn, RequesterId};

/// Type of a page request descriptor.
const TYPE: u64 = 0x01;
const TYPE_MASK: u64 = 0xff;
/// RID: requester ID, bits 16..=31 of the low word.
const RID_SHIFT: u32 = 16;
/// R, W and L: bits 0, 1 and 2 of the high word. R and W are also bits 0 and 1 of [`Permissions`].
const ACCESS: u64 = 0b11;
const LAST: u64 = 1 << 2;
/// PRG index, bits 3..=11 of the high word.
const PRG_SHIFT: u32 = 3;
/// Page address, bits 12..=63 of the high word.
const PAGE_SHIFT: u32 = 12;

/// Index of a page request group (PRG), 9 bits. The device chooses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrgIndex(u16);

impl PrgIndex {
    /// Number of indices.
    pub const COUNT: u16 = 512;

    /// Creates an index; `None` above 511.
    pub const fn new(raw: u16) -> Option<Self> {
        if raw >= Self::COUNT {
            return None;
        }
        Some(Self(raw))
    }

    /// Returns the number of the index.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// Position of a page request in its group (the L field).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupPosition {
    /// More requests of the group follow.
    More,
    /// The last request of the group. The group has one response, after this request.
    Last,
}

/// A device's request to make a page accessible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRequest {
    /// The requester, which gets the response.
    pub device: RequesterId,
    /// Page that the device found not mapped.
    pub page: Pfn,
    /// The requested permissions (R and W).
    pub permissions: Permissions,
    /// Group that the response names (PRG index).
    pub group: PrgIndex,
    /// Position in the group.
    pub position: GroupPosition,
}

impl PageRequest {
    /// Encodes the request as the descriptor in the page request queue, low word first.
    pub const fn encode(&self) -> [u64; 2] {
        let last = match self.position {
            GroupPosition::More => 0,
            GroupPosition::Last => LAST,
        };
        [
            TYPE | (self.device.get() as u64) << RID_SHIFT,
            self.permissions.bits()
                | last
                | (self.group.get() as u64) << PRG_SHIFT
                | self.page.get() << PAGE_SHIFT,
        ]
    }

    /// Decodes a descriptor; `None` if it has another type or requests no access.
    pub const fn decode([low, high]: [u64; 2]) -> Option<Self> {
        if low & TYPE_MASK != TYPE {
            return None;
        }
        let Some(permissions) = Permissions::from_bits(high & ACCESS) else {
            return None;
        };
        Some(Self {
            device: RequesterId::new((low >> RID_SHIFT) as u16),
            page: Pfn::new(high >> PAGE_SHIFT),
            permissions,
            group: PrgIndex((high >> PRG_SHIFT) as u16 % PrgIndex::COUNT),
            position: if high & LAST == 0 {
                GroupPosition::More
            } else {
                GroupPosition::Last
            },
        })
    }
}

/// Result of a page request group (Response Code).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResponseCode {
    /// All requests of the group were handled. The device may try again.
    Success,
    /// A page does not exist or the device may not access it.
    InvalidRequest,
    /// An error that is not related to the request. The device must disable page requests.
    ResponseFailure,
}

impl ResponseCode {
    /// Decodes the four bits of the field. A reserved code counts as a failure, as the
    /// specification requires.
    pub const fn decode(bits: u8) -> Self {
        match bits {
            0b0000 => Self::Success,
            0b0001 => Self::InvalidRequest,
            _ => Self::ResponseFailure,
        }
    }

    /// Returns the four bits of the field.
    pub const fn encode(self) -> u8 {
        match self {
            Self::Success => 0b0000,
            Self::InvalidRequest => 0b0001,
            Self::ResponseFailure => 0b1111,
        }
    }
}

/// The response to a page request group, which the unit sends to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageGroupResponse {
    /// The device that made the group.
    pub device: RequesterId,
    /// Index that the device chose for the group.
    pub group: PrgIndex,
    /// Worst result of the requests of the group.
    pub code: ResponseCode,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bits() {
        for (device, page, permissions, group, position, words) in [
            (
                0x3afd,
                0x1_2345_6789,
                Permissions::READ,
                0,
                GroupPosition::More,
                [0x3afd_0001, 0x1234_5678_9001],
            ),
            (
                0x0100,
                Pfn::MAX.get(),
                Permissions::WRITE,
                511,
                GroupPosition::Last,
                [0x0100_0001, u64::MAX - 1],
            ),
            (
                0xffff,
                0,
                Permissions::READ_WRITE,
                1,
                GroupPosition::Last,
                [0xffff_0001, 0xf],
            ),
        ] {
            let request = PageRequest {
                device: RequesterId::new(device),
                page: Pfn::new(page),
                permissions,
                group: PrgIndex::new(group).unwrap(),
                position,
            };
            assert_eq!(request.encode(), words);
            assert_eq!(PageRequest::decode(words), Some(request));
        }
        assert_eq!(PageRequest::decode([2, 1]), None);
        // R = W = 0 requests nothing.
        assert_eq!(PageRequest::decode([1, 0x1004]), None);
        assert_eq!(PrgIndex::new(512), None);
    }

    #[test]
    fn reserved_response_codes_are_failures() {
        for bits in 0..=u8::MAX {
            let code = ResponseCode::decode(bits);
            match bits {
                0 => assert_eq!(code, ResponseCode::Success),
                1 => assert_eq!(code, ResponseCode::InvalidRequest),
                _ => assert_eq!(code, ResponseCode::ResponseFailure),
            }
            assert_eq!(ResponseCode::decode(code.encode()), code);
        }
    }
}
