//! The steps of a run whose cost counts, and the blocks of steps that are timed together.

use std::ops::Range;

use ringfence_lab::plan::{Plan, Step, TimedStep};

use crate::capture::Run;

/// The steps of a run whose cost counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountedSteps {
    /// Every step of the run costs something.
    All,
    /// Those between an interrupt of a reception and the doorbell of the reply. The unmaps of
    /// completed transmissions, and the ends of their bursts, happen while the reply travels.
    UntilReply,
}

/// Consecutive steps of a run that are timed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) range: Range<usize>,
    pub(super) counts: bool,
}

impl Block {
    pub(super) fn steps<'a>(&self, plan: &'a Plan) -> &'a [TimedStep] {
        plan.steps.get(self.range.clone()).unwrap_or_default()
    }
}

impl CountedSteps {
    /// Maximum number of steps of a block.
    const LONGEST: usize = 1024;

    fn counts(self, step: &Step, ring: u16) -> bool {
        let completes = matches!(step, Step::Unmap { .. } | Step::EndBurst { .. });
        let transmission = !ring.is_multiple_of(2);
        self == Self::All || !(completes && transmission)
    }

    /// Cuts a run into blocks, in which either all steps count or none.
    pub(super) fn blocks(self, run: &Run) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for (at, (timed, ring)) in run.plan.steps.iter().zip(&run.step_rings).enumerate() {
            let counts = self.counts(&timed.step, *ring);
            match blocks.last_mut() {
                Some(last) if last.counts == counts && last.range.len() < Self::LONGEST => {
                    last.range.end = at + 1;
                }
                _ => blocks.push(Block {
                    range: at..at + 1,
                    counts,
                }),
            }
        }
        blocks
    }
}
