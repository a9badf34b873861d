//! The unit: start, devices and stop.

use ringfence_pgtable::{Coherency, Levels};
use ringfence_types::{
    DomainId, FrameSource, PfnBlock, PhysMemory, PhysRange, Registers, RequesterId,
};

use crate::command::{Command, Entries, Translations};
use crate::command_buffer::CommandBuffer;
use crate::device_entry::{DeviceEntry, POINTER};
use crate::device_table::DeviceTable;
use crate::event_log::EventLog;
use crate::guest::{GuestDomains, guest_root, new_gcr3};
use crate::registers::{
    ABSENT, COHERENT, COMMAND_BUFFER_BASE, COMMAND_BUFFER_EN, COMMAND_BUFFER_RUN, COMMAND_HEAD,
    COMMAND_TAIL, CONTROL, DEVICE_TABLE_BASE, EVENT_HEAD, EVENT_INT_EN, EVENT_LOG_BASE,
    EVENT_LOG_EN, EVENT_LOG_INT, EVENT_LOG_RUN, EVENT_OVERFLOW, EVENT_TAIL, EXCLUSION_BASE,
    EXCLUSION_LIMIT, EXTENDED_FEATURE, GT_EN, IOMMU_EN, STATUS, control_of_ivhd, wait_status,
};
use crate::{Capabilities, FaultRecord, Interrupts, Stage, UnitError};

/// The domain of blocked and passed-through devices.
const RESERVED: DomainId = DomainId::new(0);

/// The description of a unit, from firmware and the embedder.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Dword 0 of the capability block in the unit's configuration space.
    pub capability_header: u32,
    /// Flags of the unit's IVHD block.
    pub ivhd_flags: u8,
    /// Contiguous memory for the device table, which
    /// [`device_table_bytes`](crate::device_table_bytes) sizes. The embedder takes it back after
    /// [`Unit::disable`].
    pub device_table: PhysRange,
    /// The interrupts of devices.
    pub interrupts: Interrupts,
    /// Most polls for one completion or status bit.
    pub poll_limit: u32,
}

/// A unit that translates. See the example of the [crate].
///
/// A dropped unit keeps its frames and its state; call [`disable`](Self::disable) to end it.
#[derive(Debug)]
pub struct Unit<R, M, S> {
    pub(crate) registers: R,
    pub(crate) memory: M,
    frames: S,
    pub(crate) capabilities: Capabilities,
    pub(crate) poll_limit: u32,
    control: u64,
    pub(crate) table: DeviceTable,
    pub(crate) commands: CommandBuffer,
    events: EventLog,
    pub(crate) guests: GuestDomains,
    /// Polls since the last completion.
    pub(crate) polls: u32,
    /// The command buffer has stopped, or an invalidation of a device is owed;
    /// [`recover`](Self::recover) restarts the buffer and invalidates everything.
    pub(crate) stopped: bool,
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Blocks all devices: writes the tables, enables the unit and invalidates its caches.
    ///
    /// Translation is off for the time of this call, also if firmware had enabled it. Devices
    /// should not be bus masters yet.
    ///
    /// # Errors
    /// The options do not fit the unit, memory is missing, or the unit does not respond.
    /// Translation is then off and all frames are free, except after [`UnitError::TimedOut`] while
    /// the unit may still access them.
    pub fn new(registers: R, memory: M, frames: S, options: &Options) -> Result<Self, UnitError> {
        let feature = registers.read64(EXTENDED_FEATURE);
        if feature == ABSENT || options.capability_header == u32::MAX {
            return Err(UnitError::Absent);
        }
        let capabilities = Capabilities::decode(options.capability_header, feature);
        // The unit may be running: its tables must not change before it has stopped.
        stop(&registers, options.poll_limit)?;
        let (range, interrupts) = (options.device_table, options.interrupts);
        let table = DeviceTable::new(&memory, &frames, range, interrupts)?;
        let commands = CommandBuffer::new(&memory, &frames).inspect_err(|_| table.free(&frames))?;
        let events = EventLog::new(&memory, &frames).inspect_err(|_| {
            commands.free(&frames);
            table.free(&frames);
        })?;
        let guest = if capabilities.walks_guest(Levels::Four) {
            GT_EN
        } else {
            0
        };
        let mut unit = Self {
            registers,
            memory,
            frames,
            capabilities,
            poll_limit: options.poll_limit,
            control: control_of_ivhd(options.ivhd_flags) | COHERENT | EVENT_INT_EN | guest,
            table,
            commands,
            events,
            guests: GuestDomains::default(),
            polls: 0,
            stopped: false,
        };
        match unit.start() {
            Ok(()) => Ok(unit),
            Err(error) => {
                unit.disable()?;
                Err(error)
            }
        }
    }

