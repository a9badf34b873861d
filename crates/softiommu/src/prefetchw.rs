//! Cache lines asked for before they are stored to.

use std::sync::atomic::AtomicU64;

/// `word` will soon be stored to: its line is to be this processor's alone by then.
///
/// Lines of a table that readers walk are theirs as well, and a processor takes them over one after
/// the other, as its stores leave in their order: some 70 ns each. Asked for beforehand, they come
/// at the same time. It is a hint, to the processor alone: it orders nothing and changes nothing.
#[inline]
pub(crate) fn prefetch_write(word: &AtomicU64) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: PREFETCHW neither reads nor writes memory as the program sees it, and faults on no
    // address; a processor without it passes over it. The intrinsic would be an ordinary prefetch,
    // which does not take the line over, unless the whole program is compiled for processors that
    // have it.
    #[allow(unsafe_code)]
    unsafe {
        std::arch::asm!(
            "prefetchw [{}]",
            in(reg) word.as_ptr(),
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = word;
}
