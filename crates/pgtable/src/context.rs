//! Root table and context tables of VT-d legacy mode. They map a requester ID to its domain and
//! page table.
//!
//! Bits as in the VT-d specification, sections 9.1 "Root Entry" and 9.3 "Context Entry". Both
//! tables have 256 entries of 128 bits. The root table is indexed by bus, a context table by device
//! and function.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    DomainId, FaultReason, FrameSource, OutOfFrames, PageSize, PhysAddr, PhysMemory, RequesterId,
};

use crate::frame_reserve::fresh_frame;
use crate::{Coherency, Levels, TableError};

/// P: present, in root and context entries.
const PRESENT: u64 = 1;
/// CTP (root entry) and SLPTPTR (context entry): physical address of the next table.
const POINTER: u64 = 0xffff_ffff_ffff_f000;
/// Root entry, low word: bits 1..=11 are reserved. The whole high word is reserved.
const ROOT_RESERVED: u64 = 0xffe;
/// Context entry, low word: bits 4..=11 (1 is FPD, 2..=3 TT).
const CONTEXT_RESERVED: u64 = 0xff0;
/// Context entry, high word: bit 7 and bits 24..=63 (0..=2 are AW, 3..=6 are ignored, 8..=23 are
/// DID).
const CONTEXT_RESERVED_HIGH: u64 = 0xffff_ffff_ff00_0080;
/// TT: translation type.
const TT_SHIFT: u32 = 2;
const TT_TABLE: u64 = 0b00;
const TT_DEVICE_TLB: u64 = 0b01;
const TT_PASS_THROUGH: u64 = 0b10;
/// PRE: page requests enabled. At its position in a scalable-mode context entry, because legacy
/// mode has no page requests. Valid only with TT = 01b.
const PRE: u64 = 1 << 4;
/// Reserved in VT-d. A VT-d unit therefore faults on a ring context and a ring unit on a VT-d one,
/// instead of misreading each other's tables.
const TT_RINGS: u64 = 0b11;
/// AW of a ring context, whose addresses have 64 bits.
const AW_RINGS: u64 = 0b000;
/// Position of DID, the domain-id, in the high 64 bits.
const DID_SHIFT: u32 = 8;

/// Translation of a device's accesses (TT).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranslationType {
    /// Translates through the page table at `root` (TT = 00b).
    Table {
        /// Root of the table (SLPTPTR).
        root: PhysAddr,
        /// Depth of the table (AW).
        levels: Levels,
    },
    /// As [`Table`](Self::Table), and the device may also make translation requests and translated
    /// requests (TT = 01b). Without this type, the unit blocks both kinds.
    DeviceTlb {
        /// Root of the table (SLPTPTR).
        root: PhysAddr,
        /// Depth of the table (AW).
        levels: Levels,
        /// Permission to make page requests (PRE).
        page_requests: PageRequests,
    },
    /// Translates through the rings of the rDEVICE at `device`, 4 KiB aligned (TT = 11b, AW = 0;
    /// rIOMMU Fig. 2 and 9a). Only a ring unit supports this type.
    Rings {
        /// Address of the rDEVICE (SLPTPTR).
        device: PhysAddr,
    },
    /// Passes accesses through untranslated, up to an address width (TT = 10b).
    PassThrough {
        /// AW: the largest width that the unit supports.
        levels: Levels,
    },
}

/// Permission of a device to make page requests (PRE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageRequests {
    /// The unit answers every page request with "invalid request".
    Blocked,
    /// The unit queues page requests.
    Allowed,
}

/// A present context entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Domain-id (DID), the tag of cached translations.
    pub domain: DomainId,
    /// Translation type of the device.
    pub translation: TranslationType,
}

impl Context {
    /// Returns the two words of the entry, low word first.
    pub const fn encode(&self) -> [u64; 2] {
        let (low, aw) = match self.translation {
            TranslationType::Table { root, levels } => (
                (root.get() & POINTER) | TT_TABLE << TT_SHIFT,
                address_width(levels),
            ),
            TranslationType::DeviceTlb {
                root,
                levels,
                page_requests,
            } => {
                let pre = match page_requests {
                    PageRequests::Blocked => 0,
                    PageRequests::Allowed => PRE,
                };
                (
                    (root.get() & POINTER) | pre | TT_DEVICE_TLB << TT_SHIFT,
                    address_width(levels),
                )
            }
            TranslationType::PassThrough { levels } => {
                (TT_PASS_THROUGH << TT_SHIFT, address_width(levels))
            }
            TranslationType::Rings { device } => {
                ((device.get() & POINTER) | TT_RINGS << TT_SHIFT, AW_RINGS)
            }
        };
        [low | PRESENT, (self.domain.get() as u64) << DID_SHIFT | aw]
    }

