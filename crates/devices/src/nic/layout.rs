//! Bit layout of descriptors and completions, little-endian. The formats of real adapters differ,
//! but the mapping layer sees the same: an address and a length for each buffer, and a completion
//! with the descriptor's number and the bytes written.
//!
//! A descriptor has a segment of 16 bytes for each buffer of a packet.
//!
//! | bytes | segment |
//! |---|---|
//! | 0-7 | address of the buffer |
//! | 8-11 | length in bytes; 0 if unused; bit 31 if inline |
//! | 12-15 | zero |
//!
//! A transmit descriptor of 128 bytes can hold a frame itself. Its first segment then has bit 31 of
//! the length, as in `mlx4_wqe_inline_seg`, and the frame follows the segment.
//!
//! | bytes | completion |
//! |---|---|
//! | 0-3 | bytes of the frame |
//! | 4-7 | bytes of it in the first buffer |
//! | 8-11 | number of the descriptor, free-running |
//! | 12-13 | zero |
//! | 14-15 | bit 0 phase, bits 1-15 status |

use ringfence_types::Iova;

use crate::ring::RawCompletion;

/// Bytes of a segment.
pub const SEGMENT_BYTES: usize = 16;

/// Maximum bytes of a descriptor: a segment and an inlined frame, rounded to a power of two.
pub(super) const DESCRIPTOR_BYTES: usize = 128;

/// Bit of a segment's length: the frame is in the descriptor.
const INLINE: u32 = 1 << 31;

/// Segment of a descriptor: one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorSegment {
    /// Address of the first byte.
    pub iova: Iova,
    /// Length in bytes.
    pub bytes: u32,
}

impl DescriptorSegment {
    /// An unused segment.
    pub const NONE: Self = Self {
        iova: Iova::ZERO,
        bytes: 0,
    };

    /// A segment that is followed by a frame of `bytes` bytes.
    pub const fn inline(bytes: u32) -> Self {
        Self {
            iova: Iova::ZERO,
            bytes: bytes | INLINE,
        }
    }

    /// Returns the length of the frame that follows the segment; `None` if the segment is a buffer.
    #[inline]
    pub const fn inline_bytes(&self) -> Option<u32> {
        match self.bytes & INLINE {
            0 => None,
            _ => Some(self.bytes & !INLINE),
        }
    }

    /// Encodes the segment.
    #[inline]
    pub fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut raw = [0; SEGMENT_BYTES];
        raw[..8].copy_from_slice(&self.iova.get().to_le_bytes());
        raw[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        raw
    }

    /// Decodes a segment. Accepts any bits.
    #[inline]
    pub fn decode(raw: &[u8; SEGMENT_BYTES]) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            iova: Iova::new(word as u64),
            bytes: (word >> 64) as u32,
        }
    }
}

/// Status of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum FrameStatus {
    /// The frame was transferred.
    Done = 0,
    /// The IOMMU blocked an access to a buffer.
    Stopped = 1,
    /// The buffers were too small, or longer than the device supports.
    Size = 2,
}

impl FrameStatus {
    /// Decodes a status; `None` if the number is unknown.
    pub const fn from_raw(raw: u16) -> Option<Self> {
        Some(match raw {
            0 => Self::Done,
            1 => Self::Stopped,
            2 => Self::Size,
            _ => return None,
        })
    }
}

/// Completion of a descriptor. The status is a number, because the device may write any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicCompletion {
    /// Bytes of the frame.
    pub bytes: u32,
    /// Bytes of it in the first buffer.
    pub first: u32,
    /// Number of the descriptor, free-running.
    pub descriptor: u32,
    /// A [`FrameStatus`], of 15 bits.
    pub status: u16,
}

impl NicCompletion {
    /// Encodes the completion without the phase.
    #[inline]
    pub fn encode(&self) -> RawCompletion {
        let word = u128::from(self.bytes)
            | u128::from(self.first) << 32
            | u128::from(self.descriptor) << 64
            | u128::from(self.status & 0x7fff) << 113;
        word.to_le_bytes()
    }

    /// Decodes a completion. Accepts any bits.
    #[inline]
    pub fn decode(raw: &RawCompletion) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            bytes: word as u32,
            first: (word >> 32) as u32,
            descriptor: (word >> 64) as u32,
            status: (word >> 113) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_at_the_offsets_of_the_tables() {
        let segment = DescriptorSegment {
            iova: Iova::new(0x1122_3344_5566_7788),
            bytes: 0x99aa_bbcc,
        };
        assert_eq!(
            segment.encode(),
            [
                0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0, 0, 0, 0
            ]
        );
        assert_eq!(DescriptorSegment::decode(&segment.encode()), segment);
        // Bit 31 of the length.
        assert_eq!(segment.inline_bytes(), Some(0x19aa_bbcc));
        let inline = DescriptorSegment::inline(104);
        let raw = [0, 0, 0, 0, 0, 0, 0, 0, 104, 0, 0, 0x80, 0, 0, 0, 0];
        assert_eq!((inline.encode(), inline.inline_bytes()), (raw, Some(104)));
        assert_eq!(DescriptorSegment::NONE.inline_bytes(), None);
        let completion = NicCompletion {
            bytes: 0x0102_0304,
            first: 0x0506_0708,
            descriptor: 0x090a_0b0c,
            status: 0x7ffe,
        };
        assert_eq!(
            completion.encode(),
            [
                4, 3, 2, 1, 8, 7, 6, 5, 0x0c, 0x0b, 0x0a, 9, 0, 0, 0xfc, 0xff
            ]
        );
        assert_eq!(NicCompletion::decode(&completion.encode()), completion);
        assert_eq!(NicCompletion::decode(&[0xff; 16]).status, 0x7fff);
        for status in [FrameStatus::Done, FrameStatus::Stopped, FrameStatus::Size] {
            assert_eq!(FrameStatus::from_raw(status as u16), Some(status));
        }
        assert_eq!(FrameStatus::from_raw(3), None);
    }
}
