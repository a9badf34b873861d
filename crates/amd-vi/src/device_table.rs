//! The device table: one entry per requester id, in contiguous memory of the embedder
//! (specification section 2.2.2 "Device Table").

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_pgtable::TableError;
use ringfence_types::{DomainId, FrameSource, PhysAddr, PhysMemory, PhysRange, RequesterId};

use crate::UnitError;
use crate::device_entry::{DeviceEntry, Interrupts, POINTER, WORDS};
use crate::memory::tables;

const PAGE: u64 = 4096;
/// Bytes of an entry.
const ENTRY: u64 = 8 * WORDS as u64;
/// Bytes of the largest table, one entry for every requester id.
const MOST: u64 = ENTRY << 16;

/// Returns the size of a device table that has an entry for every requester id up to `largest`.
pub const fn device_table_bytes(largest: RequesterId) -> u64 {
    ((largest.get() as u64 + 1) * ENTRY).next_multiple_of(PAGE)
}

/// The table in memory.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    base: PhysAddr,
    bytes: u64,
    /// The table of blocked devices.
    empty: PhysAddr,
    interrupts: Interrupts,
}

impl DeviceTable {
    /// Writes a table that blocks every device.
    pub(crate) fn new<M: PhysMemory, S: FrameSource>(
        mem: &M,
        frames: &S,
        range: PhysRange,
        interrupts: Interrupts,
    ) -> Result<Self, UnitError> {
        let base = range.start();
        let bytes = (range.bytes() & !(PAGE - 1)).min(MOST);
        if bytes == 0 || !base.is_aligned(PAGE) || base.get() & !POINTER != 0 {
            return Err(UnitError::DeviceTable);
        }
        let words = mem
            .words(base, (bytes / 8) as usize)
            .map_err(|_| TableError::Memory)?;
        let empty = tables(mem).frame(frames)?;
        for entry in words.chunks_exact(WORDS) {
            store(entry, &DeviceEntry::blocked(empty, interrupts));
        }
        Ok(Self {
            base,
            bytes,
            empty,
            interrupts,
        })
    }

    /// Frees the empty table, which the unit no longer accesses.
    pub(crate) fn free<S: FrameSource>(&self, frames: &S) {
        frames.free(self.empty);
    }

    /// Returns the value of the Device Table Base Address Register: the base, and the number of
    /// pages minus one.
    pub(crate) const fn register(&self) -> u64 {
        self.base.get() | (self.bytes / PAGE).saturating_sub(1)
    }

    pub(crate) const fn interrupts(&self) -> Interrupts {
        self.interrupts
    }

    /// Returns the devices that have an entry.
    pub(crate) fn devices(&self) -> impl Iterator<Item = RequesterId> + use<> {
        let last = (self.bytes / ENTRY).saturating_sub(1).min(0xffff) as u16;
        (0..=last).map(RequesterId::new)
    }

    /// Returns the entry of `device`.
    pub(crate) fn read<M: PhysMemory>(
        &self,
        mem: &M,
        device: RequesterId,
    ) -> Result<DeviceEntry, UnitError> {
        let words = self.words(mem, device)?;
        let mut entry = [0; WORDS];
        for (value, word) in entry.iter_mut().zip(words) {
            *value = word.load(Ordering::Acquire);
        }
        Ok(DeviceEntry(entry))
    }

    /// Writes the entry of `device`, which is blocked. The word with V comes last: a unit that
    /// reads the entry meanwhile sees it blocked.
    pub(crate) fn write<M: PhysMemory>(
        &self,
        mem: &M,
        device: RequesterId,
        entry: &DeviceEntry,
    ) -> Result<(), UnitError> {
        store(self.words(mem, device)?, entry);
        Ok(())
    }

    /// Blocks `device`. The word with V comes first: its store stops the accesses, whatever the
    /// other words are.
    pub(crate) fn block<M: PhysMemory>(
        &self,
        mem: &M,
        device: RequesterId,
    ) -> Result<(), UnitError> {
        let blocked = DeviceEntry::blocked(self.empty, self.interrupts);
        for (word, value) in self.words(mem, device)?.iter().zip(blocked.0) {
            word.store(value, Ordering::Release);
        }
        Ok(())
    }

    /// Returns an attached device of `domain` other than `device`, with its entry.
    pub(crate) fn member<M: PhysMemory>(
        &self,
        mem: &M,
        domain: DomainId,
        device: RequesterId,
    ) -> Option<DeviceEntry> {
        self.attached(mem)
            .find(|(other, entry)| *other != device && entry.domain() == domain)
            .map(|(_, entry)| entry)
    }

    /// Returns the attached devices with their entries, passed-through ones too.
    pub(crate) fn attached<'a, M: PhysMemory>(
        &'a self,
        mem: &'a M,
    ) -> impl Iterator<Item = (RequesterId, DeviceEntry)> + 'a {
        self.devices().filter_map(|device| {
            let entry = self.read(mem, device).ok()?;
            (!entry.is_blocked()).then_some((device, entry))
        })
    }

    fn words<'m, M: PhysMemory>(
        &self,
        mem: &'m M,
        device: RequesterId,
    ) -> Result<&'m [AtomicU64], UnitError> {
        let offset = u64::from(device.get()) * ENTRY;
        if offset >= self.bytes {
            return Err(UnitError::DeviceBeyondTable { device });
        }
        let words = mem.words(self.base.wrapping_add(offset), WORDS);
        Ok(words.map_err(|_| TableError::Memory)?)
    }
}

/// Stores the words of an entry, the first one last.
fn store(words: &[AtomicU64], entry: &DeviceEntry) {
    for (word, value) in words.iter().zip(entry.0).rev() {
        word.store(value, Ordering::Release);
    }
}
