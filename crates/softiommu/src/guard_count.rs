//! Number of read sections that the current thread has open.
//!
//! A thread that waits for readers inside its own read section waits forever; two such threads wait
//! for each other. QSBR state cannot detect this: the second thread may be online at another
//! endpoint. Each thread therefore counts its own read sections of all units. While the count is
//! not zero, the thread may not change mappings.

use crate::sync::READ_SECTIONS;

/// Records that the current thread opened a read section.
#[inline]
pub(crate) fn increment() {
    READ_SECTIONS.with(|bursts| bursts.set(bursts.get().wrapping_add(1)));
}

/// Records that the current thread closed a read section.
#[inline]
pub(crate) fn decrement() {
    READ_SECTIONS.with(|bursts| bursts.set(bursts.get().wrapping_sub(1)));
}

/// Returns true if the current thread has a read section open.
#[inline]
pub(crate) fn any_open() -> bool {
    READ_SECTIONS.with(|bursts| bursts.get() != 0)
}
