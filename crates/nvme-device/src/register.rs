//! Offsets and fields of the registers (base specification, section 3.1).

/// Controller capabilities, 8 bytes.
pub const CAP: u64 = 0x00;
/// Version of the specification.
pub const VS: u64 = 0x08;
/// Interrupt mask set. Not used with MSI-X.
pub const INTMS: u64 = 0x0c;
/// Interrupt mask clear. Not used with MSI-X.
pub const INTMC: u64 = 0x10;
/// Controller configuration, 4 bytes.
pub const CC: u64 = 0x14;
/// Controller status, 4 bytes.
pub const CSTS: u64 = 0x1c;
/// Admin queue attributes.
pub const AQA: u64 = 0x24;
/// Admin submission queue base address, 8 bytes.
pub const ASQ: u64 = 0x28;
/// Admin completion queue base address, 8 bytes.
pub const ACQ: u64 = 0x30;
/// First doorbell: the tail of submission queue 0. The head of completion queue 0 follows, then
/// those of queue 1 (section 3.1.16; `CAP.DSTRD` is 0).
pub const DOORBELLS: u64 = 0x1000;

/// `CC.EN`: the controller is enabled.
pub const CC_ENABLE: u32 = 1;
/// `CC.SHN`: shutdown notification.
pub const CC_SHUTDOWN: u32 = 3 << 14;
/// `CSTS.RDY`: the controller is ready.
pub const CSTS_READY: u32 = 1;
/// `CSTS.CFS`: controller fatal status.
pub const CSTS_FATAL: u32 = 1 << 1;
/// `CSTS.SHST`: shutdown status.
pub const CSTS_SHUTDOWN: u32 = 3 << 2;
/// `CSTS.SHST`: shutdown processing complete.
pub const CSTS_SHUTDOWN_COMPLETE: u32 = 2 << 2;

/// `VS` of version 1.4.
pub(crate) const VERSION: u32 = 0x0001_0400;

/// `CAP.CQR`: queues must be physically contiguous.
const CAP_CONTIGUOUS: u64 = 1 << 16;
/// `CAP.TO`: the host waits for `CSTS.RDY` for at most 5 s.
const CAP_TIMEOUT: u64 = 10 << 24;
/// `CAP.CSS`: the NVM command set.
const CAP_NVM: u64 = 1 << 37;

/// Returns `CAP` of a controller with I/O queues of at most `entries` entries. Page size 4 KiB
/// (`MPSMIN` and `MPSMAX` 0), doorbell stride 4 bytes (`DSTRD` 0).
pub(crate) fn capabilities(entries: u16) -> u64 {
    u64::from(entries.saturating_sub(1)) | CAP_CONTIGUOUS | CAP_TIMEOUT | CAP_NVM
}

/// Fields of `CC` that must have one value when `CC.EN` is set: the command set (6:4), the page
/// size (10:7), the arbitration (13:11), and the entry sizes (23:16): 64 and 16 bytes.
pub(crate) const CC_FIXED_MASK: u32 = 0x00ff_3ff0;
/// Values of these fields.
pub(crate) const CC_FIXED: u32 = 0x0046_0000;
/// Bits of `CC` that are defined.
pub(crate) const CC_DEFINED: u32 = CC_FIXED_MASK | CC_SHUTDOWN | CC_ENABLE;
/// Bits of `AQA` that are defined: two sizes of 12 bits, less one.
pub(crate) const AQA_DEFINED: u32 = 0x0fff_0fff;
