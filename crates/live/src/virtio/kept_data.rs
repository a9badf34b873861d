//! Data of a completed request, which an errant device goes on reading.

use vm_memory::{Bytes, GuestAddress};

use super::chain::Chain;
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::dma_fault_injection::KEPT_READS;

/// Bytes that are read and compared.
const BYTES: usize = 8;

/// The last data segment of a write request, with its first bytes.
///
/// A device reads this segment last of the request's readable ones, so a ring IOMMU still has its
/// slot in the cache when the request is complete.
#[derive(Debug)]
pub(super) struct KeptData {
    at: GuestAddress,
    bytes: [u8; BYTES],
}

impl KeptData {
    /// Reads the first bytes of the data of `chain`, which is not served yet. `None` if the request
    /// is no write, or its buffer cannot be read.
    pub(super) fn of<A: Dma>(chain: &Chain, dma: &mut A) -> Option<Self> {
        // The first segment is the header.
        let data = chain.readable.iter().skip(1).last()?;
        let at = data.start;
        let bytes = (data.bytes as usize >= BYTES).then(|| read(dma, at))??;
        Some(Self { at, bytes })
    }

    /// Reads the bytes again until the IOMMU stops a read, at most [`KEPT_READS`] times. Counts the
    /// reads, and those that return other bytes.
    pub(super) fn read<A: Dma>(&self, dma: &mut A, counters: &DeviceCounters) {
        for _ in 0..KEPT_READS {
            let Some(bytes) = read(dma, self.at) else {
                return;
            };
            counters.kept_reads.add(1);
            if bytes != self.bytes {
                counters.kept_reads_changed.add(1);
            }
        }
    }
}

fn read<A: Dma>(dma: &mut A, at: GuestAddress) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let is_read = dma.with_retry(|memory| memory.read_slice(&mut bytes, at).is_ok());
    is_read.then_some(bytes)
}
