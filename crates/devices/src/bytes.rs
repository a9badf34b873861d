//! The interface to the bytes that devices transfer.

use ringfence_memory::Arena;
use ringfence_types::PhysAddr;

/// Byte-addressed memory. Page tables use [`PhysMemory`](ringfence_types::PhysMemory) instead.
pub trait ByteMemory {
    /// Fills `into` with the bytes from `at` on.
    ///
    /// # Errors
    /// [`Unreachable`] if some of the bytes are outside memory; `into` is then unspecified.
    fn read(&self, at: PhysAddr, into: &mut [u8]) -> Result<(), Unreachable>;

    /// Stores `from` at `at`.
    ///
    /// # Errors
    /// [`Unreachable`] if some of the bytes are outside memory; nothing is stored.
    fn write(&self, at: PhysAddr, from: &[u8]) -> Result<(), Unreachable>;
}

/// Error: an address without memory. On a real bus, an unsupported request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{bytes} bytes at {at} lie outside memory")]
pub struct Unreachable {
    /// First byte of the access.
    pub at: PhysAddr,
    /// Length of the access in bytes.
    pub bytes: u64,
}

impl ByteMemory for Arena {
    #[inline]
    fn read(&self, at: PhysAddr, into: &mut [u8]) -> Result<(), Unreachable> {
        let bytes = into.len() as u64;
        self.read_bytes(at, into)
            .map_err(|_| Unreachable { at, bytes })
    }

    #[inline]
    fn write(&self, at: PhysAddr, from: &[u8]) -> Result<(), Unreachable> {
        self.write_bytes(at, from).map_err(|_| Unreachable {
            at,
            bytes: from.len() as u64,
        })
    }
}
