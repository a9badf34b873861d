//! Entropy device (virtio 1.2, section 5.4).

use std::sync::Arc;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::Queue;

use super::DeviceState;
use super::quantum::{ChainOutcome, QuantumResult, serve_chains};
use super::{Device, QueueBroken};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::saved_state::HandOverBlocker;

/// Most random bytes of one request.
const MAX_BYTES: usize = 4096;

/// An entropy device over the host kernel's random numbers.
#[derive(Debug)]
pub struct Rng {
    counters: Arc<DeviceCounters>,
}

impl Rng {
    /// Creates a device that counts its requests in `counters`.
    pub fn new(counters: Arc<DeviceCounters>) -> Self {
        Self { counters }
    }
}

impl Device for Rng {
    const TYPE: u16 = 4;
    const CLASS: [u8; 3] = [0xff, 0, 0];

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64]
    }

    fn read_config(&self, _offset: usize, data: &mut [u8]) {
        data.fill(0);
    }

    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        Ok(DeviceState::Rng)
    }

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let counters = &self.counters;
        serve_chains(queue, dma, counters, |chain, dma| {
            let bytes = usize::try_from(chain.writable.bytes()).unwrap_or(usize::MAX);
            let mut random = vec![0; bytes.min(MAX_BYTES)];
            let got = getrandom(&mut random, GetRandomFlags::empty()).unwrap_or(0);
            random.truncate(got);
            let written = !chain.malformed
                && dma
                    .with(|memory| chain.writable.write(memory, &random))
                    .is_ok();
            if !written {
                counters.failed.add(1);
                return ChainOutcome::Used(0);
            }
            counters.bytes_read.add(random.len() as u64);
            ChainOutcome::Used(u32::try_from(got).unwrap_or(0))
        })
    }
}
