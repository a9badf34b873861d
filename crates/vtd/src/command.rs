//! Invalidation commands: descriptors of the queue (VT-d specification, section 6.5.2) and values
//! of the registers CCMD_REG and IOTLB_REG.

use ringfence_types::{CachedLevels, DomainId, Pasid, PfnBlock, PhysAddr, RequesterId};

use crate::registers::{ICC, IVT};

/// An invalidation, or a wait for those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// All context entries.
    ContextGlobal,
    /// The context entry of one device. `domain` is that of the entry, or 0 in scalable mode and
    /// for entries that were not present.
    ContextDevice {
        domain: DomainId,
        device: RequesterId,
    },
    /// All PASID-table entries.
    PasidGlobal,
    /// All PASID-table entries with one domain-id.
    PasidDomain(DomainId),
    /// The entries of one PASID with one domain-id.
    Pasid { domain: DomainId, pasid: Pasid },
    /// The translations of all domains.
    IotlbGlobal,
    /// The translations of one domain.
    IotlbDomain(DomainId),
    /// Second-stage translations of a block.
    IotlbPages {
        domain: DomainId,
        block: PfnBlock,
        levels: CachedLevels,
    },
    /// First-stage and passed-through translations of one PASID and domain.
    FirstStageAll { domain: DomainId, pasid: Pasid },
    /// First-stage translations of a block.
    FirstStagePages {
        domain: DomainId,
        pasid: Pasid,
        block: PfnBlock,
        levels: CachedLevels,
    },
    /// Commands after it begin when those before it have completed.
    Fence,
    /// Writes `value` to `status` when all commands before it have completed.
    Wait { status: PhysAddr, value: u32 },
}

// Types of descriptors, bits 3:0.
const CONTEXT: u64 = 0x1;
const IOTLB: u64 = 0x2;
const WAIT: u64 = 0x5;
const PASID_IOTLB: u64 = 0x6;
const PASID_CACHE: u64 = 0x7;

/// Position of G, the granularity, in descriptors.
const G: u32 = 4;
const GLOBAL: u64 = 0b01;
const DOMAIN: u64 = 0b10;
/// One device, or the pages of a block.
const NARROW: u64 = 0b11;
const PASID_CACHE_DOMAIN: u64 = 0b00;
const PASID_CACHE_SELECTIVE: u64 = 0b01;
const PASID_CACHE_GLOBAL: u64 = 0b11;
const PASID_IOTLB_ALL: u64 = 0b10;

/// DW and DR of the IOTLB descriptor: drain writes and reads.
const DRAIN: u64 = 1 << 6 | 1 << 7;
/// SW and FN of the wait descriptor: status write, fence.
const SW: u64 = 1 << 5;
const FN: u64 = 1 << 6;
/// IH: the walk caches stay valid.
const IH: u64 = 1 << 6;
/// DW and DR of IOTLB_REG.
const REGISTER_DRAIN: u64 = 1 << 48 | 1 << 49;

const fn did(domain: DomainId) -> u64 {
    (domain.get() as u64) << 16
}

const fn pasid_field(pasid: Pasid) -> u64 {
    (pasid.get() as u64) << 32
}

/// Returns ADDR, IH and AM, as in descriptors and in IVA_REG.
const fn address(block: PfnBlock, levels: CachedLevels) -> u64 {
    let ih = match levels {
        CachedLevels::Leaves => IH,
        CachedLevels::All => 0,
    };
    block.first().get() << 12 | ih | block.order() as u64
}

impl Command {
    /// Returns the first 128 bits of the descriptor. The other half of a wide one is zero.
    pub(crate) const fn descriptor(&self) -> [u64; 2] {
        match *self {
            Self::ContextGlobal => [CONTEXT | GLOBAL << G, 0],
            Self::ContextDevice { domain, device } => {
                let sid = (device.get() as u64) << 32;
                [CONTEXT | NARROW << G | did(domain) | sid, 0]
            }
            Self::PasidGlobal => [PASID_CACHE | PASID_CACHE_GLOBAL << G, 0],
            Self::PasidDomain(domain) => [PASID_CACHE | PASID_CACHE_DOMAIN << G | did(domain), 0],
            Self::Pasid { domain, pasid } => [
                PASID_CACHE | PASID_CACHE_SELECTIVE << G | did(domain) | pasid_field(pasid),
                0,
            ],
            Self::IotlbGlobal => [IOTLB | GLOBAL << G | DRAIN, 0],
            Self::IotlbDomain(domain) => [IOTLB | DOMAIN << G | DRAIN | did(domain), 0],
            Self::IotlbPages {
                domain,
                block,
                levels,
            } => [
                IOTLB | NARROW << G | DRAIN | did(domain),
                address(block, levels),
            ],
            Self::FirstStageAll { domain, pasid } => [
                PASID_IOTLB | PASID_IOTLB_ALL << G | did(domain) | pasid_field(pasid),
                0,
            ],
            Self::FirstStagePages {
                domain,
                pasid,
                block,
                levels,
            } => [
                PASID_IOTLB | NARROW << G | did(domain) | pasid_field(pasid),
                address(block, levels),
            ],
            Self::Fence => [WAIT | FN, 0],
            Self::Wait { status, value } => [WAIT | SW | (value as u64) << 32, status.get()],
        }
    }

