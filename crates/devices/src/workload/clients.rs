//! Clients in a closed loop: a client that has its response sends another request, in a random
//! order.

use crate::seed::Seed;

/// The clients that may send a request.
#[derive(Debug, Clone)]
pub(super) struct Clients {
    ready: Vec<u32>,
    count: u32,
    seed: Seed,
}

impl Clients {
    /// Creates `count` clients, all of which may send.
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

    /// Removes and returns a random client that may send.
    pub(super) fn draw(&mut self) -> Option<u32> {
        let index = self.seed.below(self.ready.len() as u64) as usize;
        (index < self.ready.len()).then(|| self.ready.swap_remove(index))
    }

    /// Allows the client to send again.
    pub(super) fn ready(&mut self, client: u32) {
        self.ready.push(client);
    }

    /// Returns a random number below `bound`, for other choices.
    pub(super) fn chance(&mut self, bound: u64) -> u64 {
        self.seed.below(bound)
    }
}
