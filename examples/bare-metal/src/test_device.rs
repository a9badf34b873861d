//! QEMU's `iommu-testdev`: a PCI device that writes to any address. The driver of a real device
//! takes the place of this file.

use ringfence_types::{Iova, PhysAddr, Registers, RequesterId};

use crate::io_port;
use crate::mmio::Mmio;

/// Vendor 1b36, device 0005.
const ID: u32 = 0x0005_1b36;

/// Ports of PCI configuration space, and registers of a function.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
const VENDOR: u32 = 0x00;
const COMMAND: u32 = 0x04;
const BAR0: u32 = 0x10;
/// COMMAND: memory space and bus master.
const ENABLE: u32 = 0x6;

/// Registers of the device. A read of the first one makes the access.
const TRIGGERING: u64 = 0x00;
const GVA_LO: u64 = 0x04;
const RESULT: u64 = 0x10;
const REGISTER_BYTES: u64 = 0x1000;
/// ATTRS: the address space that the IOMMU translates.
const NON_SECURE: u32 = 0b1010;
const TRANSLATED: u32 = 0;
const STOPPED: u32 = 0xdead_0002;

/// The word that the device writes.
pub(crate) const PATTERN: u64 = 0x1234_5678;

/// An enabled test device.
#[derive(Debug)]
pub(crate) struct TestDevice {
    pub(crate) requester: RequesterId,
    registers: Mmio,
}

impl TestDevice {
    /// Finds the device on bus 0 and enables it. Firmware has assigned its BAR.
    pub(crate) fn find() -> Option<Self> {
        let mut functions = (0..=0xff).map(RequesterId::new);
        let requester = functions.find(|function| config(*function, VENDOR) == ID)?;
        let bar = PhysAddr::new(u64::from(config(requester, BAR0) & !0xf));
        config(requester, COMMAND);
        io_port::write32(CONFIG_DATA, ENABLE);
        // SAFETY: the BAR is this device's, and only this value uses it.
        let registers = unsafe { Mmio::new(bar, REGISTER_BYTES) }?;
        Some(Self {
            requester,
            registers,
        })
    }

    /// Makes the device write its pattern at `iova`. Returns false if the IOMMU stopped it. The
    /// device checks that the pattern is then at `expected`; `None` if it is not.
    pub(crate) fn write(&self, iova: Iova, expected: PhysAddr) -> Option<bool> {
        let halves = |address: u64| [address as u32, (address >> 32) as u32];
        let ([gva_lo, gva_hi], [gpa_lo, gpa_hi]) = (halves(iova.get()), halves(expected.get()));
        // GVA, LEN, RESULT, DBELL (1 arms the access), ATTRS, GPA.
        let values = [gva_lo, gva_hi, 4, 0, 1, NON_SECURE, gpa_lo, gpa_hi];
        for (offset, value) in (GVA_LO..).step_by(4).zip(values) {
            self.registers.write32(offset, value);
        }
        self.registers.read32(TRIGGERING);
        match self.registers.read32(RESULT) {
            TRANSLATED => Some(true),
            STOPPED => Some(false),
            _ => None,
        }
    }
}

/// Selects a register of configuration space and reads it.
fn config(function: RequesterId, register: u32) -> u32 {
    let address = 1 << 31 | u32::from(function.get()) << 8 | register;
    io_port::write32(CONFIG_ADDRESS, address);
    io_port::read32(CONFIG_DATA)
}