    /// Returns the registers that execute the command; `None` if none does.
    pub(crate) const fn register_write(&self) -> Option<RegisterWrite> {
        Some(match *self {
            Self::ContextGlobal => RegisterWrite::Context(ICC | GLOBAL << 61),
            Self::ContextDevice { domain, device } => {
                let ids = (device.get() as u64) << 16 | domain.get() as u64;
                RegisterWrite::Context(ICC | NARROW << 61 | ids)
            }
            Self::IotlbGlobal => RegisterWrite::Iotlb {
                address: None,
                command: IVT | GLOBAL << 60 | REGISTER_DRAIN,
            },
            Self::IotlbDomain(domain) => RegisterWrite::Iotlb {
                address: None,
                command: IVT | DOMAIN << 60 | REGISTER_DRAIN | (domain.get() as u64) << 32,
            },
            Self::IotlbPages {
                domain,
                block,
                levels,
            } => RegisterWrite::Iotlb {
                address: Some(address(block, levels)),
                command: IVT | NARROW << 60 | REGISTER_DRAIN | (domain.get() as u64) << 32,
            },
            // Each register command completes before the next begins.
            Self::Fence | Self::Wait { .. } => RegisterWrite::Nothing,
            Self::PasidGlobal
            | Self::PasidDomain(_)
            | Self::Pasid { .. }
            | Self::FirstStageAll { .. }
            | Self::FirstStagePages { .. } => return None,
        })
    }
}

/// The values of registers that execute a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegisterWrite {
    /// For the context cache: CCMD_REG.
    Context(u64),
    /// For the IOTLB: IVA_REG for page-selective commands, then IOTLB_REG.
    Iotlb {
        address: Option<u64>,
        command: u64,
    },
    Nothing,
}

/// Most commands of one invalidation.
const MOST: usize = 7;

/// The commands of one invalidation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Commands([Option<Command>; MOST]);

impl Commands {
    pub(crate) fn of(commands: &[Command]) -> Self {
        let mut list = Self::default();
        for (slot, command) in list.0.iter_mut().zip(commands) {
            *slot = Some(*command);
        }
        list
    }

    /// All caches of the unit.
    pub(crate) fn everything(is_scalable: bool) -> Self {
        use Command::{ContextGlobal, Fence, IotlbGlobal, PasidGlobal};
        if is_scalable {
            Self::of(&[ContextGlobal, Fence, PasidGlobal, Fence, IotlbGlobal])
        } else {
            Self::of(&[ContextGlobal, Fence, IotlbGlobal])
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Command> {
        self.0.iter().flatten().copied()
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = Command> {
        self.0.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::{Pfn, PfnRange};

    const DOMAIN_ID: DomainId = DomainId::new(0xabcd);

    fn block() -> PfnBlock {
        PfnBlock::enclosing(&PfnRange::new(Pfn::new(0x7_fff0), 16).unwrap())
    }

    #[test]
    fn golden_descriptors() {
        let pasid = Pasid::new(0x1_2345).unwrap();
        let block = block();
        let domain = DOMAIN_ID;
        let device = RequesterId::new(0x1234);
        let (all, leaves) = (CachedLevels::All, CachedLevels::Leaves);
        for (command, words) in [
            (Command::ContextGlobal, [0x11, 0]),
            (
                Command::ContextDevice { domain, device },
                [0x1234_abcd_0031, 0],
            ),
            (Command::PasidGlobal, [0x37, 0]),
            (Command::PasidDomain(domain), [0xabcd_0007, 0]),
            (Command::Pasid { domain, pasid }, [0x0001_2345_abcd_0017, 0]),
            (Command::IotlbGlobal, [0xd2, 0]),
            (Command::IotlbDomain(domain), [0xabcd_00e2, 0]),
            (
                Command::IotlbPages {
                    domain,
                    block,
                    levels: leaves,
                },
                [0xabcd_00f2, 0x7fff_0044],
            ),
            (
                Command::IotlbPages {
                    domain,
                    block,
                    levels: all,
                },
                [0xabcd_00f2, 0x7fff_0004],
            ),
            (
                Command::FirstStageAll { domain, pasid },
                [0x0001_2345_abcd_0026, 0],
            ),
            (
                Command::FirstStagePages {
                    domain,
                    pasid,
                    block,
                    levels: all,
                },
                [0x0001_2345_abcd_0036, 0x7fff_0004],
            ),
            (Command::Fence, [0x45, 0]),
            (
                Command::Wait {
                    status: PhysAddr::new(0x12_3000),
                    value: 0xdead_beef,
                },
                [0xdead_beef_0000_0025, 0x12_3000],
            ),
        ] {
            assert_eq!(command.descriptor(), words, "{command:x?}");
        }
    }

    #[test]
    fn golden_registers() {
        let block = block();
        let pages = Command::IotlbPages {
            domain: DOMAIN_ID,
            block,
            levels: CachedLevels::Leaves,
        };
        let iotlb = |address, command| Some(RegisterWrite::Iotlb { address, command });
        let device = Command::ContextDevice {
            domain: DOMAIN_ID,
            device: RequesterId::new(0x1234),
        };
        for (command, write) in [
            (
                Command::ContextGlobal,
                Some(RegisterWrite::Context(0xa000_0000_0000_0000)),
            ),
            (device, Some(RegisterWrite::Context(0xe000_0000_1234_abcd))),
            (Command::IotlbGlobal, iotlb(None, 0x9003_0000_0000_0000)),
            (
                Command::IotlbDomain(DOMAIN_ID),
                iotlb(None, 0xa003_abcd_0000_0000),
            ),
            (pages, iotlb(Some(0x7fff_0044), 0xb003_abcd_0000_0000)),
            (Command::PasidGlobal, None),
        ] {
            assert_eq!(command.register_write(), write, "{command:x?}");
        }
    }
}
