//! The hypervisor: it checks and performs hypercalls for I/O spaces (CG05).

use std::collections::BTreeMap;
use std::rc::Rc;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{CalgaryTce, Coherency, DirtyLines, Table};
use ringfence_types::{DomainId, Invalidation, Permissions, Pfn, PhysAddr, RequesterId};

use super::frames::{FrameReferences, MachineFrames};
use super::grants::GrantTables;
use super::io_space::{IoSpace, SLOTS};
use super::{Domid, IommuOp, TceFlush, XenError};
use crate::guest::HostUnit;
use crate::hardware::{Calgary, Hardware};
use crate::layer::ContextTarget;

/// Maximum number of calls in a multicall: the batch of Linux (`MC_BATCH`,
/// `arch/x86/xen/multicalls.c`).
pub const MAX_MULTICALL: usize = 32;

/// Counters of a hypervisor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct XenStats {
    /// Crossings into the hypervisor. A multicall is one.
    pub hypercalls: u64,
    /// Calls in them.
    pub calls: u64,
    /// Flushes by the hypervisor, because a guest reused an entry before its flush.
    pub forced_flushes: u64,
    /// Entries of whole-guest maps that changed with a guest's memory.
    pub entries_moved: u64,
}

/// A hypervisor that owns a Calgary unit.
#[derive(Debug)]
pub struct Xen {
    pub(super) memory: Rc<Arena>,
    pub(super) table_frames: Rc<Frames<Rc<Arena>>>,
    coherency: Coherency,
    /// The unit that walks the tables.
    pub unit: HostUnit<Calgary>,
    buses: Option<[u8; 2]>,
    pub(super) frames: MachineFrames,
    /// Spaces by bus.
    pub(super) spaces: BTreeMap<u8, IoSpace>,
    /// Tables of removed spaces, zeroed.
    spare: Vec<PhysAddr>,
    pub(super) dirty: DirtyLines,
    pub(super) grants: GrantTables,
    pub(super) stats: XenStats,
}

impl Xen {
    /// Creates a hypervisor without domains. It keeps its tables in `memory`.
    pub fn new(
        memory: &Rc<Arena>,
        table_frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit<Calgary>,
        references: FrameReferences,
    ) -> Self {
        Self {
            memory: Rc::clone(memory),
            table_frames: Rc::clone(table_frames),
            coherency,
            unit,
            buses: None,
            frames: MachineFrames::new(references),
            spaces: BTreeMap::new(),
            spare: Vec::new(),
            dirty: DirtyLines::new(),
            grants: GrantTables::default(),
            stats: XenStats::default(),
        }
    }

    /// Creates a domain with the frames of `pages` pages from `first`. The first domain is dom0.
    ///
    /// # Errors
    /// Another domain has one of the frames, or there are too many domains.
    pub fn create_domain(&mut self, first: PhysAddr, pages: u64) -> Result<Domid, XenError> {
        self.frames.add_domain(first.get() >> 12, pages)
    }

    /// Returns the counters.
    pub fn stats(&self) -> XenStats {
        self.stats
    }

    /// Returns the machine address of a guest's page.
    pub fn machine_address(&self, domid: Domid, gpfn: u64) -> Option<PhysAddr> {
        Some(PhysAddr::new(self.frames.frame(domid, gpfn)? << 12))
    }

    /// Returns the owner of the frame at a machine address.
    pub fn owner(&self, at: PhysAddr) -> Option<Domid> {
        self.frames.owner(at.get() >> 12)
    }

    /// Returns the root of the table of a device's space.
    pub fn root(&self, bdf: RequesterId) -> Option<PhysAddr> {
        Some(self.spaces.get(&bdf.bus())?.table.root())
    }

    /// Returns a device of each space.
    pub fn devices(&self) -> Vec<RequesterId> {
        let buses = self.spaces.keys();
        buses
            .map(|bus| RequesterId::new(u16::from(*bus) << 8))
            .collect()
    }

    /// Returns true if a device's space has no entry, or there is no space.
    pub fn is_empty(&self, bdf: RequesterId) -> bool {
        self.spaces.get(&bdf.bus()).is_none_or(IoSpace::is_empty)
    }

