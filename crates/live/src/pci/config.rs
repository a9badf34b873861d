//! PCI configuration space: a type 0 header, MSI-X, and the five capabilities of virtio (virtio
//! 1.2, section 4.1.4).

use ringfence_vfio_user::fields::{copy_part, u32_at};

use super::layout;
use crate::saved_state::StateError;
use crate::session::{CONFIG_REGION, Region};

/// Bytes of a conventional configuration space.
pub(super) const CONFIG_BYTES: usize = 256;

/// Identification of a function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    /// Virtio device ID; the PCI device ID is 0x1040 more.
    pub(crate) device: u16,
    /// Base class, subclass and programming interface.
    pub(crate) class: [u8; 3],
    /// Number of MSI-X vectors.
    pub(crate) vectors: u16,
}

/// Identification and layout of a function without virtio's capabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainIdentity {
    /// PCI device ID.
    pub(crate) device: u16,
    /// Base class, subclass and programming interface.
    pub(crate) class: [u8; 3],
    /// Bytes of BAR 0, a power of two.
    pub(crate) bar_bytes: u32,
    /// Number of MSI-X vectors.
    pub(crate) vectors: u16,
    /// Offset of the MSI-X table in the BAR. The client emulates the table.
    pub(crate) msix_table: u32,
    /// Offset of the MSI-X pending bit array in the BAR.
    pub(crate) msix_pba: u32,
}

/// The registers, with a mask of their writable bits.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSpace {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
    bar_bytes: u32,
}

const VENDOR_VIRTIO: u16 = 0x1af4;
const DEVICE_BASE: u16 = 0x1040;
const STATUS_CAPABILITIES: u16 = 0x10;
const COMMAND_WRITABLE: u16 = 0x0507;

const COMMAND: usize = 0x04;
/// Bus Master Enable, in the low byte of the command register.
const BUS_MASTER_ENABLE: u8 = 1 << 2;
const BAR0: usize = 0x10;
const INTERRUPT_LINE: usize = 0x3c;
const FIRST_CAPABILITY: usize = 0x40;

const CAP_MSIX: u8 = 0x11;
const CAP_VENDOR: u8 = 0x09;

const VIRTIO_COMMON: u8 = 1;
const VIRTIO_NOTIFY: u8 = 2;
const VIRTIO_ISR: u8 = 3;
const VIRTIO_DEVICE: u8 = 4;
const VIRTIO_PCI: u8 = 5;

/// The range of the BAR that `VIRTIO_PCI_CAP_PCI_CFG` gives access to (virtio 1.2, section
/// 4.1.4.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BarRange {
    /// Offset in the BAR.
    pub(crate) offset: u32,
    /// Access width in bytes: 1, 2 or 4.
    pub(crate) bytes: u32,
}

/// Offset of the `VIRTIO_PCI_CAP_PCI_CFG` capability; its last four bytes are the data register.
const WINDOW: usize = FIRST_CAPABILITY + 12 + 16 + 20 + 16 + 16;
/// Offset of that data register.
pub(crate) const WINDOW_DATA: usize = WINDOW + 16;

impl ConfigSpace {
    pub(crate) fn new(identity: &Identity) -> Self {
        let device = DEVICE_BASE.saturating_add(identity.device);
        let mut space = Self::header(device, identity.class, layout::BAR_BYTES);
        space.capabilities(identity);
        space
    }

    /// Creates the space of a function without virtio's capabilities.
    pub(crate) fn plain(identity: &PlainIdentity) -> Self {
        let mut space = Self::header(identity.device, identity.class, identity.bar_bytes);
        space.set(0x34, &[low_byte(FIRST_CAPABILITY)]);
        let tables = [identity.msix_table, identity.msix_pba];
        space.msix(FIRST_CAPABILITY, 0, identity.vectors, tables);
        space
    }

    /// Returns the region of the function with this index: the space itself, or BAR 0.
    pub(crate) fn region(&self, index: u32) -> Region {
        let bytes = match index {
            CONFIG_REGION => CONFIG_BYTES as u64,
            _ if index == u32::from(layout::BAR) => self.bar_bytes.into(),
            _ => 0,
        };
        Region { bytes }
    }

