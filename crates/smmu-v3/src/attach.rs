//! Attach and detach of devices (IHI 0070, section 3.21.3.1 "Configuration structure update
//! procedure").

use ringfence_types::{DomainId, FrameSource, PhysAddr, PhysMemory, Registers, RequesterId};

use crate::attachments::Device;
use crate::command::Command;
use crate::context;
use crate::error::{Feature, UnitError};
use crate::stream_entry::{self, V};
use crate::translation::{Translation, check};
use crate::unit::{Unit, tables};

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Attaches `device` to `domain`. A device that is attached is detached first.
    ///
    /// The domain-id becomes the ASID of stage 1 or the VMID of stage 2. All users of a domain-id
    /// must have the same table. [`Translation::Abort`] and [`Translation::PassThrough`] have no
    /// domain and ignore it.
    ///
    /// # Errors
    /// [`UnitError`]: the stream table does not reach the device, the unit cannot express the
    /// translation, memory is missing, or an invalidation fails. Then the device is blocked, unless
    /// its earlier attachment is still in place. After [`UnitError::Invalidation`] it stays in the
    /// driver's books: [`detach`](Self::detach) it after [`recover`](Self::recover).
    pub fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        translation: &Translation,
    ) -> Result<(), UnitError> {
        let stream = self.stream_id(device)?;
        check(&self.capabilities, domain, translation)?;
        if let Translation::Nested { table, .. } = translation
            && !table.forced_write_back
            && !self.options.coherent_guests
        {
            return Err(UnitError::Unsupported(Feature::CoherentGuests));
        }
        self.attachments.check(domain, translation, device)?;
        let memory = tables(&self.memory, &self.capabilities);
        let entry = self.streams.entry(&memory, &self.frames, stream)?;
        if self.attachments.devices.contains_key(&device) {
            self.detach(device)?;
        }
        let context = self.context(domain, translation)?;
        let attached = Device {
            stream,
            entry,
            domain,
            translation: *translation,
        };
        self.attachments.insert(device, attached, context);
        let words = stream_entry::words(&self.capabilities, domain, translation, context);
        let entered = self.enter(stream, entry, &words);
        if entered.is_err() {
            self.clear(entry)?;
        }
        entered
    }

    /// Lets the accesses of `device` through with their addresses unchanged.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn pass_through(&mut self, device: RequesterId) -> Result<(), UnitError> {
        self.attach(device, DomainId::new(0), &Translation::PassThrough)
    }

    /// Returns the context descriptor of a domain of stage 1, and writes it for its first user. No
    /// entry names it before, so the unit has not cached it.
    fn context(
        &mut self,
        domain: DomainId,
        translation: &Translation,
    ) -> Result<PhysAddr, UnitError> {
        let Translation::Stage1(table) = translation else {
            return Ok(PhysAddr::ZERO);
        };
        if let Some(found) = self.attachments.domain(domain) {
            return Ok(found.context);
        }
        let memory = tables(&self.memory, &self.capabilities);
        let at = self.contexts.take(&memory, &self.frames)?;
        let words = context::words(&self.capabilities, domain, table);
        memory.store(at, &words)?;
        Ok(at)
    }

    /// Writes an entry that is not valid: first everything but V, then V. The unit may have read
    /// any words of the entry before, so each step ends with an invalidation.
    fn enter(&mut self, stream: u32, entry: PhysAddr, words: &[u64; 8]) -> Result<(), UnitError> {
        let [first, rest @ ..] = *words;
        let memory = tables(&self.memory, &self.capabilities);
        memory.store(entry.wrapping_add(8), &rest)?;
        memory.store(entry, &[first & !V])?;
        // The unit may also have cached that there was no table of the second level.
        let leaf = self.streams.shape().is_linear();
        self.complete(|_, emit| emit(Command::StreamEntry { stream, leaf }))?;
        let memory = tables(&self.memory, &self.capabilities);
        memory.store(entry, &[first])?;
        self.complete(|_, emit| emit(Command::StreamEntry { stream, leaf: true }))?;
        Ok(())
    }

    /// Blocks `device` and invalidates its stream table entry. If it is the last device of its
    /// domain, invalidates the domain too.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], or [`UnitError::Invalidation`]: the unit may still use cached
    /// entries. The device stays attached, and a repeated detach can succeed.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), UnitError> {
        let found = self.attachments.device(device)?;
        let (entry, stream) = (found.entry, found.stream);
        let is_last = self.attachments.is_last_user(found);
        self.clear(entry)?;
        self.complete(|planner, emit| {
            emit(Command::StreamEntry { stream, leaf: true });
            if let (true, Ok(device)) = (is_last, planner.attachments.device(device)) {
                planner.translations_of(device, emit);
            }
        })?;
        if let Some(domain) = self.attachments.remove(device)
            && domain.context != PhysAddr::ZERO
        {
            self.contexts.give(domain.context);
        }
        Ok(())
    }

    /// Clears V of an entry.
    fn clear(&self, entry: PhysAddr) -> Result<(), UnitError> {
        Ok(tables(&self.memory, &self.capabilities).store(entry, &[0])?)
    }
}
