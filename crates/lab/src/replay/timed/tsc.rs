//! The CPU's cycle counter.

#![allow(unsafe_code)]

/// Returns cycles since an arbitrary time. The read does not serialise, so it disturbs little. On
/// CPUs without such a counter, returns nanoseconds.
#[inline]
pub fn cycles() -> u64 {
    #[cfg(test)]
    if let Some(ticks) = counted::ticks() {
        return ticks;
    }
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

/// A counter that a test advances instead of the CPU.
#[cfg(test)]
pub(crate) mod counted {
    use std::cell::Cell;

    thread_local! {
        static TICKS: Cell<Option<u64>> = const { Cell::new(None) };
        static OF_READ: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn ticks() -> Option<u64> {
        advance(OF_READ.get());
        TICKS.get()
    }

    /// Like [`with_ticks`]; each read of the counter also advances it by one tick.
    pub(crate) fn with_ticks_of_reads<T>(run: impl FnOnce() -> T) -> T {
        OF_READ.set(1);
        let result = with_ticks(run);
        OF_READ.set(0);
        result
    }

    /// Calls `run`, in which [`cycles`](super::cycles) returns the ticks of [`advance`].
    pub(crate) fn with_ticks<T>(run: impl FnOnce() -> T) -> T {
        TICKS.set(Some(1000));
        let result = run();
        TICKS.set(None);
        result
    }

    /// Advances the counter by `ticks`.
    pub(crate) fn advance(ticks: u64) {
        TICKS.set(TICKS.get().map(|now| now + ticks));
    }
}
