//! Grants of guest memory to a sandbox process, and the I/O page table that describes them (the
//! PVIOMMU paper, section 4.2).
//!
//! Either IOMMU device of the guest makes the mappings. [`commit`](Grants::commit) executes the
//! queued changes: when it returns `Ok`, mapped pages are accessible and unmapped pages are not, or
//! the process is dead.

mod call;
pub(crate) mod child;
pub mod control_region;
mod lateness;
#[cfg(test)]
mod stuck_process_tests;
pub(crate) mod supervisor;
pub mod sys;
mod wait;
pub mod windows;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;

use ringfence_pgtable::{Coherency, MapError, MapRequest, SecondStage, Table};
use ringfence_types::{
    DomainId, Iova, IovaRange, PageSize, Permissions, PfnRange, PhysAddr, PhysRange,
};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use self::child::ChildProcess;
use self::control_region::{ControlRegion, FORMAT};
use self::supervisor::Supervisor;
use self::windows::{GrantWindow, GrantWindows};

pub use self::call::Call;
pub use self::supervisor::ProtocolViolation;
pub use self::wait::LateThread;

/// Most windows at a time. Linux limits a process to 65530 mappings; above the limit `munmap`
/// fails, even for part of a mapping. The kernel may merge or split mappings but needs at most one
/// a window.
const MAX_WINDOWS: usize = 16 * 1024;
/// Most files that can back a guest's memory.
pub(crate) const MAX_FILES: usize = 16;
/// Descriptor number of the first of them in the process.
pub(crate) const FIRST_FILE: RawFd = 64;

/// Error of a failed grant, which changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The limit of windows, tables or files is reached.
    #[error("the limit of windows, tables or files is reached")]
    NoRoom,
    /// The range does not consist of whole pages, overlaps a grant, or exceeds the address width of
    /// the table.
    #[error("the range is not whole pages, overlaps a grant or exceeds the address width")]
    Unfit,
}

/// The killed process is stuck in the kernel and still has its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckProcess;

/// One mapping that the guest made.
#[derive(Debug)]
struct Grant {
    physical: PhysAddr,
    permissions: Permissions,
    range: IovaRange,
    /// The pieces of the range that guest memory backs.
    parts: Vec<WindowMapping>,
}

/// A piece of a mapping, its window and the call that maps it.
#[derive(Debug)]
struct WindowMapping {
    range: IovaRange,
    window: GrantWindow,
    call: Call,
}

/// A range of guest memory in its backing file.
struct FileRange {
    physical: PhysRange,
    file: RawFd,
    offset: u64,
}

/// The grants of one sandbox process.
#[derive(Debug)]
pub struct Grants {
    control: Arc<ControlRegion>,
    table: Table<SecondStage>,
    windows: GrantWindows,
    /// Live windows, by start address.
    windows_in_use: BTreeMap<u64, GrantWindow>,
    granted: BTreeMap<Iova, Grant>,
    pending: Vec<Call>,
    /// Last grant. `None` after any other change, and after a commit.
    latest: Option<Call>,
    /// True while the function is not bus master: the process then has no windows.
    revoked: bool,
    memory: GuestMemoryMmap,
    /// Device and inode of each file that the process has, by descriptor.
    files: Vec<(u64, u64)>,
    /// `/dev/null`, which replaces revoked files in the process.
    dev_null: File,
    /// `None` after the process was ended.
    supervisor: Option<Supervisor>,
    child: Arc<ChildProcess>,
    /// Reason for which the process was ended.
    violation: Option<ProtocolViolation>,
}

