//! A driver's calls as the loops that make them. What is performed as loops costs what the calls
//! cost; read back step by step, as a replay has to that knows no driver, they cost as much again
//! for finding out what comes next.

use std::collections::VecDeque;

use ringfence_types::{Direction, PhysRange};

use crate::error::LabError;
use crate::plan::{Plan, Step};

/// What a loop does each time round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoopBody {
    /// Maps another buffer, and unmaps the oldest mapping behind it: the documents' drivers'
    /// receive loop (decision 0011).
    Renew,
    /// Unmaps the oldest mapping, and at once maps another buffer: a receive loop as EIOVAR section
    /// 4 words it.
    Replace,
    /// Maps a buffer and rings the doorbell: a frame is sent.
    Send,
    /// Maps a buffer: a ring is filled.
    Map,
    /// Unmaps the oldest mapping: what was sent is taken back.
    Unmap,
    /// Rings the doorbell.
    Doorbell,
    /// Ends the burst.
    EndBurst,
}

impl LoopBody {
    /// Calls each time round.
    const fn calls(self) -> usize {
        match self {
            Self::Renew | Self::Replace | Self::Send => 2,
            Self::Map | Self::Unmap | Self::Doorbell | Self::EndBurst => 1,
        }
    }

    /// Buffers mapped each time round.
    pub(super) const fn maps(self) -> usize {
        match self {
            Self::Renew | Self::Replace | Self::Send | Self::Map => 1,
            Self::Unmap | Self::Doorbell | Self::EndBurst => 0,
        }
    }
}

/// A loop of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) body: LoopBody,
    /// Of which ring.
    pub(super) ring: u16,
    pub(super) direction: Direction,
    /// How often it goes round.
    pub(super) times: usize,
}

/// The loops of a run on rings that are unmapped in the order in which they were mapped.
#[derive(Debug, Default)]
pub(super) struct Loops {
    /// In order.
    pub(super) loops: Vec<Loop>,
    /// What the maps map, in order.
    pub(super) buffers: Vec<PhysRange>,
}

/// What is mapped in each ring, oldest first, from one run to the next.
#[derive(Debug, Default)]
pub(super) struct MappedByRing(Vec<VecDeque<u32>>);

impl MappedByRing {
    fn lane(&mut self, lane: usize) -> &mut VecDeque<u32> {
        if self.0.len() <= lane {
            self.0.resize_with(lane + 1, VecDeque::new);
        }
        &mut self.0[lane]
    }
}

/// A step by itself: what it does, in which ring.
fn single(step: &Step) -> Option<(LoopBody, u16, Direction)> {
    let (body, device, direction) = match step {
        Step::Map {
            device, direction, ..
        } => (LoopBody::Map, device, direction),
        Step::Unmap {
            device, direction, ..
        } => (LoopBody::Unmap, device, direction),
        Step::Doorbell {
            device, direction, ..
        } => (LoopBody::Doorbell, device, direction),
        Step::EndBurst {
            device, direction, ..
        } => (LoopBody::EndBurst, device, direction),
        Step::Tick => return None,
    };
    Some((body, device.0, *direction))
}

impl Loops {
    /// The loops of `plan`, in which each ring is a device, after the runs that left `held`.
    ///
    /// # Errors
    /// A ring is unmapped in another order than it was mapped in, or a map has several pieces.
    pub(super) fn of(plan: &Plan, held: &mut MappedByRing) -> Result<Self, LabError> {
        let mut out = Self::default();
        let mut steps = plan.steps.iter().filter_map(|timed| {
            let step = &timed.step;
            single(step).map(|alone| (step, alone))
        });
        let mut next = steps.next();
        while let Some((step, (first, lane, direction))) = next {
            out.note(plan, step, held)?;
            next = steps.next();
            let mut body = first;
            if let Some((second, (then, other, _))) = next
                && other == lane
            {
                body = match (first, then) {
                    (LoopBody::Map, LoopBody::Unmap) => LoopBody::Renew,
                    (LoopBody::Unmap, LoopBody::Map) => LoopBody::Replace,
                    (LoopBody::Map, LoopBody::Doorbell) => LoopBody::Send,
                    _ => first,
                };
                if body != first {
                    out.note(plan, second, held)?;
                    next = steps.next();
                }
            }
            match out.loops.last_mut() {
                Some(last) if (last.body, last.ring) == (body, lane) => last.times += 1,
                _ => out.loops.push(Loop {
                    body,
                    ring: lane,
                    direction,
                    times: 1,
                }),
            }
        }
        Ok(out)
    }

