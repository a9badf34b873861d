//! Cycle counter and quantiles.

#[cfg(target_arch = "x86_64")]
pub(crate) fn cycles() -> u64 {
    // SAFETY: RDTSC has no memory operands, and Linux permits it in user mode on every x86-64 CPU.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn cycles() -> u64 {
    use std::sync::LazyLock;
    use std::time::Instant;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_nanos() as u64
}

pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}
