//! Bit layout of commands and completions, and the length of a command.

use ringfence_types::PageSize;

pub use ringfence_nvme_device::{COMMAND_BYTES, NvmeCommand, NvmeCompletion, NvmeStatus, Opcode};

/// Maximum number of pages of a command: one in PRP1, and a list of one page in PRP2. Lists could
/// be chained, but drivers stay below that length.
pub const MAX_PAGES: usize = 1 + LIST_ENTRIES;

/// Entries of a PRP list of one page.
pub(super) const LIST_ENTRIES: usize = PageSize::Size4K.bytes() as usize / 8;