    /// Decodes an entry as the hardware does.
    ///
    /// # Errors
    /// [`ContextError`] if the entry is not present, has a reserved bit set, or uses an unsupported
    /// type or width.
    pub const fn decode([low, high]: [u64; 2]) -> Result<Self, ContextError> {
        if low & PRESENT == 0 {
            return Err(ContextError::ContextNotPresent);
        }
        let translation_type = (low >> TT_SHIFT) & 0b11;
        let reserved = match translation_type {
            TT_DEVICE_TLB => CONTEXT_RESERVED & !PRE,
            _ => CONTEXT_RESERVED,
        };
        if low & reserved != 0 || high & CONTEXT_RESERVED_HIGH != 0 {
            return Err(ContextError::ReservedBit);
        }
        let pointer = PhysAddr::new(low & POINTER);
        let levels = match high & 0b111 {
            0b001 => Some(Levels::Three),
            0b010 => Some(Levels::Four),
            0b011 => Some(Levels::Five),
            AW_RINGS => None,
            _ => return Err(ContextError::Unsupported),
        };
        let translation = match (translation_type, levels) {
            (TT_TABLE, Some(levels)) => TranslationType::Table {
                root: pointer,
                levels,
            },
            (TT_DEVICE_TLB, Some(levels)) => TranslationType::DeviceTlb {
                root: pointer,
                levels,
                page_requests: if low & PRE == 0 {
                    PageRequests::Blocked
                } else {
                    PageRequests::Allowed
                },
            },
            (TT_PASS_THROUGH, Some(levels)) => TranslationType::PassThrough { levels },
            (TT_RINGS, None) => TranslationType::Rings { device: pointer },
            _ => return Err(ContextError::Unsupported),
        };
        Ok(Self {
            domain: DomainId::new((high >> DID_SHIFT) as u16),
            translation,
        })
    }
}

/// Returns the AW encoding of `levels`.
const fn address_width(levels: Levels) -> u64 {
    match levels {
        Levels::Three => 0b001,
        Levels::Four => 0b010,
        Levels::Five => 0b011,
    }
}

/// Reason why a device has no usable context entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ContextError {
    /// The root entry of the device's bus is not present.
    RootNotPresent,
    /// The device's context entry is not present.
    ContextNotPresent,
    /// A reserved bit is set in a present entry.
    ReservedBit,
    /// The translation type or the address width is not implemented.
    Unsupported,
    /// The root or the context table lies outside memory.
    TableAccess,
}

impl ContextError {
    /// Returns the fault reason that the hardware records.
    #[inline]
    pub const fn fault_reason(self) -> FaultReason {
        match self {
            Self::RootNotPresent => FaultReason::RootNotPresent,
            Self::ContextNotPresent => FaultReason::ContextNotPresent,
            Self::ReservedBit => FaultReason::ReservedBit,
            Self::Unsupported => FaultReason::ContextInvalid,
            Self::TableAccess => FaultReason::TableAccess,
        }
    }
}

impl fmt::Display for ContextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.fault_reason(), f)
    }
}

impl core::error::Error for ContextError {}

/// Finds the context entry of `device` as the hardware does, from the root table at `root_table`.
/// Reads the root entry and the context entry, 128 bits each.
///
/// Hardware reads 128 bits atomically; this function reads two words. An entry that changes during
/// its read counts as not present. An entry must not change twice during one read, because the
/// words could then belong to two contexts. Invalidate the context cache between two changes.
///
/// # Errors
/// Returns a [`ContextError`] for any invalid memory contents.
#[inline]
pub fn find_context<M: PhysMemory + ?Sized>(
    mem: &M,
    root_table: PhysAddr,
    device: RequesterId,
) -> Result<Context, ContextError> {
    let table = find_context_table(mem, root_table, device.bus())?;
    Context::decode(read(mem, table, device.devfn())?)
}

/// Returns the context table of `bus`.
#[inline]
fn find_context_table<M: PhysMemory + ?Sized>(
    mem: &M,
    root_table: PhysAddr,
    bus: u8,
) -> Result<PhysAddr, ContextError> {
    let [low, high] = read(mem, root_table, bus)?;
    if low & PRESENT == 0 {
        return Err(ContextError::RootNotPresent);
    }
    if low & ROOT_RESERVED != 0 || high != 0 {
        return Err(ContextError::ReservedBit);
    }
    Ok(PhysAddr::new(low & POINTER))
}

/// Returns the address of entry `index` of a root or context table.
#[inline]
fn address(table: PhysAddr, index: u8) -> PhysAddr {
    table.wrapping_add(u64::from(index) * 16)
}

/// Returns the two words of entry `index` of a root or context table.
#[inline]
fn entry<M: PhysMemory + ?Sized>(
    mem: &M,
    table: PhysAddr,
    index: u8,
) -> Result<&[AtomicU64; 2], ContextError> {
    mem.words(address(table, index), 2)
        .ok()
        .and_then(<[AtomicU64]>::first_chunk)
        .ok_or(ContextError::TableAccess)
}

#[inline]
fn read<M: PhysMemory + ?Sized>(
    mem: &M,
    table: PhysAddr,
    index: u8,
) -> Result<[u64; 2], ContextError> {
    let [low, high] = entry(mem, table, index)?;
    // Hardware reads the 128 bits atomically. Here the writer stores the low word, which holds P,
    // last and clears it first. If the low word is the same before and after, the high word belongs
    // to it. Otherwise the entry was changing and counts as absent.
    let before = low.load(Ordering::Acquire);
    let high = high.load(Ordering::Acquire);
    if low.load(Ordering::Relaxed) != before {
        return Ok([0, 0]);
    }
    Ok([before, high])
}

