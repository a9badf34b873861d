//! The walk that hardware does, over memory that may hold anything.

use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_types::{Access, FaultReason, Iova, PageSize, Permissions, PhysAddr, PhysMemory};

use crate::{Entry, Format, Level};

/// Where a walk stands: a table, its level, and what the path so far allows. This is what a walk
/// cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    level: Level,
    table: PhysAddr,
    permissions: Permissions,
}

impl Cursor {
    /// The start of a walk: the root, at `table`.
    #[inline]
    pub fn root<F: Format>(format: &F, table: PhysAddr) -> Self {
        Self {
            level: format.root_level(),
            table,
            permissions: Permissions::READ_WRITE,
        }
    }

    /// Level of the table.
    #[inline]
    pub const fn level(&self) -> Level {
        self.level
    }

    /// Address of the table.
    #[inline]
    pub const fn table(&self) -> PhysAddr {
        self.table
    }

    /// What all entries above the table allow.
    #[inline]
    pub const fn permissions(&self) -> Permissions {
        self.permissions
    }
}

/// The end of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// Size of the page.
    pub page: PageSize,
    /// First byte of the page.
    pub base: PhysAddr,
    /// What the leaf and the whole path above it allow.
    pub permissions: Permissions,
}

impl Leaf {
    /// Where `iova`, an address on this page, leads.
    #[inline]
    pub const fn translate(&self, iova: Iova) -> PhysAddr {
        self.base.wrapping_add(iova.offset_in(self.page.bytes()))
    }
}

/// Why a walk ended without a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WalkError {
    /// Level of the table whose entry was wanted.
    pub level: Level,
    /// What was wrong.
    pub kind: WalkErrorKind,
}

/// What was wrong with an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WalkErrorKind {
    /// The address has bits above the table's width.
    BeyondWidth,
    /// The entry is absent.
    NotPresent,
    /// The entry and the path above it allow nothing in common.
    NoPermission,
    /// The entry is present with a reserved bit set.
    ReservedBit,
    /// The table lies outside memory.
    TableAccess,
}

impl WalkErrorKind {
    /// How the hardware reports this to the device that made `access`.
    #[inline]
    pub const fn fault_reason(self, access: Access) -> FaultReason {
        match (self, access) {
            (Self::BeyondWidth, _) => FaultReason::AddressBeyondWidth,
            (Self::NotPresent, _) => FaultReason::NotPresent,
            (Self::NoPermission, Access::Read) => FaultReason::ReadDenied,
            (Self::NoPermission, Access::Write) => FaultReason::WriteDenied,
            (Self::ReservedBit, _) => FaultReason::ReservedBit,
            (Self::TableAccess, _) => FaultReason::TableAccess,
        }
    }
}

impl fmt::Display for WalkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            WalkErrorKind::BeyondWidth => "address beyond the table's width",
            WalkErrorKind::NotPresent => "entry not present",
            WalkErrorKind::NoPermission => "path allows no access",
            WalkErrorKind::ReservedBit => "reserved bit set",
            WalkErrorKind::TableAccess => "table outside memory",
        };
        write!(f, "{what} at {}", self.level)
    }
}

impl core::error::Error for WalkError {}

/// Translates `iova` from `start` down to a leaf (rIOMMU section 2.2; VT-d specification, section
/// 3.7).
///
/// `visit` sees each table that an entry led to, top to bottom, before it is read: what a walk
/// cache would keep. One word is read per level.
///
/// The tables may hold anything, point at themselves or outside memory: the level sinks with every
/// step, so there are at most [`Level::MAX`] of them, and every way out is a [`WalkError`].
#[inline]
pub fn walk<F: Format, M: PhysMemory + ?Sized>(
    format: &F,
    mem: &M,
    start: Cursor,
    iova: Iova,
    mut visit: impl FnMut(Cursor),
) -> Result<Leaf, WalkError> {
    let mut cursor = start;
    let fail = |level, kind| Err(WalkError { level, kind });
    if iova.get() >> format.width() != 0 {
        return fail(cursor.level, WalkErrorKind::BeyondWidth);
    }
    loop {
        let level = cursor.level;
        let index = format.index(level, iova) as u64;
        let at = cursor.table.wrapping_add(index * 8);
        let Ok(word) = mem.word(at) else {
            return fail(level, WalkErrorKind::TableAccess);
        };
        // Acquire pairs with the Release that made the entry valid: the table behind it is seen as
        // it was linked.
        match format.decode(level, word.load(Ordering::Acquire)) {
            Entry::Absent => return fail(level, WalkErrorKind::NotPresent),
            Entry::Reserved => return fail(level, WalkErrorKind::ReservedBit),
            Entry::Leaf { base, permissions } => {
                let Some(permissions) = cursor.permissions.intersect(permissions) else {
                    return fail(level, WalkErrorKind::NoPermission);
                };
                let Some(page) = format.leaf_size(level) else {
                    return fail(level, WalkErrorKind::ReservedBit);
                };
                return Ok(Leaf {
                    page,
                    base,
                    permissions,
                });
            }
            Entry::Table { at, permissions } => {
                let Some(permissions) = cursor.permissions.intersect(permissions) else {
                    return fail(level, WalkErrorKind::NoPermission);
                };
                let Some(below) = level.below() else {
                    return fail(level, WalkErrorKind::ReservedBit);
                };
                cursor = Cursor {
                    level: below,
                    table: at,
                    permissions,
                };
                visit(cursor);
            }
        }
    }
}