    /// What a step maps and unmaps.
    fn note(&mut self, plan: &Plan, step: &Step, held: &mut MappedByRing) -> Result<(), LabError> {
        match step {
            Step::Map {
                id,
                device,
                first,
                count,
                ..
            } => {
                let [piece] = plan.segments(*first, *count) else {
                    return Err(LabError::Internal("a list in an owned ring"));
                };
                held.lane(device.index()).push_back(id.0);
                self.buffers.push(*piece);
            }
            Step::Unmap { id, device, .. } => {
                if held.lane(device.index()).pop_front() != Some(id.0) {
                    return Err(LabError::Internal("an owned ring out of order"));
                }
            }
            Step::Doorbell { .. } | Step::EndBurst { .. } | Step::Tick => {}
        }
        Ok(())
    }

    /// Loops of at least `calls` calls together, but for the last ones.
    pub(super) fn blocks(&self, calls: usize) -> impl Iterator<Item = &[Loop]> {
        let mut made = 0;
        self.loops.split_inclusive(move |each| {
            made += each.body.calls() * each.times;
            let full = made >= calls;
            if full {
                made = 0;
            }
            full
        })
    }
}

#[cfg(test)]
mod tests {
    use ringfence_devices::nic::{Profile as Adapter, Replace};
    use ringfence_devices::workload::NetperfStream;

    use super::*;
    use crate::experiments::capture::Capture;

    /// Loops that are unrolled again are the steps that they were made of.
    #[test]
    fn loops_are_the_steps_of_their_run() {
        unrolled(Adapter::MLX, LoopBody::Renew);
        let wording = Adapter {
            replace: Replace::AfterUnmap,
            ..Adapter::MLX
        };
        unrolled(wording, LoopBody::Replace);
    }

    fn unrolled(adapter: Adapter, receive: LoopBody) {
        let mut capture = Capture::with(adapter, NetperfStream::default(), 50, 2000).unwrap();
        let mut held = MappedByRing::default();
        for number in 0..3 {
            let plan = capture.run().unwrap().by_ring();
            let loops = Loops::of(&plan, &mut held).unwrap();
            let mut buffers = loops.buffers.iter();
            let mut steps = plan.steps.iter();
            for each in &loops.loops {
                let bodies: &[LoopBody] = match each.body {
                    LoopBody::Renew => &[LoopBody::Map, LoopBody::Unmap],
                    LoopBody::Replace => &[LoopBody::Unmap, LoopBody::Map],
                    LoopBody::Send => &[LoopBody::Map, LoopBody::Doorbell],
                    _ => &[each.body],
                };
                for _ in 0..each.times {
                    for body in bodies {
                        let step = &steps.next().unwrap().step;
                        let wanted = (*body, each.ring, each.direction);
                        assert_eq!(single(step), Some(wanted));
                        if let Step::Map { first, count, .. } = step {
                            assert_eq!(plan.segments(*first, *count), [*buffers.next().unwrap()]);
                        }
                    }
                }
            }
            assert!(steps.next().is_none() && buffers.next().is_none());
            // A receive loop is one, not a chain of steps. The first run also fills the rings, in
            // turns.
            assert!(number == 0 || loops.loops.len() * 20 < plan.steps.len());
            assert!(
                loops
                    .loops
                    .iter()
                    .any(|each| each.body == receive && each.times > 50)
            );
            let blocks: Vec<&[Loop]> = loops.blocks(1000).collect();
            assert_eq!(blocks.concat(), loops.loops);
            assert!(blocks.len() > 2);
        }
    }

    #[test]
    fn what_is_not_the_oldest_is_refused() {
        let mut capture = Capture::with(Adapter::MLX, NetperfStream::default(), 50, 600).unwrap();
        capture.run().unwrap();
        // The second run unmaps what the first has mapped.
        let plan = capture.run().unwrap().by_ring();
        assert!(Loops::of(&plan, &mut MappedByRing::default()).is_err());
    }
}
