//! Offsets and bits of the registers in BAR 0. All are little-endian.

/// Size of BAR 0 in bytes.
pub const BAR_BYTES: u64 = 0x1000;

/// ID, 4 bytes, read-only: [`MAGIC`].
pub const ID: u64 = 0x00;
/// VERSION, 4 bytes, read-only: [`VERSION_1`].
pub const VERSION: u64 = 0x04;
/// CAP, 8 bytes, read-only: number of devices in bits 0 to 15, binary logarithm of the largest
/// number of entries of a fault queue ([`MAX_QUEUE_SHIFT`]) in bits 16 to 20, [`CAP_PREFETCH`].
pub const CAP: u64 = 0x08;
/// ROOT, 8 bytes: address of the root table, a multiple of 4096.
pub const ROOT: u64 = 0x10;
/// CTRL, 4 bytes: [`TRANSLATE`], [`RECORD_FAULTS`], [`INTERRUPT`].
pub const CTRL: u64 = 0x18;
/// STS, 4 bytes: [`OVERFLOW`], [`QUEUE_ERROR`], [`BAD_INVALIDATION`]. Writing 1 to a bit clears it.
pub const STS: u64 = 0x1c;
/// INV, 8 bytes, write-only: [`InvalidateWord`](crate::InvalidateWord).
pub const INV: u64 = 0x20;
/// FQ, 8 bytes: address of the fault queue, a multiple of 4096, and its size in bits 0 to 4: the
/// binary logarithm of the number of entries. Writable while [`RECORD_FAULTS`] is 0.
pub const FQ: u64 = 0x28;
/// FQ_HEAD, 4 bytes: number of entries that the driver has read, modulo 2^32.
pub const FQ_HEAD: u64 = 0x30;
/// FQ_TAIL, 4 bytes, read-only: number of entries that the device has written, modulo 2^32.
pub const FQ_TAIL: u64 = 0x34;
/// DEV, 4 bytes each, read-only: requester IDs of the devices, ascending.
pub const DEV: u64 = 0x400;

/// Value of [`ID`]: "RING" in ASCII.
pub const MAGIC: u32 = 0x474e_4952;
/// Value of [`VERSION`]: major version 1 in bits 16 to 31, minor version 0.
pub const VERSION_1: u32 = 1 << 16;
/// Largest binary logarithm of the number of entries of a fault queue.
pub const MAX_QUEUE_SHIFT: u32 = 12;
/// Maximum number of devices: their IDs fill the rest of the BAR.
pub const MAX_DEVICES: usize = 0x300;

/// CAP: position of the field with [`MAX_QUEUE_SHIFT`].
pub const CAP_QUEUE_SHIFT: u32 = 16;
/// CAP, bit 24: the unit reads the next slot of a ring in advance. It may hold a copy of this slot
/// until the ring is invalidated.
pub const CAP_PREFETCH: u64 = 1 << 24;

/// CTRL, bit 0: devices reach memory through rings. While it is 0, all devices are blocked.
pub const TRANSLATE: u32 = 1 << 0;
/// CTRL, bit 1: faults are written to the queue.
pub const RECORD_FAULTS: u32 = 1 << 1;
/// CTRL, bit 2: a new fault raises the interrupt.
pub const INTERRUPT: u32 = 1 << 2;
/// CTRL: all defined bits. A write ignores the others.
pub const CTRL_BITS: u32 = TRANSLATE | RECORD_FAULTS | INTERRUPT;

/// STS, bit 0: the queue was full, and the device dropped a fault.
pub const OVERFLOW: u32 = 1 << 0;
/// STS, bit 1: an entry of the queue lies outside memory. The device has cleared
/// [`RECORD_FAULTS`].
pub const QUEUE_ERROR: u32 = 1 << 1;
/// STS, bit 2: an invalidation had a reserved bit or scope. The device has invalidated everything.
pub const BAD_INVALIDATION: u32 = 1 << 2;
/// STS: all defined bits.
pub const STS_BITS: u32 = OVERFLOW | QUEUE_ERROR | BAD_INVALIDATION;
