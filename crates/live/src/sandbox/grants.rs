//! What a device's process has of the guest's memory, and the I/O page table that says so (the
//! fifth document, section 4.2).
//!
//! Mappings come from whichever IOMMU device the guest has. Changes gather until
//! [`commit`](Grants::commit): when it returns, what was mapped is there and what was unmapped is
//! out of the process's reach, or the process is dead.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;

use ringfence_pgtable::{Coherency, MapRequest, SecondStage, Table};
use ringfence_types::{
    DomainId, Iova, IovaRange, PageSize, Permissions, PfnRange, PhysAddr, PhysRange,
};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::call::Call;
use super::child::ChildProcess;
use super::control_region::ControlRegion;
use super::sandbox_memory::FORMAT;
use super::supervisor::{ProtocolViolation, Supervisor};
use super::windows::{Window, Windows};

/// Most windows at a time. The kernel lets a process have 65530 mappings, and refuses to take one
/// away, or a part of one, from whoever has more. However it joins and splits them, there is one
/// for each window at most.
const MAX_WINDOWS: usize = 16 * 1024;
/// Most files that a guest's memory lies in.
pub(super) const MAX_FILES: usize = 16;
/// Number of the first of them in the process.
pub(super) const FIRST_FILE: RawFd = 64;

/// Why a page was not granted. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantError {
    /// A limit: windows, tables, files.
    NoRoom,
    /// Not whole pages, or mapped already.
    Unfit,
}

impl std::fmt::Display for GrantError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoRoom => "no room for another grant",
            Self::Unfit => "not whole pages, or granted already",
        })
    }
}

impl std::error::Error for GrantError {}

/// The process hangs in the kernel after it was killed, with its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckProcess;

/// One mapping of the guest's.
#[derive(Debug)]
struct Grant {
    physical: PhysAddr,
    permissions: Permissions,
    range: IovaRange,
    /// Those of its pages that are memory.
    parts: Vec<WindowMapping>,
}

/// Where pages appear, and the call that has them do so.
#[derive(Debug)]
struct WindowMapping {
    range: IovaRange,
    window: Window,
    call: Call,
}

/// Memory of the guest in a file.
struct FileRange {
    physical: PhysRange,
    file: RawFd,
    offset: u64,
}

/// The grants of one process.
#[derive(Debug)]
pub struct Grants {
    control: Arc<ControlRegion>,
    table: Table<SecondStage>,
    windows: Windows,
    /// By first address.
    windows_in_use: BTreeMap<u64, Window>,
    granted: BTreeMap<Iova, Grant>,
    pending: Vec<Call>,
    /// What was granted last, if nothing has changed or taken effect since.
    latest: Option<Call>,
    /// The device's function is no master of the bus: the process has none of it.
    revoked: bool,
    memory: GuestMemoryMmap,
    /// Which files the process has, by device and inode.
    files: Vec<(u64, u64)>,
    /// `/dev/null`, which takes their places.
    dev_null: File,
    /// None once it is dead.
    supervisor: Option<Supervisor>,
    child: Arc<ChildProcess>,
    /// Why it is.
    violation: Option<ProtocolViolation>,
}

impl Grants {
    pub(super) fn new(board: Arc<ControlRegion>, supervisor: Supervisor) -> io::Result<Self> {
        Ok(Self {
            table: empty_table(&board)?,
            control: board,
            windows: Windows::new(),
            windows_in_use: BTreeMap::new(),
            granted: BTreeMap::new(),
            pending: Vec::new(),
            latest: None,
            revoked: true,
            memory: GuestMemoryMmap::default(),
            files: Vec::new(),
            dev_null: File::open("/dev/null")?,
            child: Arc::clone(supervisor.child()),
            supervisor: Some(supervisor),
            violation: None,
        })
    }

    /// Why the process was ended, if it was; once.
    pub fn take_violation(&mut self) -> Option<ProtocolViolation> {
        self.violation.take()
    }

    /// Grants the memory at `physical` under `iova`. What of it is no memory is not reached.
    ///
    /// # Errors
    /// [`GrantError`]; nothing has changed. None if the process is dead: it reaches nothing.
    pub fn map(
        &mut self,
        range: IovaRange,
        physical: PhysAddr,
        permissions: Permissions,
    ) -> Result<(), GrantError> {
        if self.supervisor.is_none() {
            return Ok(());
        }
        let page = PageSize::Size4K.bytes();
        let whole = range.start().is_aligned(page) && range.bytes().is_multiple_of(page);
        if !whole || !physical.is_aligned(page) || self.granted.contains_key(&range.start()) {
            return Err(GrantError::Unfit);
        }
        let mut grant = Grant {
            physical,
            permissions,
            range,
            parts: Vec::new(),
        };
        let found = self.parts(&range, physical)?;
        if self.windows_in_use.len().saturating_add(found.len()) > MAX_WINDOWS {
            return Err(GrantError::NoRoom);
        }
        let before = self.pending.len();
        for part in found {
            if let Err(error) = self.map_part(&mut grant, &part) {
                // Nothing of it was asked of the process yet.
                self.pending.truncate(before);
                self.latest = None;
                for part in &grant.parts {
                    self.clear(&part.range);
                    self.windows_in_use.remove(&part.window.start);
                }
                return Err(error);
            }
        }
        self.granted.insert(range.start(), grant);
        Ok(())
    }

