//! MSI page tables (RISC-V Advanced Interrupt Architecture, section "MSI page tables"): they direct
//! a guest's message-signalled interrupts to interrupt files of the host.

use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_pgtable::{Coherency, TableError, TableMemory};
use ringfence_types::{
    DomainId, Flushed, FrameSource, GuestPhysAddr, PageSize, Pfn, PfnRange, PhysAddr, PhysMemory,
    Unmapped,
};

use crate::translation::MsiTranslation;
use crate::unit::ADDRESS_BITS;

/// V: the entry is valid.
const V: u64 = 1;
/// The entry was unmapped, and its invalidation may not have completed. If V = 0, software may use
/// all other bits (section "MSI PTE").
const UNMAPPED: u64 = 1 << 1;
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
    /// The interrupt file of the guest was unmapped, and [`MsiPageTable::release`] has not received
    /// the proof that the unit no longer uses the entry.
    NotInvalidated {
        /// The requested page.
        page: GuestPhysAddr,
    },
    /// The invalidation was that of another domain.
    OtherDomain(DomainId),
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
            Self::NotInvalidated { page } => {
                write!(f, "the interrupt file at {page} is not invalidated yet")
            }
            Self::OtherDomain(domain) => {
                write!(f, "the MSI page table is not that of domain {domain}")
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

/// The guest-physical pages of the interrupt files of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MsiAddresses {
    /// Bits of a guest page number that select the interrupt file (`msi_addr_mask`).
    pub mask: u64,
    /// The other bits of the guest page numbers (`msi_addr_pattern`).
    pub pattern: u64,
}

/// A flat table of up to 256 interrupt files.
///
/// ```text
/// map -> unmap -> Unmapped --Pending::submit, wait--> Flushed -> release -> map
/// ```
#[derive(Debug)]
pub struct MsiPageTable {
    table: PhysAddr,
    domain: DomainId,
    mask: u64,
    pattern: u64,
}

impl MsiPageTable {
    /// Creates a table without entries for the interrupt files at `addresses` of the guest whose
    /// second stage is `domain`.
    ///
    /// # Errors
    /// [`MsiError::TooManyFiles`], [`MsiError::BeyondPageNumber`] or [`MsiError::Table`]. No frame
    /// stays allocated.
    pub fn new<M: PhysMemory, S: FrameSource + ?Sized>(
        memory: &M,
        frames: &S,
        domain: DomainId,
        addresses: MsiAddresses,
    ) -> Result<Self, MsiError> {
        let MsiAddresses { mask, pattern } = addresses;
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
            domain,
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

    /// Directs the MSIs to the guest page `page` to the interrupt file at `to`. The caller needs no
    /// invalidation: a unit caches no MSI PTE whose V bit is clear (RISC-V IOMMU section "Caching
    /// in-memory data structures"). If several CPUs map one page, one of them succeeds.
    ///
    /// # Errors
    /// [`MsiError`]; the table is unchanged. [`MsiError::NotInvalidated`] until the invalidation of
    /// an earlier entry has completed: the unit may use the old entry until then (section "Changing
    /// MSI page table entry").
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
        let was_free = |word| (word == 0).then_some(basic(to));
        match update(memory, entry, was_free)? {
            Ok(_) => Ok(()),
            Err(word) if word & V == 0 => Err(MsiError::NotInvalidated { page }),
            Err(_) => Err(MsiError::AlreadyMapped { page }),
        }
    }

    /// Blocks the MSIs to the guest page `page`. Returns the guest-physical page that the caller
    /// must invalidate, as a page of the second stage. The unit may use the entry until then.
    ///
    /// # Errors
    /// [`MsiError`]; the table is unchanged.
    pub fn unmap<M: PhysMemory>(
        &self,
        memory: &M,
        page: GuestPhysAddr,
    ) -> Result<Unmapped, MsiError> {
        let entry = self.entry(page)?;
        let first = Pfn::new(page.get() >> 12);
        let range = PfnRange::new(first, 1).ok_or(MsiError::NotAnInterruptFile { page })?;
        let was_mapped = |word| (word & V != 0).then_some(UNMAPPED);
        match update(memory, entry, was_mapped)? {
            Ok(_) => Ok(Unmapped::attest_cleared(self.domain, range)),
            Err(_) => Err(MsiError::NotMapped { page }),
        }
    }

    /// Makes the entries of flushed pages free for other interrupt files.
    ///
    /// # Errors
    /// [`MsiError::OtherDomain`], or [`MsiError::Table`]. The remaining entries stay unusable until
    /// a call with the returned proof succeeds.
    pub fn release<M: PhysMemory>(
        &self,
        memory: &M,
        flushed: Flushed,
    ) -> Result<(), (Flushed, MsiError)> {
        if flushed.domain() != self.domain {
            let error = MsiError::OtherDomain(flushed.domain());
            return Err((flushed, error));
        }
        match self.free_entries(memory, flushed.range()) {
            Ok(()) => Ok(()),
            Err(error) => Err((flushed, error)),
        }
    }

