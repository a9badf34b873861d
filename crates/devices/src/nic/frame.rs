//! Frames with a number and a checksum, which the receiver verifies.
//!
//! The headers are as long as Ethernet, IPv4 and TCP without options (14 + 20 + 20). After the
//! Ethernet header, they contain test data in little-endian order: flow (4 bytes), number in the
//! flow (8), bytes of data (4), checksum of all other bytes (8).

/// Length of the headers in bytes.
pub const FRAME_HEADER_BYTES: usize = 54;
/// Maximum length of the data: an MTU of 1500 less IP and TCP headers.
pub const MAX_BODY_BYTES: usize = 1460;

/// EtherType for local experiments (IEEE 802).
const ETHER_TYPE: [u8; 2] = [0x88, 0xb5];
const SUM_AT: usize = 30;

/// Header fields of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Number of the connection.
    pub flow: u32,
    /// Number of the frame in its connection.
    pub number: u64,
    /// Length of the data in bytes.
    pub body: u32,
}

/// Error in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame is shorter than its headers, or its length differs from the header field.
    #[error("a frame of {bytes} bytes differs from the length in its header")]
    Length {
        /// Length of the frame in bytes.
        bytes: usize,
    },
    /// The checksum does not match.
    #[error("the checksum of a frame does not match")]
    Checksum,
}

impl Frame {
    /// Writes the frame into `into`, replacing its content. The data are derived from flow and
    /// number.
    pub fn build(&self, into: &mut Vec<u8>) {
        into.clear();
        into.resize(FRAME_HEADER_BYTES + self.body as usize, 0);
        let (header, body) = into.split_at_mut(FRAME_HEADER_BYTES);
        header[12..14].copy_from_slice(&ETHER_TYPE);
        header[14..18].copy_from_slice(&self.flow.to_le_bytes());
        header[18..26].copy_from_slice(&self.number.to_le_bytes());
        header[26..30].copy_from_slice(&self.body.to_le_bytes());
        let mut word = mix(u64::from(self.flow) << 40 ^ self.number);
        for bytes in body.chunks_mut(8) {
            word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
        let sum = sum(into);
        into[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Returns the header fields of a frame after verifying its checksum.
    ///
    /// # Errors
    /// See [`FrameError`].
    pub fn verify(frame: &[u8]) -> Result<Self, FrameError> {
        let length = FrameError::Length { bytes: frame.len() };
        let header: &[u8; FRAME_HEADER_BYTES] = frame.first_chunk().ok_or(length)?;
        let number = |at: usize, bytes: usize| {
            let mut word = [0; 8];
            word[..bytes].copy_from_slice(&header[at..at + bytes]);
            u64::from_le_bytes(word)
        };
        let found = Self {
            flow: number(14, 4) as u32,
            number: number(18, 8),
            body: number(26, 4) as u32,
        };
        if frame.len() - FRAME_HEADER_BYTES != found.body as usize {
            return Err(length);
        }
        if sum(frame) != number(SUM_AT, 8) {
            return Err(FrameError::Checksum);
        }
        Ok(found)
    }
}

const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^ (word >> 29)
}

/// Returns a checksum of all bytes except itself. Each step is a bijection of the state, so it
/// detects every change of a single word.
fn sum(frame: &[u8]) -> u64 {
    let (front, rest) = frame.split_at(SUM_AT);
    let tail = &rest[8..];
    let mut state = frame.len() as u64;
    for part in [front, tail] {
        for bytes in part.chunks(8) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            state = (state ^ u64::from_le_bytes(word))
                .wrapping_mul(0x9fb2_1c65_1e98_df25)
                .rotate_left(23);
        }
    }
    mix(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_shows() {
        let mut frame = Vec::new();
        for body in [0, 1, 7, 8, 9, 1460] {
            let sent = Frame {
                flow: 3,
                number: 77,
                body,
            };
            sent.build(&mut frame);
            assert_eq!(frame.len(), FRAME_HEADER_BYTES + body as usize);
            assert_eq!(Frame::verify(&frame), Ok(sent));
            for at in 0..frame.len() {
                frame[at] ^= 0x40;
                assert!(Frame::verify(&frame).is_err(), "byte {at} of {body}");
                frame[at] ^= 0x40;
            }
            assert!(Frame::verify(&frame[..frame.len() - 1]).is_err());
        }
        assert_eq!(Frame::verify(&[]), Err(FrameError::Length { bytes: 0 }));
    }
}
