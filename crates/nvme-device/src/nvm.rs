//! Commands of the NVM command set (base specification, section 6).

use alloc::vec::Vec;

use crate::command::{Entry, NAMESPACE, NvmeCommand, Opcode, RawCommand};
use crate::controller::{CommandKind, Controller, Outcome};
use crate::identify::ALL_NAMESPACES;
use crate::prp::{gather, scatter, segments};
use crate::{BLOCK_BYTES, Medium, Memory, NvmeStatus};

const FLUSH: u8 = 0x00;
/// Force Unit Access (dword 12).
const FORCE_UNIT_ACCESS: u32 = 1 << 30;

/// Blocks that a command transfers.
struct Extent {
    block: u64,
    bytes: u64,
}

impl Controller {
    pub(crate) fn execute_nvm(
        &mut self,
        raw: &RawCommand,
        memory: &mut impl Memory,
        medium: &mut impl Medium,
    ) -> Outcome {
        let entry = Entry(raw);
        let opcode = Opcode::from_raw(entry.opcode());
        let (kind, result) = match (entry.opcode(), opcode) {
            (FLUSH, _) => (CommandKind::Flush, self.flush(entry, medium)),
            (_, Some(Opcode::Read)) => (
                CommandKind::Read,
                self.transfer(Opcode::Read, raw, memory, medium),
            ),
            (_, Some(Opcode::Write)) => (
                CommandKind::Write,
                self.transfer(Opcode::Write, raw, memory, medium),
            ),
            _ => (CommandKind::Other, Err(NvmeStatus::InvalidOpcode)),
        };
        Outcome::new(kind, result.map(|bytes| (0, bytes)))
    }

    fn flush(&self, entry: Entry<'_>, medium: &mut impl Medium) -> Result<u64, NvmeStatus> {
        if entry.is_unsupported() {
            return Err(NvmeStatus::InvalidField);
        }
        if !matches!(entry.namespace(), NAMESPACE | ALL_NAMESPACES) {
            return Err(NvmeStatus::InvalidNamespace);
        }
        medium.flush().map_err(|_| NvmeStatus::WriteFault)?;
        Ok(0)
    }

    /// Checks a read or a write, and returns its blocks.
    fn extent(&self, opcode: Opcode, raw: &RawCommand) -> Result<Extent, NvmeStatus> {
        let command = NvmeCommand::decode(raw);
        if Entry(raw).is_unsupported() {
            return Err(NvmeStatus::InvalidField);
        }
        if Entry(raw).namespace() != NAMESPACE {
            return Err(NvmeStatus::InvalidNamespace);
        }
        let blocks = u64::from(command.blocks_less_one) + 1;
        let bytes = blocks * BLOCK_BYTES;
        if bytes > self.config.transfer_bytes() {
            return Err(NvmeStatus::InvalidField);
        }
        let end = command.block.checked_add(blocks);
        if end.is_none_or(|end| end > self.config.blocks) {
            return Err(NvmeStatus::LbaOutOfRange);
        }
        if opcode == Opcode::Write && self.config.read_only {
            return Err(NvmeStatus::WriteProtected);
        }
        Ok(Extent {
            block: command.block,
            bytes,
        })
    }

    /// Executes a read or a write. Returns the number of bytes.
    fn transfer(
        &mut self,
        opcode: Opcode,
        raw: &RawCommand,
        memory: &mut impl Memory,
        medium: &mut impl Medium,
    ) -> Result<u64, NvmeStatus> {
        let Extent { block, bytes } = self.extent(opcode, raw)?;
        let entry = Entry(raw);
        let buffers = segments(memory, entry.prps(), bytes)?;
        memory.before_transfer(opcode, &buffers);
        let data = room(&mut self.buffer, bytes as usize);
        match opcode {
            Opcode::Read => {
                let read = medium.read(block, data);
                read.map_err(|_| NvmeStatus::UnrecoveredRead)?;
                scatter(memory, &buffers, data)?;
            }
            Opcode::Write => {
                gather(memory, &buffers, data)?;
                let written = medium.write(block, data);
                written.map_err(|_| NvmeStatus::WriteFault)?;
                let is_forced = entry.dword(12) & FORCE_UNIT_ACCESS != 0;
                if is_forced || !self.features.has_write_cache() {
                    medium.flush().map_err(|_| NvmeStatus::WriteFault)?;
                }
            }
        }
        Ok(bytes)
    }
}

/// Returns the first `bytes` bytes of `buffer` and grows it if necessary.
fn room(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    buffer.get_mut(..bytes).unwrap_or_default()
}