    /// Makes the unmapped entries of `range` free.
    fn free_entries<M: PhysMemory>(&self, memory: &M, range: PfnRange) -> Result<(), MsiError> {
        for file in 0..1_u32.wrapping_shl(self.mask.count_ones()) {
            let page = self.page_of(file);
            if !(range.lo()..=range.hi()).contains(&page) {
                continue;
            }
            let entry = self.entry(GuestPhysAddr::new(page.get() << 12))?;
            let _ = update(memory, entry, |word| (word == UNMAPPED).then_some(0))?;
        }
        Ok(())
    }

    /// Frees the table. The caller must have detached the guest's devices.
    pub fn destroy<S: FrameSource + ?Sized>(self, frames: &S) {
        frames.free(self.table);
    }

    /// Returns the guest page of an interrupt file: the inverse of [`file`](Self::file).
    fn page_of(&self, file: u32) -> Pfn {
        let (mut number, mut packed) = (self.pattern & !self.mask, 0_u32);
        for bit in 0..PAGE_NUMBER_BITS {
            if self.mask >> bit & 1 != 0 {
                number |= (u64::from(file) >> packed & 1) << bit;
                packed = packed.wrapping_add(1);
            }
        }
        Pfn::new(number)
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
/// the old word, as an error if `change` returns none; the word is unchanged then.
fn update<M: PhysMemory>(
    memory: &M,
    at: PhysAddr,
    change: impl FnMut(u64) -> Option<u64>,
) -> Result<Result<u64, u64>, MsiError> {
    let word = memory.word(at).map_err(|_| TableError::Memory)?;
    let updated = word.fetch_update(Ordering::Release, Ordering::Acquire, change);
    if updated.is_ok() {
        memory.write_back(at, 8);
        memory.drain();
    }
    Ok(updated)
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
        let domain = DomainId::new(1);
        for (size, at, mask, pattern, wanted) in [
            (small, 0x4000, 0, 0, MsiError::Table(TableError::Memory)),
            (small, 1 << 40, 0, 0, MsiError::Table(TableError::Memory)),
            (small, 0x1000, 0x1ff, 0, MsiError::TooManyFiles),
            (small, 0x1000, 1 << 52, 0, MsiError::BeyondPageNumber),
            (small, 0x1000, 0, 1 << 52, MsiError::BeyondPageNumber),
            (large, 0x1000, 0, 0, MsiError::Table(TableError::FrameSize)),
        ] {
            let frames = OneFrame::new(size, at);
            let addresses = MsiAddresses { mask, pattern };
            let made = MsiPageTable::new(&&memory, &frames, domain, addresses);
            assert_eq!(made.map(drop), Err(wanted));
            assert!(frames.is_free.get(), "{wanted}");
        }
        let frames = OneFrame::new(small, 0x1000);
        let addresses = |mask| MsiAddresses { mask, pattern: 0 };
        let mask = 1 << 51;
        let table = MsiPageTable::new(&&memory, &frames, domain, addresses(mask)).unwrap();
        assert_eq!(table.file(GuestPhysAddr::new(mask << 12)), Some(1));
        let second = MsiPageTable::new(&&memory, &frames, domain, addresses(0));
        assert_eq!(
            second.map(drop),
            Err(MsiError::Table(TableError::OutOfFrames))
        );
        table.destroy(&frames);
        assert!(frames.is_free.get());
    }

    /// Each number of a file is that of its page, also where the mask has gaps.
    #[test]
    fn a_file_and_its_page_name_each_other() {
        let memory = Arena::new(0x4000).unwrap();
        let frames = OneFrame::new(PageSize::Size4K, 0x3000);
        let addresses = MsiAddresses {
            mask: 0x8_0000_0000_1025,
            pattern: 0x2_8002,
        };
        let table = MsiPageTable::new(&&memory, &frames, DomainId::new(1), addresses).unwrap();
        for file in 0..32 {
            let page = table.page_of(file).get();
            assert_eq!(page & !addresses.mask, 0x2_8002, "{file}");
            assert_eq!(table.file(GuestPhysAddr::new(page << 12)), Some(file));
        }
    }

    /// The caller passes another memory than at the creation.
    #[test]
    fn entries_outside_memory_are_an_error() {
        let memory = Arena::new(0x4000).unwrap();
        let frames = OneFrame::new(PageSize::Size4K, 0x3000);
        let addresses = MsiAddresses {
            mask: 0x3,
            pattern: 0,
        };
        let table = MsiPageTable::new(&&memory, &frames, DomainId::new(1), addresses).unwrap();
        let (page, to) = (GuestPhysAddr::new(0x2000), PhysAddr::new(0x9000));
        let smaller = Arena::new(0x3000).unwrap();
        assert_eq!(
            table.map(&&smaller, page, to),
            Err(MsiError::Table(TableError::Memory))
        );
        assert_eq!(
            table.unmap(&&smaller, page).map(drop),
            Err(MsiError::Table(TableError::Memory))
        );
        table.map(&&memory, page, to).unwrap();
        let entry = memory.word(PhysAddr::new(0x3020)).unwrap();
        assert_eq!(entry.load(Ordering::Relaxed), 0x9000 >> 2 | 0b111);
    }
}
