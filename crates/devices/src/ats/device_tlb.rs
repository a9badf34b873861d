//! The device TLB, also called address translation cache (ATC).

use std::collections::VecDeque;

use ringfence_types::{Access, Iova, IovaRange, PageSize, Permissions, PhysAddr};

/// A translation that the unit gave to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedTranslation {
    /// First address of the page.
    pub page: Iova,
    /// Size of the page.
    pub size: PageSize,
    /// First host address of the page.
    pub base: PhysAddr,
    /// Permissions of the page.
    pub permissions: Permissions,
}

impl CachedTranslation {
    /// Returns the addresses of the page.
    pub fn range(&self) -> IovaRange {
        // A page is aligned, so it does not wrap.
        IovaRange::new(self.page, self.size.bytes()).unwrap_or(IovaRange::ALL)
    }

    /// Translates `iova`, which must lie on this page.
    pub const fn translate(&self, iova: Iova) -> PhysAddr {
        self.base.wrapping_add(iova.offset_in(self.size.bytes()))
    }
}

/// The translations that a device caches. A full TLB evicts the oldest.
#[derive(Debug, Clone)]
pub struct DeviceTlb {
    entries: VecDeque<CachedTranslation>,
    capacity: usize,
}

impl DeviceTlb {
    /// Creates an empty TLB of `capacity` entries.
    pub const fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            capacity,
        }
    }

    /// Returns the newest entry for the page of `iova` that allows `access`.
    pub fn lookup(&self, iova: Iova, access: Access) -> Option<CachedTranslation> {
        self.entries
            .iter()
            .rev()
            .find(|entry| entry.range().contains_address(iova) && entry.permissions.allows(access))
            .copied()
    }

    /// Caches `entry`. It replaces all entries of the same addresses, and the oldest if the TLB is
    /// full.
    pub fn fill(&mut self, entry: CachedTranslation) {
        self.invalidate(&entry.range());
        if self.entries.len() >= self.capacity {
            self.entries.pop_front();
        }
        if self.capacity > 0 {
            self.entries.push_back(entry);
        }
    }

    /// Removes every entry that translates any address of `range`.
    pub fn invalidate(&mut self, range: &IovaRange) {
        self.entries.retain(|entry| !entry.range().overlaps(range));
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if the TLB has no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the entries, oldest first. An attacker in the device reads them.
    pub fn iter(&self) -> impl Iterator<Item = &CachedTranslation> {
        self.entries.iter()
    }
}
