//! Changes of a guest's memory: ballooning and page flipping.
//!
//! Both fail for a frame that an I/O space refers to. A whole-guest map refers to every frame, so
//! the hypervisor updates it: it removes the page's entry and flushes before the frame changes its
//! owner, and maps the new frame (slides, "Pre-allocating the IO Address Space").

use ringfence_types::{Permissions, Pfn, RequesterId};

use super::hypervisor::Xen;
use super::io_space::SLOTS;
use super::{Domid, XenError};
use crate::xen::FrameReferences;

impl Xen {
    /// Returns a page of the caller to the hypervisor (balloon).
    ///
    /// # Errors
    /// [`XenError::Busy`] if a device may reach the frame.
    pub fn decrease_reservation(&mut self, caller: Domid, gpfn: u64) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        let frame = self.take_page(caller, gpfn)?;
        self.frames.release(frame);
        Ok(())
    }

    /// Gives the caller a free frame at a page without one.
    ///
    /// # Errors
    /// The page has a frame, or no frame is free.
    pub fn increase_reservation(&mut self, caller: Domid, gpfn: u64) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        self.frames.check_hole(caller, gpfn)?;
        let frame = self.frames.reuse().ok_or(XenError::NoMemory)?;
        self.give_page(caller, gpfn, frame)
    }

    /// Moves the frame of the caller's page to a page of another domain that has none: page
    /// flipping, as the network backend of Xen 3 did for each received packet.
    ///
    /// # Errors
    /// [`XenError::Busy`] if a device may reach the frame.
    pub fn transfer(
        &mut self,
        caller: Domid,
        gpfn: u64,
        to: Domid,
        to_gpfn: u64,
    ) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        self.frames.check_hole(to, to_gpfn)?;
        let frame = self.take_page(caller, gpfn)?;
        self.give_page(to, to_gpfn, frame)
    }

    /// Removes a page from a domain, and before that its entries in whole-guest maps of the domain.
    fn take_page(&mut self, domid: Domid, gpfn: u64) -> Result<u64, XenError> {
        let frame = self.frames.frame(domid, gpfn).ok_or(XenError::NoFrame)?;
        let mut buses = self.whole_guest_buses(domid, gpfn);
        let page = Pfn::new(gpfn);
        buses.retain(|bus| {
            let space = self.spaces.get(bus);
            space.and_then(|space| space.frame(&self.memory, page)) == Some(frame)
        });
        // Entries of other maps also refer to the frame: refuse before anything changes.
        if usize::from(self.frames.count(frame)) > buses.len() {
            return Err(XenError::Busy);
        }
        for bus in buses {
            if let Some(space) = self.spaces.get_mut(&bus) {
                space.unmap(&self.memory, &mut self.dirty, page)?;
                self.stats.entries_moved += 1;
                self.dirty.sync(&*self.memory);
            }
            self.flush(bus)?;
        }
        self.frames.take(domid, gpfn)
    }

    fn give_page(&mut self, domid: Domid, gpfn: u64, frame: u64) -> Result<(), XenError> {
        self.frames.give(domid, gpfn, frame)?;
        for bus in self.whole_guest_buses(domid, gpfn) {
            let (bdf, page) = (RequesterId::new(u16::from(bus) << 8), Pfn::new(gpfn));
            match self.map_frame(domid, bdf, page, frame, Permissions::READ_WRITE) {
                Ok(()) => self.stats.entries_moved += 1,
                // The guest has used the hole for an entry of its own.
                Err(XenError::Occupied) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the buses whose spaces map all of a domain's memory. Without references, the
    /// hypervisor does not update these spaces.
    fn whole_guest_buses(&self, domid: Domid, gpfn: u64) -> Vec<u8> {
        if self.frames.references() == FrameReferences::NotCounted || gpfn >= SLOTS {
            return Vec::new();
        }
        let spaces = self.spaces.iter();
        let whole = spaces.filter(|(_, space)| space.whole_guest && space.owner == domid);
        whole.map(|(bus, _)| *bus).collect()
    }
}
