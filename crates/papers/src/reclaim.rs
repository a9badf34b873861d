//! FreeBSD's write-back at unmap as published (EIOVAR section 7).

use ringfence_types::{PageSize, PhysAddr};

/// Returns the table pages that contain the stored bytes. As published, every unmap writes back all
/// 64 cache lines of the table page whose entries it cleared.
///
/// The fix is the default of [`ReclaimingTable`](ringfence_pgtable::ReclaimingTable), which writes
/// back the lines of the cleared entries.
#[must_use]
pub fn whole_table_pages(at: PhysAddr, bytes: u64) -> (PhysAddr, u64) {
    let page = PageSize::Size4K.bytes();
    let first = at.align_down(page);
    let end = at.wrapping_add(bytes.saturating_sub(1)).align_down(page);
    let span = end.get().wrapping_sub(first.get()).wrapping_add(page);
    (first, span)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_the_pages_of_all_bytes() {
        for (at, bytes, first, span) in [
            (0x5000, 8, 0x5000, 0x1000),
            (0x5ff8, 8, 0x5000, 0x1000),
            (0x5008, 0xff8, 0x5000, 0x1000),
            (0x5ff8, 16, 0x5000, 0x2000),
            (0x5010, 0, 0x5000, 0x1000),
        ] {
            let found = whole_table_pages(PhysAddr::new(at), bytes);
            assert_eq!(found, (PhysAddr::new(first), span), "{at:#x} {bytes}");
        }
    }
}
