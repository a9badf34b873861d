//! MSI page tables (RISC-V Advanced Interrupt Architecture, section "MSI page tables"): they direct
//! a guest's message-signalled interrupts to interrupt files of the host.

use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{Coherency, TableError, TableMemory};
use ringfence_types::{FrameSource, GuestPhysAddr, PageSize, Pfn, PfnRange, PhysAddr, PhysMemory};

use crate::translation::MsiTranslation;
use crate::unit::ADDRESS_BITS;

/// V: the entry is valid.
const V: u64 = 1;
/// M = 3: basic translate mode.
const BASIC: u64 = 0b11 << 1;
/// PPN of the interrupt file.
const PPN: u64 = 0x003f_ffff_ffff_fc00;
const PPN_FROM_ADDRESS: u32 = 2;
/// Entries of 16 bytes in a frame.
const FILES_PER_FRAME: u32 = 256;
/// Bits of a guest page number, as in the MSI address mask and pattern of a device context.
const PAGE_NUMBER_BITS: u32 = 52;

/// The reason why an MSI page table was not created or changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MsiError {
    /// The mask selects more interrupt files than a frame has entries.
    TooManyFiles,
    /// The mask or the pattern has bits above the 52 of a guest page number.
    BeyondPageNumber,
    /// The table could not be allocated or accessed.
    Table(TableError),
    /// The page is not the page of an interrupt file of the guest.
    NotAnInterruptFile {
        /// The requested page.
        page: GuestPhysAddr,
    },
    /// The interrupt file of the guest is already mapped.
    AlreadyMapped {
        /// The requested page.
        page: GuestPhysAddr,
    },
    /// The interrupt file of the guest is not mapped.
    NotMapped {
        /// The requested page.
        page: GuestPhysAddr,
    },
    /// The interrupt file of the host is not page-aligned, or is above the 56 address bits that an
    /// entry holds.
    Target {
        /// The requested address.
        at: PhysAddr,
    },
}

impl fmt::Display for MsiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyFiles => f.write_str("the mask selects more than 256 interrupt files"),
            Self::BeyondPageNumber => {
                f.write_str("the mask or the pattern has bits above those of a guest page number")
            }
            Self::Table(error) => error.fmt(f),
            Self::NotAnInterruptFile { page } => {
                write!(f, "no interrupt file of the guest is at {page}")
            }
            Self::AlreadyMapped { page } => {
                write!(f, "the interrupt file at {page} is already mapped")
            }
            Self::NotMapped { page } => write!(f, "the interrupt file at {page} is not mapped"),
            Self::Target { at } => write!(f, "no interrupt file of the host can be at {at}"),
        }
    }
}

impl core::error::Error for MsiError {}

impl From<TableError> for MsiError {
    fn from(error: TableError) -> Self {
        Self::Table(error)
    }
}

/// A flat table of up to 256 interrupt files.
#[derive(Debug)]
pub struct MsiPageTable {
    table: PhysAddr,
    mask: u64,
    pattern: u64,
}

impl MsiPageTable {
    /// Creates a table without entries for the guest pages that match `pattern` in all bits of the
    /// page number that `mask` does not select.
    ///
    /// # Errors
    /// [`MsiError::TooManyFiles`], [`MsiError::BeyondPageNumber`] or [`MsiError::Table`]. No frame
    /// stays allocated.
    pub fn new<M: PhysMemory, S: FrameSource + ?Sized>(
        memory: &M,
        frames: &S,
        mask: u64,
        pattern: u64,
    ) -> Result<Self, MsiError> {
        if mask.count_ones() > FILES_PER_FRAME.ilog2() {
            return Err(MsiError::TooManyFiles);
        }
        if (mask | pattern) >> PAGE_NUMBER_BITS != 0 {
            return Err(MsiError::BeyondPageNumber);
        }
        if frames.frame_size() != PageSize::Size4K {
            return Err(MsiError::Table(TableError::FrameSize));
        }
        Ok(Self {
            table: tables(memory).frame(frames)?,
            mask,
            pattern,
        })
    }

