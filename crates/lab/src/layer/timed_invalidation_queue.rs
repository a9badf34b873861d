//! The measured part of an invalidation in a timed replay: writing descriptors as a driver does
//! (VT-d specification, section 6.5.2). No IOTLB is behind this queue; the profile models the
//! response time of the hardware. An oracle replay invalidates through `crate::replay_platform`.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_memory::Arena;
use ringfence_types::{
    CachedLevels, Invalidation, InvalidationError, Invalidator, PfnRange, PhysAddr, PhysMemory,
    Ticket,
};

/// Descriptors in the queue: one page of 128-bit descriptors.
const ENTRIES: usize = 256;

/// An invalidation queue of 128-bit descriptors in memory. A wait descriptor follows each request.
#[derive(Debug)]
pub struct TimedInvalidationQueue {
    memory: Rc<Arena>,
    base: PhysAddr,
    status: PhysAddr,
    tail: usize,
    sequence: u64,
}

impl TimedInvalidationQueue {
    /// Creates a queue in the page at `base` with its status word at `status`.
    pub fn new(memory: Rc<Arena>, base: PhysAddr, status: PhysAddr) -> Self {
        Self {
            memory,
            base,
            status,
            tail: 0,
            sequence: 0,
        }
    }

    /// Creates a queue in the first two frames of `memory`.
    pub fn in_first_frames(memory: &Rc<Arena>) -> Self {
        Self::new(Rc::clone(memory), PhysAddr::ZERO, PhysAddr::new(0x1000))
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> u64 {
        self.sequence
    }

    #[inline]
    fn write(&mut self, descriptor: [u64; 2]) -> Result<(), InvalidationError> {
        let at = self.base.wrapping_add(self.tail as u64 * 16);
        let words = self
            .memory
            .words(at, 2)
            .map_err(|_| InvalidationError::Failed)?;
        store(words, descriptor);
        self.tail = (self.tail + 1) % ENTRIES;
        Ok(())
    }
}

#[inline]
fn store(words: &[AtomicU64], [low, high]: [u64; 2]) {
    if let [first, second] = words {
        second.store(high, Ordering::Relaxed);
        first.store(low, Ordering::Release);
    }
}

/// Returns the binary logarithm of the smallest naturally aligned power of two of pages that covers
/// `range`.
#[inline]
fn address_mask(range: &PfnRange) -> u64 {
    let differing = range.lo().get() ^ range.hi().get();
    u64::from(u64::BITS - differing.leading_zeros())
}

/// Encodes a request (section 6.5.2.3, IOTLB invalidate; 6.5.2.1, context cache).
#[inline]
fn encode(request: &Invalidation) -> [u64; 2] {
    const IOTLB: u64 = 0x2;
    const CONTEXT: u64 = 0x1;
    const DRAIN: u64 = 0b11 << 6;
    // No specification has a descriptor for a ring. This one names device and ring, with a type
    // that VT-d does not use.
    const RING: u64 = 0xf;
    match request {
        Invalidation::Pages {
            domain,
            range,
            levels,
        } => {
            let mask = address_mask(range);
            let page = range.lo().get() >> mask << mask;
            let hint = u64::from(*levels == CachedLevels::Leaves) << 6;
            [
                IOTLB | 0b11 << 4 | DRAIN | u64::from(domain.get()) << 16,
                page << 12 | hint | mask,
            ]
        }
        Invalidation::Domain(domain) => {
            [IOTLB | 0b10 << 4 | DRAIN | u64::from(domain.get()) << 16, 0]
        }
        Invalidation::Global => [IOTLB | 0b01 << 4 | DRAIN, 0],
        Invalidation::Context(device) => [CONTEXT | 0b11 << 4 | u64::from(device.get()) << 32, 0],
        Invalidation::Ring { device, ring, .. } => [
            RING | u64::from(device.get()) << 32 | u64::from(ring.get()) << 48,
            0,
        ],
    }
}

impl Invalidator for TimedInvalidationQueue {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        const WAIT_AND_WRITE: u64 = 0x5 | 1 << 5;
        self.sequence += 1;
        self.write(encode(&request))?;
        self.write([WAIT_AND_WRITE | self.sequence << 32, self.status.get()])?;
        // Complete the request for the hardware. The profile models the waiting time.
        let status = self
            .memory
            .word(self.status)
            .map_err(|_| InvalidationError::Failed)?;
        status.store(self.sequence, Ordering::Release);
        Ok(Ticket::new(self.sequence))
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let status = self
            .memory
            .word(self.status)
            .map_err(|_| InvalidationError::Failed)?;
        Ok(status.load(Ordering::Acquire) >= ticket.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::{DomainId, Pfn};

    #[test]
    fn page_requests_cover_their_range_with_one_mask() {
        let cases = [
            (5, 5, 0, 5),
            (4, 5, 1, 4),
            (5, 6, 2, 4),
            (7, 8, 4, 0),
            (0x100, 0x1ff, 8, 0x100),
        ];
        for (lo, hi, mask, page) in cases {
            let range = PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap();
            let request = Invalidation::Pages {
                domain: DomainId::new(7),
                range,
                levels: CachedLevels::Leaves,
            };
            let [low, high] = encode(&request);
            assert_eq!(low, 0x2 | 0x30 | 0xc0 | 7 << 16, "{lo:#x}..{hi:#x}");
            assert_eq!(high, page << 12 | 1 << 6 | mask, "{lo:#x}..{hi:#x}");
        }
    }
}
