//! Bit layout of submission and completion queue entries (base specification, sections 4.2 and
//! 4.6).

use ringfence_types::Iova;

/// Bytes of a submission queue entry.
pub const COMMAND_BYTES: usize = 64;

/// Bytes of a completion queue entry.
pub const COMPLETION_BYTES: usize = 16;

/// A submission queue entry in memory.
pub type RawCommand = [u8; COMMAND_BYTES];
/// A completion queue entry in memory.
pub type RawCompletion = [u8; COMPLETION_BYTES];

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
pub(crate) const NAMESPACE: u32 = 1;

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

/// Fields that all commands have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a>(pub(crate) &'a RawCommand);

impl Entry<'_> {
    pub(crate) fn dword(&self, number: usize) -> u32 {
        let Self(raw) = self;
        let bytes = raw.as_chunks().0.get(number).copied();
        u32::from_le_bytes(bytes.unwrap_or_default())
    }

    pub(crate) fn opcode(&self) -> u8 {
        let Self(raw) = self;
        raw[0]
    }

    /// Returns true if the command is fused, or describes its data with SGLs (dword 0, bits 9:8 and
    /// 15:14). The controller supports neither.
    pub(crate) fn is_unsupported(&self) -> bool {
        let Self(raw) = self;
        raw[1] & 0xc3 != 0
    }

    pub(crate) fn id(&self) -> u16 {
        let Self(raw) = self;
        u16::from_le_bytes([raw[2], raw[3]])
    }

    pub(crate) fn namespace(&self) -> u32 {
        self.dword(1)
    }

    pub(crate) fn prps(&self) -> [Iova; 2] {
        let quad = |low: usize| u64::from(self.dword(low + 1)) << 32 | u64::from(self.dword(low));
        [Iova::new(quad(6)), Iova::new(quad(8))]
    }
}

/// A completion.
///
/// | dword | field |
/// |---|---|
/// | 0 | result of the command |
/// | 2 | bits 15-0 submission queue head, 31-16 submission queue |
/// | 3 | bits 15-0 command identifier, 16 phase, 24-17 status code, 27-25 status code type |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeCompletion {
    /// Result of the command; 0 for most.
    pub result: u32,
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
    /// Encodes the completion, with the phase 0.
    pub fn encode(&self) -> RawCompletion {
        let word = u128::from(self.result)
            | u128::from(self.head) << 64
            | u128::from(self.queue) << 80
            | u128::from(self.id) << 96
            | u128::from(self.status & 0x7fff) << 113;
        word.to_le_bytes()
    }

    /// Decodes a completion. Accepts any bits.
    pub fn decode(raw: &RawCompletion) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            result: word as u32,
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
    use crate::NvmeStatus;

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
        let dwords: [u32; 16] = core::array::from_fn(dword);
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
            result: 0x0c0b_0a09,
            head: 0x0102,
            queue: 0x0304,
            id: 0x0506,
            status: NvmeStatus::LbaOutOfRange as u16,
        };
        let raw = done.encode();
        assert_eq!(raw, [9, 10, 11, 12, 0, 0, 0, 0, 2, 1, 4, 3, 6, 5, 0, 1]);
        assert_eq!(NvmeCompletion::decode(&raw), done);
    }
}
