//! Virtio over MMIO, version 2 (virtio 1.3, section 4.2.2).

use ringfence_types::PhysAddr;
use ringfence_virtio_iommu::spec::VIRTIO_ID_IOMMU;

use super::{QueueParts, Transport};
use crate::registers::NarrowRegisters;

const MAGIC_VALUE: u64 = 0x000;
const VERSION: u64 = 0x004;
const DEVICE_ID: u64 = 0x008;
const DEVICE_FEATURES: u64 = 0x010;
const DEVICE_FEATURES_SEL: u64 = 0x014;
const DRIVER_FEATURES: u64 = 0x020;
const DRIVER_FEATURES_SEL: u64 = 0x024;
const QUEUE_SEL: u64 = 0x030;
const QUEUE_SIZE_MAX: u64 = 0x034;
const QUEUE_SIZE: u64 = 0x038;
const QUEUE_READY: u64 = 0x044;
const QUEUE_NOTIFY: u64 = 0x050;
const STATUS: u64 = 0x070;
const QUEUE_DESC_LOW: u64 = 0x080;
const QUEUE_DRIVER_LOW: u64 = 0x090;
const QUEUE_DEVICE_LOW: u64 = 0x0a0;
const CONFIG_GENERATION: u64 = 0x0fc;
const CONFIG: u64 = 0x100;

/// The bytes "virt" as a little-endian number.
const MAGIC: u32 = 0x7472_6976;
const VERSION_2: u32 = 2;

/// A virtio-mmio device of version 2.
#[derive(Debug, Clone)]
pub struct VirtioMmio<R>(R);

impl<R: NarrowRegisters> VirtioMmio<R> {
    /// Wraps the registers of the device.
    pub const fn new(registers: R) -> Self {
        Self(registers)
    }

    fn write_address(&self, low: u64, at: PhysAddr) {
        self.0.write32(low, at.get() as u32);
        self.0.write32(low.wrapping_add(4), (at.get() >> 32) as u32);
    }
}

impl<R: NarrowRegisters> Transport for VirtioMmio<R> {
    fn is_present(&self) -> bool {
        self.0.read32(MAGIC_VALUE) == MAGIC
            && self.0.read32(VERSION) == VERSION_2
            && self.0.read32(DEVICE_ID) == u32::from(VIRTIO_ID_IOMMU)
    }

    fn status(&self) -> u8 {
        self.0.read32(STATUS) as u8
    }

    fn write_status(&mut self, status: u8) {
        self.0.write32(STATUS, status.into());
    }

    fn offered_features(&mut self) -> u64 {
        let half = |select: u32| {
            self.0.write32(DEVICE_FEATURES_SEL, select);
            u64::from(self.0.read32(DEVICE_FEATURES))
        };
        half(0) | half(1) << 32
    }

    fn accept_features(&mut self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.0.write32(DRIVER_FEATURES_SEL, select);
            self.0.write32(DRIVER_FEATURES, half);
        }
    }

    fn queue_size(&mut self, queue: u16) -> u16 {
        self.0.write32(QUEUE_SEL, queue.into());
        u16::try_from(self.0.read32(QUEUE_SIZE_MAX)).unwrap_or(u16::MAX)
    }

    fn enable_queue(&mut self, queue: u16, parts: &QueueParts) {
        self.0.write32(QUEUE_SEL, queue.into());
        self.0.write32(QUEUE_SIZE, parts.size.into());
        self.write_address(QUEUE_DESC_LOW, parts.descriptors);
        self.write_address(QUEUE_DRIVER_LOW, parts.available);
        self.write_address(QUEUE_DEVICE_LOW, parts.used);
        self.0.write32(QUEUE_READY, 1);
    }

    fn notify(&mut self, queue: u16) {
        self.0.write32(QUEUE_NOTIFY, queue.into());
    }

    fn config_generation(&self) -> u32 {
        self.0.read32(CONFIG_GENERATION)
    }

    fn read_config(&self, offset: u64) -> u32 {
        self.0.read32(CONFIG.wrapping_add(offset))
    }

    fn read_config_byte(&self, offset: u64) -> u8 {
        self.0.read8(CONFIG.wrapping_add(offset))
    }

    fn write_config_byte(&mut self, offset: u64, value: u8) {
        self.0.write8(CONFIG.wrapping_add(offset), value);
    }
}
