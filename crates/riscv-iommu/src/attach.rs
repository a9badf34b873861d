//! Attach and detach of devices and processes.

use alloc::collections::BTreeMap;

use ringfence_types::{
    DomainId, FrameSource, Invalidation, Invalidator, PhysAddr, PhysMemory, Registers, RequesterId,
};

use crate::attachments::Device;
use crate::command::Command;
use crate::directory::{Directory, Shape};
use crate::error::{Feature, UnitError};
use crate::translation::{
    self, Ats, PageTable, Privilege, ProcessBits, Translation, check_first_stage, device_context,
    process_context,
};
use crate::unit::{Unit, tables};

/// Words of a device context that the driver writes, in the base and the extended format.
const BASE_WORDS: usize = 4;
const EXTENDED_WORDS: usize = 7;
/// Index bits of a leaf table of a process directory.
const PROCESS_LEAF_BITS: u32 = 8;

impl<R: Registers, M: PhysMemory> Unit<R, M> {
    /// Attaches `device` to `domain`. A device that is attached is detached first.
    ///
    /// The domain-id becomes the PSCID of a first stage and the GSCID of a second stage. All users
    /// of a domain-id must have the same table. [`Translation::PassThrough`] and
    /// [`Translation::Processes`] have no domain and ignore it.
    ///
    /// # Errors
    /// [`UnitError`]: the directory does not reach the device, the unit or the tables cannot
    /// express the translation, or an invalidation fails. Then the device is blocked, unless its
    /// earlier attachment is still in place.
    pub fn attach<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
        domain: DomainId,
        translation: &Translation,
    ) -> Result<(), UnitError> {
        self.attach_with_ats(frames, device, domain, translation, None)
    }

    /// Gives `device` access to all memory.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn pass_through<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
    ) -> Result<(), UnitError> {
        let no_domain = DomainId::new(0);
        self.attach(frames, device, no_domain, &Translation::PassThrough)
    }

    /// Attaches a device with address translation services. Invalidations then include its TLB.
    ///
    /// The caller enables the services in the device after the attach and disables them before the
    /// detach: a device TLB is empty after it was enabled. The caller also limits outstanding
    /// invalidations to the device's queue depth.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn attach_with_ats<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
        domain: DomainId,
        translation: &Translation,
        ats: Option<Ats>,
    ) -> Result<(), UnitError> {
        let id = self.device_id(device)?;
        translation::check(&self.capabilities, translation, ats)?;
        if self.capabilities.svpbmt && translation.has_guest_tables() {
            let coherent = self.options.coherent_guests;
            translation::need(coherent, Feature::CoherentGuests)?;
        }
        self.attachments.check(domain, translation, device)?;
        let tables = tables(&self.memory, &self.options);
        let entry = self.directory.entry(&tables, frames, id)?;
        let directory = match translation {
            Translation::Processes(bits) => {
                Some(Directory::new(process_shape(*bits), &tables, frames)?)
            }
            _ => None,
        };
        let attached = Device {
            id,
            entry,
            domain,
            translation: *translation,
            ats,
            directory,
            processes: BTreeMap::new(),
        };
        let replaced = match self.attachments.devices.contains_key(&device) {
            true => self.detach(frames, device),
            false => Ok(()),
        };
        let has_domain = !matches!(
            translation,
            Translation::PassThrough | Translation::Processes(_)
        );
        let ready = replaced.and_then(|()| match has_domain {
            true => self.empty_domain(domain),
            false => Ok(()),
        });
        if let Err(error) = ready {
            self.free_directory(frames, attached.directory);
            return Err(error);
        }
        self.enter(frames, device, attached)
    }

    /// Writes the device context and registers the device.
    fn enter<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        requester: RequesterId,
        device: Device,
    ) -> Result<(), UnitError> {
        let (id, entry) = (device.id, device.entry);
        let root = device.directory.as_ref().map(Directory::root);
        let words = device_context(
            device.domain,
            &device.translation,
            device.ats,
            root.unwrap_or(PhysAddr::ZERO),
        );
        self.attachments.insert(requester, device);
        if !self.holds_everything() {
            let directory = self.attachments.remove(requester);
            self.free_directory(frames, directory);
            return Err(UnitError::QueueTooSmall);
        }
        let length = match self.capabilities.msi_flat {
            true => EXTENDED_WORDS,
            false => BASE_WORDS,
        };
        let words = words.get(..length).unwrap_or_default();
        tables(&self.memory, &self.options).store_entry(entry, words)?;
        // A unit does not cache entries without V. It may have read some words of this one before
        // the driver wrote them, and V after: no such mix survives the invalidation.
        let command = Command::DeviceContext { device: Some(id) };
        self.invalidate_new(entry, command)
    }

    /// Executes `command` for a new entry, and clears the entry if that fails.
    fn invalidate_new(&mut self, entry: PhysAddr, command: Command) -> Result<(), UnitError> {
        let done = self.submit_plan(|_, emit| emit(command));
        let done = done.and_then(|ticket| self.wait(ticket));
        if let Err(error) = done {
            self.clear(entry)?;
            return Err(UnitError::Invalidation(error));
        }
        Ok(())
    }

    /// Blocks `device` and invalidates everything that was cached through it.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], or [`UnitError::Invalidation`]: the unit may still use cached
    /// entries. The device stays attached. After [`recover`](Self::recover) a repeated detach
    /// succeeds, even if the device never answers an invalidation of its TLB.
    pub fn detach<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
    ) -> Result<(), UnitError> {
        let entry = self.attachments.device(device)?.entry;
        self.clear(entry)?;
        let done = self.submit_plan(|planner, emit| planner.context(device, emit));
        let done = done.and_then(|ticket| self.wait(ticket));
        if done.is_err() && self.completion.failed {
            // Nothing completes before `recover`, which invalidates the cleared context. Then the
            // unit rejects what the device's TLB translated, so nobody need wait for the device.
            self.attachments.forget_tlb(device);
        }
        done?;
        let directory = self.attachments.remove(device);
        self.free_directory(frames, directory);
        Ok(())
    }

    /// Attaches a process of a device with [`Translation::Processes`] to `domain`, whose id becomes
    /// its PSCID.
    ///
    /// # Errors
    /// [`UnitError`]: the process directory does not reach the process, the process is attached,
    /// the unit cannot walk the table, the queue is too small, or an invalidation fails. The
    /// process is blocked, unless it was attached.
    pub fn attach_process<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
        process: u32,
        domain: DomainId,
        table: PageTable,
        privilege: Privilege,
    ) -> Result<(), UnitError> {
        check_first_stage(&self.capabilities, &table)?;
        self.attachments.check_process(domain, &table)?;
        let (id, directory) = self.process_directory(device, process)?;
        if self.has_process(device, process) {
            return Err(UnitError::Process { process });
        }
        let entry = directory.entry(&tables(&self.memory, &self.options), frames, process)?;
        self.empty_domain(domain)?;
        self.attachments
            .insert_process(device, process, domain, table);
        if !self.holds_everything() {
            self.attachments.remove_process(device, process);
            return Err(UnitError::QueueTooSmall);
        }
        let words = process_context(domain, &table, privilege);
        tables(&self.memory, &self.options).store_entry(entry, &words)?;
        let command = Command::ProcessContext {
            device: id,
            process,
        };
        self.invalidate_new(entry, command)
    }

    /// Blocks a process and invalidates everything that was cached through its context.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], [`UnitError::Process`], or [`UnitError::Invalidation`]: the unit
    /// may still use cached entries. The process stays attached, and a repeated detach can succeed.
    pub fn detach_process<S: FrameSource + ?Sized>(
        &mut self,
        frames: &S,
        device: RequesterId,
        process: u32,
    ) -> Result<(), UnitError> {
        let (id, directory) = self.process_directory(device, process)?;
        let used = self.attachments.device(device)?.processes.get(&process);
        let domain = *used.ok_or(UnitError::Process { process })?;
        // The tables on the path exist.
        let entry = directory.entry(&tables(&self.memory, &self.options), frames, process)?;
        self.clear(entry)?;
        let ticket = self.submit_plan(|planner, emit| {
            emit(Command::ProcessContext {
                device: id,
                process,
            });
            planner.burst(&[Invalidation::Domain(domain)], emit);
        })?;
        self.wait(ticket)?;
        self.attachments.remove_process(device, process);
        Ok(())
    }

    /// Returns true if the empty queue holds the invalidation of everything, which recovery needs.
    fn holds_everything(&self) -> bool {
        self.count(|planner, emit| planner.everything(emit)) <= self.commands.capacity()
    }

    /// Blocks the device or the process of an entry.
    fn clear(&self, entry: PhysAddr) -> Result<(), UnitError> {
        Ok(tables(&self.memory, &self.options).store(entry, &[0])?)
    }

    fn has_process(&self, device: RequesterId, process: u32) -> bool {
        let device = self.attachments.devices.get(&device);
        device.is_some_and(|device| device.processes.contains_key(&process))
    }

    /// Returns the device id and the process directory of a device, which must reach `process`.
    fn process_directory(
        &self,
        device: RequesterId,
        process: u32,
    ) -> Result<(u32, &Directory), UnitError> {
        let attached = self.attachments.device(device)?;
        let directory = attached.directory.as_ref();
        let directory = directory.ok_or(UnitError::NoProcesses { device })?;
        if !directory.shape().reaches(process) {
            return Err(UnitError::ProcessBeyondDirectory { process });
        }
        Ok((attached.id, directory))
    }

    /// Invalidates the entries of a domain that nobody uses. An earlier kernel may have used its
    /// id.
    fn empty_domain(&mut self, domain: DomainId) -> Result<(), UnitError> {
        if self.attachments.domain(domain).is_some() {
            return Ok(());
        }
        let request = [Invalidation::Domain(domain)];
        let ticket = self.submit_plan(|planner, emit| planner.burst(&request, emit))?;
        Ok(self.wait(ticket)?)
    }

    fn free_directory<S: FrameSource + ?Sized>(&self, frames: &S, directory: Option<Directory>) {
        if let Some(directory) = directory {
            directory.destroy(&tables(&self.memory, &self.options), frames);
        }
    }
}

const fn process_shape(bits: ProcessBits) -> Shape {
    Shape {
        levels: match bits {
            ProcessBits::Eight => 1,
            ProcessBits::Seventeen => 2,
            ProcessBits::Twenty => 3,
        },
        bits: bits.bits(),
        leaf_bits: PROCESS_LEAF_BITS,
    }
}
