//! Entropy device (virtio 1.2, section 5.4).

use std::sync::Arc;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::{Queue, QueueT};

use super::chain::Chain;
use super::{Device, QueueBroken};
use crate::counters::DeviceCounters;
use crate::dma::Dma;

/// Most random bytes for one request.
const MAX_BYTES: usize = 4096;

/// Random bytes of the host's kernel.
#[derive(Debug)]
pub struct Rng {
    counters: Arc<DeviceCounters>,
}

impl Rng {
    /// One that counts what it does.
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

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<bool, QueueBroken> {
        let mut served = false;
        while let Some(chain) = dma.with(|memory| Chain::next(queue, memory))? {
            let bytes = usize::try_from(chain.writable.bytes()).unwrap_or(usize::MAX);
            let mut random = vec![0; bytes.min(MAX_BYTES)];
            let got = getrandom(&mut random, GetRandomFlags::empty()).unwrap_or(0);
            random.truncate(got);
            dma.with(|memory| {
                let written = chain.writable.write(memory, &random).is_ok() && !chain.malformed;
                let used = if written { got } else { 0 };
                queue.add_used(memory, chain.head, u32::try_from(used).unwrap_or(0))
            })?;
            self.counters.requests.add(1);
            self.counters.bytes_read.add(random.len() as u64);
            served = true;
        }
        Ok(served && dma.with(|memory| queue.needs_notification(memory))?)
    }
}
