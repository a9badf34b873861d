//! Root table and context tables of VT-d's legacy mode: from a device to its domain and table
//! (HW02).
//!
//! Bits as in the VT-d specification, sections 9.1 "Root Entry" and 9.3 "Context Entry". Both
//! tables have 256 entries of 128 bits: the root table is indexed by bus, a context table by device
//! and function.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    DomainId, FaultReason, FrameSource, OutOfFrames, PhysAddr, PhysMemory, RequesterId,
};

use crate::{Coherency, Levels, TableError};

/// P, in root and context entries.
const PRESENT: u64 = 1;
/// CTP and SLPTPTR.
const POINTER: u64 = 0xffff_ffff_ffff_f000;
/// Root entry, low word: bits 1..=11 are reserved; the high word is reserved altogether.
const ROOT_RESERVED: u64 = 0xffe;
/// Context entry, low word: bits 4..=11 (1 is FPD, 2..=3 TT).
const CONTEXT_RESERVED: u64 = 0xff0;
/// Context entry, high word: bit 7 and bits 24..=63 (0..=2 are AW, 3..=6 are ignored, 8..=23 are
/// DID).
const CONTEXT_RESERVED_HIGH: u64 = 0xffff_ffff_ff00_0080;
/// TT.
const TT_SHIFT: u32 = 2;
const TT_TABLE: u64 = 0b00;
const TT_PASS_THROUGH: u64 = 0b10;
/// Reserved in VT-d, so that a unit of either kind stops the devices of the other instead of
/// misreading their tables.
const TT_RINGS: u64 = 0b11;
/// AW of a context with rings, whose addresses are 64 bits.
const AW_RINGS: u64 = 0b000;
/// DID.
const DID_SHIFT: u32 = 8;

/// What the hardware does with a device's accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranslationType {
    /// Translates them by the table at `root` (TT = 00b).
    Table {
        /// The root of the table (SLPTPTR).
        root: PhysAddr,
        /// Its depth (AW).
        levels: Levels,
    },
    /// Translates them by the rings of the rDEVICE at this address, 4 KiB aligned (TT = 11b, AW =
    /// 0; rIOMMU Fig. 2 and 9a). Only a ring unit takes it.
    Rings {
        /// The rDEVICE (SLPTPTR).
        device: PhysAddr,
    },
    /// Passes them through untranslated, up to a width (TT = 10b; HW10).
    PassThrough {
        /// AW: the widest that the unit supports.
        levels: Levels,
    },
}

/// A present context entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Tags what the caches hold (DID).
    pub domain: DomainId,
    /// Where the device's accesses go.
    pub translation: TranslationType,
}

impl Context {
    /// The two words of the entry, low word first.
    pub const fn encode(&self) -> [u64; 2] {
        let (low, aw) = match self.translation {
            TranslationType::Table { root, levels } => (
                (root.get() & POINTER) | TT_TABLE << TT_SHIFT,
                address_width(levels),
            ),
            TranslationType::PassThrough { levels } => {
                (TT_PASS_THROUGH << TT_SHIFT, address_width(levels))
            }
            TranslationType::Rings { device } => {
                ((device.get() & POINTER) | TT_RINGS << TT_SHIFT, AW_RINGS)
            }
        };
        [low | PRESENT, (self.domain.get() as u64) << DID_SHIFT | aw]
    }

