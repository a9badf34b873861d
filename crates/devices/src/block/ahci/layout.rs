//! Bit layout of command headers, command tables and frame information structures.

use ringfence_types::Iova;

use crate::block::Operation;

/// Command slots of a port.
pub const SLOTS: u32 = 32;
/// Bytes of a command header (section 4.2.2).
pub const HEADER_BYTES: usize = 32;
/// Bytes of an entry of the physical region descriptor table (section 4.2.3.3).
pub const REGION_BYTES: usize = 16;
/// Offset of the region table in a command table.
pub(super) const REGIONS_AT: usize = 0x80;
/// Maximum number of regions of a command, which fill a command table of 1 KiB.
pub const MAX_PAGES: usize = (TABLE_BYTES - REGIONS_AT) / REGION_BYTES;
/// Bytes of a command table with its regions.
pub const TABLE_BYTES: usize = 1024;

/// Offset of the Set Device Bits FIS in the received FIS area (section 4.2.1).
pub(super) const SET_DEVICE_BITS_AT: u64 = 0x58;
/// Bytes of the received FIS area.
pub(super) const RECEIVED_BYTES: u32 = 256;

/// READ and WRITE FPDMA QUEUED (ATA command set).
const READ_QUEUED: u8 = 0x60;
const WRITE_QUEUED: u8 = 0x61;

/// A command header.
///
/// | dword | field |
/// |---|---|
/// | 0 | bits 4-0 length of the command FIS in dwords, 6 write, 31-16 regions |
/// | 1 | bytes transferred, written by the device; not for queued commands |
/// | 2-3 | command table, aligned to 128 bytes |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandHeader {
    /// Direction of the data.
    pub operation: Operation,
    /// Entries of the region table.
    pub regions: u16,
    /// The command table.
    pub table: Iova,
}

impl CommandHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        const FIS_DWORDS: u32 = Fis::BYTES as u32 / 4;
        let write = match self.operation {
            Operation::Read => 0,
            Operation::Write => 1 << 6,
        };
        let mut raw = [0; HEADER_BYTES];
        let flags = FIS_DWORDS | write | u32::from(self.regions) << 16;
        raw[..4].copy_from_slice(&flags.to_le_bytes());
        raw[8..16].copy_from_slice(&self.table.get().to_le_bytes());
        raw
    }

    /// Decodes a header. Accepts any bits.
    pub fn decode(raw: &[u8; HEADER_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&raw[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let flags = word(0);
        Self {
            operation: if flags & 1 << 6 == 0 {
                Operation::Read
            } else {
                Operation::Write
            },
            regions: (flags >> 16) as u16,
            table: Iova::new(word(8)).align_down(128),
        }
    }
}

/// An entry of the region table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhysicalRegion {
    /// Address of the first byte; even.
    pub base: Iova,
    /// Length in bytes; even, from 2 to 4 MiB.
    pub bytes: u32,
}

impl PhysicalRegion {
    /// Encodes the region. The count is stored less one.
    pub fn encode(&self) -> [u8; REGION_BYTES] {
        let mut raw = [0; REGION_BYTES];
        raw[..8].copy_from_slice(&self.base.get().to_le_bytes());
        raw[12..].copy_from_slice(&(self.bytes.wrapping_sub(1) & 0x3f_ffff).to_le_bytes());
        raw
    }

    /// Decodes a region. Accepts any bits.
    pub fn decode(raw: &[u8; REGION_BYTES]) -> Self {
        let word = u128::from_le_bytes(*raw);
        Self {
            base: Iova::new(word as u64).align_down(2),
            bytes: ((word >> 96) as u32 & 0x3f_ffff) + 1,
        }
    }
}

/// The command FIS of a queued read or write (register, host to device).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fis {
    /// Read or write.
    pub operation: Operation,
    /// First block, 48 bits.
    pub block: u64,
    /// Number of blocks, 1 to 65536.
    pub blocks: u32,
    /// Number of the slot.
    pub tag: u8,
}

impl Fis {
    /// Length of the FIS in bytes.
    pub const BYTES: usize = 20;
    /// Register FIS, host to device.
    const TYPE: u8 = 0x27;

    /// Encodes the FIS.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let block = self.block.to_le_bytes();
        // 65536 blocks are encoded as 0.
        let blocks = (self.blocks as u16).to_le_bytes();
        let mut raw = [0; Self::BYTES];
        raw[0] = Self::TYPE;
        raw[1] = 0x80;
        raw[2] = match self.operation {
            Operation::Read => READ_QUEUED,
            Operation::Write => WRITE_QUEUED,
        };
        raw[3] = blocks[0];
        raw[4..7].copy_from_slice(&block[..3]);
        raw[7] = 0x40;
        raw[8..11].copy_from_slice(&block[3..6]);
        raw[11] = blocks[1];
        raw[12] = self.tag << 3;
        raw
    }

    /// Decodes a FIS; `None` if it is no queued read or write.
    pub fn decode(raw: &[u8; Self::BYTES]) -> Option<Self> {
        if raw[0] != Self::TYPE || raw[1] & 0x80 == 0 {
            return None;
        }
        let operation = match raw[2] {
            READ_QUEUED => Operation::Read,
            WRITE_QUEUED => Operation::Write,
            _ => return None,
        };
        let mut block = [0; 8];
        block[..3].copy_from_slice(&raw[4..7]);
        block[3..6].copy_from_slice(&raw[8..11]);
        let blocks = u32::from(u16::from_le_bytes([raw[3], raw[11]]));
        Some(Self {
            operation,
            block: u64::from_le_bytes(block),
            blocks: if blocks == 0 { 1 << 16 } else { blocks },
            tag: raw[12] >> 3,
        })
    }
}

/// Encodes the Set Device Bits FIS that reports completed commands.
pub(super) fn set_device_bits(done: u32, failed: bool) -> [u8; 8] {
    const TYPE: u8 = 0xa1;
    const INTERRUPT: u8 = 1 << 6;
    const READY: u8 = 0x40;
    let mut raw = [TYPE, INTERRUPT, READY | u8::from(failed), 0, 0, 0, 0, 0];
    raw[4..].copy_from_slice(&done.to_le_bytes());
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_specification_has_them() {
        let header = CommandHeader {
            operation: Operation::Write,
            regions: 0x1234,
            table: Iova::new(0x1122_3344_5566_7780),
        };
        let raw = header.encode();
        assert_eq!(raw[..4], [0x45, 0, 0x34, 0x12]);
        assert_eq!(raw[8..16], 0x1122_3344_5566_7780_u64.to_le_bytes());
        assert_eq!(CommandHeader::decode(&raw), header);

        let region = PhysicalRegion {
            base: Iova::new(0x8899_aabb_ccdd_eef0),
            bytes: 4 << 20,
        };
        let raw = region.encode();
        assert_eq!(raw[8..], [0, 0, 0, 0, 0xff, 0xff, 0x3f, 0]);
        assert_eq!(PhysicalRegion::decode(&raw), region);

        for (operation, blocks) in [(Operation::Read, 8), (Operation::Write, 1 << 16)] {
            let fis = Fis {
                operation,
                block: 0x0605_0403_0201,
                blocks,
                tag: 31,
            };
            let raw = fis.encode();
            assert_eq!((raw[0], raw[12]), (0x27, 0xf8));
            assert_eq!((&raw[4..7], &raw[8..11]), (&[1, 2, 3][..], &[4, 5, 6][..]));
            assert_eq!(Fis::decode(&raw), Some(fis));
        }
        assert_eq!(Fis::decode(&[0; 20]), None);
        assert_eq!(MAX_PAGES, 56);
    }
}