    fn map_part(&mut self, grant: &mut Grant, part: &FileRange) -> Result<(), GrantError> {
        let extra = part.physical.start().offset_from(&grant.physical);
        let start = extra.and_then(|extra| grant.range.start().checked_add(extra));
        let bytes = part.physical.bytes();
        let range = start.and_then(|start| IovaRange::new(start, bytes));
        let range = range.ok_or(GrantError::Unfit)?;
        let taken = &self.windows_in_use;
        let overlapping = |window: &Window| {
            let end = window.start.saturating_add(window.bytes);
            let last = taken.range(..end).next_back().map(|(_, last)| *last)?;
            (last.start.saturating_add(last.bytes) > window.start).then_some(last)
        };
        // What is consecutive in memory and asked for together is granted with one call.
        let before = self
            .latest
            .and_then(|last| last.goes_on(bytes, part.file, part.offset, grant.permissions));
        let window = match before {
            Some(before) => self.windows.alloc_after(&before, bytes, overlapping),
            None => self.windows.alloc(bytes, overlapping),
        };
        let window = window.ok_or(GrantError::NoRoom)?;
        let request = MapRequest {
            iova: range.start(),
            pa: PhysAddr::new(window.start),
            pages: range.pages(PageSize::Size4K),
            permissions: grant.permissions,
        };
        let mapped = self.table.map(&*self.control, &*self.control, request);
        mapped.map_err(|_| GrantError::NoRoom)?;
        self.windows_in_use.insert(window.start, window);
        let call = Call::grant(window, part.file, part.offset, grant.permissions);
        grant.parts.push(WindowMapping {
            range,
            window,
            call,
        });
        self.queue_call(call);
        self.latest = Some(call);
        Ok(())
    }

    /// Has a call made with the next ones, unless none of it is in the process anyway.
    fn queue_call(&mut self, call: Call) {
        if !self.revoked {
            self.pending.push(call);
        }
    }

    /// The files behind a guest-physical range, where it is memory.
    fn parts(
        &mut self,
        range: &IovaRange,
        physical: PhysAddr,
    ) -> Result<Vec<FileRange>, GrantError> {
        let wanted = PhysRange::new(physical, range.bytes()).ok_or(GrantError::Unfit)?;
        let memory = self.memory.clone();
        let mut parts = Vec::new();
        for region in memory.iter() {
            let start = PhysAddr::new(region.start_addr().raw_value());
            let Some((has, at)) = PhysRange::new(start, region.len()).zip(region.file_offset())
            else {
                continue;
            };
            let first = wanted.start().max(has.start());
            let last = wanted.last().min(has.last());
            let within = PhysRange::inclusive(first, last);
            let skipped = first.offset_from(&has.start());
            let (Some(physical), Some(offset)) =
                (within, skipped.and_then(|s| at.start().checked_add(s)))
            else {
                continue;
            };
            // A region ends with a page, or its last bytes are out of reach.
            let bytes = physical.bytes() - physical.bytes() % PageSize::Size4K.bytes();
            let Some(physical) = PhysRange::new(first, bytes) else {
                continue;
            };
            let file = self.file(at.file().as_fd())?;
            parts.push(FileRange {
                physical,
                file,
                offset,
            });
        }
        Ok(parts)
    }

    /// The number under which the process has this file; it is given it if need be.
    fn file(&mut self, file: std::os::fd::BorrowedFd<'_>) -> Result<RawFd, GrantError> {
        let about = rustix::fs::fstat(file).map_err(|_| GrantError::NoRoom)?;
        let identity = (about.st_dev, about.st_ino);
        let known = self.files.iter().position(|known| *known == identity);
        let at = known.unwrap_or(self.files.len());
        let number = RawFd::try_from(at).map_err(|_| GrantError::NoRoom)? + FIRST_FILE;
        if known.is_none() {
            if at >= MAX_FILES {
                return Err(GrantError::NoRoom);
            }
            let supervisor = self.supervisor.as_ref().ok_or(GrantError::NoRoom)?;
            let given = supervisor.give(file, number.cast_unsigned());
            given.map_err(|_| GrantError::NoRoom)?;
            self.files.push(identity);
        }
        Ok(number)
    }