    /// Reads an entry as the hardware does.
    pub const fn decode([low, high]: [u64; 2]) -> Result<Self, ContextError> {
        if low & PRESENT == 0 {
            return Err(ContextError::ContextNotPresent);
        }
        if low & CONTEXT_RESERVED != 0 || high & CONTEXT_RESERVED_HIGH != 0 {
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
        let translation = match ((low >> TT_SHIFT) & 0b11, levels) {
            (TT_TABLE, Some(levels)) => TranslationType::Table {
                root: pointer,
                levels,
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

/// AW.
const fn address_width(levels: Levels) -> u64 {
    match levels {
        Levels::Three => 0b001,
        Levels::Four => 0b010,
        Levels::Five => 0b011,
    }
}

/// Why a device has no usable context entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ContextError {
    /// The root entry of the device's bus is not present.
    RootNotPresent,
    /// The device's context entry is not present.
    ContextNotPresent,
    /// A reserved bit is set in a present entry.
    ReservedBit,
    /// The translation type or address width is not one of those implemented.
    Unsupported,
    /// The root or the context table lies outside memory.
    TableAccess,
}

impl ContextError {
    /// How the hardware reports this.
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

/// Finds the context of `device` as the hardware does, from the root table at `root_table`: two
/// reads of 128 bits.
///
/// # Errors
/// Whatever the memory holds, a [`ContextError`].
#[inline]
pub fn find_context<M: PhysMemory + ?Sized>(
    mem: &M,
    root_table: PhysAddr,
    device: RequesterId,
) -> Result<Context, ContextError> {
    let [low, high] = read(mem, root_table, device.bus())?;
    if low & PRESENT == 0 {
        return Err(ContextError::RootNotPresent);
    }
    if low & ROOT_RESERVED != 0 || high != 0 {
        return Err(ContextError::ReservedBit);
    }
    Context::decode(read(mem, PhysAddr::new(low & POINTER), device.devfn())?)
}

/// Address of entry `index` of a root or context table.
#[inline]
fn address(table: PhysAddr, index: u8) -> PhysAddr {
    table.wrapping_add(u64::from(index) * 16)
}

/// The two words of entry `index` of a root or context table.
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
    // Hardware reads the 128 bits at once. Here the low word, which holds P, is stored last and
    // cleared first, so if it is the same before and after, the high word belongs to it; else the
    // entry was changing, and that means absent.
    let before = low.load(Ordering::Acquire);
    let high = high.load(Ordering::Acquire);
    if low.load(Ordering::Relaxed) != before {
        return Ok([0, 0]);
    }
    Ok([before, high])
}

/// The root table and its context tables, as the operating system writes them.
///
/// Attaching and detaching are rare: the methods take `&mut self`, the embedder serialises them.
/// Invalidating the context cache after a change is the caller's
/// ([`Invalidation::Context`](ringfence_types::Invalidation::Context), then the domain's
/// translations).
#[derive(Debug)]
pub struct ContextTables {
    root: PhysAddr,
    coherency: Coherency,
}

impl ContextTables {
    /// An empty root table.
    pub fn new<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        coherency: Coherency,
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        let root = crate::frame_reserve::fresh_frame(coherency, mem, frames)?;
        coherency.drain(mem);
        Ok(Self { root, coherency })
    }

    /// Address of the root table (the root table address register).
    #[inline]
    pub const fn root(&self) -> PhysAddr {
        self.root
    }

    /// Directs `device` to `context`; replaces what was there. The entry is not present while it
    /// changes, so the hardware sees the old one, none, or the new one, never a mixture.
    ///
    /// # Errors
    /// Nothing has changed if no frame is left for the context table of the device's bus, or memory
    /// fails.
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

    /// Denies `device` all DMA. Whether it had a context.
    pub fn detach<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
    ) -> Option<Context> {
        let old = find_context(mem, self.root, device).ok()?;
        let [root_low, _] = read(mem, self.root, device.bus()).ok()?;
        let table = PhysAddr::new(root_low & POINTER);
        let at = address(table, device.devfn());
        // P is in the low word: cleared first.
        store(mem, at, 0).ok()?;
        store(mem, at.wrapping_add(8), 0).ok()?;
        self.written(mem, at);
        Some(old)
    }

    /// Gives all tables back. The caller has pointed the hardware away from them and flushed its
    /// context cache.
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
        let table = crate::frame_reserve::fresh_frame(self.coherency, mem, frames)?;
        // The zeroes must be in memory before the entry that leads to them can be.
        self.coherency.drain(mem);
        store(mem, at, (table.get() & POINTER) | PRESENT)?;
        self.written(mem, at);
        Ok(table)
    }

    /// The entry at `at` is in memory from here on.
    fn written<M: PhysMemory + ?Sized>(&self, mem: &M, at: PhysAddr) {
        self.coherency.write_back(mem, at, 16);
        self.coherency.drain(mem);
    }
}

/// Stores one half of an entry, after all that was stored before. The memory is asked for each word
/// anew, so that a test's memory can look in between.
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