    fn header(device: u16, class: [u8; 3], bar_bytes: u32) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_BYTES],
            writable: [0; CONFIG_BYTES],
            bar_bytes,
        };
        space.set(0x00, &VENDOR_VIRTIO.to_le_bytes());
        space.set(0x02, &device.to_le_bytes());
        space.set(0x06, &STATUS_CAPABILITIES.to_le_bytes());
        // A revision of 1 or higher: not a transitional device.
        space.set(0x08, &[1]);
        let [class, subclass, interface] = class;
        space.set(0x09, &[interface, subclass, class]);
        space.set(0x2c, &VENDOR_VIRTIO.to_le_bytes());
        space.set(0x2e, &DEVICE_BASE.to_le_bytes());
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(BAR0, &(!(bar_bytes - 1)).to_le_bytes());
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Writes an MSI-X capability at `at`.
    fn msix(&mut self, at: usize, next: usize, vectors: u16, [table, pending]: [u32; 2]) {
        let bar = u32::from(layout::BAR);
        self.set(at, &[CAP_MSIX, low_byte(next)]);
        self.set(at + 2, &vectors.saturating_sub(1).to_le_bytes());
        // MSI-X Enable and Function Mask.
        self.allow(at + 2, &0xc000u16.to_le_bytes());
        self.set(at + 4, &(table | bar).to_le_bytes());
        self.set(at + 8, &(pending | bar).to_le_bytes());
    }

    fn capabilities(&mut self, identity: &Identity) {
        self.set(0x34, &[low_byte(FIRST_CAPABILITY)]);
        let msix = FIRST_CAPABILITY;
        let common = msix + 12;
        let notify = common + 16;
        let isr = notify + 20;
        let device = isr + 16;
        let tables = [layout::MSIX_TABLE, layout::MSIX_PBA];
        self.msix(msix, common, identity.vectors, tables);
        let parts = [
            (
                common,
                notify,
                VIRTIO_COMMON,
                layout::COMMON,
                layout::COMMON_BYTES,
            ),
            (
                notify,
                isr,
                VIRTIO_NOTIFY,
                layout::NOTIFY,
                layout::NOTIFY_BYTES,
            ),
            (isr, device, VIRTIO_ISR, layout::ISR, 1),
            (
                device,
                WINDOW,
                VIRTIO_DEVICE,
                layout::DEVICE,
                layout::DEVICE_BYTES,
            ),
            (WINDOW, 0, VIRTIO_PCI, 0, 0),
        ];
        for (at, next, kind, offset, bytes) in parts {
            let length = if matches!(kind, VIRTIO_NOTIFY | VIRTIO_PCI) {
                20
            } else {
                16
            };
            self.set(at, &[CAP_VENDOR, low_byte(next), length, kind, layout::BAR]);
            self.set(at + 8, &offset.to_le_bytes());
            self.set(at + 12, &bytes.to_le_bytes());
        }
        self.set(notify + 16, &layout::NOTIFY_STRIDE.to_le_bytes());
        self.allow(WINDOW + 4, &[0xff]);
        self.allow(WINDOW + 8, &[0xff; 8]);
    }

    /// Reads `data.len()` bytes at `offset`.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        copy_part(&self.bytes, offset, data);
    }

    /// Writes `data` at `offset`; changes writable bits only.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) {
        let registers = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((byte, mask), new) in registers.zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
    }

    pub(crate) fn save(&self) -> [u8; CONFIG_BYTES] {
        self.bytes
    }

    /// Returns the Bus Master Enable bit. Code that acts on it must use `bus_master` instead.
    pub(super) fn bus_master_enable(&self) -> bool {
        let command = self.bytes.get(COMMAND).copied().unwrap_or(0);
        command & BUS_MASTER_ENABLE != 0
    }

    /// Restores the registers of another process. Read-only bits must have the same values here.
    ///
    /// # Errors
    /// [`StateError::Register`] if a read-only bit differs; nothing has changed.
    pub(crate) fn restore(&mut self, bytes: [u8; CONFIG_BYTES]) -> Result<(), StateError> {
        let fixed = self.bytes.iter().zip(&bytes).zip(&self.writable);
        if fixed
            .into_iter()
            .any(|((own, new), mask)| (own ^ new) & !mask != 0)
        {
            return Err(StateError::Register {
                what: "configuration space",
            });
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Returns the selected range of the BAR; `None` if the driver has selected no valid one.
    pub(crate) fn window(&self) -> Option<BarRange> {
        let bar = *self.bytes.get(WINDOW + 4)?;
        let window = BarRange {
            offset: u32_at(&self.bytes, WINDOW + 8)?,
            bytes: u32_at(&self.bytes, WINDOW + 12)?,
        };
        (bar == layout::BAR && matches!(window.bytes, 1 | 2 | 4)).then_some(window)
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(at).zip(bits) {
            *to = *from;
        }
    }
}

const fn low_byte(offset: usize) -> u8 {
    offset.to_le_bytes()[0]
}
