//! Page table formats, one per file, with the bit names of the hardware documentation.

mod amd_v1;
mod arm;
mod calgary_tce;
mod dart;
mod gart;
mod ring;
mod riscv;
mod vtd_first_stage;
mod vtd_second_stage;

pub use amd_v1::AmdV1;
pub use arm::{Arm, Granule, Granule4K, Granule16K, Granule64K};
pub use calgary_tce::CalgaryTce;
pub use dart::Dart;
pub use gart::Gart;
pub(crate) use ring::{DIR, DIR_SHIFT, VALID};
pub use ring::{
    MAX_RING_BUFFER, MAX_RING_SLOTS, RING_ENTRY_BYTES, RingDevice, RingFormatError, RingPte,
    RingTable,
};
pub use riscv::{MemoryType, RiscV};
pub use vtd_first_stage::{AmdV2, FirstStage};
pub use vtd_second_stage::{Levels, SecondStage, Snoop};