    /// Returns the fields of a device context that select the table.
    pub const fn translation(&self) -> MsiTranslation {
        MsiTranslation {
            table: self.table,
            mask: self.mask,
            pattern: self.pattern & !self.mask,
        }
    }

    /// Returns the number of the interrupt file at a guest page: the masked bits of the page
    /// number, packed (function `extract` of section "Process to translate addresses of MSIs").
    /// `None` if the page does not match the pattern.
    pub fn file(&self, page: GuestPhysAddr) -> Option<u32> {
        let number = page.get() >> 12;
        if (number ^ self.pattern) & !self.mask != 0 {
            return None;
        }
        let (mut file, mut packed) = (0_u32, 0_u32);
        for bit in 0..PAGE_NUMBER_BITS {
            if self.mask >> bit & 1 != 0 {
                file |= ((number >> bit & 1) as u32).wrapping_shl(packed);
                packed = packed.wrapping_add(1);
            }
        }
        Some(file)
    }

    /// Directs the MSIs to the guest page `page` to the interrupt file at `to`. The caller
    /// needs no invalidation: the entry was not valid before. If several CPUs map one page, one of
    /// them succeeds.
    ///
    /// # Errors
    /// [`MsiError`]; the table is unchanged.
    pub fn map<M: PhysMemory>(
        &self,
        memory: &M,
        page: GuestPhysAddr,
        to: PhysAddr,
    ) -> Result<(), MsiError> {
        if !to.is_aligned(PageSize::Size4K.bytes()) || to.get() >> 56 != 0 {
            return Err(MsiError::Target { at: to });
        }
        let entry = self.entry(page)?;
        // The second word is zero since the creation of the table.
        let was_free = |word| (word & V == 0).then_some(basic(to));
        if !update(memory, entry, was_free)? {
            return Err(MsiError::AlreadyMapped { page });
        }
        Ok(())
    }

    /// Blocks the MSIs to the guest page `page`. Returns the guest-physical pages that the caller
    /// must invalidate in the guest's domain, as for a page of the second stage.
    ///
    /// # Errors
    /// [`MsiError`]; the table is unchanged.
    #[must_use = "the unit may use the entry until the page is invalidated"]
    pub fn unmap<M: PhysMemory>(
        &self,
        memory: &M,
        page: GuestPhysAddr,
    ) -> Result<PfnRange, MsiError> {
        let entry = self.entry(page)?;
        let first = Pfn::new(page.get() >> 12);
        let range = PfnRange::new(first, 1).ok_or(MsiError::NotAnInterruptFile { page })?;
        let was_mapped = |word| (word & V != 0).then_some(0);
        if !update(memory, entry, was_mapped)? {
            return Err(MsiError::NotMapped { page });
        }
        Ok(range)
    }

    /// Frees the table. The caller must have detached the guest's devices.
    pub fn destroy<S: FrameSource + ?Sized>(self, frames: &S) {
        frames.free(self.table);
    }

    fn entry(&self, page: GuestPhysAddr) -> Result<PhysAddr, MsiError> {
        let file = self
            .file(page)
            .ok_or(MsiError::NotAnInterruptFile { page })?;
        Ok(self.table.wrapping_add(u64::from(file).wrapping_mul(16)))
    }
}

/// The unit may not snoop: the table does not know.
const fn tables<M: PhysMemory>(memory: &M) -> TableMemory<'_, M> {
    TableMemory::new(memory, Coherency::NonCoherent, ADDRESS_BITS)
}

/// Replaces the word at `at` by the one that `change` returns for it, and writes it back. Returns
/// false if `change` returns none; the word is unchanged.
fn update<M: PhysMemory>(
    memory: &M,
    at: PhysAddr,
    change: impl FnMut(u64) -> Option<u64>,
) -> Result<bool, MsiError> {
    let word = memory.word(at).map_err(|_| TableError::Memory)?;
    let updated = word.fetch_update(Ordering::Release, Ordering::Acquire, change);
    if updated.is_err() {
        return Ok(false);
    }
    memory.write_back(at, 8);
    memory.drain();
    Ok(true)
}

