//! Root, context, PASID-directory and PASID tables of scalable mode (VT-d specification, sections
//! 9.1 to 9.6).
//!
//! A root entry points to two context tables: one for devices 0 to 15, one for 16 to 31. A context
//! entry of 256 bits points to the PASID directory of its device. A directory entry points to a
//! table of 64 PASID entries of 512 bits.

use ringfence_pgtable::{Coherency, TableError, TableMemory};
use ringfence_types::{FrameSource, Pasid, PhysAddr, PhysMemory, RequesterId};

use crate::pasid_entry::{POINTER, PRESENT, WORDS};

/// PDTS = 2, bits 11:9 of a context entry: 2^(2 + 7) directory entries, one frame.
const PDTS: u64 = 2 << 9;
/// PASIDE, bit 3 of a context entry: requests may carry a PASID.
const PASIDE: u64 = 1 << 3;
/// Bits of a PASID that the directory of one frame translates.
pub(crate) const PASID_BITS: u32 = 15;
/// Bits of a PASID that select an entry of a PASID table.
const TABLE_BITS: u32 = 6;
const DIRECTORY_ENTRIES: u64 = 512;
const ROOT_ENTRIES: u64 = 512;
const PASID_ENTRY: u64 = 8 * WORDS as u64;

/// The tables of a unit in scalable mode.
#[derive(Debug)]
pub(crate) struct ScalableTables {
    root: PhysAddr,
    coherency: Coherency,
    /// Requests with PASID are supported.
    pasids: bool,
}

/// The PASID directory of a device whose context entry is not present any more.
#[derive(Debug)]
#[must_use = "the directory must be freed once no cache holds the entry"]
pub(crate) struct Unlinked {
    context: PhysAddr,
    directory: PhysAddr,
}

impl ScalableTables {
    pub(crate) fn new(
        coherency: Coherency,
        pasids: bool,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
    ) -> Result<Self, TableError> {
        let root = tables(coherency, memory).frame(frames)?;
        Ok(Self {
            root,
            coherency,
            pasids,
        })
    }

    pub(crate) const fn root(&self) -> PhysAddr {
        self.root
    }

    /// Writes the PASID entry, then the directory entry, then the context entry that leads to it,
    /// if they are not present. P of each is written last.
    pub(crate) fn set(
        &self,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
        device: RequesterId,
        pasid: Pasid,
        entry: [u64; WORDS],
    ) -> Result<(), TableError> {
        let context = self.context(memory, frames, device)?;
        let old_context = load(memory, context)?;
        let directory = self.next(memory, frames, old_context)?;
        let slot = directory_entry(directory.at, pasid);
        let linked = load(memory, slot).and_then(|old| self.next(memory, frames, old));
        let table = linked.inspect_err(|_| directory.free_if_new(frames))?;
        let at = pasid_entry(table.at, pasid);
        let written = tables(self.coherency, memory).store_entry(at, &entry);
        if let Err(error) = written {
            table.free_if_new(frames);
            directory.free_if_new(frames);
            return Err(error);
        }
        if table.is_new {
            self.store(memory, slot, table.at.get() | PRESENT)?;
        }
        if directory.is_new {
            let paside = if self.pasids { PASIDE } else { 0 };
            let word = directory.at.get() | PDTS | paside | PRESENT;
            // RID_PASID is zero, as the rest of the entry.
            self.store(memory, context, word)?;
        }
        Ok(())
    }

    /// Clears P of the PASID entry. The rest stays, as the unit may be reading it.
    pub(crate) fn clear(
        &self,
        memory: &impl PhysMemory,
        device: RequesterId,
        pasid: Pasid,
    ) -> Result<(), TableError> {
        let Some(context) = self.find_context(memory, device)? else {
            return Ok(());
        };
        let context = load(memory, context)?;
        if context & PRESENT == 0 {
            return Ok(());
        }
        let directory = PhysAddr::new(context & POINTER);
        let table = load(memory, directory_entry(directory, pasid))?;
        if table & PRESENT == 0 {
            return Ok(());
        }
        let at = pasid_entry(PhysAddr::new(table & POINTER), pasid);
        self.store(memory, at, 0)
    }

    /// Clears P of the context entry, which blocks the device. The address of the directory stays
    /// in the entry, where the unit ignores it, until [`free`](Self::free). A repeated call finds
    /// it.
    pub(crate) fn unlink(
        &self,
        memory: &impl PhysMemory,
        device: RequesterId,
    ) -> Result<Option<Unlinked>, TableError> {
        let Some(context) = self.find_context(memory, device)? else {
            return Ok(None);
        };
        let entry = load(memory, context)?;
        if entry == 0 {
            return Ok(None);
        }
        self.store(memory, context, entry & !PRESENT)?;
        let directory = PhysAddr::new(entry & POINTER);
        Ok(Some(Unlinked { context, directory }))
    }

