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
    /// The bytes of the file `number` from `offset` on appear in `window`, with these rights and no
    /// others. A place that is taken is an error.
    ///
    /// A page of this architecture that can be written can be read: whoever may only write is held
    /// to that by the table alone.
    pub(super) fn grant(
        window: Window,
        number: RawFd,
        offset: u64,
        permissions: Permissions,
    ) -> Self {
        let write = permissions.allows(ringfence_types::Access::Write);
        let rights = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let mut flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // A fault at each first access is dearer; but who maps gigabytes will not touch them all,
        // and it must not take long.
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

    /// The window of this grant, if one call could do for it and for another of so many bytes of
    /// the file right behind it.
    pub(super) fn goes_on(
        &self,
        bytes: u64,
        number: RawFd,
        offset: u64,
        permissions: Permissions,
    ) -> Option<Window> {
        let [start, before, ..] = self.arguments;
        let window = Window {
            start,
            bytes: before,
        };
        let behind = Window {
            start: start.checked_add(before)?,
            bytes,
        };
        let next = Self::grant(behind, number, offset, permissions);
        self.joined(&next).map(|_| window)
    }

    /// One call that does what this one and then `next` do, if there is one.
    fn joined(&self, next: &Self) -> Option<Self> {
        let [start, bytes, rights, flags, file, offset] = self.arguments;
        let [next_start, next_bytes, ..] = next.arguments;
        let behind = start.checked_add(bytes) == Some(next_start);
        let both = bytes.checked_add(next_bytes)?;
        let joins = self.number == next.number
            && match self.number {
                libc::SYS_munmap => behind,
                libc::SYS_mmap => {
                    behind
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

    /// As few calls as do what `calls` do one after the other.
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

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn window(page: u64, pages: u64) -> Window {
        Window {
            start: page * PAGE,
            bytes: pages * PAGE,
        }
    }

    fn grant(page: u64, pages: u64, file: RawFd, offset: u64, permissions: Permissions) -> Call {
        Call::grant(window(page, pages), file, offset * PAGE, permissions)
    }

    #[test]
    fn what_goes_on_is_one_call() {
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
    fn what_does_not_go_on_is_a_call_of_its_own() {
        let both = Permissions::READ_WRITE;
        let first = grant(100, 2, 64, 7, both);
        for other in [
            grant(103, 1, 64, 9, both),
            grant(99, 1, 64, 9, both),
            grant(102, 1, 64, 10, both),
            grant(102, 1, 64, 6, both),
            grant(102, 1, 65, 9, both),
            grant(102, 1, 64, 9, Permissions::READ),
            // Too large for all of its pages to be mapped at once.
            grant(102, 63, 64, 9, both),
            Call::revoke(window(102, 1)),
            Call::revoke(window(100, 2)),
        ] {
            assert_eq!(Call::join(&[first, other]), [first, other]);
        }
        let last = grant(u64::MAX / PAGE, 1, 64, 7, both);
        let wrapped = grant(0, 1, 64, 8, both);
        assert_eq!(Call::join(&[last, wrapped]), [last, wrapped]);
        // Nothing goes on across one of the other kind.
        let (gone, next) = (Call::revoke(window(5, 1)), grant(102, 1, 64, 9, both));
        assert_eq!(Call::join(&[first, gone, next]), [first, gone, next]);
        // Gaps between windows stay.
        let gone = [window(5, 1), window(7, 1)].map(Call::revoke);
        assert_eq!(Call::join(&gone), gone);
    }
}
