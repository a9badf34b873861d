//! Commands of the command queue (specification 1.0, section "Command-Queue").
//!
//! | command | first doubleword | second doubleword |
//! |---|---|---|
//! | all | 0..=6 opcode, 7..=9 func3 | |
//! | `IOTINVAL` | 10 AV, 12..=31 PSCID, 32 PSCV, 33 GV, 34 NL, 44..=59 GSCID | 9 S, 10..=61 ADDR |
//! | `IOFENCE.C` | 10 AV, 11 WSI, 12 PR, 13 PW, 32..=63 DATA | 0..=61 ADDR\[63:2\] |
//! | `IODIR` | 12..=31 PID, 33 DV, 40..=63 DID | |
//! | `ATS` | 12..=31 PID, 32 PV, 33 DSV, 40..=55 RID, 56..=63 DSEG | PAYLOAD |
//!
//! The PAYLOAD of `ATS.INVAL` has 0 G, 11 S and 12..=63 the address. That of `ATS.PRGR` has 32..=40
//! the page-request group, 44..=47 the response code and 48..=63 the destination ID.

use ringfence_types::{PfnBlock, PhysAddr};

use crate::options::Segments;

const IOTINVAL: u64 = 1;
const IOFENCE: u64 = 2;
const IODIR: u64 = 3;
const ATS: u64 = 4;
/// func3 of `IOTINVAL.GVMA`, `IODIR.INVAL_PDT` and `ATS.PRGR`.
const FUNC_1: u64 = 1 << 7;
const AV: u64 = 1 << 10;
const PSCID_SHIFT: u32 = 12;
const PSCV: u64 = 1 << 32;
const GV: u64 = 1 << 33;
const NL: u64 = 1 << 34;
const GSCID_SHIFT: u32 = 44;
/// S in the second doubleword.
const S: u64 = 1 << 9;
/// Position of ADDR\[63:12\] in the second doubleword.
const ADDR_SHIFT: u32 = 10;
const WSI: u64 = 1 << 11;
const PR: u64 = 1 << 12;
const PW: u64 = 1 << 13;
const DATA_SHIFT: u32 = 32;
const PID_SHIFT: u32 = 12;
const DV: u64 = 1 << 33;
const DID_SHIFT: u32 = 40;
const PV: u64 = 1 << 32;
const DSV: u64 = 1 << 33;
/// G and S of the payload of `ATS.INVAL`.
const ATS_GLOBAL: u64 = 1;
const ATS_SIZE: u64 = 1 << 11;
/// Fields of the payload of `ATS.PRGR`.
const PRGR_GROUP: u64 = 0x1ff;
const PRGR_GROUP_SHIFT: u32 = 32;
const PRGR_CODE: u64 = 0xf;
const PRGR_CODE_SHIFT: u32 = 44;
const PRGR_DESTINATION_SHIFT: u32 = 48;
/// Binary logarithm of the most pages of a block. The driver invalidates all addresses instead of a
/// larger block.
pub(crate) const LARGEST_ORDER: u32 = 50;

/// Returns the page number with the size of the block in its low bits ("NAPOT range").
const fn napot(block: PfnBlock) -> u64 {
    let first = block.first().get();
    first | (block.last().get() - first) >> 1
}

/// Returns S and ADDR of an `IOTINVAL` command.
const fn operand(block: PfnBlock) -> u64 {
    let size = if block.order() > 0 { S } else { 0 };
    napot(block) << ADDR_SHIFT | size
}

/// Returns the payload of `ATS.INVAL`.
const fn payload(block: PfnBlock) -> u64 {
    let size = if block.order() > 0 { ATS_SIZE } else { 0 };
    napot(block) << 12 | size
}

/// Addresses that an `IOTINVAL` command selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// AV = 0: all addresses, and the non-leaf entries.
    All,
    /// AV = 1.
    Block {
        block: PfnBlock,
        /// NL: the non-leaf entries on the path too.
        non_leaf: bool,
    },
}

impl Addresses {
    const fn encode(&self) -> [u64; 2] {
        match self {
            Self::All => [0, 0],
            Self::Block { block, non_leaf } => {
                let non_leaf = if *non_leaf { NL } else { 0 };
                [AV | non_leaf, operand(*block)]
            }
        }
    }
}

