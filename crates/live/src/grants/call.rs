//! The `mmap` and `munmap` calls that the supervisor lets the mapping thread make, as register
//! values.

use std::os::fd::RawFd;

use ringfence_types::Permissions;

use super::windows::GrantWindow;

/// Largest window, in bytes, that `mmap` populates at once.
const POPULATED_BYTES: u64 = 256 * 1024;

/// A system call as the kernel sees it: number and argument registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// System call number.
    pub number: libc::c_long,
    /// Argument registers, in order.
    pub arguments: [u64; 6],
}

impl Call {
    /// Returns the `mmap` call that maps the bytes from `offset` of descriptor `number` at
    /// `window`, with `permissions` only. The call fails if the window overlaps an existing
    /// mapping.
    ///
    /// x86-64 has no write-only pages: a writable page is also readable. Only the I/O page table
    /// enforces write-only permissions.
    pub(crate) fn grant(
        window: GrantWindow,
        number: RawFd,
        offset: u64,
        permissions: Permissions,
    ) -> Self {
        let write = permissions.allows(ringfence_types::Access::Write);
        let rights = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let mut flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // Large windows are not populated: a device rarely touches gigabytes, and `mmap` must
        // return soon. They cost a page fault at each first access instead.
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

    /// Returns the `munmap` call that removes all mappings in `window`.
    pub(crate) fn revoke(window: GrantWindow) -> Self {
        Self {
            number: libc::SYS_munmap,
            arguments: [window.start, window.bytes, 0, 0, 0, 0],
        }
    }

    /// Returns the window of this `mmap` call if one call could also map `bytes` bytes from
    /// `offset` of descriptor `number`, directly behind the window. `None` otherwise.
    pub(super) fn mergeable_window(
        &self,
        bytes: u64,
        number: RawFd,
        offset: u64,
        permissions: Permissions,
    ) -> Option<GrantWindow> {
        let [start, before, ..] = self.arguments;
        let window = GrantWindow {
            start,
            bytes: before,
        };
        let adjacent = GrantWindow {
            start: start.checked_add(before)?,
            bytes,
        };
        let next = Self::grant(adjacent, number, offset, permissions);
        self.joined(&next).map(|_| window)
    }

    /// Returns one call equivalent to this call followed by `next`, or `None`.
    fn joined(&self, next: &Self) -> Option<Self> {
        let [start, bytes, rights, flags, file, offset] = self.arguments;
        let [next_start, next_bytes, ..] = next.arguments;
        let adjacent = start.checked_add(bytes) == Some(next_start);
        let both = bytes.checked_add(next_bytes)?;
        let joins = self.number == next.number
            && match self.number {
                libc::SYS_munmap => adjacent,
                libc::SYS_mmap => {
                    adjacent
                        && both <= POPULATED_BYTES
                        && next.arguments[2..5] == [rights, flags, file]
                        && offset.checked_add(bytes) == Some(next.arguments[5])
                }
                _ => false,
            };
        let mut all = *self;
        all.arguments[1] = both;
        joins.then_some(all)
    }

    /// Merges adjacent calls. The result has the same effect as `calls` in order.
    pub(super) fn join(calls: &[Self]) -> Vec<Self> {
        let mut fewer: Vec<Self> = Vec::new();
        for call in calls {
            let both = fewer.last().and_then(|last| last.joined(call));
            if let Some(both) = both {
                fewer.pop();
                fewer.push(both);
            } else {
                fewer.push(*call);
            }
        }
        fewer
    }

    /// Returns true if both calls have the same number and the same values in the registers that
    /// the kernel reads.
    pub(super) fn has_same_effect(&self, other: &Self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn window(page: u64, pages: u64) -> GrantWindow {
        GrantWindow {
            start: page * PAGE,
            bytes: pages * PAGE,
        }
    }

    fn grant(page: u64, pages: u64, file: RawFd, offset: u64, permissions: Permissions) -> Call {
        Call::grant(window(page, pages), file, offset * PAGE, permissions)
    }

    #[test]
    fn adjacent_calls_are_merged() {
        let both = Permissions::READ_WRITE;
        let first = grant(100, 2, 64, 7, both);
        let next = grant(102, 1, 64, 9, both);
        let after = grant(103, 4, 64, 10, both);
        let all = grant(100, 7, 64, 7, both);
        assert_eq!(Call::join(&[first, next, after]), [all]);
        let revoked = [window(100, 2), window(102, 1), window(103, 4)].map(Call::revoke);
        assert_eq!(Call::join(&revoked), [Call::revoke(window(100, 7))]);
        assert_eq!(Call::join(&[]), []);
    }

    #[test]
    fn other_calls_are_not_merged() {
        let both = Permissions::READ_WRITE;
        let first = grant(100, 2, 64, 7, both);
        for other in [
            grant(103, 1, 64, 9, both),
            grant(99, 1, 64, 9, both),
            grant(102, 1, 64, 10, both),
            grant(102, 1, 64, 6, both),
            grant(102, 1, 65, 9, both),
            grant(102, 1, 64, 9, Permissions::READ),
            // Together they exceed `POPULATED_BYTES`.
            grant(102, 63, 64, 9, both),
            Call::revoke(window(102, 1)),
            Call::revoke(window(100, 2)),
        ] {
            assert_eq!(Call::join(&[first, other]), [first, other]);
        }
        let last = grant(u64::MAX / PAGE, 1, 64, 7, both);
        let wrapped = grant(0, 1, 64, 8, both);
        assert_eq!(Call::join(&[last, wrapped]), [last, wrapped]);
        // Calls of another kind between them prevent a merge.
        let (revoked, next) = (Call::revoke(window(5, 1)), grant(102, 1, 64, 9, both));
        assert_eq!(Call::join(&[first, revoked, next]), [first, revoked, next]);
        // Windows with a gap between them are not merged.
        let revoked = [window(5, 1), window(7, 1)].map(Call::revoke);
        assert_eq!(Call::join(&revoked), revoked);
    }
}
