//! A guest with a ring IOMMU, a disk behind it, and tables written word by word, as a driver in C
//! writes them.

use std::sync::atomic::Ordering;

use ringfence_hw::{Geometry, Prefetch};
use ringfence_memory::Arena;
use ringfence_riommu_device::{
    Config, FaultEntry, InvalidateScope, InvalidateWord, RiommuDevice, register,
};
use ringfence_types::{
    Access, Fault, FaultReason, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId,
};

pub(crate) const MEMORY: u64 = 1 << 20;
pub(crate) const ROOT: u64 = 0x1000;
pub(crate) const CONTEXTS: u64 = 0x2000;
pub(crate) const DEVICE: u64 = 0x3000;
pub(crate) const RINGS: u64 = 0x3100;
/// Tables of rings 0 and 1, 8 slots each.
pub(crate) const TABLES: [u64; 2] = [0x4000, 0x5000];
pub(crate) const SLOTS: u64 = 8;
pub(crate) const QUEUE: u64 = 0x6000;
/// Binary logarithm of the number of entries of the fault queue.
pub(crate) const QUEUE_SHIFT: u64 = 2;

pub(crate) const READ: u64 = 1 << 30;
pub(crate) const WRITE: u64 = 1 << 31;
pub(crate) const VALID: u64 = 1 << 32;

/// Device 4, function 0 of bus 0.
pub(crate) const DISK: RequesterId = RequesterId::new(0x20);

pub(crate) struct Rig {
    pub(crate) memory: Arena,
    pub(crate) device: RiommuDevice,
}

/// Caches as the monitor has them: every ring has an entry, and the next slot is read in advance.
pub(crate) fn cached() -> Config {
    Config {
        riotlb: Geometry::new(1, 16).unwrap(),
        contexts: Geometry::new(1, 16).unwrap(),
        prefetch: Prefetch::Immediate,
    }
}

/// Returns the address of `offset` in the buffer of a slot.
pub(crate) fn riova(ring: u64, slot: u64, offset: u64) -> Iova {
    Iova::new(ring << 48 | slot << 30 | offset)
}

/// Returns the address of the disk's context entry.
const fn context_entry() -> u64 {
    context_entry_in(CONTEXTS)
}

/// Returns the address of the disk's context entry in the context table at `contexts`.
pub(crate) const fn context_entry_in(contexts: u64) -> u64 {
    contexts + (DISK.get() as u64 & 0xff) * 16
}

impl Rig {
    /// Writes the tables; the registers are those after power-on.
    pub(crate) fn new(config: &Config) -> Self {
        let rig = Self {
            memory: Arena::new(MEMORY).unwrap(),
            device: RiommuDevice::new(config, &[DISK]).unwrap(),
        };
        rig.store(ROOT, [CONTEXTS | 1, 0]);
        // Translation type 3, address width 0, domain 1.
        rig.store(context_entry(), [DEVICE | 0b11 << 2 | 1, 1 << 8]);
        rig.store(DEVICE, [RINGS, TABLES.len() as u64]);
        for (at, table) in (RINGS..).step_by(16).zip(TABLES) {
            rig.store(at, [table, SLOTS]);
        }
        rig
    }

    /// Enables translation, the fault queue and the interrupt.
    pub(crate) fn started(config: &Config) -> Self {
        let mut rig = Self::new(config);
        rig.device.write(register::ROOT, 8, ROOT);
        rig.device.write(register::FQ, 8, QUEUE | QUEUE_SHIFT);
        let control = register::TRANSLATE | register::RECORD_FAULTS | register::INTERRUPT;
        rig.device.write(register::CTRL, 4, control.into());
        rig
    }

    pub(crate) fn store(&self, at: u64, words: [u64; 2]) {
        let stored = self.memory.words(PhysAddr::new(at), 2).unwrap();
        for (to, word) in stored.iter().zip(words) {
            to.store(word, Ordering::Release);
        }
    }

    pub(crate) fn load(&self, at: u64) -> [u64; 2] {
        let words = self.memory.words(PhysAddr::new(at), 2).unwrap();
        [0, 1].map(|index| words[index].load(Ordering::Acquire))
    }

    /// Maps a buffer: address first, then the word with `valid`.
    pub(crate) fn map(&self, ring: usize, slot: u64, buffer: u64, bytes: u64, direction: u64) {
        let entry = [buffer, bytes | direction | VALID];
        self.store(TABLES[ring] + slot * 16, entry);
    }

    /// Clears the word with `valid`. Cached entries remain.
    pub(crate) fn clear(&self, ring: usize, slot: u64) {
        let at = TABLES[ring] + slot * 16;
        let [address, _] = self.load(at);
        self.store(at, [address, 0]);
    }

    /// Clears the disk's context entry. A cached one remains.
    pub(crate) fn remove_context(&self) {
        self.store(context_entry(), [0; 2]);
    }

    pub(crate) fn invalidate(&mut self, scope: InvalidateScope) {
        let word = InvalidateWord::new(scope).get();
        self.device.write(register::INV, 8, word);
    }

    pub(crate) fn access(
        &mut self,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<PhysRange, Fault> {
        self.device
            .translate(&self.memory, DISK, iova, bytes, access)
    }

    /// Reads through the device; returns the reached address or the reason.
    pub(crate) fn reads(&mut self, iova: Iova, bytes: u64) -> Result<u64, FaultReason> {
        let found = self.access(iova, bytes, Access::Read);
        found
            .map(|range| range.start().get())
            .map_err(|fault| fault.reason)
    }

    pub(crate) fn status(&self) -> u64 {
        self.device.read(register::STS, 4)
    }

    pub(crate) fn tail(&self) -> u64 {
        self.device.read(register::FQ_TAIL, 4)
    }

    /// Reads the entries that the driver has not seen, and moves the head behind them.
    pub(crate) fn take_faults(&mut self) -> Vec<FaultEntry> {
        let head = self.device.read(register::FQ_HEAD, 4) as u32;
        let tail = self.tail() as u32;
        let unread = (0..tail.wrapping_sub(head)).map(|entry| {
            let index = u64::from(head.wrapping_add(entry)) % (1 << QUEUE_SHIFT);
            FaultEntry::from_words(self.load(QUEUE + index * 16))
        });
        let faults = unread.collect();
        self.device.write(register::FQ_HEAD, 4, tail.into());
        faults
    }
}
