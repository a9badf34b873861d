//! Events of the kernel's page allocator.

use core::fmt;

use crate::printable::printable_line;

/// Name of a task (`comm`): the first 15 bytes of it, as Linux keeps them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TaskName {
    bytes: [u8; Self::BYTES],
    length: u8,
}

impl TaskName {
    /// Maximum length in bytes: TASK_COMM_LEN without its NUL.
    pub const BYTES: usize = 15;

    /// Keeps the first bytes of `name`.
    pub fn new(name: &[u8]) -> Self {
        let mut kept = Self::default();
        for (to, from) in kept.bytes.iter_mut().zip(name) {
            *to = *from;
            kept.length += 1;
        }
        kept
    }

    /// Returns the bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or(&[])
    }
}

impl fmt::Display for TaskName {
    /// Replaces invalid UTF-8 and escapes characters that control a terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable_line(&String::from_utf8_lossy(self.as_bytes())))
    }
}

impl fmt::Debug for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.as_bytes()))
    }
}

/// Number of a page frame, in pages of the kernel that recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelPfn(pub u64);

/// Change of a block of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageChange {
    /// `mm_page_alloc`: the allocator gave the block to a caller.
    Allocated,
    /// `mm_page_free`, `mm_page_free_batched`: the allocator got the block back.
    Freed,
}

/// An event of the kernel's page allocator: 2^`order` pages from `pfn` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageEvent {
    /// An allocation or a free.
    pub change: PageChange,
    /// The first page, below 2^48.
    pub pfn: KernelPfn,
    /// At most 20.
    pub order: u8,
    /// The task that the CPU ran; an interrupt has the name of the task that it interrupted.
    pub task: TaskName,
}
