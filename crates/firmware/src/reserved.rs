//! Regions of the I/O virtual address space that firmware reserves for a device.

use core::error::Error;
use core::fmt;

use ringfence_types::{Iova, IovaRange, Permissions, PfnRange};

use crate::error::{FirmwareError, FirmwareErrorKind};

/// A region that no allocator may hand out to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservedRegion {
    /// Its I/O virtual addresses. If the region is mapped, these are the physical addresses too.
    pub range: IovaRange,
    /// Treatment of the device's accesses.
    pub treatment: Treatment,
}

/// Treatment that firmware requests for the accesses to a reserved region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// The region must be mapped one to one with these permissions while the device is translated
    /// (RMRR of DMAR, unity map of IVMD, RMR of IORT).
    Identity(Permissions),
    /// As `Identity`; but the operating system may move the memory to another address once it
    /// controls the device (RMR with "remap permitted").
    IdentityUntilMoved(Permissions),
    /// The unit does not translate the region (exclusion range of IVMD).
    Untranslated,
    /// The region must not be mapped: the platform takes a write as an interrupt, or a
    /// HyperTransport link takes the access as a special cycle.
    Unusable,
}

/// The region where VT-d and AMD-Vi take a write as an interrupt (VT-d specification, section
/// 3.14).
pub const X86_INTERRUPTS: ReservedRegion = unusable(0xfee0_0000, 0xfeef_ffff);

/// The reserved region of HyperTransport (AMD I/O Virtualization specification, section 2.1.2
/// "IOMMU Logical Topology").
pub const HYPERTRANSPORT: ReservedRegion = unusable(0xfd_0000_0000, 0xff_ffff_ffff);

const fn unusable(first: u64, last: u64) -> ReservedRegion {
    let range = match IovaRange::inclusive(Iova::new(first), Iova::new(last)) {
        Some(range) => range,
        None => IovaRange::ALL,
    };
    ReservedRegion {
        range,
        treatment: Treatment::Unusable,
    }
}

/// Returns the range of `bytes` bytes from `start`, both read at `offset` of a table.
pub(crate) fn range_of(start: u64, bytes: u64, offset: usize) -> Result<IovaRange, FirmwareError> {
    IovaRange::new(Iova::new(start), bytes).ok_or(FirmwareErrorKind::Range.at(offset))
}

/// A buffer for ranges is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyRanges;

impl fmt::Display for TooManyRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reserved regions need more ranges than the buffer has")
    }
}

impl Error for TooManyRanges {}

/// Merges regions into page ranges that are sorted, disjoint and not adjacent. Every page that a
/// region touches is in one of them. Writes them to the start of `buffer` and returns that part.
///
/// The previous content of `buffer` has no meaning. Time: at most the number of regions times the
/// length of `buffer`.
///
/// # Errors
/// At some point, the ranges so far did not fit into `buffer`.
pub fn merge_reserved(
    regions: impl IntoIterator<Item = ReservedRegion>,
    buffer: &mut [PfnRange],
) -> Result<&mut [PfnRange], TooManyRanges> {
    let mut used = 0_usize;
    for region in regions {
        used = insert(buffer, used, PfnRange::covering(&region.range))?;
    }
    buffer.get_mut(..used).ok_or(TooManyRanges)
}

/// Adds `new` to the first `used` ranges. Returns how many there are then.
fn insert(buffer: &mut [PfnRange], used: usize, new: PfnRange) -> Result<usize, TooManyRanges> {
    let ranges = buffer.get(..used).ok_or(TooManyRanges)?;
    // Ranges from `first` up to `end` touch the new one: they overlap it or are adjacent to it.
    let first = ranges.partition_point(|range| range.hi().get().saturating_add(1) < new.lo().get());
    let end = ranges.partition_point(|range| range.lo().get() <= new.hi().get().saturating_add(1));
    let Some(touching) = ranges.get(first..end).filter(|ranges| !ranges.is_empty()) else {
        let longer = used.checked_add(1).ok_or(TooManyRanges)?;
        let moved = buffer.get_mut(first..longer).ok_or(TooManyRanges)?;
        moved.rotate_right(1);
        if let Some(slot) = moved.first_mut() {
            *slot = new;
        }
        return Ok(longer);
    };
    let lo = touching.iter().map(PfnRange::lo).fold(new.lo(), Ord::min);
    let hi = touching.iter().map(PfnRange::hi).fold(new.hi(), Ord::max);
    let replaced = touching.len();
    let rest = buffer.get_mut(first..used).ok_or(TooManyRanges)?;
    if let (Some(slot), Some(merged)) = (rest.first_mut(), PfnRange::inclusive(lo, hi)) {
        *slot = merged;
    }
    // The merged range replaces all of them; the others move down.
    if let Some(tail) = rest.get_mut(1..) {
        tail.rotate_left(replaced.saturating_sub(1).min(tail.len()));
    }
    Ok(used.saturating_sub(replaced).saturating_add(1))
}
