//! A driver's calls, grouped into the loops that make them. Executing loops costs the calls only. A
//! replay step by step, which knows no driver, costs about as much again to find the next step.

use std::collections::VecDeque;

use ringfence_types::{Direction, PhysRange};

use ringfence_lab::LabError;
use ringfence_lab::plan::{Plan, Step};

/// Calls of one iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoopBody {
    /// Maps another buffer, then unmaps the oldest mapping: the receive loop of the papers' drivers
    /// (decision 0011).
    Renew,
    /// Unmaps the oldest mapping, then maps another buffer: the receive loop as EIOVAR section 4
    /// describes it.
    Replace,
    /// Maps a buffer and rings the doorbell: sends a frame.
    Send,
    /// Maps a buffer: fills a ring.
    Map,
    /// Unmaps the oldest mapping: completes a transmission.
    Unmap,
    /// Rings the doorbell.
    Doorbell,
    /// Ends the burst.
    EndBurst,
}

impl LoopBody {
    /// DMA API calls per iteration.
    const fn calls(self) -> usize {
        match self {
            Self::Renew | Self::Replace | Self::Send => 2,
            Self::Map | Self::Unmap | Self::Doorbell | Self::EndBurst => 1,
        }
    }

    /// Buffers mapped per iteration.
    pub(super) const fn maps(self) -> usize {
        match self {
            Self::Renew | Self::Replace | Self::Send | Self::Map => 1,
            Self::Unmap | Self::Doorbell | Self::EndBurst => 0,
        }
    }
}

/// A loop of a driver on one ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) body: LoopBody,
    /// Index of the ring.
    pub(super) ring: u16,
    pub(super) direction: Direction,
    /// Number of iterations.
    pub(super) times: usize,
}

/// The loops of a run, for rings whose mappings are unmapped in the order of their maps.
#[derive(Debug, Default)]
pub(super) struct Loops {
    /// Loops, in order.
    pub(super) loops: Vec<Loop>,
    /// Buffers of all maps, in order.
    pub(super) buffers: Vec<PhysRange>,
}

/// Live mappings of each ring, oldest first. Carried over from run to run.
#[derive(Debug, Default)]
pub(super) struct MappedByRing(Vec<VecDeque<u32>>);

impl MappedByRing {
    fn of_ring(&mut self, ring: usize) -> &mut VecDeque<u32> {
        if self.0.len() <= ring {
            self.0.resize_with(ring + 1, VecDeque::new);
        }
        &mut self.0[ring]
    }
}

/// Classifies a step as a separate loop body: body, ring and direction. `None` for ticks.
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
        Step::EndDescriptor { .. } | Step::Tick => return None,
    };
    Some((body, device.0, *direction))
}

impl Loops {
    /// Groups the steps of `plan`, in which each ring is a device. `held` has the mappings that
    /// earlier runs left live, and is updated.
    ///
    /// # Errors
    /// A ring is unmapped out of order, or a map has several segments.
    pub(super) fn of(plan: &Plan, held: &mut MappedByRing) -> Result<Self, LabError> {
        let mut out = Self::default();
        let mut steps = plan.steps.iter().filter_map(|timed| {
            let step = &timed.step;
            single(step).map(|alone| (step, alone))
        });
        let mut next = steps.next();
        while let Some((step, (first, ring, direction))) = next {
            out.note(plan, step, held)?;
            next = steps.next();
            let mut body = first;
            if let Some((second, (then, other, _))) = next
                && other == ring
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
                Some(last) if (last.body, last.ring) == (body, ring) => last.times += 1,
                _ => out.loops.push(Loop {
                    body,
                    ring,
                    direction,
                    times: 1,
                }),
            }
        }
        Ok(out)
    }

    /// Records the buffer that a step maps, or checks that it unmaps the oldest mapping.
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
                held.of_ring(device.index()).push_back(id.0);
                self.buffers.push(*piece);
            }
            Step::Unmap { id, device, .. } => {
                if held.of_ring(device.index()).pop_front() != Some(id.0) {
                    return Err(LabError::Internal("an owned ring out of order"));
                }
            }
            Step::Doorbell { .. }
            | Step::EndBurst { .. }
            | Step::EndDescriptor { .. }
            | Step::Tick => {}
        }
        Ok(())
    }

    /// Splits the loops into blocks of at least `calls` calls each, except for the last block.
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
    use ringfence_devices::nic::{NicProfile, Replace};
    use ringfence_devices::workload::NetperfStream;

    use super::*;
    use crate::capture::Capture;

    /// Expanding the loops gives the steps that they were made from.
    #[test]
    fn loops_are_the_steps_of_their_run() {
        unrolled(NicProfile::MLX, LoopBody::Renew);
        let wording = NicProfile {
            replace: Replace::AfterUnmap,
            ..NicProfile::MLX
        };
        unrolled(wording, LoopBody::Replace);
    }

    fn unrolled(adapter: NicProfile, receive: LoopBody) {
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
            // A receive loop is one loop and not a sequence of single steps. The first run also
            // fills the rings, in turns.
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
    fn unmap_of_a_newer_mapping_is_rejected() {
        let mut capture =
            Capture::with(NicProfile::MLX, NetperfStream::default(), 50, 600).unwrap();
        capture.run().unwrap();
        // The second run unmaps buffers that the first one mapped.
        let plan = capture.run().unwrap().by_ring();
        assert!(Loops::of(&plan, &mut MappedByRing::default()).is_err());
    }
}
