//! Virtio over PCI without the legacy interface (virtio 1.3, section 4.1).

use core::fmt;

use ringfence_types::PhysAddr;
use ringfence_virtio_iommu::spec::{EVENTQ, REQUESTQ, VIRTIO_ID_IOMMU};

use super::{ABSENT, QueueParts, Transport};
use crate::registers::NarrowRegisters;

/// Fields of `struct virtio_pci_common_cfg` (section 4.1.4.3).
const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const DEVICE_STATUS: u64 = 0x14;
const CONFIG_GENERATION: u64 = 0x15;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESC: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;

/// PCI vendor and device id (section 4.1.2).
const VENDOR: u32 = 0x1af4;
const FIRST_DEVICE_ID: u32 = 0x1040;

/// Registers of PCI configuration space.
const PCI_STATUS: u8 = 0x04;
const PCI_STATUS_CAPABILITIES: u32 = 1 << 20;
const PCI_CAPABILITIES: u8 = 0x34;
const PCI_CAPABILITY_VENDOR: u32 = 0x09;
/// Capabilities that fit in 256 bytes.
const MOST_CAPABILITIES: usize = 48;

/// `cfg_type` (section 4.1.4).
const COMMON_CFG: u32 = 1;
const NOTIFY_CFG: u32 = 2;
const ISR_CFG: u32 = 3;
const DEVICE_CFG: u32 = 4;

/// A structure in a memory BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location {
    /// Number of the BAR, 0 to 5.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u32,
    /// Number of bytes.
    pub bytes: u32,
}

/// The locations of a virtio device's structures, from its vendor-specific capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciCapabilities {
    /// Status, features and queues.
    pub common: Location,
    /// Registers that announce new buffers.
    pub notify: Location,
    /// Bytes between the notification registers of two queues.
    pub notify_multiplier: u32,
    /// ISR status. The driver polls and does not use it.
    pub isr: Location,
    /// Configuration of the device.
    pub device: Location,
}

/// The reason why configuration space describes no virtio-iommu device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CapabilityError {
    /// Vendor or device id are others.
    OtherDevice {
        /// The register with both ids.
        id: u32,
    },
    /// The capability with this `cfg_type` is missing or too short.
    Missing(u8),
    /// The list of capabilities has no end.
    Endless,
}

impl fmt::Display for CapabilityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherDevice { id } => write!(f, "PCI id {id:08x} is no virtio-iommu device"),
            Self::Missing(kind) => write!(f, "virtio capability {kind} is missing or too short"),
            Self::Endless => f.write_str("the list of PCI capabilities has no end"),
        }
    }
}

impl core::error::Error for CapabilityError {}

impl PciCapabilities {
    /// Finds the structures of a virtio-iommu device. `read` reads the 32-bit register of its
    /// configuration space at an offset, a multiple of 4.
    ///
    /// # Errors
    /// It is another device, or its capabilities are malformed.
    pub fn find(mut read: impl FnMut(u8) -> u32) -> Result<Self, CapabilityError> {
        let id = read(0);
        let expected = VENDOR | (FIRST_DEVICE_ID | u32::from(VIRTIO_ID_IOMMU)) << 16;
        if id != expected {
            return Err(CapabilityError::OtherDevice { id });
        }
        let mut found = [None; 4];
        let mut multiplier = 0;
        let mut at = match read(PCI_STATUS) & PCI_STATUS_CAPABILITIES {
            0 => 0,
            _ => read(PCI_CAPABILITIES) as u8 & !3,
        };
        for _ in 0..MOST_CAPABILITIES {
            if at == 0 {
                let part = |kind: u32, bytes: u32| part(&found, kind, bytes);
                return Ok(Self {
                    common: part(COMMON_CFG, 0x38)?,
                    notify: part(NOTIFY_CFG, 2)?,
                    notify_multiplier: multiplier,
                    isr: part(ISR_CFG, 1)?,
                    device: part(DEVICE_CFG, 40)?,
                });
            }
            let mut word = |number: u8| read(at.wrapping_add(number.wrapping_mul(4)));
            let head = word(0);
            if head & 0xff == PCI_CAPABILITY_VENDOR {
                let (kind, bar) = (head >> 24, word(1) as u8);
                let location = Location {
                    bar,
                    offset: word(2),
                    bytes: word(3),
                };
                let slot = found.get_mut(kind.wrapping_sub(1) as usize);
                // The first capability of a type is preferred (section 4.1.4.1).
                if let Some(slot @ None) = slot
                    && bar < 6
                {
                    *slot = Some(location);
                    if kind == NOTIFY_CFG {
                        multiplier = word(4);
                    }
                }
            }
            at = (head >> 8) as u8 & !3;
        }
        Err(CapabilityError::Endless)
    }
}

