//! Keeps the pages of a sandbox process in memory (mlock2(2)).
//!
//! The IOMMU waits for the mapping thread. If the host has reclaimed a page of the program, the
//! thread waits for the host's disk first. Under heavy I/O that takes seconds, and the daemon ends
//! a process that does not answer in time.
//!
//! `MLOCK_ONFAULT` locks a page at its first access, so locking reads no page from a disk. The
//! process has no guest memory yet, and does not lock later mappings.

use std::fs;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::grants::sys;

/// Maximum number of bytes of address space that a process locks.
const LOCKED_BYTES: u64 = 256 << 20;

/// Raises the limit of locked memory. Without `CAP_SYS_RESOURCE`, raises the soft limit to the hard
/// limit.
pub(super) fn raise_limit() {
    let limit = Rlimit {
        current: Some(LOCKED_BYTES),
        maximum: Some(LOCKED_BYTES),
    };
    if setrlimit(Resource::Memlock, limit).is_err() {
        // A process may always raise its limit to the maximum.
        let limit = getrlimit(Resource::Memlock);
        let current = limit.maximum;
        let _ = setrlimit(Resource::Memlock, Rlimit { current, ..limit });
    }
}

/// Locks the mappings of the calling process, code first. All threads must exist already. Mappings
/// beyond the limit of locked memory stay unlocked.
///
/// # Errors
/// The process cannot read its own list of mappings.
pub(super) fn lock_own_pages() -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut mappings: Vec<_> = maps.lines().filter_map(Mapping::parse).collect();
    mappings.sort_by_key(|mapping| !mapping.executable);
    let mut left = LOCKED_BYTES;
    for mapping in mappings {
        let bytes = mapping.end.saturating_sub(mapping.start);
        // A failed lock is no error: the host may then reclaim the page.
        if bytes <= left && sys::lock_on_access(mapping.start, bytes).is_ok() {
            left = left.saturating_sub(bytes);
        }
    }
    Ok(())
}

/// One line of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    executable: bool,
}

impl Mapping {
    /// Returns a mapping to lock. `None` for the kernel's own mappings, for inaccessible ones, and
    /// for the first thread's stack: a locked stack cannot grow once the limit is 0.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let name = words.nth(3).unwrap_or("");
        if !rights.starts_with('r') || (name.starts_with('[') && name != "[heap]") {
            return None;
        }
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            executable: rights.contains('x'),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_to_lock() {
        let mapping = |executable| {
            Some(Mapping {
                start: 0x1000,
                end: 0x3000,
                executable,
            })
        };
        for (rest, expected) in [
            ("r-xp 00000000 fe:00 12 /usr/bin/a program", mapping(true)),
            ("r--p 00000000 fe:00 12 /usr/bin/program", mapping(false)),
            (
                "rw-s 00000000 00:01 12 /memfd:region (deleted)",
                mapping(false),
            ),
            ("rw-p 00000000 00:00 0", mapping(false)),
            ("rw-p 00000000 00:00 0 [heap]", mapping(false)),
            ("---p 00000000 00:00 0", None),
            ("rw-p 00000000 00:00 0 [stack]", None),
            ("r-xp 00000000 00:00 0 [vdso]", None),
        ] {
            assert_eq!(
                Mapping::parse(&format!("1000-3000 {rest}")),
                expected,
                "{rest}"
            );
        }
    }
}
