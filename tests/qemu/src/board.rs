//! The machines of QEMU: where RAM and PCI lie.

use ringfence_types::RequesterId;

use crate::qtest::Commands;

/// A machine with one PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Board {
    /// x86, machine `q35`.
    Q35,
    /// 64-bit Arm, machine `virt`.
    ArmVirt,
    /// 64-bit RISC-V, machine `virt`.
    RiscvVirt,
}

impl Board {
    pub(crate) const fn program(self) -> &'static str {
        match self {
            Self::Q35 => "qemu-system-x86_64",
            Self::ArmVirt => "qemu-system-aarch64",
            Self::RiscvVirt => "qemu-system-riscv64",
        }
    }

    pub(crate) const fn machine(self) -> &'static str {
        match self {
            Self::Q35 => "q35",
            Self::ArmVirt | Self::RiscvVirt => "virt",
        }
    }

    /// Returns the address of the first byte of RAM.
    pub const fn ram_base(self) -> u64 {
        match self {
            Self::Q35 => 0,
            Self::ArmVirt => 0x4000_0000,
            Self::RiscvVirt => 0x8000_0000,
        }
    }

    /// Returns the address where the first memory BAR may lie.
    pub(crate) const fn bars(self) -> u64 {
        match self {
            Self::Q35 => 0xc000_0000,
            Self::ArmVirt => 0x1000_0000,
            Self::RiscvVirt => 0x4000_0000,
        }
    }

    /// Returns the address of the memory-mapped configuration space; `None` where it is accessed
    /// through ports.
    const fn ecam(self) -> Option<u64> {
        match self {
            Self::Q35 => None,
            Self::ArmVirt => Some(0x40_1000_0000),
            Self::RiscvVirt => Some(0x3000_0000),
        }
    }

    /// Adds a write of the 32-bit register `offset` of the configuration space of `device`.
    pub fn write_config(
        self,
        commands: &mut Commands,
        device: RequesterId,
        offset: u8,
        value: u32,
    ) -> usize {
        match self.ecam() {
            Some(base) => commands.write32(config_address(base, device, offset), value),
            None => {
                commands.out32(0xcf8, config_port(device, offset));
                commands.out32(0xcfc, value)
            }
        }
    }

    /// Adds a read of the 32-bit register `offset` of the configuration space of `device`.
    pub fn read_config(self, commands: &mut Commands, device: RequesterId, offset: u8) -> usize {
        match self.ecam() {
            Some(base) => commands.read32(config_address(base, device, offset)),
            None => {
                commands.out32(0xcf8, config_port(device, offset));
                commands.in32(0xcfc)
            }
        }
    }
}

/// PCI Express Base Specification, section 7.2.2: 4 KiB of configuration space per function.
fn config_address(base: u64, device: RequesterId, offset: u8) -> u64 {
    base + (u64::from(device.get()) << 12) + u64::from(offset)
}

/// PCI Local Bus Specification, section 3.2.2.3.2: the register CONFIG_ADDRESS.
fn config_port(device: RequesterId, offset: u8) -> u32 {
    0x8000_0000 | u32::from(device.get()) << 8 | u32::from(offset)
}
