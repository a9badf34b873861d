//! Cost of a run's calls on rings that the driver owns: map and unmap without a lock, the DMA layer
//! or its mapping token.
//!
//! The driver's loops make the calls. The same loops also run without protection, and their cost is
//! subtracted: it is part of `none`, and so of the cycles of a packet.
//!
//! Invalidations are either counted and modelled, or waited for. The rIOMMU paper simulated its
//! hardware by running `none` under the real driver code and spinning for 2150 cycles at each
//! invalidation of a ring (RI19, rIOMMU section 5.1). Both models exist so that they can be
//! compared.

use std::collections::VecDeque;
use std::hint::black_box;
use std::rc::Rc;

use ringfence_dma::MapReason;
use ringfence_dma::ring::{
    OwnedRing, Ring, RingError, RingMapping, RingSetup, RingTables, SlotChoice, lay_out,
};
use ringfence_memory::Arena;
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Direction, DomainId, Invalidation, InvalidationError, Invalidator, Iova, PhysAddr, PhysRange,
    RequesterId, Ticket,
};

use super::capture::Run;
use super::loops::{Loop, LoopBody, Loops, MappedByRing};
use super::timed::{Cost, sum_of_medians};
use ringfence_lab::LabError;
use ringfence_lab::meter::{TimedInvalidationQueue, cycles};
use ringfence_lab::plan::{Plan, Step};

/// Bytes of memory for the tables of one port.
pub(super) const ARENA: u64 = 64 << 20;

/// Slots of a ring's table. At most two buffers for each of 1024 descriptors are live, and the
/// unmaps of the longest burst also occupy slots until it ends.
const SLOTS: u32 = 4096;

/// Minimum number of calls in a timed block.
const BLOCK: usize = 1024;

/// Time model of an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InvalidationModel {
    /// Counts the invalidation; the caller adds its modelled cycles.
    Counted,
    /// Spins for this number of cycles.
    Waited(u64),
}

/// Invalidation unit that writes queue descriptors as a driver does, and waits if the model says
/// so.
#[derive(Debug)]
struct QueuedUnit<C> {
    queue: TimedInvalidationQueue,
    model: InvalidationModel,
    /// Reads a counter of cycles.
    now: C,
    count: u64,
}

