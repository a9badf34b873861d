//! The I/O virtual addresses that the kernel recorded, for a comparison with a model.

use ringfence_types::{Nanos, PfnRange};

use crate::op::DeviceIndex;

/// The change of a range of I/O virtual addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressKind {
    /// The kernel mapped the range; it had allocated it just before.
    Allocated,
    /// The kernel unmapped the range; it frees it just after.
    Freed,
}

/// One allocation or free of I/O virtual addresses, from the `iommu:map` or `iommu:unmap` lines of
/// one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddressEvent {
    /// Time of the line.
    pub time: Nanos,
    /// Line number, from 1: that of the first `iommu:map` line, or of the `iommu:unmap` line.
    pub line: u64,
    /// The CPU that printed the line.
    pub cpu: u16,
    /// Device of the call's `dma:*` line, or the only device that the trace names. `None` if
    /// neither shows it.
    pub device: Option<DeviceIndex>,
    /// An allocation or a free.
    pub kind: AddressKind,
    /// The pages of the range.
    pub range: PfnRange,
}