    /// Programs the registers and enables the unit.
    fn start(&mut self) -> Result<(), UnitError> {
        let registers = &self.registers;
        registers.write32(STATUS, EVENT_OVERFLOW | EVENT_LOG_INT);
        registers.write64(DEVICE_TABLE_BASE, self.table.register());
        registers.write64(COMMAND_BUFFER_BASE, self.commands.register());
        registers.write64(EVENT_LOG_BASE, self.events.register());
        for pointer in [COMMAND_HEAD, COMMAND_TAIL, EVENT_HEAD, EVENT_TAIL] {
            registers.write32(pointer, 0);
        }
        // An exclusion range of firmware would pass accesses untranslated.
        registers.write64(EXCLUSION_BASE, 0);
        registers.write64(EXCLUSION_LIMIT, 0);
        let run = COMMAND_BUFFER_EN | EVENT_LOG_EN;
        registers.write64(CONTROL, self.control | run | IOMMU_EN);
        let running = COMMAND_BUFFER_RUN | EVENT_LOG_RUN;
        wait_status(registers, running, running, self.poll_limit)?;
        self.invalidate_everything()
    }

    /// Turns translation off, and frees all frames. Devices then access memory untranslated: the
    /// embedder must have stopped them.
    ///
    /// # Errors
    /// The unit does not stop. It may still access the frames, which stay allocated.
    pub fn disable(mut self) -> Result<(), UnitError> {
        stop(&self.registers, self.poll_limit)?;
        for (_, entry) in self.table.attached(&self.memory) {
            if let Some(gcr3) = entry.gcr3() {
                self.frames.free(gcr3);
            }
        }
        self.guests.free(&self.frames);
        self.events.free(&self.frames);
        self.commands.free(&self.frames);
        self.table.free(&self.frames);
        Ok(())
    }

    /// Returns the features of the unit.
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Returns the coherency of the unit's table walk. It snoops CPU caches, because no entry of
    /// the driver has the bit SD.
    pub const fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    /// Returns true if a map owes an invalidation too, because the unit may cache entries that are
    /// not present (NpCache).
    pub const fn invalidates_after_map(&self) -> bool {
        self.capabilities.np_cache
    }

