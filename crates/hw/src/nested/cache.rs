//! Caches of nested translation, with least-recently-used replacement.

use alloc::collections::VecDeque;

use ringfence_pgtable::Leaf;
use ringfence_types::{
    DomainId, GuestPhysAddr, Iova, IovaRange, PageSize, Pasid, Permissions, PfnRange, PhysAddr,
};

/// A combined translation: IOVA to host address, of the smaller page of both stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Combined {
    pub(super) domain: DomainId,
    pub(super) pasid: Pasid,
    pub(super) page: Iova,
    pub(super) size: PageSize,
    pub(super) base: PhysAddr,
    /// Permissions that both stages grant.
    pub(super) permissions: Permissions,
}

impl Combined {
    fn range(&self) -> IovaRange {
        // A page is aligned, so it does not wrap.
        IovaRange::new(self.page, self.size.bytes()).unwrap_or(IovaRange::ALL)
    }

    pub(super) const fn translate(&self, iova: Iova) -> PhysAddr {
        self.base.wrapping_add(iova.offset_in(self.size.bytes()))
    }
}

/// A bounded list that evicts the least recently used entry.
#[derive(Debug, Clone)]
struct LruList<T> {
    entries: VecDeque<T>,
    capacity: usize,
}

impl<T: Copy> LruList<T> {
    const fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            capacity,
        }
    }

    fn find(&mut self, matches: impl FnMut(&T) -> bool) -> Option<T> {
        let at = self.entries.iter().position(matches)?;
        let entry = self.entries.remove(at)?;
        self.entries.push_back(entry);
        Some(entry)
    }

    fn push(&mut self, entry: T) {
        if self.capacity == 0 {
            return;
        }
        if self.entries.len() >= self.capacity {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }
}

/// The IOTLB: combined translations, tagged with the domain of the second stage and the PASID of
/// the first.
#[derive(Debug, Clone)]
pub(super) struct CombinedCache(LruList<Combined>);

impl CombinedCache {
    pub(super) const fn new(capacity: usize) -> Self {
        Self(LruList::new(capacity))
    }

    pub(super) fn lookup(
        &mut self,
        domain: DomainId,
        pasid: Pasid,
        iova: Iova,
    ) -> Option<Combined> {
        self.0.find(|entry| {
            entry.domain == domain && entry.pasid == pasid && entry.range().contains_address(iova)
        })
    }

    /// Caches `entry`. It replaces all entries of the same addresses.
    pub(super) fn fill(&mut self, entry: Combined) {
        self.0.entries.retain(|old| {
            old.domain != entry.domain
                || old.pasid != entry.pasid
                || !old.range().overlaps(&entry.range())
        });
        self.0.push(entry);
    }

    pub(super) fn len(&self) -> usize {
        self.0.entries.len()
    }

    /// Drops the translations of one first stage, or only those of `range`.
    pub(super) fn invalidate_first(
        &mut self,
        domain: DomainId,
        pasid: Pasid,
        range: Option<&PfnRange>,
    ) {
        self.0.entries.retain(|entry| {
            entry.domain != domain
                || entry.pasid != pasid
                || range.is_some_and(|range| !entry.range().overlaps(&range.iovas()))
        });
    }

    /// Drops the translations of all first stages over one second stage, or only those of `range`.
    pub(super) fn invalidate_domain(&mut self, domain: DomainId, range: Option<&PfnRange>) {
        self.0.entries.retain(|entry| {
            entry.domain != domain
                || range.is_some_and(|range| !entry.range().overlaps(&range.iovas()))
        });
    }

    pub(super) fn clear(&mut self) {
        self.0.entries.clear();
    }
}

/// Leaves of second stages, which shorten the walks of first-stage tables.
#[derive(Debug, Clone)]
pub(super) struct SecondStageCache(LruList<(DomainId, GuestPhysAddr, Leaf)>);

/// Returns true if the page of `leaf` that begins at `page` contains `guest`.
fn holds(page: GuestPhysAddr, leaf: &Leaf, guest: GuestPhysAddr) -> bool {
    guest.align_down(leaf.page.bytes()) == page
}

impl SecondStageCache {
    pub(super) const fn new(capacity: usize) -> Self {
        Self(LruList::new(capacity))
    }

    pub(super) fn lookup(&mut self, domain: DomainId, guest: GuestPhysAddr) -> Option<Leaf> {
        self.0
            .find(|(owner, page, leaf)| *owner == domain && holds(*page, leaf, guest))
            .map(|(.., leaf)| leaf)
    }

    pub(super) fn fill(&mut self, domain: DomainId, guest: GuestPhysAddr, leaf: Leaf) {
        let page = guest.align_down(leaf.page.bytes());
        self.0.push((domain, page, leaf));
    }

    /// Drops the leaves of one second stage, or only those of `range`, in guest-physical pages.
    pub(super) fn invalidate(&mut self, domain: DomainId, range: Option<&PfnRange>) {
        self.0.entries.retain(|(owner, page, leaf)| {
            let overlaps = |range: &PfnRange| {
                IovaRange::new(Iova::new(page.get()), leaf.page.bytes())
                    .is_none_or(|own| own.overlaps(&range.iovas()))
            };
            *owner != domain || range.is_some_and(|range| !overlaps(range))
        });
    }

    pub(super) fn clear(&mut self) {
        self.0.entries.clear();
    }
}
