//! How many bursts the current thread holds open.
//!
//! A thread that waits for readers while it is one itself, waits for ever; two such threads wait
//! for each other. Neither can be seen in a gate: the second holds its pin at another endpoint. So
//! a thread counts its own bursts, whatever they belong to, and none that has one changes mappings.

use crate::sync::READ_SECTIONS;

/// The current thread has opened a burst.
#[inline]
pub(crate) fn increment() {
    READ_SECTIONS.with(|bursts| bursts.set(bursts.get().wrapping_add(1)));
}

/// The current thread has closed a burst.
#[inline]
pub(crate) fn decrement() {
    READ_SECTIONS.with(|bursts| bursts.set(bursts.get().wrapping_sub(1)));
}

/// Whether the current thread holds a burst open.
#[inline]
pub(crate) fn any_open() -> bool {
    READ_SECTIONS.with(|bursts| bursts.get() != 0)
}
