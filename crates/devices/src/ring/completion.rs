//! Completion rings: the device writes, the driver finds new entries by their phase.

use ringfence_types::RequesterId;

use super::{Cursor, RingBase, RingMemory};
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, DmaError, Transfer, Unreachable};

/// Bytes of a completion: that of NVMe, which all devices here share.
pub const COMPLETION_BYTES: u32 = 16;

/// A completion as it stands in memory. Bit 0 of byte 14 is the phase (NVMe base specification,
/// completion queue entry, dword 3 bit 16); the rest is the device's.
pub type RawCompletion = [u8; COMPLETION_BYTES as usize];

const PHASE_BYTE: usize = 14;

/// A completion ring as its driver keeps it.
#[derive(Debug)]
pub struct CompletionQueue {
    memory: RingMemory,
    next: Cursor,
}

impl CompletionQueue {
    /// An empty one in `memory`, which is zeroed.
    pub fn new(memory: RingMemory) -> Self {
        let next = Cursor::new(memory.size());
        Self { memory, next }
    }

    /// The next completion, if the device has written it. It stays the next one until
    /// [`advance`](Self::advance).
    ///
    /// # Errors
    /// Memory's.
    #[inline]
    pub fn peek<M: ByteMemory>(&self, memory: &M) -> Result<Option<RawCompletion>, Unreachable> {
        let mut raw = RawCompletion::default();
        self.memory.read(memory, self.next.index(), &mut raw)?;
        let phase = raw[PHASE_BYTE] & 1 == 1;
        Ok((phase == self.next.phase()).then_some(raw))
    }

    /// Is done with the next completion.
    #[inline]
    pub fn advance(&mut self) {
        self.next.advance();
    }

    /// What the driver writes into the head doorbell: the entry it will look at next.
    #[inline]
    pub const fn head(&self) -> u32 {
        self.next.index()
    }

    /// Where the device finds it.
    pub fn base(&self) -> RingBase {
        self.memory.base()
    }

    /// Frees its memory.
    ///
    /// # Errors
    /// The memory is lost.
    pub fn free<A: DmaApi>(self, api: &mut A, ring: DeviceRing) -> Result<(), ApiError> {
        self.memory.free(api, ring)
    }
}

/// A completion ring as its device keeps it.
#[derive(Debug, Clone, Copy)]
pub struct CompletionWriter {
    base: RingBase,
    next: Cursor,
}

impl CompletionWriter {
    /// At the beginning of the ring at `base`.
    pub const fn new(base: RingBase) -> Self {
        Self {
            base,
            next: Cursor::new(base.size),
        }
    }

    /// Writes a completion with the right phase. That there is room is the caller's to know.
    ///
    /// # Errors
    /// The access was stopped: the device has lost its voice.
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

    /// The entry that is written next.
    #[inline]
    pub const fn tail(&self) -> u32 {
        self.next.index()
    }
}
