//! The calls that the supervisor lets through, as registers.

use std::os::fd::RawFd;

use ringfence_types::Permissions;

use super::windows::Window;

/// Largest window whose pages are all mapped at once.
const POPULATED_BYTES: u64 = 256 * 1024;

/// A system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: libc::c_long,
    /// Its arguments.
    pub arguments: [u64; 6],
}

impl Call {
    /// The bytes of the file `number` from `offset` on appear in `window`, with these rights and no others. A place that is taken is an error.
    ///
    /// A page of this architecture that can be written can be read: whoever may only write is held to that by the table alone.
    pub(super) fn grant(
        window: Window,
        number: RawFd,
        offset: u64,
        permissions: Permissions,
    ) -> Self {
        let write = permissions.allows(ringfence_types::Access::Write);
        let rights = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let mut flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // A fault at each first access is dearer; but who maps gigabytes will not touch them all, and it must not take long.
        if window.bytes <= POPULATED_BYTES {
            flags |= libc::MAP_POPULATE;
        }
        Self {
            number: libc::SYS_mmap,
            arguments: [
                window.start,
                window.bytes,
                word(rights),
                word(flags),
                word(number),
                offset,
            ],
        }
    }

    /// Nothing is in `window` any more.
    pub(super) fn revoke(window: Window) -> Self {
        Self {
            number: libc::SYS_munmap,
            arguments: [window.start, window.bytes, 0, 0, 0, 0],
        }
    }

    /// Whether the registers that the kernel looks at are the same.
    pub(super) fn is(&self, other: &Self) -> bool {
        let used = if self.number == libc::SYS_munmap {
            2
        } else {
            self.arguments.len()
        };
        self.number == other.number && self.arguments[..used] == other.arguments[..used]
    }
}

fn word(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}
