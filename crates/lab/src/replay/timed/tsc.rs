//! The CPU's cycle counter.

#![allow(unsafe_code)]

/// Returns cycles since an arbitrary time. The read does not serialise, so it disturbs little. On
/// CPUs without such a counter, returns nanoseconds.
#[inline]
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has RDTSC, and Linux leaves it enabled for user programs;
        // it reads no memory.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}