impl<C: Fn() -> u64> Invalidator for QueuedUnit<C> {
    /// Submits a request. In the model [`Waited`](InvalidationModel::Waited), also waits.
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.count += 1;
        let ticket = self.queue.submit(request)?;
        if let InvalidationModel::Waited(wanted) = self.model {
            let begin = (self.now)();
            while (self.now)().saturating_sub(begin) < wanted {
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

/// Protection between a driver and its device.
trait Protection {
    /// State that the driver keeps for each mapping, besides the descriptor.
    type Token;

    /// Maps `piece` for the device. Returns the driver's token and the address for the descriptor.
    fn map(
        &mut self,
        memory: &Arena,
        buffer: u64,
        piece: &PhysRange,
        direction: Direction,
    ) -> Result<(Self::Token, Iova), LabError>;

    fn unmap(&mut self, memory: &Arena, held: Self::Token) -> Result<(), LabError>;

    fn doorbell(&mut self, memory: &Arena);

    fn end_burst(&mut self, memory: &Arena, unit: &mut impl Invalidator) -> Result<(), LabError>;
}

impl Protection for OwnedRing<'_, u64> {
    type Token = RingMapping<u64>;

    #[inline(always)]
    fn map(
        &mut self,
        memory: &Arena,
        buffer: u64,
        piece: &PhysRange,
        direction: Direction,
    ) -> Result<(RingMapping<u64>, Iova), LabError> {
        match Self::map(self, memory, buffer, piece, direction) {
            Ok(mapping) => {
                let at = mapping.iova();
                Ok((mapping, at))
            }
            Err(_) => Err(LOST),
        }
    }

    #[inline(always)]
    fn unmap(&mut self, memory: &Arena, held: RingMapping<u64>) -> Result<(), LabError> {
        match Self::unmap(self, memory, held) {
            Ok(_withheld) => Ok(()),
            Err(_) => Err(LOST),
        }
    }

    #[inline(always)]
    fn doorbell(&mut self, memory: &Arena) {
        Self::sync_map(self, memory);
    }

    fn end_burst(&mut self, memory: &Arena, unit: &mut impl Invalidator) -> Result<(), LabError> {
        let ended = Self::end_burst(self, memory, unit, |buffer| {
            black_box(buffer);
        });
        ended.map_err(|_| LOST)
    }
}

/// No protection: the IOVA is the physical address, and unmap returns the buffer at once.
struct NoProtection;

impl Protection for NoProtection {
    type Token = u64;

    #[inline(always)]
    fn map(
        &mut self,
        _: &Arena,
        buffer: u64,
        piece: &PhysRange,
        _: Direction,
    ) -> Result<(u64, Iova), LabError> {
        Ok((buffer, Iova::new(piece.start().get())))
    }

    #[inline(always)]
    fn unmap(&mut self, _: &Arena, buffer: u64) -> Result<(), LabError> {
        black_box(buffer);
        Ok(())
    }

    #[inline(always)]
    fn doorbell(&mut self, _: &Arena) {}

    fn end_burst(&mut self, _: &Arena, _: &mut impl Invalidator) -> Result<(), LabError> {
        Ok(())
    }
}

/// A ring and its outstanding mappings in ring order. A driver keeps these with its descriptors.
struct DriverRing<P: Protection> {
    protection: P,
    outstanding: VecDeque<P::Token>,
}

/// The rings of a port and its invalidation unit.
struct Port<'m, P: Protection, C> {
    memory: &'m Arena,
    rings: Vec<DriverRing<P>>,
    unit: QueuedUnit<C>,
    /// Number of buffers mapped so far; the next buffer's id.
    mapped: u64,
}

/// Error of a call that a driver's ring must not refuse.
pub(super) const LOST: LabError = LabError::Internal("an owned ring refused a call of its driver");

impl<P: Protection> DriverRing<P> {
    #[inline(always)]
    fn map(
        &mut self,
        memory: &Arena,
        buffer: u64,
        piece: &PhysRange,
        direction: Direction,
    ) -> Result<(), LabError> {
        let (held, iova) = self.protection.map(memory, buffer, piece, direction)?;
        // The address that a driver would write into the descriptor.
        black_box(iova);
        self.outstanding.push_back(held);
        Ok(())
    }

    #[inline(always)]
    fn unmap(&mut self, memory: &Arena) -> Result<(), LabError> {
        let held = self.outstanding.pop_front().ok_or(LOST)?;
        self.protection.unmap(memory, held)
    }
}

/// Lays out an empty ring in `memory` for each of `slots`, its number of slots.
///
/// # Errors
/// Memory is exhausted.
pub(super) fn empty_rings(memory: &Arena, slots: &[u32]) -> Result<Vec<Ring>, LabError> {
    let setup = RingSetup {
        choice: SlotChoice::Tail,
        coherency: Coherency::Coherent,
    };
    let base = PhysAddr::new(0x2000);
    let tables = RingTables::new(base, slots).map_err(LabError::Rings)?;
    lay_out(memory, &tables, setup).map_err(LabError::Rings)
}

/// Lays out an empty ring of the driver in `memory` for each of `slots`, its number of slots.
fn rings<'m>(memory: &'m Arena, slots: &[u32]) -> Result<Vec<OwnedRing<'m, u64>>, LabError> {
    let laid = empty_rings(memory, slots)?;
    let (domain, device) = (DomainId::new(1), RequesterId::new(0x0300));
    let owned = laid
        .into_iter()
        .map(|ring| OwnedRing::new(ring, memory, domain, device));
    owned
        .collect::<Result<_, RingError>>()
        .map_err(LabError::Rings)
}

