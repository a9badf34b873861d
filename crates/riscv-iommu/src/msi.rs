//! MSI page tables (RISC-V Advanced Interrupt Architecture, section "MSI page tables"): they direct
//! a guest's message-signalled interrupts to interrupt files of the host.

use core::fmt;

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

/// The reason why an MSI page table was not created or changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MsiError {
    /// The mask selects more interrupt files than a frame has entries.
    TooManyFiles,
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
    /// [`MsiError::TooManyFiles`] or [`MsiError::Table`].
    pub fn new<M: PhysMemory, S: FrameSource + ?Sized>(
        memory: &M,
        frames: &S,
        mask: u64,
        pattern: u64,
    ) -> Result<Self, MsiError> {
        if mask.count_ones() > FILES_PER_FRAME.ilog2() {
            return Err(MsiError::TooManyFiles);
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
        for bit in 0..52_u32 {
            if self.mask >> bit & 1 != 0 {
                file |= ((number >> bit & 1) as u32).wrapping_shl(packed);
                packed = packed.wrapping_add(1);
            }
        }
        Some(file)
    }

    /// Directs the MSIs to the guest page `page` to the interrupt file at `to`. The caller
    /// needs no invalidation: the entry was not valid before.
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
        if tables(memory).load(entry)? & V != 0 {
            return Err(MsiError::AlreadyMapped { page });
        }
        // The second word is zero since the creation of the table.
        Ok(tables(memory).store(entry, &[basic(to)])?)
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
        if tables(memory).load(entry)? & V == 0 {
            return Err(MsiError::NotMapped { page });
        }
        tables(memory).store(entry, &[0])?;
        let first = Pfn::new(page.get() >> 12);
        PfnRange::new(first, 1).ok_or(MsiError::NotAnInterruptFile { page })
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

/// Returns the first word of an entry in basic translate mode. The second is zero.
const fn basic(to: PhysAddr) -> u64 {
    to.get() >> PPN_FROM_ADDRESS & PPN | BASIC | V
}