/// Returns the first word of an entry in basic translate mode. The second is zero.
const fn basic(to: PhysAddr) -> u64 {
    to.get() >> PPN_FROM_ADDRESS & PPN | BASIC | V
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use ringfence_memory::Arena;
    use ringfence_types::OutOfFrames;

    use super::*;

    /// A source of one frame.
    struct OneFrame {
        size: PageSize,
        at: PhysAddr,
        is_free: Cell<bool>,
    }

    impl OneFrame {
        fn new(size: PageSize, at: u64) -> Self {
            Self {
                size,
                at: PhysAddr::new(at),
                is_free: Cell::new(true),
            }
        }
    }

    impl FrameSource for OneFrame {
        fn frame_size(&self) -> PageSize {
            self.size
        }

        fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
            match self.is_free.replace(false) {
                true => Ok(self.at),
                false => Err(OutOfFrames),
            }
        }

        fn free(&self, frame: PhysAddr) {
            assert_eq!(frame, self.at);
            self.is_free.set(true);
        }
    }

    #[test]
    fn a_table_that_is_not_created_keeps_no_frame() {
        let memory = Arena::new(0x4000).unwrap();
        let (small, large) = (PageSize::Size4K, PageSize::Size2M);
        for (size, at, mask, pattern, wanted) in [
            (small, 0x4000, 0, 0, MsiError::Table(TableError::Memory)),
            (small, 1 << 40, 0, 0, MsiError::Table(TableError::Memory)),
            (small, 0x1000, 0x1ff, 0, MsiError::TooManyFiles),
            (small, 0x1000, 1 << 52, 0, MsiError::BeyondPageNumber),
            (small, 0x1000, 0, 1 << 52, MsiError::BeyondPageNumber),
            (large, 0x1000, 0, 0, MsiError::Table(TableError::FrameSize)),
        ] {
            let frames = OneFrame::new(size, at);
            let made = MsiPageTable::new(&&memory, &frames, mask, pattern);
            assert_eq!(made.map(drop), Err(wanted));
            assert!(frames.is_free.get(), "{wanted}");
        }
        let frames = OneFrame::new(small, 0x1000);
        let mask = 1 << 51;
        let table = MsiPageTable::new(&&memory, &frames, mask, 0).unwrap();
        assert_eq!(table.file(GuestPhysAddr::new(mask << 12)), Some(1));
        let second = MsiPageTable::new(&&memory, &frames, 0, 0);
        assert_eq!(
            second.map(drop),
            Err(MsiError::Table(TableError::OutOfFrames))
        );
        table.destroy(&frames);
        assert!(frames.is_free.get());
    }

    /// The caller passes another memory than at the creation.
    #[test]
    fn entries_outside_memory_are_an_error() {
        let memory = Arena::new(0x4000).unwrap();
        let frames = OneFrame::new(PageSize::Size4K, 0x3000);
        let table = MsiPageTable::new(&&memory, &frames, 0x3, 0).unwrap();
        let (page, to) = (GuestPhysAddr::new(0x2000), PhysAddr::new(0x9000));
        let smaller = Arena::new(0x3000).unwrap();
        assert_eq!(
            table.map(&&smaller, page, to),
            Err(MsiError::Table(TableError::Memory))
        );
        assert_eq!(
            table.unmap(&&smaller, page),
            Err(MsiError::Table(TableError::Memory))
        );
        table.map(&&memory, page, to).unwrap();
        let entry = memory.word(PhysAddr::new(0x3020)).unwrap();
        assert_eq!(entry.load(Ordering::Relaxed), 0x9000 >> 2 | 0b111);
    }
}
