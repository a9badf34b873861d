//! Counts of present entries, by which tables that free empty table pages find them.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Format;

/// Counts the present entries of each table page.
pub(crate) trait EntryCount<F: Format>: Copy {
    /// Records that `entries` entries of the table that `parent` points to became present.
    fn added(self, format: &F, parent: Option<&AtomicU64>, entries: u64);
    /// Records that `entries` entries of the table that `parent` points to became absent.
    fn removed(self, format: &F, parent: Option<&AtomicU64>, entries: u64);
}

/// No counting, for tables whose pages stay linked.
#[derive(Clone, Copy)]
pub(crate) struct NoCount;

impl<F: Format> EntryCount<F> for NoCount {
    #[inline]
    fn added(self, _format: &F, _parent: Option<&AtomicU64>, _entries: u64) {}
    #[inline]
    fn removed(self, _format: &F, _parent: Option<&AtomicU64>, _entries: u64) {}
}

/// Keeps the count in the software bits of the entry above. Allows one writer at a time.
#[derive(Clone, Copy)]
pub(crate) struct CountInParent;

impl CountInParent {
    #[inline]
    fn change<F: Format>(format: &F, parent: Option<&AtomicU64>, change: impl FnOnce(u64) -> u64) {
        if F::COUNTS
            && let Some(word) = parent
        {
            let raw = word.load(Ordering::Relaxed);
            let live = change(u64::from(format.live(raw))).min(512) as u16;
            // The hardware ignores these bits: no ordering and no write-back needed.
            word.store(format.with_live(raw, live), Ordering::Relaxed);
        }
    }
}

impl<F: Format> EntryCount<F> for CountInParent {
    #[inline]
    fn added(self, format: &F, parent: Option<&AtomicU64>, entries: u64) {
        Self::change(format, parent, |live| live.saturating_add(entries));
    }

    #[inline]
    fn removed(self, format: &F, parent: Option<&AtomicU64>, entries: u64) {
        Self::change(format, parent, |live| live.saturating_sub(entries));
    }
}