    /// Performs one hypercall of `caller`.
    ///
    /// # Errors
    /// See [`XenError`].
    #[inline]
    pub fn hypercall(&mut self, caller: Domid, call: &IommuOp) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        self.perform(caller, call)
    }

    /// Performs several calls in one crossing, in order (CG12). `each` gets the result of each
    /// call; a refused call does not stop the others, as in Xen's `multicall`.
    ///
    /// # Errors
    /// The batch is too long. No call was performed.
    #[inline]
    pub fn multicall<'c>(
        &mut self,
        caller: Domid,
        calls: impl ExactSizeIterator<Item = &'c IommuOp>,
        mut each: impl FnMut(&IommuOp, Result<(), XenError>),
    ) -> Result<(), XenError> {
        self.stats.hypercalls += 1;
        if calls.len() > MAX_MULTICALL {
            return Err(XenError::TooManyCalls);
        }
        for call in calls {
            each(call, self.perform(caller, call));
        }
        Ok(())
    }

    fn perform(&mut self, caller: Domid, call: &IommuOp) -> Result<(), XenError> {
        self.stats.calls += 1;
        if !self.frames.exists(caller) {
            return Err(XenError::NoSuchDomain);
        }
        match *call {
            IommuOp::IommuDetected {
                first_bus,
                last_bus,
            } => self.detected(caller, [first_bus, last_bus]),
            IommuOp::CreateIoSpace { bdf, domid } => self.create(caller, bdf, domid),
            IommuOp::DestroyIoSpace { bdf } => self.destroy(caller, bdf),
            IommuOp::MapEntry {
                bdf,
                page,
                gpfn,
                permissions,
            } => {
                let frame = self.frames.frame(caller, gpfn).ok_or(XenError::NoFrame)?;
                self.map_frame(caller, bdf, page, frame, permissions)
            }
            IommuOp::UnmapEntry { bdf, page, flush } => {
                let space = space_of(&mut self.spaces, caller, bdf)?;
                if space.is_granted(page) {
                    return Err(XenError::Busy);
                }
                space.unmap(&self.memory, &mut self.dirty, page)?;
                self.dirty.sync(&*self.memory);
                match flush {
                    TceFlush::Now => self.flush(bdf.bus()),
                    TceFlush::Deferred => Ok(()),
                }
            }
            IommuOp::FlushIoSpace { bdf } => {
                space_of(&mut self.spaces, caller, bdf)?;
                self.flush(bdf.bus())
            }
            IommuOp::MapWholeGuest { bdf } => self.map_whole_guest(caller, bdf),
        }
    }

    fn detected(&mut self, caller: Domid, buses: [u8; 2]) -> Result<(), XenError> {
        privileged(caller)?;
        if self.buses.is_some() {
            return Err(XenError::AlreadyDetected);
        }
        if buses[0] > buses[1] {
            return Err(XenError::NoSuchBus);
        }
        self.buses = Some(buses);
        Ok(())
    }

    fn create(&mut self, caller: Domid, bdf: RequesterId, domid: Domid) -> Result<(), XenError> {
        privileged(caller)?;
        let [first, last] = self.buses.ok_or(XenError::NotDetected)?;
        let bus = bdf.bus();
        if !(first..=last).contains(&bus) {
            return Err(XenError::NoSuchBus);
        }
        if !self.frames.exists(domid) {
            return Err(XenError::NoSuchDomain);
        }
        if self.spaces.contains_key(&bus) {
            return Err(XenError::SpaceExists);
        }
        let root = match self.spare.pop() {
            Some(root) => root,
            None => {
                let frames = Table::root_bytes_of(&CalgaryTce::FULL) >> 12;
                let root = self.table_frames.alloc_contiguous(frames);
                root.map_err(|_| XenError::NoMemory)?
            }
        };
        // The tag of the TCE cache: bus 0 has domain 1, because 0 is VT-d's reserved domain.
        let tag = DomainId::new(u16::from(bus) + 1);
        let table = Table::at(CalgaryTce::FULL, tag, self.coherency, &*self.memory, root);
        let table = table.map_err(|_| XenError::NoMemory)?;
        if let Err(error) = self.program_bridge(bus, Some((tag, root))) {
            self.spare.push(root);
            return Err(error);
        }
        self.spaces.insert(bus, IoSpace::new(domid, table));
        Ok(())
    }

    /// Programs the host bridge of a bus, or removes its table.
    fn program_bridge(
        &mut self,
        bus: u8,
        to: Option<(DomainId, PhysAddr)>,
    ) -> Result<(), XenError> {
        let HostUnit::Modelled { hardware, .. } = &mut self.unit else {
            return Ok(());
        };
        let device = RequesterId::new(u16::from(bus) << 8);
        match to {
            Some((tag, root)) => {
                let to = ContextTarget::Table(root);
                let programmed = hardware.attach(&self.memory, &self.table_frames, device, tag, to);
                programmed.map_err(|_| XenError::NoSuchBus)
            }
            None => {
                hardware.detach(bus);
                Ok(())
            }
        }
    }

    fn destroy(&mut self, caller: Domid, bdf: RequesterId) -> Result<(), XenError> {
        privileged(caller)?;
        let bus = bdf.bus();
        let space = self.spaces.get_mut(&bus).ok_or(XenError::NoSpace)?;
        let pages = space.mapped_pages(&self.memory);
        if pages.iter().any(|page| space.is_granted(*page)) {
            return Err(XenError::Busy);
        }
        for page in pages {
            space.unmap(&self.memory, &mut self.dirty, page)?;
        }
        self.dirty.sync(&*self.memory);
        self.program_bridge(bus, None)?;
        self.flush(bus)?;
        if let Some(space) = self.spaces.remove(&bus) {
            self.spare.push(space.table.root());
        }
        Ok(())
    }

    /// Maps a frame that `caller` may use.
    #[inline]
    pub(super) fn map_frame(
        &mut self,
        caller: Domid,
        bdf: RequesterId,
        page: Pfn,
        frame: u64,
        permissions: Permissions,
    ) -> Result<(), XenError> {
        let space = space_of(&mut self.spaces, caller, bdf)?;
        if space.must_flush_before(page) {
            // The guest reuses an entry before its flush. The old frame keeps its reference until
            // a flush, so the hypervisor flushes.
            self.stats.forced_flushes += 1;
            self.flush(bdf.bus())?;
        }
        self.frames.get(frame)?;
        let space = space_of(&mut self.spaces, caller, bdf)?;
        let mapped = space.map(&self.memory, &self.table_frames, page, frame, permissions);
        if mapped.is_err() {
            self.frames.put(frame);
        }
        mapped
    }

    fn map_whole_guest(&mut self, caller: Domid, bdf: RequesterId) -> Result<(), XenError> {
        let space = space_of(&mut self.spaces, caller, bdf)?;
        if !space.is_empty() {
            return Err(XenError::Occupied);
        }
        let pages = self.frames.pages(caller).min(SLOTS);
        let rights = Permissions::READ_WRITE;
        for gpfn in 0..pages {
            let Some(frame) = self.frames.frame(caller, gpfn) else {
                continue;
            };
            if let Err(error) = self.map_frame(caller, bdf, Pfn::new(gpfn), frame, rights) {
                let space = space_of(&mut self.spaces, caller, bdf)?;
                for page in space.mapped_pages(&self.memory) {
                    space.unmap(&self.memory, &mut self.dirty, page)?;
                }
                self.dirty.sync(&*self.memory);
                self.flush(bdf.bus())?;
                return Err(error);
            }
        }
        space_of(&mut self.spaces, caller, bdf)?.whole_guest = true;
        Ok(())
    }

    /// Flushes the TCE cache for a space, and drops the references of its unmapped entries.
    pub(super) fn flush(&mut self, bus: u8) -> Result<(), XenError> {
        let Some(space) = self.spaces.get_mut(&bus) else {
            return Ok(());
        };
        let request = Invalidation::Domain(space.domain());
        self.unit
            .invalidate(request)
            .map_err(|_| XenError::FlushFailed)?;
        space.flushed(|frame| self.frames.put(frame));
        Ok(())
    }
}

/// Returns the space of a device, if `caller` owns it.
#[inline]
pub(super) fn space_of(
    spaces: &mut BTreeMap<u8, IoSpace>,
    caller: Domid,
    bdf: RequesterId,
) -> Result<&mut IoSpace, XenError> {
    let space = spaces.get_mut(&bdf.bus());
    let space = space.filter(|space| space.owner == caller);
    space.ok_or(XenError::NoSpace)
}

fn privileged(caller: Domid) -> Result<(), XenError> {
    if caller == Domid::DOM0 {
        Ok(())
    } else {
        Err(XenError::NotPrivileged)
    }
}
