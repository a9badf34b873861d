//! Permanently mapped buffers that a user-level program sends: isolates the cost of an IOTLB miss
//! (rIOMMU section 5.3).

use ringfence_types::{Direction, Iova, PhysRange, RequesterId};

use super::error::NicError;
use crate::api::{ApiError, DeviceRing, DmaApi, MapFailure, Mapped};
use crate::seed::Seed;
use crate::{Buffer, DmaError, Pool, Transfer};

/// Choice of the next buffer to send.
#[derive(Debug, Clone)]
pub enum BufferChoice {
    /// A random one for each packet: the IOTLB almost always misses.
    Random(Seed),
    /// Always the first one: the IOTLB always hits.
    Same,
}

/// A pool of mapped buffers. `H` is the API's handle of a mapping.
#[derive(Debug)]
pub struct Premapped<H> {
    mapped: Vec<(Iova, H)>,
    bytes: u32,
    packet: Vec<u8>,
}

/// The queue pair of the program.
const RING: DeviceRing = DeviceRing::new(0, Direction::ToDevice);

impl<H> Premapped<H> {
    /// Number of buffers for the rIOMMU paper's experiment; the size is our choice (decision 0011).
    pub const BUFFERS: u64 = 16_384;

    /// Maps a packet of `bytes` bytes in each buffer of `slot_bytes` bytes in `memory`.
    ///
    /// # Errors
    /// Nothing stays mapped.
    pub fn open<A: DmaApi<Handle = H>>(
        api: &mut A,
        memory: PhysRange,
        slot_bytes: u64,
        bytes: u32,
    ) -> Result<Self, NicError> {
        let mut pool = Pool::new(memory, slot_bytes).map_err(NicError::Pool)?;
        let mut opened = Self {
            mapped: Vec::with_capacity(pool.slots()),
            bytes,
            packet: vec![0; bytes as usize],
        };
        while let Some(buffer) = pool.alloc() {
            if let Err(error) = opened.map(api, &pool, buffer) {
                opened.close(api)?;
                return Err(error);
            }
        }
        api.sync_map(RING);
        Ok(opened)
    }

    fn map<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        pool: &Pool,
        buffer: Buffer,
    ) -> Result<(), NicError> {
        let range = pool.range(&buffer, u64::from(self.bytes));
        let range = range.ok_or(NicError::FrameLength {
            bytes: self.bytes as usize,
        })?;
        match api.map(RING, buffer, range) {
            Ok(Mapped { iova, handle }) => {
                self.mapped.push((iova, handle));
                Ok(())
            }
            Err(refused) => Err(match refused.failure {
                MapFailure::Busy => NicError::NoEntries,
                MapFailure::NoSuchRing => ApiError::NoSuchRing(RING).into(),
                MapFailure::Failed(error) => ApiError::Map(error).into(),
            }),
        }
    }

    /// Returns the number of mapped buffers.
    pub fn buffers(&self) -> usize {
        self.mapped.len()
    }

    /// Makes the device send one packet.
    ///
    /// # Errors
    /// The access was blocked.
    pub fn send<T: Transfer>(
        &mut self,
        bus: &mut T,
        device: RequesterId,
        choice: &mut BufferChoice,
    ) -> Result<(), DmaError> {
        let index = match choice {
            BufferChoice::Random(seed) => seed.below(self.mapped.len() as u64) as usize,
            BufferChoice::Same => 0,
        };
        match self.mapped.get(index) {
            Some((iova, _)) => bus.read(device, *iova, &mut self.packet),
            None => Ok(()),
        }
    }

    /// Unmaps all buffers.
    ///
    /// # Errors
    /// Returns the first error, after trying all.
    pub fn close<A: DmaApi<Handle = H>>(self, api: &mut A) -> Result<(), NicError> {
        let mut result = Ok(());
        for (_, handle) in self.mapped {
            let unmapped = api.unmap(RING, handle).map(|_| ());
            result = result.and(unmapped.map_err(NicError::from));
        }
        result.and(api.end_burst(RING, |_| {}).map_err(NicError::from))
    }
}