impl<'m, P: Protection, C: Fn() -> u64> Port<'m, P, C> {
    /// A port with one ring for each of `protections`. `now` reads a counter of cycles.
    fn new(
        memory: &'m Rc<Arena>,
        protections: impl IntoIterator<Item = P>,
        answer: InvalidationModel,
        now: C,
    ) -> Self {
        let driver_rings = protections.into_iter().map(|protection| DriverRing {
            protection,
            outstanding: VecDeque::with_capacity(SLOTS as usize),
        });
        let queue =
            TimedInvalidationQueue::new(Rc::clone(memory), PhysAddr::new(0), PhysAddr::new(0x1000));
        Self {
            memory,
            rings: driver_rings.collect(),
            unit: QueuedUnit {
                queue,
                model: answer,
                now,
                count: 0,
            },
            mapped: 0,
        }
    }

    /// Executes `loops` and returns the cycles of each block.
    fn drive(&mut self, loops: &Loops) -> Result<Vec<u64>, LabError> {
        let mut buffers = loops.buffers.as_slice();
        let blocks = loops.blocks(BLOCK);
        blocks
            .map(|block| {
                let begin = (self.unit.now)();
                let done = block
                    .iter()
                    .try_for_each(|each| self.run_loop(each, &mut buffers));
                let spent = (self.unit.now)().saturating_sub(begin);
                done.map(|()| spent)
            })
            .collect()
    }

    /// Executes one loop of the driver. Takes the buffers to map from the front of `buffers`.
    fn run_loop(&mut self, each: &Loop, buffers: &mut &[PhysRange]) -> Result<(), LabError> {
        let (memory, direction) = (self.memory, each.direction);
        let ring = self.rings.get_mut(usize::from(each.ring)).ok_or(LOST)?;
        let pieces = buffers
            .split_off(..each.body.maps() * each.times)
            .ok_or(LOST)?;
        let names = self.mapped..;
        self.mapped += pieces.len() as u64;
        match each.body {
            LoopBody::Renew => {
                for (piece, name) in pieces.iter().zip(names) {
                    ring.map(memory, name, piece, direction)?;
                    ring.unmap(memory)?;
                }
            }
            LoopBody::Replace => {
                for (piece, name) in pieces.iter().zip(names) {
                    ring.unmap(memory)?;
                    ring.map(memory, name, piece, direction)?;
                }
            }
            LoopBody::Send => {
                for (piece, name) in pieces.iter().zip(names) {
                    ring.map(memory, name, piece, direction)?;
                    ring.protection.doorbell(memory);
                }
            }
            LoopBody::Map => {
                for (piece, name) in pieces.iter().zip(names) {
                    ring.map(memory, name, piece, direction)?;
                }
            }
            LoopBody::Unmap => {
                for _ in 0..each.times {
                    ring.unmap(memory)?;
                }
            }
            LoopBody::Doorbell => {
                for _ in 0..each.times {
                    ring.protection.doorbell(memory);
                }
            }
            LoopBody::EndBurst => {
                for _ in 0..each.times {
                    ring.protection.end_burst(memory, &mut self.unit)?;
                }
            }
        }
        Ok(())
    }
}

/// Cost of each of `runs`, which follow each other on one interface, on rings that the driver owns.
/// The cost of the same loops without protection is subtracted. Repetitions of both are
/// interleaved, run by run; each block counts with its median.
///
/// # Errors
/// Memory is exhausted, or a ring refused a call.
pub(super) fn costs(
    runs: &[Run],
    repetitions: usize,
    answer: InvalidationModel,
) -> Result<Vec<Cost>, LabError> {
    costs_by(runs, repetitions, answer, cycles)
}

