//! The structures of guest tables: the GCR3 table of a device, and the set of domains whose tables
//! are guest tables (specification section 2.2.6 "I/O Page Tables for Guest Translations").

use core::sync::atomic::Ordering;

use ringfence_pgtable::TableError;
use ringfence_types::{DomainId, FrameSource, PhysAddr, PhysMemory};

use crate::device_entry::POINTER;
use crate::memory::tables;

/// V of a GCR3 table entry.
const VALID: u64 = 1;
/// Domains in one frame of the set.
const DOMAINS: u16 = 4096 * 8;

/// Allocates a GCR3 table of one level whose PASID 0 selects the guest table at `root`.
pub(crate) fn new_gcr3<M: PhysMemory, S: FrameSource>(
    mem: &M,
    frames: &S,
    root: PhysAddr,
) -> Result<PhysAddr, TableError> {
    let table = tables(mem).frame(frames)?;
    let entry = tables(mem).store(table, &[root.get() & POINTER | VALID]);
    entry.inspect_err(|_| frames.free(table))?;
    Ok(table)
}

/// Returns the guest table of PASID 0.
pub(crate) fn guest_root<M: PhysMemory>(mem: &M, gcr3: PhysAddr) -> Option<PhysAddr> {
    let entry = tables(mem).load(gcr3).ok()?;
    Some(PhysAddr::new(entry & POINTER))
}

/// A bit per domain, in two frames. Page invalidations of a guest table have the bit GN, and an
/// [`Invalidation`](ringfence_types::Invalidation) names only the domain.
#[derive(Debug, Default)]
pub(crate) struct GuestDomains {
    frames: Option<[PhysAddr; 2]>,
}

impl GuestDomains {
    pub(crate) fn contains<M: PhysMemory>(&self, mem: &M, domain: DomainId) -> bool {
        let Some((at, bit)) = self.locate(domain) else {
            return false;
        };
        mem.word(at)
            .is_ok_and(|word| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Allocates the frames unless they exist.
    pub(crate) fn reserve<M: PhysMemory, S: FrameSource>(
        &mut self,
        mem: &M,
        frames: &S,
    ) -> Result<(), TableError> {
        if self.frames.is_some() {
            return Ok(());
        }
        let first = tables(mem).frame(frames)?;
        let second = tables(mem)
            .frame(frames)
            .inspect_err(|_| frames.free(first))?;
        self.frames = Some([first, second]);
        Ok(())
    }

    pub(crate) fn insert<M: PhysMemory>(&self, mem: &M, domain: DomainId) {
        if let Some((at, bit)) = self.locate(domain)
            && let Ok(word) = mem.word(at)
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn remove<M: PhysMemory>(&self, mem: &M, domain: DomainId) {
        if let Some((at, bit)) = self.locate(domain)
            && let Ok(word) = mem.word(at)
        {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn free<S: FrameSource>(&mut self, frames: &S) {
        for frame in self.frames.take().into_iter().flatten() {
            frames.free(frame);
        }
    }

    /// Returns the word and the bit of `domain`; `None` without frames.
    fn locate(&self, domain: DomainId) -> Option<(PhysAddr, u64)> {
        let [first, second] = self.frames?;
        let frame = if domain.get() < DOMAINS {
            first
        } else {
            second
        };
        let index = u64::from(domain.get() % DOMAINS);
        Some((frame.wrapping_add(index / 64 * 8), 1 << (index % 64)))
    }
}
