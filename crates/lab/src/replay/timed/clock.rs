//! The clock of a timed replay.

use super::tsc::cycles;

/// Reads the cycle counter at both ends of each block and, in run mode, between runs of maps and
/// runs of unmaps. One type for both modes, because every timed replay is compiled for it.
#[derive(Debug, Default)]
pub struct Clock {
    /// Cycles of each block.
    pub blocks: Vec<u64>,
    /// Cycles of each block in runs of maps; empty in block mode.
    pub in_maps: Vec<u64>,
    /// Cycles of each block in runs of unmaps; empty in block mode.
    pub in_unmaps: Vec<u64>,
    /// Cycles of two counter reads; `None` in block mode.
    overhead: Option<u64>,
    began: u64,
    mapping: bool,
    since: u64,
    now: (u64, u64),
}

impl Clock {
    /// Creates a clock that times blocks.
    pub fn blocks() -> Self {
        Self::default()
    }

    /// Creates a clock that times runs of maps and of unmaps within blocks; `overhead` is the cost
    /// of two counter reads.
    pub fn runs(overhead: u64) -> Self {
        Self {
            overhead: Some(overhead),
            ..Self::default()
        }
    }

    pub(super) fn begin(&mut self) {
        self.now = (0, 0);
        self.mapping = false;
        self.began = cycles();
        self.since = self.began;
    }

    /// Notes that a map follows.
    #[inline]
    pub(super) fn map(&mut self) {
        if let Some(overhead) = self.overhead
            && !self.mapping
        {
            self.turn(overhead);
        }
    }

    /// Notes that an unmap, or work that belongs to one, follows.
    #[inline]
    pub(super) fn unmap(&mut self) {
        if let Some(overhead) = self.overhead
            && self.mapping
        {
            self.turn(overhead);
        }
    }

    #[cold]
    fn turn(&mut self, overhead: u64) {
        self.close(overhead);
        self.mapping = !self.mapping;
    }

    fn close(&mut self, overhead: u64) {
        let spent = cycles().saturating_sub(self.since);
        let spent = spent.saturating_sub(overhead);
        if self.mapping {
            self.now.0 += spent;
        } else {
            self.now.1 += spent;
        }
        self.since = cycles();
    }

    pub(super) fn end(&mut self) {
        self.blocks.push(cycles().saturating_sub(self.began));
        if let Some(overhead) = self.overhead {
            self.close(overhead);
            self.in_maps.push(self.now.0);
            self.in_unmaps.push(self.now.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::counted::{advance, with_ticks};
    use super::*;

    /// Runs of maps, of unmaps and of work before the first map each have their ticks, less those
    /// of two reads. Consecutive calls of one kind are one run.
    #[test]
    fn runs_have_their_own_ticks() {
        let block = |clock: &mut Clock, ticks: [u64; 4]| {
            clock.begin();
            advance(ticks[0]);
            clock.map();
            advance(ticks[1]);
            clock.map();
            advance(ticks[2]);
            clock.unmap();
            advance(ticks[3]);
            clock.end();
        };
        with_ticks(|| {
            let mut clock = Clock::runs(2);
            block(&mut clock, [5, 10, 20, 400]);
            block(&mut clock, [1, 7, 0, 50]);
            assert_eq!(clock.blocks, [435, 58]);
            assert_eq!(clock.in_maps, [28, 5]);
            assert_eq!(clock.in_unmaps, [3 + 398, 48]);
            let mut clock = Clock::blocks();
            block(&mut clock, [5, 10, 20, 400]);
            assert_eq!(clock.blocks, [435]);
            assert!(clock.in_maps.is_empty() && clock.in_unmaps.is_empty());
        });
    }
}