/// Returns the [`costs`] on the clock `now`, which times the loops and the waits.
fn costs_by<C: Fn() -> u64 + Copy>(
    runs: &[Run],
    repetitions: usize,
    answer: InvalidationModel,
    now: C,
) -> Result<Vec<Cost>, LabError> {
    let count = runs.iter().map(|run| run.rings.len()).max().unwrap_or(0);
    let memories = (0..repetitions.max(1)).map(|_| Arena::new(ARENA).map(Rc::new));
    let memories: Vec<Rc<Arena>> = memories.collect::<Result<_, _>>()?;
    let mut ports = Vec::with_capacity(memories.len());
    for memory in &memories {
        let bare = (0..count.max(1)).map(|_| NoProtection);
        ports.push((
            Port::new(
                memory,
                rings(memory, &vec![SLOTS; count.max(1)])?,
                answer,
                now,
            ),
            Port::new(memory, bare, InvalidationModel::Counted, now),
        ));
    }
    let mut held = MappedByRing::default();
    runs.iter()
        .map(|run| {
            let plan = run.by_ring();
            let loops = Loops::of(&plan, &mut held)?;
            cost(&mut ports, &plan, &loops)
        })
        .collect()
}

type Ports<'m, C> = (Port<'m, OwnedRing<'m, u64>, C>, Port<'m, NoProtection, C>);

fn cost<C: Fn() -> u64>(
    ports: &mut [Ports<'_, C>],
    plan: &Plan,
    loops: &Loops,
) -> Result<Cost, LabError> {
    let mut invalidations = 0;
    let (mut blocks, mut bare) = (Vec::new(), Vec::new());
    for (port, none) in ports {
        let before = port.unit.count;
        blocks.push(port.drive(loops)?);
        invalidations = port.unit.count - before;
        bare.push(none.drive(loops)?);
    }
    Ok(Cost::of(
        &blocks,
        plan,
        sum_of_medians(&bare),
        invalidations,
    ))
}

/// Returns the share of the maps of `run` that rings refuse because they are full. `slots` has the
/// size of each ring, in the order of first use. The rings are empty at the start. A refused map is
/// skipped together with its unmap.
///
/// # Errors
/// Memory is exhausted, or a ring refused a call for another reason.
pub(super) fn refused(run: &Run, slots: &[u32]) -> Result<f64, LabError> {
    let plan = run.by_ring();
    let memory = Rc::new(Arena::new(ARENA)?);
    let rings = rings(&memory, slots)?;
    let mut driver_rings: Vec<_> = rings
        .into_iter()
        .map(|ring| (ring, VecDeque::new()))
        .collect();
    let bare: [NoProtection; 0] = [];
    let mut unit = Port::new(&memory, bare, InvalidationModel::Counted, cycles).unit;
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
                let (ring, held) = driver_rings.get_mut(device.index()).ok_or(LOST)?;
                match ring.map(&*memory, u64::from(id.0), piece, direction) {
                    Ok(mapping) => held.push_back(mapping),
                    Err((_, MapReason::RingFull(_))) => full += 1,
                    Err(_) => return Err(LOST),
                }
            }
            Step::Unmap { id, device, .. } => {
                let (ring, held) = driver_rings.get_mut(device.index()).ok_or(LOST)?;
                // A buffer whose map was refused is not the oldest of `held`: skip its unmap.
                if let Some(mapping) =
                    held.pop_front_if(|oldest| *oldest.buffer() == u64::from(id.0))
                {
                    let unmapped = ring.unmap(&*memory, mapping);
                    let _withheld = unmapped.map_err(|_| LOST)?;
                }
            }
            Step::EndBurst { device, .. } => {
                let (ring, _) = driver_rings.get_mut(device.index()).ok_or(LOST)?;
                ring.end_burst(&*memory, &mut unit, |_| ())
                    .map_err(|_| LOST)?;
            }
            Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => {}
        }
    }
    Ok(full as f64 / plan.maps.max(1) as f64)
}

#[cfg(test)]
mod tests;
