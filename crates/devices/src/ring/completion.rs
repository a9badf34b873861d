//! Completion rings: the device writes entries, and the driver detects new ones by their phase.

use ringfence_types::RequesterId;

use super::{RingBase, RingCursor, RingMemory};
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, DmaError, Transfer, Unreachable};

/// Size of a completion: that of NVMe, which all devices here use.
pub const COMPLETION_BYTES: u32 = 16;

/// An encoded completion. Bit 0 of byte 14 is the phase (NVMe base specification, completion queue
/// entry, dword 3 bit 16). The device defines the rest.
pub type RawCompletion = [u8; COMPLETION_BYTES as usize];

const PHASE_BYTE: usize = 14;

/// The driver's side of a completion ring.
#[derive(Debug)]
pub struct CompletionQueue {
    memory: RingMemory,
    next: RingCursor,
}

impl CompletionQueue {
    /// Creates an empty ring in `memory`, which must be zeroed.
    pub fn new(memory: RingMemory) -> Self {
        let next = RingCursor::new(memory.size());
        Self { memory, next }
    }

    /// Returns the next completion if the device has written it. Call [`advance`](Self::advance) to
    /// consume it.
    ///
    /// # Errors
    /// The memory is not accessible.
    #[inline]
    pub fn peek<M: ByteMemory>(&self, memory: &M) -> Result<Option<RawCompletion>, Unreachable> {
        let mut raw = RawCompletion::default();
        self.memory.read(memory, self.next.index(), &mut raw)?;
        let phase = raw[PHASE_BYTE] & 1 == 1;
        Ok((phase == self.next.phase()).then_some(raw))
    }

    /// Consumes the next completion.
    #[inline]
    pub fn advance(&mut self) {
        self.next.advance();
    }

    /// Returns the value for the head doorbell: the index of the next entry to read.
    #[inline]
    pub const fn head(&self) -> u32 {
        self.next.index()
    }

    /// Returns the address of the ring for the device.
    pub fn base(&self) -> RingBase {
        self.memory.base()
    }

    /// Frees the ring's memory.
    ///
    /// # Errors
    /// The invalidation failed twice. The memory is lost, because the device may still access it.
    pub fn free<A: DmaApi>(self, api: &mut A, ring: DeviceRing) -> Result<(), ApiError> {
        self.memory.free(api, ring)
    }
}

/// The device's side of a completion ring.
#[derive(Debug, Clone, Copy)]
pub struct CompletionWriter {
    base: RingBase,
    next: RingCursor,
}

impl CompletionWriter {
    /// Creates a writer at the start of the ring at `base`.
    pub const fn new(base: RingBase) -> Self {
        Self {
            base,
            next: RingCursor::new(base.size),
        }
    }

    /// Writes a completion with the current phase. The caller ensures that the ring has room.
    ///
    /// # Errors
    /// The access was blocked, so the device can no longer report completions.
    #[inline]
    pub fn post<T: Transfer>(
        &mut self,
        bus: &mut T,
        device: RequesterId,
        mut raw: RawCompletion,
    ) -> Result<(), DmaError> {
        raw[PHASE_BYTE] = (raw[PHASE_BYTE] & !1) | u8::from(self.next.phase());
        bus.write(device, self.base.entry(self.next.index()), &raw)?;
        self.next.advance();
        Ok(())
    }

    /// Returns the index of the next entry to write.
    #[inline]
    pub const fn tail(&self) -> u32 {
        self.next.index()
    }
}
