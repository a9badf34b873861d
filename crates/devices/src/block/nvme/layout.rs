//! Bit layout of commands and completions.

use ringfence_types::{Iova, PageSize};

use crate::ring::RawCompletion;

/// Bytes of a submission queue entry.
pub const COMMAND_BYTES: usize = 64;

/// Maximum number of pages of a command: one in PRP1, and a list of one page in PRP2. Lists could
/// be chained, but drivers stay below that length.
pub const MAX_PAGES: usize = 1 + LIST_ENTRIES;

/// Entries of a PRP list of one page.
pub(super) const LIST_ENTRIES: usize = PageSize::Size4K.bytes() as usize / 8;

/// Supported commands of the NVM command set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Transfers from memory to the disk.
    Write = 0x01,
    /// Transfers from the disk to memory.
    Read = 0x02,
}

impl Opcode {
    /// Decodes an opcode; `None` if it is not supported.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            0x01 => Self::Write,
            0x02 => Self::Read,
            _ => return None,
        })
    }
}

/// Generic command status (base specification, "Status Code"), as far as this controller reports
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum NvmeStatus {
    /// The command completed without error.
    Success = 0x00,
    /// Invalid command opcode.
    InvalidOpcode = 0x01,
    /// Data transfer error: the IOMMU blocked an access.
    DataTransferError = 0x04,
    /// PRP offset invalid.
    PrpOffsetInvalid = 0x13,
    /// LBA out of range.
    LbaOutOfRange = 0x80,
}

/// A read or write command. The opcode is a number, because memory may hold any.
///
/// | dword | field |
/// |---|---|
/// | 0 | bits 7-0 opcode, 31-16 command identifier |
/// | 1 | namespace |
/// | 6-7 | PRP entry 1 |
/// | 8-9 | PRP entry 2 |
/// | 10-11 | starting LBA |
/// | 12 | bits 15-0 number of blocks less one |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeCommand {
    /// Opcode, unchecked; [`Opcode::from_raw`] decodes it.
    pub opcode: u8,
    /// Identifier of the command in its completion.
    pub id: u16,
    /// The first page, at any offset that is a multiple of 4 bytes.
    pub prp1: Iova,
    /// The second page, or the list of all pages except the first.
    pub prp2: Iova,
    /// Number of the first block (starting LBA).
    pub block: u64,
    /// Number of blocks less one.
    pub blocks_less_one: u16,
}

/// The only namespace.
const NAMESPACE: u32 = 1;

impl NvmeCommand {
    /// Encodes the command.
    pub fn encode(&self) -> [u8; COMMAND_BYTES] {
        let mut raw = [0; COMMAND_BYTES];
        raw[0] = self.opcode;
        raw[2..4].copy_from_slice(&self.id.to_le_bytes());
        raw[4..8].copy_from_slice(&NAMESPACE.to_le_bytes());
        raw[24..32].copy_from_slice(&self.prp1.get().to_le_bytes());
        raw[32..40].copy_from_slice(&self.prp2.get().to_le_bytes());
        raw[40..48].copy_from_slice(&self.block.to_le_bytes());
        raw[48..50].copy_from_slice(&self.blocks_less_one.to_le_bytes());
        raw
    }

    /// Decodes a command. Accepts any bits.
    pub fn decode(raw: &[u8; COMMAND_BYTES]) -> Self {
        let quad = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&raw[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            opcode: raw[0],
            id: u16::from_le_bytes([raw[2], raw[3]]),
            prp1: Iova::new(quad(24)),
            prp2: Iova::new(quad(32)),
            block: quad(40),
            blocks_less_one: u16::from_le_bytes([raw[48], raw[49]]),
        }
    }
}

/// A completion.
///
/// | dword | field |
/// |---|---|
/// | 2 | bits 15-0 submission queue head, 31-16 submission queue |
/// | 3 | bits 15-0 command identifier, 16 phase, 24-17 status code, 27-25 status code type |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeCompletion {
    /// Submission queue head: entries before it have been fetched.
    pub head: u16,
    /// Identifier of the command's submission queue.
    pub queue: u16,
    /// Identifier of the completed command.
    pub id: u16,
    /// Status code, type and the bits after them, 15 bits; 0 is success.
    pub status: u16,
}

impl NvmeCompletion {
    /// Encodes the completion without the phase.
    pub fn encode(&self) -> RawCompletion {
        let word = u128::from(self.head) << 64
            | u128::from(self.queue) << 80
            | u128::from(self.id) << 96
            | u128::from(self.status & 0x7fff) << 113;
        word.to_le_bytes()
    }

    /// Decodes a completion. Accepts any bits.
    pub fn decode(raw: &RawCompletion) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            head: (word >> 64) as u16,
            queue: (word >> 80) as u16,
            id: (word >> 96) as u16,
            status: (word >> 113) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_specification_has_them() {
        let command = NvmeCommand {
            opcode: Opcode::Read as u8,
            id: 0x1234,
            prp1: Iova::new(0x1111_2222_3333_4444),
            prp2: Iova::new(0x5555_6666_7777_8888),
            block: 0x9999_aaaa_bbbb_cccc,
            blocks_less_one: 0xddee,
        };
        let raw = command.encode();
        let dword = |n: usize| u32::from_le_bytes(raw[4 * n..4 * n + 4].try_into().unwrap());
        let dwords: Vec<_> = (0..16).map(dword).collect();
        assert_eq!(
            dwords,
            [
                0x1234_0002,
                1,
                0,
                0,
                0,
                0,
                0x3333_4444,
                0x1111_2222,
                0x7777_8888,
                0x5555_6666,
                0xbbbb_cccc,
                0x9999_aaaa,
                0xddee,
                0,
                0,
                0
            ]
        );
        assert_eq!(NvmeCommand::decode(&raw), command);
        let done = NvmeCompletion {
            head: 0x0102,
            queue: 0x0304,
            id: 0x0506,
            status: NvmeStatus::LbaOutOfRange as u16,
        };
        let raw = done.encode();
        assert_eq!(raw[8..], [2, 1, 4, 3, 6, 5, 0, 1]);
        assert_eq!(NvmeCompletion::decode(&raw), done);
    }
}