    /// Frees the PASID directory and tables of a device. No cache of the unit holds them.
    pub(crate) fn free(
        &self,
        unlinked: Unlinked,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
    ) -> Result<(), TableError> {
        self.store(memory, unlinked.context, 0)?;
        free_directory(unlinked.directory, memory, frames);
        Ok(())
    }

    /// Frees everything. The unit must not use the tables any more.
    pub(crate) fn destroy(self, memory: &impl PhysMemory, frames: &impl FrameSource) {
        for slot in 0..ROOT_ENTRIES {
            let Some(contexts) = present(memory, self.root.wrapping_add(slot.wrapping_mul(8)))
            else {
                continue;
            };
            for devfn in 0..128_u64 {
                let context = load(memory, contexts.wrapping_add(devfn.wrapping_mul(32)));
                if let Ok(context @ 1..) = context {
                    free_directory(PhysAddr::new(context & POINTER), memory, frames);
                }
            }
            frames.free(contexts);
        }
        frames.free(self.root);
    }

    /// Returns the context entry of `device`; `None` if its context table does not exist.
    fn find_context(
        &self,
        memory: &impl PhysMemory,
        device: RequesterId,
    ) -> Result<Option<PhysAddr>, TableError> {
        let root = load(memory, self.root_word(device))?;
        let table = PhysAddr::new(root & POINTER);
        Ok((root & PRESENT != 0).then(|| context_entry(table, device)))
    }

    fn context(
        &self,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
        device: RequesterId,
    ) -> Result<PhysAddr, TableError> {
        if let Some(found) = self.find_context(memory, device)? {
            return Ok(found);
        }
        let table = tables(self.coherency, memory).frame(frames)?;
        // LP and UP are bit 0 of each half of the root entry.
        self.store(memory, self.root_word(device), table.get() | PRESENT)?;
        Ok(context_entry(table, device))
    }

    /// Returns the address of the half of the root entry for `device`.
    fn root_word(&self, device: RequesterId) -> PhysAddr {
        let half = u64::from(device.devfn() >> 7).wrapping_mul(8);
        let entry = u64::from(device.bus()).wrapping_mul(16);
        self.root.wrapping_add(entry).wrapping_add(half)
    }

    /// Returns the table that `entry` points to, or a new one.
    fn next(
        &self,
        memory: &impl PhysMemory,
        frames: &impl FrameSource,
        entry: u64,
    ) -> Result<Linked, TableError> {
        if entry & PRESENT != 0 {
            return Ok(Linked {
                at: PhysAddr::new(entry & POINTER),
                is_new: false,
            });
        }
        Ok(Linked {
            at: tables(self.coherency, memory).frame(frames)?,
            is_new: true,
        })
    }

    fn store(&self, memory: &impl PhysMemory, at: PhysAddr, value: u64) -> Result<(), TableError> {
        tables(self.coherency, memory).store(at, &[value])
    }
}

/// Frees a directory and its PASID tables.
fn free_directory(directory: PhysAddr, memory: &impl PhysMemory, frames: &impl FrameSource) {
    for index in 0..DIRECTORY_ENTRIES {
        if let Some(table) = present(memory, directory.wrapping_add(index.wrapping_mul(8))) {
            frames.free(table);
        }
    }
    frames.free(directory);
}

/// A table on the path to an entry.
#[derive(Clone, Copy)]
struct Linked {
    at: PhysAddr,
    is_new: bool,
}

impl Linked {
    fn free_if_new(self, frames: &impl FrameSource) {
        if self.is_new {
            frames.free(self.at);
        }
    }
}

const fn tables<M: PhysMemory>(coherency: Coherency, memory: &M) -> TableMemory<'_, M> {
    TableMemory::new(memory, coherency, u64::BITS)
}

fn load(memory: &impl PhysMemory, at: PhysAddr) -> Result<u64, TableError> {
    tables(Coherency::Coherent, memory).load(at)
}

/// Returns the table that the entry at `at` points to.
fn present(memory: &impl PhysMemory, at: PhysAddr) -> Option<PhysAddr> {
    let entry = load(memory, at).ok()?;
    (entry & PRESENT != 0).then(|| PhysAddr::new(entry & POINTER))
}

fn context_entry(table: PhysAddr, device: RequesterId) -> PhysAddr {
    table.wrapping_add(u64::from(device.devfn() & 0x7f).wrapping_mul(32))
}

fn directory_entry(directory: PhysAddr, pasid: Pasid) -> PhysAddr {
    let index = u64::from(pasid.get() >> TABLE_BITS);
    directory.wrapping_add(index.wrapping_mul(8))
}

fn pasid_entry(table: PhysAddr, pasid: Pasid) -> PhysAddr {
    let index = u64::from(pasid.get() & ((1 << TABLE_BITS) - 1));
    table.wrapping_add(index.wrapping_mul(PASID_ENTRY))
}
