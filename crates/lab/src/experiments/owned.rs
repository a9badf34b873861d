//! The calls of a run on rings that a port's driver owns, one by one: what map and unmap cost without a lock, a layer or a token between.
//!
//! Invalidations are counted and charged, or waited for: the document simulated its hardware by running `none` under the real driver code and
//! spinning for 2150 cycles at each invalidation of a ring (RI19, rIOMMU section 5.1). Both ways are here, so that they can be compared.

use std::collections::VecDeque;
use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::MapReason;
use ringfence_dma::ring::{
    OwnedRing, RingError, RingMapping, RingSetup, SlotChoice, Tables, lay_out,
};
use ringfence_memory::Arena;
use ringfence_pgtable::Coherency;
use ringfence_types::{
    DeviceId, DomainId, Invalidation, InvalidationError, Invalidator, PhysAddr, Ticket,
};

use super::capture::Run;
use super::timed::{Cost, own_loop};
use crate::error::LabError;
use crate::meter::{InvalidationQueue, cycles};
use crate::plan::{Plan, Step, Timed};

/// Memory of one port's tables.
const ARENA: u64 = 64 << 20;

/// Slots of a ring's table: two buffers for each of 1024 descriptors are live at most, and the longest burst waits.
const SLOTS: u32 = 4096;

/// Steps that are timed together.
const BLOCK: usize = 1024;

/// How an invalidation takes its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is counted, and the caller charges it.
    Counted,
    /// The processor spins for so many cycles.
    Waited(u64),
}

/// Writes descriptors as a driver does, and waits if it is to.
#[derive(Debug)]
struct Unit {
    queue: InvalidationQueue,
    answer: Answer,
    count: u64,
}

impl Invalidator for Unit {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.count += 1;
        let ticket = self.queue.submit(request)?;
        if let Answer::Waited(wanted) = self.answer {
            let begin = cycles();
            while cycles().saturating_sub(begin) < wanted {
                std::hint::spin_loop();
            }
        }
        Ok(ticket)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.queue.poll(ticket)
    }
}

/// A ring, and its mappings in their order: a driver keeps them beside its descriptors.
struct Lane<'m> {
    ring: OwnedRing<'m, u64>,
    held: VecDeque<RingMapping<u64>>,
}

/// A port's rings.
struct Port<'m> {
    memory: &'m Arena,
    lanes: Vec<Lane<'m>>,
    unit: Unit,
}

const LOST: LabError = LabError::Internal("an owned ring refused a call of its driver");

impl Lane<'_> {
    /// The mapping of `id`, if it is the oldest.
    #[inline]
    fn oldest(&mut self, id: u32) -> Option<RingMapping<u64>> {
        let held = self.held.front()?;
        if *held.buffer() != u64::from(id) {
            return None;
        }
        self.held.pop_front()
    }
}

impl<'m> Port<'m> {
    /// Rings of `slots` slots each, empty.
    fn new(
        memory: &'m Rc<Arena>,
        rings: usize,
        slots: u32,
        answer: Answer,
    ) -> Result<Self, LabError> {
        let setup = RingSetup {
            choice: SlotChoice::Tail,
            coherency: Coherency::Coherent,
        };
        let base = PhysAddr::new(0x2000);
        let tables = Tables::new(base, &vec![slots; rings.max(1)]).map_err(LabError::Rings)?;
        let laid = lay_out(&**memory, &tables, setup).map_err(LabError::Rings)?;
        let domain = DomainId::new(1);
        let device = DeviceId::new(0x0300);
        let lanes = laid.into_iter().map(|ring| {
            Ok(Lane {
                ring: OwnedRing::new(ring, &**memory, domain, device)?,
                held: VecDeque::with_capacity(SLOTS as usize),
            })
        });
        let queue =
            InvalidationQueue::new(Rc::clone(memory), PhysAddr::new(0), PhysAddr::new(0x1000));
        Ok(Self {
            memory,
            lanes: lanes
                .collect::<Result<_, RingError>>()
                .map_err(LabError::Rings)?,
            unit: Unit {
                queue,
                answer,
                count: 0,
            },
        })
    }

    /// Cycles of each block.
    fn drive(&mut self, plan: &Plan) -> Result<Vec<u64>, LabError> {
        let blocks = plan.steps.chunks(BLOCK);
        blocks
            .map(|block| {
                let begin = cycles();
                let done = self.block(plan, block);
                let spent = cycles().saturating_sub(begin);
                done.map(|()| spent)
            })
            .collect()
    }

