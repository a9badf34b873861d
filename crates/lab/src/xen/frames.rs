//! Machine frames: owners, guests' pseudo-physical maps, and references from I/O spaces.

use std::collections::BTreeMap;

use super::{Domid, XenError};

/// Frames for each block of reference counts.
const BLOCK: u64 = 4096;
/// Maximum number of domains.
const DOMAINS: usize = 256;

/// The references that maps take on frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameReferences {
    /// A map takes a reference. A referenced frame keeps its owner.
    Counted,
    /// A map takes no reference. A device may reach a frame that moved to another domain. A
    /// whole-guest map has this defect if the hypervisor does not follow changes of guest memory.
    NotCounted,
}

/// Memory of one domain: a run of frames, and the pages that moved to or from other frames.
#[derive(Debug)]
struct GuestMemory {
    first: u64,
    frames: u64,
    /// Pages that moved: their frame, or `None` for a hole.
    moved: BTreeMap<u64, Option<u64>>,
}

/// All machine frames.
#[derive(Debug)]
pub(super) struct MachineFrames {
    references: FrameReferences,
    domains: Vec<GuestMemory>,
    /// Present owners of frames that their first owner gave away.
    owners: BTreeMap<u64, Option<Domid>>,
    /// Frames without an owner.
    free: Vec<u64>,
    counts: Vec<Option<Box<[u16; BLOCK as usize]>>>,
}

impl MachineFrames {
    pub(super) fn new(references: FrameReferences) -> Self {
        Self {
            references,
            domains: Vec::new(),
            owners: BTreeMap::new(),
            free: Vec::new(),
            counts: Vec::new(),
        }
    }

    /// Adds a domain with the frames from `first`.
    pub(super) fn add_domain(&mut self, first: u64, frames: u64) -> Result<Domid, XenError> {
        let end = first.checked_add(frames).ok_or(XenError::NoMemory)?;
        let number = self.domains.len();
        let taken = |other: &GuestMemory| first < other.first + other.frames && other.first < end;
        if number >= DOMAINS || self.domains.iter().any(taken) {
            return Err(XenError::NoMemory);
        }
        self.domains.push(GuestMemory {
            first,
            frames,
            moved: BTreeMap::new(),
        });
        let blocks = end.div_ceil(BLOCK) as usize;
        if self.counts.len() < blocks {
            self.counts.resize_with(blocks, || None);
        }
        Ok(Domid::new(number as u16))
    }

    pub(super) fn references(&self) -> FrameReferences {
        self.references
    }

    pub(super) fn exists(&self, domid: Domid) -> bool {
        usize::from(domid.get()) < self.domains.len()
    }

    /// Returns the machine frame of a page.
    #[inline]
    pub(super) fn frame(&self, domid: Domid, gpfn: u64) -> Option<u64> {
        let guest = self.domains.get(usize::from(domid.get()))?;
        if let Some(moved) = guest.moved.get(&gpfn) {
            return *moved;
        }
        (gpfn < guest.frames).then(|| guest.first + gpfn)
    }

    /// Returns the number of pages with which a domain was created.
    pub(super) fn pages(&self, domid: Domid) -> u64 {
        let guest = self.domains.get(usize::from(domid.get()));
        guest.map_or(0, |guest| guest.frames)
    }

    /// Returns the owner of a frame; `None` if no domain owns it.
    pub(super) fn owner(&self, frame: u64) -> Option<Domid> {
        if let Some(owner) = self.owners.get(&frame) {
            return *owner;
        }
        let holds =
            |guest: &GuestMemory| (guest.first..guest.first + guest.frames).contains(&frame);
        let number = self.domains.iter().position(holds)?;
        Some(Domid::new(number as u16))
    }

    /// Takes a reference for an entry.
    #[inline]
    pub(super) fn get(&mut self, frame: u64) -> Result<(), XenError> {
        if self.references == FrameReferences::NotCounted {
            return Ok(());
        }
        let block = self.counts.get_mut((frame / BLOCK) as usize);
        let block = block.ok_or(XenError::NoFrame)?;
        let counts = block.get_or_insert_with(|| Box::new([0; BLOCK as usize]));
        let count = &mut counts[(frame % BLOCK) as usize];
        *count = count.checked_add(1).ok_or(XenError::NoMemory)?;
        Ok(())
    }

    /// Drops a reference. No cache may hold a translation to the frame for it.
    #[inline]
    pub(super) fn put(&mut self, frame: u64) {
        if let Some(Some(counts)) = self.counts.get_mut((frame / BLOCK) as usize) {
            let count = &mut counts[(frame % BLOCK) as usize];
            *count = count.saturating_sub(1);
        }
    }

    /// Returns the number of entries and cached translations that refer to a frame.
    pub(super) fn count(&self, frame: u64) -> u16 {
        let block = self.counts.get((frame / BLOCK) as usize);
        match block {
            Some(Some(counts)) => counts[(frame % BLOCK) as usize],
            _ => 0,
        }
    }

    /// Removes a page and its frame from a domain.
    pub(super) fn take(&mut self, domid: Domid, gpfn: u64) -> Result<u64, XenError> {
        let frame = self.frame(domid, gpfn).ok_or(XenError::NoFrame)?;
        if self.count(frame) > 0 {
            return Err(XenError::Busy);
        }
        let guest = self.domains.get_mut(usize::from(domid.get()));
        let guest = guest.ok_or(XenError::NoSuchDomain)?;
        guest.moved.insert(gpfn, None);
        self.owners.insert(frame, None);
        Ok(frame)
    }

    /// Gives a frame without an owner to a page that has none. The page must lie in the domain's
    /// first run, so that holes bound the map of moved pages.
    pub(super) fn give(&mut self, domid: Domid, gpfn: u64, frame: u64) -> Result<(), XenError> {
        self.check_hole(domid, gpfn)?;
        if let Some(guest) = self.domains.get_mut(usize::from(domid.get())) {
            guest.moved.insert(gpfn, Some(frame));
            self.owners.insert(frame, Some(domid));
        }
        Ok(())
    }

    /// Returns an error unless [`give`](Self::give) accepts the page.
    pub(super) fn check_hole(&self, domid: Domid, gpfn: u64) -> Result<(), XenError> {
        let guest = self.domains.get(usize::from(domid.get()));
        let guest = guest.ok_or(XenError::NoSuchDomain)?;
        if gpfn >= guest.frames {
            return Err(XenError::NoFrame);
        }
        match self.frame(domid, gpfn) {
            None => Ok(()),
            Some(_) => Err(XenError::Occupied),
        }
    }

    pub(super) fn release(&mut self, frame: u64) {
        self.free.push(frame);
    }

    pub(super) fn reuse(&mut self) -> Option<u64> {
        self.free.pop()
    }
}
