//! The size from which a buffer is cheaper to map than to copy.

use ringfence_dma::space::SharedPages;
use ringfence_pgtable::Coherency;
use ringfence_types::PageSize;

use crate::plan::DESCRIPTOR_PAGES;
use crate::profile::Profile;

/// Costs of a buffer, copied or mapped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransferCosts {
    /// Cycles to copy a byte.
    pub copy_cycles_per_byte: f64,
    /// Cycles of a map and an unmap beyond those of a copied buffer, without their pages and
    /// without the invalidation.
    pub mapping_cycles: f64,
    /// Cycles to install and to clear the entry of a page.
    pub page_cycles: f64,
    /// Cycles of an invalidation.
    pub invalidation_cycles: f64,
    /// Number of mappings that share an invalidation.
    pub mappings_per_invalidation: f64,
}

impl TransferCosts {
    /// Returns the least number of bytes, in whole pages, that cost at least as much to copy as to
    /// map: n bytes with n x copy >= mapping + invalidation / sharers + n / 4096 x page. `u64::MAX`
    /// if a page costs more to map than to copy, or if a cost is not a number.
    pub fn threshold(&self) -> u64 {
        let page = PageSize::Size4K.bytes();
        let fixed = self.mapping_cycles + self.invalidation_cycles / self.mappings_per_invalidation;
        let saved_by_page = self.copy_cycles_per_byte * page as f64 - self.page_cycles;
        let pages = (fixed / saved_by_page).ceil();
        if fixed >= 0.0 && saved_by_page > 0.0 && pages.is_finite() {
            (pages.max(1.0) as u64).saturating_mul(page)
        } else {
            u64::MAX
        }
    }
}

/// Returns the threshold of buffers that pay for an invalidation alone, on the machine of
/// `profile`, in a mode that treats shared pages in this way.
///
/// The profile gives the invalidation, whose cost no user program can measure. A burst may share
/// it: that only makes it cheaper. The other costs are measured (decision 0041 and
/// `docs/notes/claims-commands.md`).
pub fn copy_threshold(profile: &Profile, shared_pages: SharedPages) -> u64 {
    TransferCosts {
        invalidation_cycles: profile.invalidation_cycles as f64,
        ..measured(profile, shared_pages)
    }
    .threshold()
}

/// Returns the threshold of transmit buffers that share the invalidation of a full batch: each page
/// pays its part of the batch's pages.
pub fn transmit_threshold(profile: &Profile, shared_pages: SharedPages) -> u64 {
    let share = profile.invalidation_cycles as f64 / DESCRIPTOR_PAGES as f64;
    let measured = measured(profile, shared_pages);
    TransferCosts {
        page_cycles: measured.page_cycles + share,
        ..measured
    }
    .threshold()
}

/// Returns the measured costs, without an invalidation. A split buffer has copied parts and a
/// record of its exact range; another buffer is only mapped. If page walks do not snoop, the map
/// and the unmap write lines of the table back, and wait for that.
fn measured(profile: &Profile, shared_pages: SharedPages) -> TransferCosts {
    TransferCosts {
        copy_cycles_per_byte: 0.063,
        mapping_cycles: match (shared_pages, profile.coherency()) {
            (SharedPages::Copied, _) => 650.0,
            (SharedPages::Mapped, Coherency::Coherent) => 50.0,
            (SharedPages::Mapped, Coherency::NonCoherent) => 550.0,
        },
        page_cycles: 6.0,
        invalidation_cycles: 0.0,
        mappings_per_invalidation: 1.0,
    }
}