    fn block(&mut self, plan: &Plan, block: &[Timed]) -> Result<(), LabError> {
        for timed in block {
            match timed.step {
                Step::Map {
                    id,
                    device,
                    direction,
                    first,
                    count,
                    ..
                } => {
                    let [piece] = plan.segments(first, count) else {
                        return Err(LOST);
                    };
                    let lane = self.lanes.get_mut(device.index()).ok_or(LOST)?;
                    let mapped = lane
                        .ring
                        .map(self.memory, u64::from(id.0), piece, direction);
                    lane.held.push_back(mapped.map_err(|_| LOST)?);
                }
                Step::Unmap { id, device, .. } => {
                    let lane = self.lanes.get_mut(device.index()).ok_or(LOST)?;
                    let held = lane.oldest(id.0).ok_or(LOST)?;
                    let unmapped = lane.ring.unmap(self.memory, held);
                    let _withheld = unmapped.map_err(|_| LOST)?;
                }
                Step::EndBurst { device, .. } => {
                    let lane = self.lanes.get_mut(device.index()).ok_or(LOST)?;
                    let ended = lane.ring.end_burst(self.memory, &mut self.unit, |buffer| {
                        black_box(buffer);
                    });
                    ended.map_err(|_| LOST)?;
                }
                Step::Doorbell { device, .. } => {
                    let lane = self.lanes.get_mut(device.index()).ok_or(LOST)?;
                    lane.ring.doorbell(self.memory);
                }
                Step::Tick => {}
            }
        }
        Ok(())
    }
}

/// What each of `runs`, which follow each other on one interface, costs on rings that their driver owns. Repetitions are interleaved, run by
/// run; each block of steps counts with its median.
///
/// # Errors
/// No memory, or a call was refused.
pub(super) fn costs(
    runs: &[Run],
    repetitions: usize,
    answer: Answer,
) -> Result<Vec<Cost>, LabError> {
    let plans: Vec<Plan> = runs.iter().map(Run::by_ring).collect();
    let rings = runs.iter().map(|run| run.rings.len()).max().unwrap_or(0);
    let memories = (0..repetitions.max(1)).map(|_| Arena::new(ARENA).map(Rc::new));
    let memories: Vec<Rc<Arena>> = memories.collect::<Result<_, _>>()?;
    let ports = memories
        .iter()
        .map(|memory| Port::new(memory, rings, SLOTS, answer));
    let mut ports: Vec<Port<'_>> = ports.collect::<Result<_, _>>()?;
    plans.iter().map(|plan| cost(&mut ports, plan)).collect()
}

fn cost(ports: &mut [Port<'_>], plan: &Plan) -> Result<Cost, LabError> {
    let mut invalidations = 0;
    let mut blocks = Vec::with_capacity(ports.len());
    for port in ports {
        let before = port.unit.count;
        blocks.push(port.drive(plan)?);
        invalidations = port.unit.count - before;
    }
    Ok(Cost::of(&blocks, plan, own_loop(plan), invalidations))
}

/// Share of the maps of `run`, from empty rings on, that the driver is told to wait for when each ring has `slots` slots. Such a map is left
/// out, and so is its unmap.
///
/// # Errors
/// No memory, or a call was refused for another reason.
pub(super) fn refused(run: &Run, slots: u32) -> Result<f64, LabError> {
    let plan = run.by_ring();
    let memory = Rc::new(Arena::new(ARENA)?);
    let mut port = Port::new(&memory, run.rings.len(), slots, Answer::Counted)?;
    let mut full = 0_u64;
    for timed in &plan.steps {
        match timed.step {
            Step::Map {
                id,
                device,
                direction,
                first,
                count,
                ..
            } => {
                let [piece] = plan.segments(first, count) else {
                    return Err(LOST);
                };
                let lane = port.lanes.get_mut(device.index()).ok_or(LOST)?;
                let mapped = lane
                    .ring
                    .map(port.memory, u64::from(id.0), piece, direction);
                match mapped {
                    Ok(mapping) => lane.held.push_back(mapping),
                    Err((_, MapReason::RingFull(_))) => full += 1,
                    Err(_) => return Err(LOST),
                }
            }
            Step::Unmap { id, device, .. } => {
                let lane = port.lanes.get_mut(device.index()).ok_or(LOST)?;
                if let Some(mapping) = lane.oldest(id.0) {
                    let unmapped = lane.ring.unmap(port.memory, mapping);
                    let _withheld = unmapped.map_err(|_| LOST)?;
                }
            }
            Step::EndBurst { .. } | Step::Doorbell { .. } | Step::Tick => {
                port.block(&plan, std::slice::from_ref(timed))?;
            }
        }
    }
    Ok(full as f64 / plan.maps.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use ringfence_devices::nic::Profile as Adapter;
    use ringfence_devices::workload::Stream;

    use super::*;
    use crate::experiments::capture::Capture;

    #[test]
    fn each_burst_is_one_invalidation_and_waiting_takes_its_time() {
        const WAIT: u64 = 1_000_000;
        let mut capture = Capture::with(Adapter::BRCM, Stream::default(), 50, 1200).unwrap();
        let runs = [capture.run().unwrap(), capture.run().unwrap()];
        let counted = costs(&runs, 1, Answer::Counted).unwrap();
        let waited = costs(&runs, 1, Answer::Waited(WAIT)).unwrap();
        for ((run, counted), waited) in runs.iter().zip(&counted).zip(&waited) {
            assert_eq!(counted.invalidations, run.bursts());
            assert_eq!(waited.invalidations, run.bursts());
            assert_eq!(counted.pairs, run.plan.maps.max(run.plan.unmaps));
            // The wait is a floor whatever else the processor does.
            assert!(waited.executed > (run.bursts() * WAIT) as f64 * 0.9);
        }
    }
}
