//! The hardware's page walk, in software. The memory may hold anything. The driver's walk, over
//! tables that it linked itself, is `walk_linked` in `table.rs`.

use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_types::{Access, FaultReason, Iova, PageSize, Permissions, PhysAddr, PhysMemory};

use crate::{Entry, Format, Level};

/// Position of a walk: a table, its level, and the permissions of the path so far. A walk cache
/// stores these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    level: Level,
    table: PhysAddr,
    permissions: Permissions,
}

impl Cursor {
    /// Starts a walk at the root `table`.
    #[inline]
    pub fn root<F: Format>(format: &F, table: PhysAddr) -> Self {
        Self {
            level: format.root_level(),
            table,
            permissions: Permissions::READ_WRITE,
        }
    }

    /// Returns the level of the table.
    #[inline]
    pub const fn level(&self) -> Level {
        self.level
    }

    /// Returns the physical address of the table.
    #[inline]
    pub const fn table(&self) -> PhysAddr {
        self.table
    }

    /// Returns the permissions that all entries above the table grant.
    #[inline]
    pub const fn permissions(&self) -> Permissions {
        self.permissions
    }
}

/// Result of a successful walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// Size of the page.
    pub page: PageSize,
    /// First byte of the page.
    pub base: PhysAddr,
    /// Permissions granted by the leaf and by every entry above it.
    pub permissions: Permissions,
}

impl Leaf {
    /// Translates `iova`, which must lie on this page.
    #[inline]
    pub const fn translate(&self, iova: Iova) -> PhysAddr {
        self.base.wrapping_add(iova.offset_in(self.page.bytes()))
    }
}

/// A walk that ended without a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WalkError {
    /// Level of the table whose entry the walk tried to read.
    pub level: Level,
    /// Reason of the failure.
    pub kind: WalkErrorKind,
}

/// Reason why a walk failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WalkErrorKind {
    /// The address has bits that the table does not translate: above its width, or of a level that
    /// an entry skips.
    BeyondWidth,
    /// The entry is absent.
    NotPresent,
    /// The entry and the path above it grant no common permission.
    NoPermission,
    /// The entry is present with a reserved bit set.
    ReservedBit,
    /// The table lies outside memory.
    TableAccess,
}

impl WalkErrorKind {
    /// Returns the fault reason that the hardware records for `access`.
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

/// Translates `iova` by walking from `start` down to a leaf (rIOMMU section 2.2; VT-d
/// specification, section 3.7).
///
/// Calls `visit` with each lower-level table, top to bottom, before reading it. A walk cache would
/// store these. Reads one word per level.
///
/// The tables may hold anything and may point to themselves or outside memory. The level decreases
/// at each step, so a walk takes at most [`Level::MAX`] steps and fails only with a [`WalkError`].
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
    if !format.translates(iova) {
        return fail(cursor.level, WalkErrorKind::BeyondWidth);
    }
    loop {
        let level = cursor.level;
        let index = format.index(level, iova);
        let at = cursor.table.wrapping_add(format.word_offset(index));
        let Ok(word) = mem.word(at) else {
            return fail(level, WalkErrorKind::TableAccess);
        };
        // Acquire pairs with the Release store that made the entry valid: the walk sees the
        // contents of a table as they were when it was linked.
        let entry = format.entry_in(word.load(Ordering::Acquire), index);
        match format.decode(level, entry) {
            Entry::Absent => return fail(level, WalkErrorKind::NotPresent),
            Entry::Reserved => return fail(level, WalkErrorKind::ReservedBit),
            Entry::Leaf {
                base,
                size,
                permissions,
            } => {
                let Some(permissions) = cursor.permissions.intersect(permissions) else {
                    return fail(level, WalkErrorKind::NoPermission);
                };
                return Ok(Leaf {
                    page: size,
                    base,
                    permissions,
                });
            }
            Entry::Table {
                at,
                next,
                permissions,
            } => {
                let Some(permissions) = cursor.permissions.intersect(permissions) else {
                    return fail(level, WalkErrorKind::NoPermission);
                };
                if level.below() != Some(next) && !skips_zeros(format, level, next, iova) {
                    return fail(level, WalkErrorKind::BeyondWidth);
                }
                cursor = Cursor {
                    level: next,
                    table: at,
                    permissions,
                };
                visit(cursor);
            }
        }
    }
}

/// Returns true if a walk from an entry of `level` to a table of level `next` ends, and the address
/// bits of the levels between are zero (AMD I/O Virtualization Technology specification, section
/// 2.2.3).
#[cold]
fn skips_zeros<F: Format>(format: &F, level: Level, next: Level, iova: Iova) -> bool {
    let above = iova.get() & !(u64::MAX.checked_shl(format.shift(level)).unwrap_or(0));
    let bits = format.entries(next).trailing_zeros();
    next < level && above.checked_shr(format.shift(next).wrapping_add(bits)) == Some(0)
}