    /// Translates `device` through the table of `domain`. A device that was attached is blocked
    /// first.
    ///
    /// # Errors
    /// The request does not fit the unit, and nothing has changed; or an invalidation failed, and
    /// the device is blocked in memory, but the unit may use another entry until
    /// [`recover`](Self::recover) succeeds.
    pub fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        stage: Stage,
    ) -> Result<(), UnitError> {
        let old = self.table.read(&self.memory, device)?;
        let entry = self.check(device, domain, stage)?;
        let gcr3 = match stage {
            Stage::Host { .. } => None,
            Stage::Guest { root, .. } => {
                self.guests.reserve(&self.memory, &self.frames)?;
                Some(new_gcr3(&self.memory, &self.frames, root)?)
            }
        };
        if !old.is_blocked()
            && let Err(error) = self.detach(device)
        {
            gcr3.into_iter().for_each(|gcr3| self.frames.free(gcr3));
            return Err(error);
        }
        let entry = match (stage, gcr3) {
            (Stage::Guest { levels, .. }, Some(gcr3)) => {
                self.guests.insert(&self.memory, domain);
                DeviceEntry::guest(domain, gcr3, levels, self.table.interrupts())
            }
            _ => {
                self.guests.remove(&self.memory, domain);
                entry
            }
        };
        self.open(device, domain, &entry)
    }

    /// Passes the accesses of `device` through untranslated.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn pass_through(&mut self, device: RequesterId) -> Result<(), UnitError> {
        if !self.table.read(&self.memory, device)?.is_blocked() {
            self.detach(device)?;
        }
        let entry = DeviceEntry::pass_through(self.table.interrupts());
        self.open(device, RESERVED, &entry)
    }

    /// Blocks `device`, and invalidates its entry and the translations of its domain.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`] if it was blocked. If an invalidation failed, the device is
    /// blocked in memory, but the unit may use the old entry until [`recover`](Self::recover)
    /// succeeds.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), UnitError> {
        let old = self.table.read(&self.memory, device)?;
        if old.is_blocked() {
            return Err(UnitError::NotAttached { device });
        }
        self.table.block(&self.memory, device)?;
        self.flush(device, old.domain())?;
        if let Some(gcr3) = old.gcr3() {
            self.frames.free(gcr3);
        }
        Ok(())
    }

    /// Returns the oldest record of the event log and removes it; `None` if the log is empty.
    pub fn next_fault(&mut self) -> Option<FaultRecord> {
        self.events
            .next(&self.registers, &self.memory, self.poll_limit)
    }

    /// Returns true if [`next_fault`](Self::next_fault) will return a record without reading a
    /// register. False does not mean that the log is empty.
    pub const fn has_known_fault(&self) -> bool {
        self.events.has_known()
    }

    /// Restarts the command buffer after an error, and invalidates all caches. Then all tickets
    /// have completed.
    ///
    /// # Errors
    /// The unit does not respond. The command buffer stays stopped.
    pub fn recover(&mut self) -> Result<(), UnitError> {
        self.stopped = true;
        let registers = &self.registers;
        let control = registers.read64(CONTROL);
        if control == ABSENT {
            return Err(UnitError::Absent);
        }
        registers.write64(CONTROL, control & !COMMAND_BUFFER_EN);
        wait_status(registers, COMMAND_BUFFER_RUN, 0, self.poll_limit)?;
        registers.write64(COMMAND_BUFFER_BASE, self.commands.register());
        registers.write32(COMMAND_HEAD, 0);
        registers.write32(COMMAND_TAIL, 0);
        self.commands.restart(&self.memory)?;
        registers.write64(CONTROL, control | COMMAND_BUFFER_EN);
        let run = COMMAND_BUFFER_RUN;
        wait_status(registers, run, run, self.poll_limit)?;
        self.stopped = false;
        self.polls = 0;
        self.invalidate_everything()
            .inspect_err(|_| self.stopped = true)
    }

    /// Checks a request against the unit and the device table. Returns the entry of a host table.
    fn check(
        &self,
        device: RequesterId,
        domain: DomainId,
        stage: Stage,
    ) -> Result<DeviceEntry, UnitError> {
        if domain == RESERVED {
            return Err(UnitError::ReservedDomain);
        }
        let (interrupts, root) = (self.table.interrupts(), stage.root());
        if root.get() & !POINTER != 0 {
            return Err(UnitError::Root { at: root });
        }
        let entry = match stage {
            Stage::Host { levels, .. } if !self.capabilities.walks_host(levels) => {
                return Err(UnitError::HostLevels { levels });
            }
            Stage::Guest { levels, .. } if !self.capabilities.walks_guest(levels) => {
                return Err(UnitError::GuestLevels { levels });
            }
            Stage::Host { levels, .. } => DeviceEntry::host(domain, root, levels, interrupts),
            Stage::Guest { levels, .. } => DeviceEntry::guest(domain, root, levels, interrupts),
        };
        let member = self.table.member(&self.memory, domain, device);
        let same = member.is_none_or(|other| {
            let gcr3 = other.gcr3();
            let guest = gcr3.and_then(|gcr3| guest_root(&self.memory, gcr3));
            other.translates_as(&entry) && guest == entry.gcr3()
        });
        if !same {
            return Err(UnitError::DomainMismatch { domain });
        }
        Ok(entry)
    }

    /// Writes the entry of a blocked device.
    fn open(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        entry: &DeviceEntry,
    ) -> Result<(), UnitError> {
        self.table.write(&self.memory, device, entry)?;
        let flushed = self.flush(device, domain);
        if flushed.is_err() {
            // The unit may have read the entry: its GCR3 table stays allocated.
            self.table.block(&self.memory, device)?;
        }
        flushed
    }

    /// Invalidates the entry of `device`, then all translations of `domain`. The second command
    /// follows the completion of the first: an access that had read the old entry would otherwise
    /// cache a translation after the second.
    ///
    /// After an error, a part was not submitted, and no later invalidation makes up for it. Nothing
    /// completes until a recovery has.
    fn flush(&mut self, device: RequesterId, domain: DomainId) -> Result<(), UnitError> {
        let translations = self.translations(domain);
        self.run([Command::invalidate_devtab_entry(device)])
            .and_then(|()| self.run([domain_command(domain, translations)]))
            .inspect_err(|_| self.stopped = true)
    }

    /// Invalidates all entries of the device table and all translations.
    ///
    /// Every entry has a command, although INVALIDATE_IOMMU_ALL covers them too: QEMU passes the
    /// accesses of a device through until its entry is invalidated.
    fn invalidate_everything(&mut self) -> Result<(), UnitError> {
        let devices = self.table.devices();
        self.run(devices.map(Command::invalidate_devtab_entry))?;
        if self.capabilities.ia_sup {
            return self.run([Command::invalidate_iommu_all()]);
        }
        let domains = (0..=u16::MAX).map(DomainId::new);
        self.run(
            domains
                .clone()
                .map(|domain| domain_command(domain, Translations::Host)),
        )?;
        if !self.capabilities.gt_sup {
            return Ok(());
        }
        self.run(domains.map(|domain| domain_command(domain, Translations::Guest)))
    }

    /// Returns the kind of tables of `domain`.
    pub(crate) fn translations(&self, domain: DomainId) -> Translations {
        if self.guests.contains(&self.memory, domain) {
            Translations::Guest
        } else {
            Translations::Host
        }
    }
}

/// Invalidates all translations of `domain`.
pub(crate) const fn domain_command(domain: DomainId, translations: Translations) -> Command {
    let entries = Entries::PagesAndDirectories;
    Command::invalidate_iommu_pages(domain, translations, PfnBlock::ALL, entries)
}

/// Turns translation, the command buffer and the event log off.
fn stop<R: Registers>(registers: &R, limit: u32) -> Result<(), UnitError> {
    registers.write64(CONTROL, 0);
    wait_status(registers, COMMAND_BUFFER_RUN | EVENT_LOG_RUN, 0, limit)
}
