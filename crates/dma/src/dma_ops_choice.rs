//! The choice between `nommu`, `swiotlb`, `gart` and `calgary` for a device (CG04), as x86-64 Linux
//! 2.6.18 to 2.6.23 made it.
//!
//! Linux asks each IOMMU in turn whether it is present (`pci_iommu_alloc`), and initialises the
//! first of them (`pci_iommu_init`). A Calgary machine translates bus by bus: a device on a bus
//! without translation falls back to bounce buffers, or to none. In this crate the four are layers
//! of one API: an [`Identity`](crate::space::Identity) space, the same with
//! [`Dma::with_bounce`](crate::Dma::with_bounce), and a [`Paged`](crate::space::Paged) space.

use ringfence_types::{Iova, PhysRange, RequesterId};

/// Highest address below 4 GiB (`MAX_DMA32_PFN`).
const LAST_32_BIT: u64 = 0xffff_ffff;

/// An implementation of the DMA API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DmaOpsKind {
    /// Physical addresses. A buffer beyond the device's mask is refused.
    NoMmu,
    /// Physical addresses. A buffer beyond the device's mask is copied.
    Swiotlb,
    /// Physical addresses. A buffer beyond the device's mask is mapped in the aperture.
    Gart,
    /// Every buffer is mapped in the I/O space of the device's bus.
    Calgary,
}

/// The path of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BufferPath {
    /// The device uses the physical address.
    Direct,
    /// The layer refuses the buffer.
    Refused,
    /// The CPU copies the buffer.
    Bounced,
    /// The IOMMU translates the buffer's address.
    Remapped,
}

impl DmaOpsKind {
    /// Returns true if the IOMMU stops accesses outside live mappings. GART does not: the device
    /// reaches all memory outside the aperture.
    pub const fn isolates(self) -> bool {
        matches!(self, Self::Calgary)
    }

    /// Returns the path of `memory` for a device that reaches addresses up to `mask`.
    pub fn path(self, memory: &PhysRange, mask: Iova) -> BufferPath {
        let beyond = memory.last().get() > mask.get();
        match (self, beyond) {
            (Self::Calgary, _) | (Self::Gart, true) => BufferPath::Remapped,
            (_, false) => BufferPath::Direct,
            (Self::Swiotlb, true) => BufferPath::Bounced,
            (Self::NoMmu, true) => BufferPath::Refused,
        }
    }
}

/// The option `iommu=` of the kernel command line, or its absence.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IommuOption {
    #[default]
    Unset,
    /// `off`: no IOMMU and no bounce buffers.
    Off,
    /// `soft`: bounce buffers in place of an IOMMU.
    Soft,
    /// `force`: the GART also if no memory lies above 4 GiB.
    Force,
}

/// The buses that a Calgary machine translates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalgaryBuses {
    /// One bit for each bus with a host bridge that has a table.
    translated: [u64; 4],
}

impl CalgaryBuses {
    /// Creates the set of `buses`, without those of the option `calgary=disable=<bus>`.
    pub fn new(buses: impl IntoIterator<Item = u8>, disabled: &[u8]) -> Self {
        let mut translated = [0_u64; 4];
        for bus in buses.into_iter().filter(|bus| !disabled.contains(bus)) {
            if let Some(word) = translated.get_mut(usize::from(bus >> 6)) {
                *word |= 1 << (bus & 63);
            }
        }
        Self { translated }
    }

    /// Returns true if the bus has an I/O space.
    pub fn translates(&self, bus: u8) -> bool {
        let word = self.translated.get(usize::from(bus >> 6));
        word.is_some_and(|word| word >> (bus & 63) & 1 == 1)
    }
}

/// A machine at boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmaOpsConfig {
    /// The last byte of memory.
    pub last_memory: u64,
    /// True if the processors' northbridges have a GART with an aperture.
    pub gart: bool,
    /// The buses of a Calgary chipset; `None` without one.
    pub calgary: Option<CalgaryBuses>,
    /// The option `iommu=`.
    pub option: IommuOption,
}

impl DmaOpsConfig {
    fn memory_above_4_gib(&self) -> bool {
        self.last_memory > LAST_32_BIT
    }

    /// Returns true if Linux uses the GART: `iommu_hole_init` finds it, and there is memory that a
    /// 32-bit device does not reach, or the user forces it.
    fn uses_gart(&self) -> bool {
        self.gart
            && match self.option {
                IommuOption::Unset => self.memory_above_4_gib(),
                IommuOption::Force => true,
                IommuOption::Off | IommuOption::Soft => false,
            }
    }

    /// Returns the Calgary buses if Linux uses them: `detect_calgary` runs after the GART's
    /// detection, and not with `off` or `soft`.
    fn uses_calgary(&self) -> Option<&CalgaryBuses> {
        let excluded = matches!(self.option, IommuOption::Off | IommuOption::Soft);
        if self.gart || excluded {
            return None;
        }
        self.calgary.as_ref()
    }

    /// Returns the implementation for devices that no IOMMU translates.
    fn without_iommu(&self) -> DmaOpsKind {
        match self.option {
            IommuOption::Soft => DmaOpsKind::Swiotlb,
            IommuOption::Off => DmaOpsKind::NoMmu,
            _ if self.memory_above_4_gib() => DmaOpsKind::Swiotlb,
            _ => DmaOpsKind::NoMmu,
        }
    }

    /// Returns the implementation for a device.
    pub fn choose(&self, device: RequesterId) -> DmaOpsKind {
        match self.uses_calgary() {
            Some(buses) if buses.translates(device.bus()) => DmaOpsKind::Calgary,
            Some(_) => self.without_iommu(),
            None if self.uses_gart() => DmaOpsKind::Gart,
            None => self.without_iommu(),
        }
    }
}
