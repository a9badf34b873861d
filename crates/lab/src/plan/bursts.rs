//! Open bursts, and descriptors of F&S: the unmaps whose buffers one invalidation returns.

use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, Nanos, PhysRange};

use super::withheld::{Withheld, WithheldRun};
use super::{BURST_NS, Plan, Step, TimedStep, pages_of};
use crate::withholds::Withholds;

/// Pages of a descriptor (F&S section 3).
pub const DESCRIPTOR_PAGES: u64 = 64;

/// Longest duration of a descriptor of buffers that the device writes.
pub const RECEIVE_DESCRIPTOR_NS: u64 = 100_000;

/// Longest duration of a descriptor of buffers that the device only reads.
pub const TRANSMIT_DESCRIPTOR_NS: u64 = 1_000_000;

/// Maximum number of open bursts; each belongs to a (device, direction, CPU). Each operation
/// searches all open bursts. The limit bounds the cost for a trace whose clock does not advance.
const MAX_OPEN_BURSTS: usize = 1024;

pub(super) type Key = (DeviceIndex, u16, Direction);

/// The rule that ends a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Any other event of the key, or [`BURST_NS`].
    Burst,
    /// [`DESCRIPTOR_PAGES`] withheld pages, or the longest duration of the direction.
    Descriptor(Withholds),
}

impl Rule {
    fn longest(self, (_, _, direction): Key) -> u64 {
        match (self, direction) {
            (Self::Burst, _) => BURST_NS,
            (Self::Descriptor(_), Direction::ToDevice) => TRANSMIT_DESCRIPTOR_NS,
            (Self::Descriptor(_), _) => RECEIVE_DESCRIPTOR_NS,
        }
    }

    fn step(self, (device, cpu, direction): Key) -> Step {
        match self {
            Self::Burst => Step::EndBurst {
                device,
                cpu,
                direction,
            },
            Self::Descriptor(of) => Step::EndDescriptor {
                device,
                cpu,
                direction,
                of,
            },
        }
    }

    /// Returns the units of a buffer that a driver does not map again before the end.
    fn run(self, buffer: &PhysRange) -> WithheldRun {
        match self {
            Self::Descriptor(Withholds::TransmitFrom(_)) => WithheldRun::bytes(buffer),
            _ => WithheldRun::pages(buffer),
        }
    }
}

#[derive(Debug, Clone)]
struct OpenBurst {
    key: Key,
    due: Nanos,
    pages: u64,
    runs: Vec<WithheldRun>,
    withheld: Withheld,
}

/// The open bursts of one rule, oldest first.
#[derive(Debug)]
pub(super) struct Bursts {
    pub(super) rule: Rule,
    open: Vec<OpenBurst>,
    withheld: Withheld,
    /// The earliest time at which a burst is due.
    due: Option<Nanos>,
    /// Number of bursts.
    pub(super) count: u64,
    /// Bursts ended because a part of a withheld buffer was mapped again.
    pub(super) cut_by_map: u64,
}

impl Bursts {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            rule,
            open: Vec::new(),
            withheld: Withheld::default(),
            due: None,
            count: 0,
            cut_by_map: 0,
        }
    }

    /// Returns the earliest time at which a burst is due.
    pub(super) fn due(&self) -> Option<Nanos> {
        self.due
    }

    /// Adds the unmap of `pieces`, and ends the burst if it is complete.
    pub(super) fn unmap(&mut self, key: Key, pieces: &[PhysRange], time: Nanos, plan: &mut Plan) {
        if let Rule::Descriptor(of) = self.rule
            && !of.includes(key.2, pieces)
        {
            return;
        }
        let found = self.open.iter().position(|open| open.key == key);
        if found.is_none() && self.open.len() >= MAX_OPEN_BURSTS {
            let oldest = self.open[0].key;
            self.end(oldest, time, plan);
        }
        let index = found.unwrap_or_else(|| {
            let due = Nanos(time.0.saturating_add(self.rule.longest(key)));
            self.count += 1;
            self.due = Some(self.due.map_or(due, |soonest| soonest.min(due)));
            self.open.push(OpenBurst {
                key,
                due,
                pages: 0,
                runs: Vec::new(),
                withheld: Withheld::default(),
            });
            self.open.len() - 1
        });
        let open = &mut self.open[index];
        for piece in pieces {
            let run = self.rule.run(piece);
            open.runs.push(run);
            open.withheld.add(run);
            self.withheld.add(run);
        }
        open.pages = open.pages.saturating_add(pages_of(pieces));
        if self.rule != Rule::Burst && open.pages >= DESCRIPTOR_PAGES {
            self.end(key, time, plan);
        }
    }

    /// Precedes a map of `pieces` with the ends that it requires.
    pub(super) fn map(&mut self, key: Key, pieces: &[PhysRange], time: Nanos, plan: &mut Plan) {
        if self.open.is_empty() {
            return;
        }
        if self.rule == Rule::Burst {
            self.end(key, time, plan);
        }
        for piece in pieces {
            let wanted = self.rule.run(piece);
            while self.withheld.any(&wanted) {
                let holds = |open: &&OpenBurst| open.withheld.any(&wanted);
                let Some(open) = self.open.iter().find(holds) else {
                    break;
                };
                let key = open.key;
                self.cut_by_map += 1;
                self.end(key, time, plan);
            }
        }
    }

    /// Ends the bursts that are due at `due`.
    pub(super) fn end_due(&mut self, due: Nanos, plan: &mut Plan) {
        while let Some(open) = self.open.iter().find(|open| open.due <= due) {
            let key = open.key;
            self.end(key, due, plan);
        }
    }

    /// Ends all bursts.
    pub(super) fn end_all(&mut self, time: Nanos, plan: &mut Plan) {
        while let Some(open) = self.open.first() {
            let key = open.key;
            self.end(key, time, plan);
        }
    }

    fn end(&mut self, key: Key, time: Nanos, plan: &mut Plan) {
        let Some(index) = self.open.iter().position(|open| open.key == key) else {
            return;
        };
        let ended = self.open.remove(index);
        for run in ended.runs {
            self.withheld.remove(run);
        }
        self.due = self.open.iter().map(|open| open.due).min();
        plan.steps.push(TimedStep {
            time,
            step: self.rule.step(key),
        });
    }
}