/// The root table and its context tables, as the operating system writes them.
///
/// Attach and detach are rare, so the methods take `&mut self` and the embedder serialises them.
/// After a change the caller must invalidate the context cache
/// ([`Invalidation::Context`](ringfence_types::Invalidation::Context)), then the translations of
/// the domain.
#[derive(Debug)]
pub struct ContextTables {
    root: PhysAddr,
    coherency: Coherency,
}

impl ContextTables {
    /// Allocates an empty root table.
    ///
    /// # Errors
    /// [`TableError::OutOfFrames`] or [`TableError::Memory`] if the frame source has no usable
    /// frame.
    pub fn new<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        coherency: Coherency,
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        let root = fresh_frame(PageSize::Size4K, coherency, mem, frames)?;
        coherency.drain(mem);
        Ok(Self { root, coherency })
    }

    /// Returns the address of the root table, for the root table address register.
    #[inline]
    pub const fn root(&self) -> PhysAddr {
        self.root
    }

    /// Points the context entry of `device` to `context` and replaces any old entry. The entry is
    /// not present while it changes, so the hardware sees the old entry, none, or the new one,
    /// never a mix of both.
    ///
    /// # Errors
    /// [`TableError::OutOfFrames`] if no frame is left for the context table of the bus,
    /// [`TableError::Memory`] if a table lies outside memory. The tables are unchanged.
    pub fn attach<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        mem: &M,
        frames: &S,
        device: RequesterId,
        context: &Context,
    ) -> Result<(), TableError> {
        let table = self.context_table(mem, frames, device)?;
        let at = address(table, device.devfn());
        let low = at;
        let high = at.wrapping_add(8);
        let [new_low, new_high] = context.encode();
        store(mem, low, 0)?;
        self.written(mem, at);
        store(mem, high, new_high)?;
        store(mem, low, new_low)?;
        self.written(mem, at);
        Ok(())
    }

    /// Clears the context entry of `device`, valid or malformed, which denies the device all DMA.
    /// Returns the old context; `None` if the entry was not present or malformed.
    ///
    /// # Errors
    /// The context entry is out of reach and unchanged: [`ContextError::TableAccess`] if a table
    /// lies outside memory, [`ContextError::ReservedBit`] if the bus has a malformed root entry.
    pub fn detach<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Result<Option<Context>, ContextError> {
        let table = match find_context_table(mem, self.root, device.bus()) {
            Err(ContextError::RootNotPresent) => return Ok(None),
            found => found?,
        };
        let old = read(mem, table, device.devfn())?;
        let [low, _] = old;
        if low & PRESENT == 0 {
            return Ok(None);
        }
        let at = address(table, device.devfn());
        // P is in the low word: clear it first.
        store(mem, at, 0)
            .and_then(|()| store(mem, at.wrapping_add(8), 0))
            .map_err(|_| ContextError::TableAccess)?;
        self.written(mem, at);
        Ok(Context::decode(old).ok())
    }

    /// Frees all tables. The caller must first point the hardware to another root table and
    /// invalidate its context cache.
    pub fn destroy<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(self, mem: &M, frames: &S) {
        for bus in 0..=u8::MAX {
            if let Ok([low, _]) = read(mem, self.root, bus)
                && low & PRESENT != 0
            {
                frames.free(PhysAddr::new(low & POINTER));
            }
        }
        frames.free(self.root);
    }

    fn context_table<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        mem: &M,
        frames: &S,
        device: RequesterId,
    ) -> Result<PhysAddr, TableError> {
        let at = address(self.root, device.bus());
        let [old, _] = read(mem, self.root, device.bus()).map_err(|_| TableError::Memory)?;
        if old & PRESENT != 0 {
            return Ok(PhysAddr::new(old & POINTER));
        }
        let table = fresh_frame(PageSize::Size4K, self.coherency, mem, frames)?;
        // The zeroes must reach memory before the entry that points to them.
        self.coherency.drain(mem);
        store(mem, at, (table.get() & POINTER) | PRESENT)?;
        self.written(mem, at);
        Ok(table)
    }

    /// Writes the entry at `at` back to memory and waits.
    fn written<M: PhysMemory + ?Sized>(&self, mem: &M, at: PhysAddr) {
        self.coherency.write_back(mem, at, 16);
        self.coherency.drain(mem);
    }
}

/// Stores one half of an entry after all earlier stores (Release). Looks up each word anew, so that
/// a test's memory can check the order.
fn store<M: PhysMemory + ?Sized>(mem: &M, at: PhysAddr, word: u64) -> Result<(), TableError> {
    mem.word(at)
        .map_err(|_| TableError::Memory)?
        .store(word, Ordering::Release);
    Ok(())
}

impl From<OutOfFrames> for TableError {
    fn from(_: OutOfFrames) -> Self {
        Self::OutOfFrames
    }
}