impl Grants {
    pub(crate) fn new(control: Arc<ControlRegion>, supervisor: Supervisor) -> io::Result<Self> {
        Ok(Self {
            table: empty_table(&control)?,
            control,
            windows: GrantWindows::new(),
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

    /// Returns the reason for which the process was ended, once; `None` if it was not.
    pub fn take_violation(&mut self) -> Option<ProtocolViolation> {
        self.violation.take()
    }

    /// Grants the memory at `physical` under `range`. Parts that guest memory does not back stay
    /// inaccessible. Returns `Ok` without effect if the process is dead.
    ///
    /// # Errors
    /// [`GrantError`]; nothing has changed.
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
        // Grants do not overlap each other, so only the last one that begins in or before the range
        // can overlap it.
        let before = self.granted.range(..=range.last()).next_back();
        let overlaps = before.is_some_and(|(_, grant)| grant.range.overlaps(&range));
        if !whole || !physical.is_aligned(page) || overlaps {
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
                // None of these calls was made yet.
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
        let overlapping = |window: &GrantWindow| {
            let end = window.start.saturating_add(window.bytes);
            let last = taken.range(..end).next_back().map(|(_, last)| *last)?;
            (last.start.saturating_add(last.bytes) > window.start).then_some(last)
        };
        // One call covers grants that are consecutive in memory and requested together.
        let before = self.latest.and_then(|last| {
            last.mergeable_window(bytes, part.file, part.offset, grant.permissions)
        });
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
        mapped.map_err(|error| match error {
            MapError::OutOfFrames => GrantError::NoRoom,
            _ => GrantError::Unfit,
        })?;
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

    /// Queues a call for the next commit, unless the process has no windows at present.
    fn queue_call(&mut self, call: Call) {
        if !self.revoked {
            self.pending.push(call);
        }
    }

    /// Returns the backing files of the parts of `range` that guest memory backs.
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
            // Drop the last, partial page of a region.
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

    /// Returns the descriptor number of `file` in the process; installs the file there if
    /// necessary.
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

    /// Revokes the grant that starts at `iova`; does nothing if there is no such grant.
    pub fn unmap(&mut self, iova: Iova) {
        let Some(grant) = self.granted.remove(&iova) else {
            return;
        };
        self.latest = None;
        for WindowMapping { range, window, .. } in grant.parts {
            // Clear the table first: a device that walks it from now on finds no entry and does not
            // fault.
            self.clear(&range);
            self.windows_in_use.remove(&window.start);
            self.queue_call(Call::revoke(window));
        }
    }

    fn clear(&self, range: &IovaRange) {
        // No hardware walks this table, so nothing needs an invalidation. The guest allocates the
        // IOVAs, so nothing needs to be freed.
        let _ = self.table.unmap(&*self.control, PfnRange::covering(range));
    }

    /// Revokes all grants.
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
            // Without a table the process cannot continue.
            Err(error) => self.ended(ProtocolViolation::Io(error)),
        }
    }

    /// Asks the device to abandon its current request without side effects and to start no other. A
    /// device that follows the protocol stops soon.
    pub fn cancel_requests(&self) {
        self.control.set_master(false);
    }

    /// Revokes all windows until [`release`](Self::release), even if the device ignores
    /// [`cancel_requests`](Self::cancel_requests). Mappings may change while they are revoked. A
    /// new `Grants` begins in this state.
    ///
    /// # Errors
    /// [`StuckProcess`]. The caller must call it again.
    pub fn hold(&mut self) -> Result<(), StuckProcess> {
        self.cancel_requests();
        if !std::mem::replace(&mut self.revoked, true) {
            let parts = self.granted.values().flat_map(|grant| &grant.parts);
            self.pending
                .extend(parts.map(|part| Call::revoke(part.window)));
        }
        self.commit()
    }

    /// Maps all grants in the process and lets the device work.
    pub fn release(&mut self) {
        if std::mem::replace(&mut self.revoked, false) {
            let parts = self.granted.values().flat_map(|grant| &grant.parts);
            self.pending.extend(parts.map(|part| part.call));
            // A process that refuses is dead or dying and gains no access.
            let _ = self.commit();
        }
        self.control.set_master(true);
    }

    /// Replaces the guest's memory: revokes all grants of the old memory and grants them from the
    /// new one.
    ///
    /// # Errors
    /// [`StuckProcess`]: the memory was replaced and nothing is granted from the new one, but the
    /// process still has pages of the old one. The caller must call this or
    /// [`commit`](Self::commit) until it succeeds.
    pub fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), StuckProcess> {
        let granted: Vec<_> = self.granted.values().collect();
        let again: Vec<_> = granted
            .iter()
            .map(|grant| (grant.range, grant.physical, grant.permissions))
            .collect();
        self.unmap_all();
        let revoked = self.commit();
        // The daemon keeps no reference to the old memory, whatever the process keeps.
        self.memory = memory.clone();
        self.revoke_files();
        revoked?;
        for (range, physical, permissions) in again {
            // A grant that fails for lack of room stays absent, so accesses to it fault.
            let _ = self.map(range, physical, permissions);
        }
        self.commit()
    }

    /// Replaces each memory file of the process by `/dev/null`.
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
        if let Err(violation) = taken {
            self.ended(violation);
        }
    }

    /// Executes all changes since the last commit. They have taken effect when it returns `Ok`.
    ///
    /// # Errors
    /// [`StuckProcess`]: the process violated the protocol or was late, was killed, and still has
    /// its memory. The caller must call it again until it succeeds.
    pub fn commit(&mut self) -> Result<(), StuckProcess> {
        if let Some(supervisor) = &mut self.supervisor
            && !self.pending.is_empty()
            && let Err(violation) = supervisor.run(&Call::join(&self.pending))
        {
            self.ended(violation);
        }
        self.pending.clear();
        self.latest = None;
        if self.supervisor.is_none() && !self.child.kill_and_wait() {
            return Err(StuckProcess);
        }
        Ok(())
    }

    fn ended(&mut self, violation: ProtocolViolation) {
        self.child.kill();
        self.supervisor = None;
        self.violation.get_or_insert(violation);
        self.granted.clear();
        self.windows_in_use.clear();
    }
}

fn empty_table(control: &Arc<ControlRegion>) -> io::Result<Table<SecondStage>> {
    Table::new(
        FORMAT,
        DomainId::new(0),
        Coherency::Coherent,
        &**control,
        &**control,
    )
    .map_err(io::Error::other)
}
