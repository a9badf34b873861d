//! Domains as the driver knows them. A device forgets a domain with its last endpoint, so the
//! driver keeps the mappings (virtio 1.3, section 5.13.6.4).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{DomainId, Permissions, Pfn, PfnRange, PhysAddr, RequesterId};

use crate::error::UnitError;
use crate::request::{DomainKind, Request};

/// Pages that one MAP maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: PfnRange,
    pub(crate) physical: PhysAddr,
    pub(crate) permissions: Permissions,
}

impl Mapping {
    pub(crate) const fn request(&self, domain: DomainId) -> Request {
        Request::Map {
            domain,
            range: self.range.iovas(),
            physical: self.physical,
            permissions: self.permissions,
        }
    }
}

/// A domain with endpoints or mappings.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    pub(crate) kind: DomainKind,
    /// If there are none, the device does not know the domain.
    pub(crate) endpoints: Vec<RequesterId>,
    /// By first page, without overlap.
    mappings: BTreeMap<Pfn, Mapping>,
}

/// All domains, sorted by id.
#[derive(Debug, Default)]
pub(crate) struct Domains(Vec<Domain>);

impl Domain {
    pub(crate) fn is_empty(&self) -> bool {
        self.mappings.is_empty()
    }

    pub(crate) fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.values()
    }

    /// Returns the mapping with `page`.
    pub(crate) fn find(&self, page: Pfn) -> Option<&Mapping> {
        let (_, below) = self.mappings.range(..=page).next_back()?;
        (page <= below.range.hi()).then_some(below)
    }

    /// Adds a mapping, unless it overlaps another one.
    pub(crate) fn insert(&mut self, mapping: Mapping) -> Result<(), UnitError> {
        let below = self.mappings.range(..=mapping.range.hi()).next_back();
        if below.is_some_and(|(_, other)| other.range.overlaps(&mapping.range)) {
            return Err(UnitError::Overlap(mapping.range));
        }
        self.mappings.insert(mapping.range.lo(), mapping);
        Ok(())
    }

    pub(crate) fn remove(&mut self, mapping: &Mapping) {
        self.mappings.remove(&mapping.range.lo());
    }

    /// Checks that `range` is made of whole mappings, without a gap.
    pub(crate) fn check_whole(&self, range: PfnRange) -> Result<(), UnitError> {
        let mut page = range.lo();
        loop {
            let mapping = self.find(page).ok_or(UnitError::NotMapped(range))?;
            if mapping.range.lo() < range.lo() || mapping.range.hi() > range.hi() {
                return Err(UnitError::Splits(range));
            }
            if mapping.range.hi() == range.hi() {
                return Ok(());
            }
            page = Pfn::new(mapping.range.hi().get().wrapping_add(1));
        }
    }

    /// Removes the mappings of a range that [`check_whole`](Self::check_whole) accepted.
    pub(crate) fn remove_range(&mut self, range: PfnRange) {
        let inside = self.mappings.range(range.lo()..=range.hi());
        let pages: Vec<Pfn> = inside.map(|(page, _)| *page).collect();
        for page in pages {
            self.mappings.remove(&page);
        }
    }
}

impl Domains {
    fn position(&self, id: DomainId) -> Result<usize, usize> {
        self.0.binary_search_by_key(&id, |domain| domain.id)
    }

    pub(crate) fn get(&self, id: DomainId) -> Option<&Domain> {
        self.0.get(self.position(id).ok()?)
    }

    pub(crate) fn get_mut(&mut self, id: DomainId) -> Option<&mut Domain> {
        let index = self.position(id).ok()?;
        self.0.get_mut(index)
    }

    /// Returns the domain, which is made if it does not exist.
    ///
    /// # Errors
    /// It is of another kind.
    pub(crate) fn of_kind(
        &mut self,
        id: DomainId,
        kind: DomainKind,
    ) -> Result<&mut Domain, UnitError> {
        let index = match self.position(id) {
            Ok(index) => index,
            Err(index) => {
                let domain = Domain {
                    id,
                    kind,
                    endpoints: Vec::new(),
                    mappings: BTreeMap::new(),
                };
                self.0.insert(index, domain);
                index
            }
        };
        match self.0.get_mut(index) {
            Some(domain) if domain.kind == kind => Ok(domain),
            _ => Err(UnitError::OtherKind(id)),
        }
    }

    /// Forgets the domain if it has neither endpoints nor mappings.
    pub(crate) fn tidy(&mut self, id: DomainId) {
        if let Ok(index) = self.position(id) {
            let unused = |domain: &Domain| domain.endpoints.is_empty() && domain.is_empty();
            if self.0.get(index).is_some_and(unused) {
                self.0.remove(index);
            }
        }
    }

    /// Returns the domain of `device`.
    pub(crate) fn of_device(&self, device: RequesterId) -> Option<DomainId> {
        let mut domains = self.0.iter();
        domains
            .find(|domain| domain.endpoints.contains(&device))
            .map(|domain| domain.id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Domain> {
        self.0.iter()
    }
}