fn part(found: &[Option<Location>; 4], kind: u32, bytes: u32) -> Result<Location, CapabilityError> {
    let location = found.get(kind.wrapping_sub(1) as usize).copied().flatten();
    let long_enough = location.filter(|location| location.bytes >= bytes);
    long_enough.ok_or(CapabilityError::Missing(kind as u8))
}

/// A virtio PCI device. The embedder has enabled memory accesses and bus mastering.
#[derive(Debug, Clone)]
pub struct VirtioPci<R> {
    common: R,
    notify: R,
    device: R,
    notify_multiplier: u32,
    /// Bytes of the notification structure.
    notify_bytes: u32,
    /// Offsets of the notification registers of the two queues.
    notify_offsets: [Option<u64>; 2],
}

impl<R: NarrowRegisters> VirtioPci<R> {
    /// Wraps the structures of `capabilities`; `map` returns the registers at a location.
    pub fn new(capabilities: &PciCapabilities, mut map: impl FnMut(&Location) -> R) -> Self {
        Self {
            common: map(&capabilities.common),
            notify: map(&capabilities.notify),
            device: map(&capabilities.device),
            notify_multiplier: capabilities.notify_multiplier,
            notify_bytes: capabilities.notify.bytes,
            notify_offsets: [None; 2],
        }
    }

    fn write_address(&self, offset: u64, at: PhysAddr) {
        // 64-bit fields are accessed as two of 32 bits (section 4.1.3.1).
        self.common.write32(offset, at.get() as u32);
        let high = offset.wrapping_add(4);
        self.common.write32(high, (at.get() >> 32) as u32);
    }
}

const fn position(queue: u16) -> usize {
    match queue {
        REQUESTQ => 0,
        EVENTQ => 1,
        _ => usize::MAX,
    }
}

impl<R: NarrowRegisters> Transport for VirtioPci<R> {
    /// Capabilities have shown the type; a device that was removed reads as all ones.
    fn is_present(&self) -> bool {
        self.status() != ABSENT
    }

    fn status(&self) -> u8 {
        self.common.read8(DEVICE_STATUS)
    }

    fn write_status(&mut self, status: u8) {
        self.common.write8(DEVICE_STATUS, status);
    }

    fn offered_features(&mut self) -> u64 {
        let half = |select: u32| {
            self.common.write32(DEVICE_FEATURE_SELECT, select);
            u64::from(self.common.read32(DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    fn accept_features(&mut self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.common.write32(DRIVER_FEATURE_SELECT, select);
            self.common.write32(DRIVER_FEATURE, half);
        }
    }

    fn queue_size(&mut self, queue: u16) -> u16 {
        self.common.write16(QUEUE_SELECT, queue);
        self.common.read16(QUEUE_SIZE)
    }

    fn enable_queue(&mut self, queue: u16, parts: &QueueParts) {
        self.common.write16(QUEUE_SELECT, queue);
        self.common.write16(QUEUE_SIZE, parts.size);
        self.write_address(QUEUE_DESC, parts.descriptors);
        self.write_address(QUEUE_DRIVER, parts.available);
        self.write_address(QUEUE_DEVICE, parts.used);
        let offset = u64::from(self.common.read16(QUEUE_NOTIFY_OFF));
        let offset = offset.wrapping_mul(self.notify_multiplier.into());
        // A register outside the structure belongs to something else; then requests time out.
        let is_inside = offset.wrapping_add(2) <= self.notify_bytes.into();
        if let Some(slot) = self.notify_offsets.get_mut(position(queue)) {
            *slot = is_inside.then_some(offset);
        }
        self.common.write16(QUEUE_ENABLE, 1);
    }

    fn notify(&mut self, queue: u16) {
        if let Some(Some(offset)) = self.notify_offsets.get(position(queue)) {
            self.notify.write16(*offset, queue);
        }
    }

    fn config_generation(&self) -> u32 {
        self.common.read8(CONFIG_GENERATION).into()
    }

    fn read_config(&self, offset: u64) -> u32 {
        self.device.read32(offset)
    }

    fn read_config_byte(&self, offset: u64) -> u8 {
        self.device.read8(offset)
    }

    fn write_config_byte(&mut self, offset: u64, value: u8) {
        self.device.write8(offset, value);
    }
}
