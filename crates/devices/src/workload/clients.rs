//! Clients in a closed loop: each that has its answer asks again, in an order drawn from a seed.

use crate::seed::Seed;

/// The clients that may ask.
#[derive(Debug, Clone)]
pub(super) struct Clients {
    ready: Vec<u32>,
    count: u32,
    seed: Seed,
}

impl Clients {
    /// All of them may ask.
    pub(super) fn new(count: u32, seed: u64) -> Self {
        Self {
            ready: (0..count).collect(),
            count,
            seed: Seed::new(seed),
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// One of those that may ask, which may not any more.
    pub(super) fn draw(&mut self) -> Option<u32> {
        let place = self.seed.below(self.ready.len() as u64) as usize;
        (place < self.ready.len()).then(|| self.ready.swap_remove(place))
    }

    /// This one may ask again.
    pub(super) fn ready(&mut self, client: u32) {
        self.ready.push(client);
    }

    /// A number below `bound`, for what else is up to chance.
    pub(super) fn chance(&mut self, bound: u64) -> u64 {
        self.seed.below(bound)
    }
}