/// A command, before its encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// `IOTINVAL.VMA`: entries of the first stage.
    FirstStage {
        /// GSCID; `None` (GV = 0) selects address spaces without a second stage.
        guest: Option<u16>,
        /// PSCID; `None` (PSCV = 0) selects all.
        space: Option<u32>,
        addresses: Addresses,
    },
    /// `IOTINVAL.GVMA`: entries of the second stage.
    SecondStage {
        /// GSCID; `None` (GV = 0) selects all.
        guest: Option<u16>,
        addresses: Addresses,
    },
    /// `IODIR.INVAL_DDT`: device contexts; `None` (DV = 0) selects all.
    DeviceContext { device: Option<u32> },
    /// `IODIR.INVAL_PDT`: a process context.
    ProcessContext { device: u32, process: u32 },
    /// `IOFENCE.C` without a write: orders what follows after what precedes.
    Fence,
    /// `IOFENCE.C` that writes `data` to `at` when all earlier commands are complete, and commits
    /// the reads and writes of devices (PR, PW).
    Completion {
        at: PhysAddr,
        data: u32,
        /// WSI: also raises `fence_w_ip`.
        interrupt: bool,
    },
    /// `ATS.INVAL`: entries of a device TLB; no block selects all addresses.
    DeviceTlb {
        device: u32,
        process: Option<u32>,
        /// G: the entries of all processes.
        global: bool,
        block: Option<PfnBlock>,
    },
    /// `ATS.PRGR`: the response to a group of page requests.
    PageResponse {
        device: u32,
        process: Option<u32>,
        group: u16,
        code: u8,
    },
}

impl Command {
    /// Returns the two doublewords of the command, for a unit that serves `segments`.
    pub(crate) const fn encode(&self, segments: Segments) -> [u64; 2] {
        match *self {
            Self::FirstStage {
                guest,
                space,
                addresses,
            } => {
                let [operands, second] = addresses.encode();
                let space = match space {
                    Some(space) => PSCV | (space as u64 & 0xf_ffff) << PSCID_SHIFT,
                    None => 0,
                };
                [IOTINVAL | operands | space | gscid(guest), second]
            }
            Self::SecondStage { guest, addresses } => {
                let [operands, second] = addresses.encode();
                [IOTINVAL | FUNC_1 | operands | gscid(guest), second]
            }
            Self::DeviceContext { device } => match device {
                Some(device) => [IODIR | DV | did(device), 0],
                None => [IODIR, 0],
            },
            Self::ProcessContext { device, process } => {
                [IODIR | FUNC_1 | DV | did(device) | pid(process), 0]
            }
            Self::Fence => [IOFENCE, 0],
            Self::Completion {
                at,
                data,
                interrupt,
            } => {
                let interrupt = if interrupt { WSI } else { 0 };
                let data = (data as u64) << DATA_SHIFT;
                [IOFENCE | AV | interrupt | PR | PW | data, at.get() >> 2]
            }
            Self::DeviceTlb {
                device,
                process,
                global,
                block,
            } => {
                let global = if global { ATS_GLOBAL } else { 0 };
                let payload = match block {
                    Some(block) => payload(block),
                    None => !(1 << 63) & !0xfff | ATS_SIZE,
                };
                let rid = rid(device, segments);
                [ATS | rid | pasid(process), payload | global]
            }
            Self::PageResponse {
                device,
                process,
                group,
                code,
            } => {
                let group = (group as u64 & PRGR_GROUP) << PRGR_GROUP_SHIFT;
                let code = (code as u64 & PRGR_CODE) << PRGR_CODE_SHIFT;
                // The message is routed by the RID; the segment is that of the command.
                let destination = (device as u64 & 0xffff) << PRGR_DESTINATION_SHIFT;
                let rid = rid(device, segments);
                [
                    ATS | FUNC_1 | rid | pasid(process),
                    destination | code | group,
                ]
            }
        }
    }
}

const fn gscid(guest: Option<u16>) -> u64 {
    match guest {
        Some(guest) => GV | (guest as u64) << GSCID_SHIFT,
        None => 0,
    }
}

const fn did(device: u32) -> u64 {
    (device as u64 & 0xff_ffff) << DID_SHIFT
}

const fn pid(process: u32) -> u64 {
    (process as u64 & 0xf_ffff) << PID_SHIFT
}

/// RID, and DSEG with DSV if the unit serves several segments.
const fn rid(device: u32, segments: Segments) -> u64 {
    let segment = match segments {
        Segments::One => 0,
        Segments::Several => DSV,
    };
    did(device) | segment
}

const fn pasid(process: Option<u32>) -> u64 {
    match process {
        Some(process) => PV | pid(process),
        None => 0,
    }
}
