//! Guest memory that is always present.

use alloc::vec::Vec;

use ringfence_types::{AddressRange, PhysAddr};

use super::{GuestBacking, PinError};
use crate::wire::{Gpa, GuestPhysical, PAGE_BYTES};

/// Ranges of guest memory that are always mapped. Nothing is allocated or pinned, and a "frame" is
/// the GPA itself. For embedders that keep all guest memory mapped and access it by GPA.
#[derive(Debug, Clone)]
pub struct Resident {
    ranges: Vec<AddressRange<GuestPhysical>>,
}

impl Resident {
    /// Creates guest memory at `ranges`.
    pub fn new(ranges: Vec<AddressRange<GuestPhysical>>) -> Self {
        Self { ranges }
    }
}

impl GuestBacking for Resident {
    #[inline]
    fn contains(&self, page: Gpa) -> bool {
        let Some(page) = AddressRange::new(page, PAGE_BYTES) else {
            return false;
        };
        self.ranges.iter().any(|range| range.contains(&page))
    }

    #[inline]
    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        if !self.contains(page) {
            return Err(PinError::NotMemory);
        }
        Ok(PhysAddr::new(page.get()))
    }

    #[inline]
    fn unpin(&mut self, _page: Gpa) {}
}
