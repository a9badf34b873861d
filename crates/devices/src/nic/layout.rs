//! Descriptors and completions in bits, little-endian. The adapters' own formats differ; what the
//! mapping layer sees is the same: an address and a length for each buffer, and a completion that
//! names the descriptor and the bytes written.
//!
//! Descriptor: a segment of 16 bytes for each buffer of a packet.
//!
//! | bytes | segment |
//! |---|---|
//! | 0-7 | address of the buffer |
//! | 8-11 | its bytes; 0: not used |
//! | 12-15 | zero |
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

/// A buffer as a descriptor names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorSegment {
    /// First byte.
    pub iova: Iova,
    /// How many.
    pub bytes: u32,
}

impl DescriptorSegment {
    /// Not used.
    pub const NONE: Self = Self {
        iova: Iova::ZERO,
        bytes: 0,
    };

    /// Into bits.
    #[inline]
    pub fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut raw = [0; SEGMENT_BYTES];
        raw[..8].copy_from_slice(&self.iova.get().to_le_bytes());
        raw[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        raw
    }

    /// From bits, whatever they are.
    #[inline]
    pub fn decode(raw: &[u8; SEGMENT_BYTES]) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            iova: Iova::new(word as u64),
            bytes: (word >> 64) as u32,
        }
    }
}

/// How a frame ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum FrameStatus {
    /// It was moved.
    Done = 0,
    /// An access to a buffer was stopped.
    Stopped = 1,
    /// The buffers were too small, or larger than the device takes.
    Size = 2,
}

impl FrameStatus {
    /// From its number; `None` if it does not exist.
    pub const fn from_raw(raw: u16) -> Option<Self> {
        Some(match raw {
            0 => Self::Done,
            1 => Self::Stopped,
            2 => Self::Size,
            _ => return None,
        })
    }
}

/// What a device reports of one descriptor. The status is a number, because it may be none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicCompletion {
    /// Bytes of the frame.
    pub bytes: u32,
    /// Bytes of it in the first buffer.
    pub first: u32,
    /// The descriptor, free-running.
    pub descriptor: u32,
    /// A [`FrameStatus`], of 15 bits.
    pub status: u16,
}

impl NicCompletion {
    /// Into bits, without the phase.
    #[inline]
    pub fn encode(&self) -> RawCompletion {
        let word = u128::from(self.bytes)
            | u128::from(self.first) << 32
            | u128::from(self.descriptor) << 64
            | u128::from(self.status & 0x7fff) << 113;
        word.to_le_bytes()
    }

    /// From bits, whatever they are.
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
    fn bits_are_where_the_tables_say() {
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