    /// Takes away what was granted at `iova`, as it was granted.
    pub fn unmap(&mut self, iova: Iova) {
        let Some(grant) = self.granted.remove(&iova) else {
            return;
        };
        self.latest = None;
        for WindowMapping { range, window, .. } in grant.parts {
            // First the table: a device that looks from now on finds nothing, and does not fault.
            self.clear(&range);
            self.windows_in_use.remove(&window.start);
            self.queue_call(Call::revoke(window));
        }
    }

    fn clear(&self, range: &IovaRange) {
        // The table is not walked by hardware, and its addresses come from the guest: there is
        // nothing to invalidate and nothing to free.
        let _ = self.table.unmap(&*self.control, PfnRange::covering(range));
    }

    /// Takes everything away.
    pub fn unmap_all(&mut self) {
        self.latest = None;
        for grant in std::mem::take(&mut self.granted).into_values() {
            for WindowMapping { window, .. } in grant.parts {
                self.windows_in_use.remove(&window.start);
                self.queue_call(Call::revoke(window));
            }
        }
        let anew = self
            .control
            .clear_tables()
            .and_then(|()| empty_table(&self.control));
        match anew {
            Ok(table) => self.table = table,
            // Without a table it can go no further.
            Err(error) => self.ended(ProtocolViolation::Io(error)),
        }
    }

    /// Has the device leave what it has in hand as if it had not begun, and begin nothing else. It
    /// does so soon, if it keeps the rules.
    pub fn call_off(&self) {
        self.control.set_master(false);
    }

    /// Takes all of it out of the process's reach until [`release`](Self::release), whatever the
    /// device does. Mappings come and go meanwhile as before. So it begins.
    ///
    /// # Errors
    /// [`StuckProcess`]. To be called again.
    pub fn hold(&mut self) -> Result<(), StuckProcess> {
        self.call_off();
        if !std::mem::replace(&mut self.revoked, true) {
            let parts = self.granted.values().flat_map(|grant| &grant.parts);
            self.pending
                .extend(parts.map(|part| Call::revoke(part.window)));
        }
        self.commit()
    }

    /// The process has what is mapped, and the device may work.
    pub fn release(&mut self) {
        if std::mem::replace(&mut self.revoked, false) {
            let parts = self.granted.values().flat_map(|grant| &grant.parts);
            self.pending.extend(parts.map(|part| part.call));
            // Whoever does not obey is dead or dying, and has nothing that it did not have before.
            let _ = self.commit();
        }
        self.control.set_master(true);
    }

    /// The guest's memory is another one now: what was granted of the old one goes, and comes anew
    /// from this one.
    ///
    /// # Errors
    /// [`StuckProcess`].
    pub fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), StuckProcess> {
        let granted: Vec<_> = self.granted.values().collect();
        let again: Vec<_> = granted
            .iter()
            .map(|grant| (grant.range, grant.physical, grant.permissions))
            .collect();
        self.unmap_all();
        self.commit()?;
        self.memory = memory.clone();
        self.revoke_files();
        for (range, physical, permissions) in again {
            // What has no room is not there, and faults.
            let _ = self.map(range, physical, permissions);
        }
        self.commit()
    }

    /// In the place of each file that the process has it gets one in which there is nothing.
    fn revoke_files(&mut self) {
        let count = self.files.len();
        self.files.clear();
        let Some(supervisor) = &self.supervisor else {
            return;
        };
        let taken = (0..count).try_for_each(|at| {
            let number = FIRST_FILE.cast_unsigned() + u32::try_from(at).unwrap_or(0);
            supervisor.give(self.dev_null.as_fd(), number)
        });
        if let Err(breach) = taken {
            self.ended(breach);
        }
    }

    /// Has all changes made since the last time take effect. When it returns `Ok`, they have.
    ///
    /// # Errors
    /// [`StuckProcess`]: the process broke a rule or was late, was killed, and still has its memory. To be called again until it has not.
    pub fn commit(&mut self) -> Result<(), StuckProcess> {
        if let Some(supervisor) = &mut self.supervisor
            && !self.pending.is_empty()
            && let Err(breach) = supervisor.run(&Call::join(&self.pending))
        {
            self.ended(breach);
        }
        self.pending.clear();
        self.latest = None;
        if self.supervisor.is_none() && !self.child.kill_and_wait() {
            return Err(StuckProcess);
        }
        Ok(())
    }

    fn ended(&mut self, breach: ProtocolViolation) {
        self.child.kill();
        self.supervisor = None;
        self.violation.get_or_insert(breach);
        self.granted.clear();
        self.windows_in_use.clear();
    }
}

fn empty_table(board: &Arc<ControlRegion>) -> io::Result<Table<SecondStage>> {
    Table::new(
        FORMAT,
        DomainId::new(0),
        Coherency::Coherent,
        &**board,
        &**board,
    )
    .map_err(io::Error::other)
}
