//! The maps of a replay, and those that wait for a slot of their ring.

use ringfence_devices::{Attacker, Event, Mapping as Target};
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{MapReason, Segment, SgLimits, SgRequest};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, Iova, IovaRange, PfnRange, PhysRange};

use super::Judged;
use crate::error::LabError;
use crate::hardware::Hardware;
use crate::oracle::GrantId;
use crate::replay::stalled::place;
use crate::replay::{Held, Waiting};

/// What became of a map.
enum Attempt {
    /// It is mapped, or refused for good.
    Settled,
    /// Its ring is full.
    Full,
}

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> Judged<H, S, F, X> {
    /// Maps, unless the ring is full or others wait for it: then the map waits behind them.
    pub(super) fn map_in_turn(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
    ) -> Result<(), LabError> {
        let waits = self.stalled.queues(device, direction)
            || matches!(self.map(id, device, cpu, direction, pieces)?, Attempt::Full);
        if waits {
            self.outcomes.stalls += 1;
            self.outcomes.ring(place(device, direction)).stalls += 1;
            let pieces = pieces.into();
            self.stalled
                .push(device, direction, Waiting { id, cpu, pieces });
        }
        Ok(())
    }

    /// Maps what waits for a ring, in order, as far as there are slots.
    #[inline]
    pub(super) fn retry(
        &mut self,
        device: DeviceIndex,
        direction: Direction,
    ) -> Result<(), LabError> {
        while let Some(first) = self.stalled.pop(device, direction) {
            let Waiting { id, cpu, pieces } = &first;
            if let Attempt::Full = self.map(*id, device, *cpu, direction, pieces)? {
                self.stalled.put_back(device, direction, first);
                break;
            }
        }
        Ok(())
    }

    fn map(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
    ) -> Result<Attempt, LabError> {
        while self.cpus.len() <= usize::from(cpu) {
            self.cpus.push(self.dma.cpu());
        }
        if self.held.len() <= id.index() {
            self.held.resize_with(id.index() + 1, Held::default);
        }
        let (Some(Some(attached)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) else {
            return Err(LabError::Internal("attachment"));
        };
        let at = attached.towards(direction);
        // The grant's name travels as the buffer; it is known only once the addresses are.
        let next = self.oracle.next();
        let mapped = if let [piece] = pieces {
            self.dma
                .map_single(own, &mut self.machine, at, next, *piece, direction)
                .map(|(mapping, placed)| (Held::Single(mapping), placed.steps))
        } else {
            if let (Some(first), true) = (pieces.first(), self.segments.len() < pieces.len()) {
                let range = IovaRange::new(Iova::new(first.start().get()), 1)
                    .ok_or(LabError::Internal("segment"))?;
                self.segments.resize(pieces.len(), Segment { range });
            }
            let limits = SgLimits::default();
            self.dma
                .map_sg(
                    own,
                    &mut self.machine,
                    at,
                    SgRequest {
                        buffer: next,
                        pieces,
                        direction,
                        limits,
                        out: &mut self.segments,
                    },
                )
                .map(|(mapping, _)| {
                    let steps = mapping.steps;
                    (Held::List(mapping), steps)
                })
        };
        let (held, steps) = match mapped {
            Ok(made) => made,
            Err((_, error)) if matches!(error.reason, MapReason::RingFull(_)) => {
                return Ok(Attempt::Full);
            }
            Err((_, error)) => {
                self.outcomes.refused_maps += 1;
                self.outcomes.ring(place(device, direction)).refused += 1;
                self.outcomes.first_refusal.get_or_insert(error);
                let kept = self.windows.kept();
                self.search.refused(kept, &self.limits)?;
                return Ok(Attempt::Settled);
            }
        };
        let device_id = at.device();
        self.told.clear();
        let granted = if self.is_apart() {
            match &held {
                Held::Single(mapping) => self.told.push(mapping.range()),
                Held::List(list) if S::KEEPS => self.told.extend(list.apart()),
                _ => {
                    let segments = self.segments.iter().take(pieces.len());
                    self.told.extend(segments.map(|segment| segment.range));
                }
            }
            let (row, told) = (device.index(), &self.told);
            if S::KEEPS {
                let now = self.machine.now;
                for range in told {
                    self.windows
                        .reuse(at.domain(), PfnRange::covering(range), now);
                }
            }
            self.oracle.grant_apart(row, told, pieces, direction)
        } else {
            // Where addresses are the memory's own, the first piece stands for the list.
            let alone =
                |piece: &PhysRange| IovaRange::new(Iova::new(piece.start().get()), piece.bytes());
            let range = held.range().or_else(|| pieces.first().and_then(alone));
            let range = range.ok_or(LabError::Internal("mapping without range"))?;
            self.told.push(range);
            self.oracle.grant(device.index(), range, pieces, direction)
        };
        debug_assert_eq!(granted.to_raw(), next);
        self.held[id.index()] = held;
        self.live += 1;
        let outcomes = &mut self.outcomes;
        outcomes.maps += 1;
        outcomes.live_max = outcomes.live_max.max(self.live);
        outcomes.search_steps += u64::from(steps);
        outcomes.search_max = outcomes.search_max.max(steps);
        let kept = self.windows.kept();
        let searched = self.search.mapped(&self.told, steps, kept, &self.limits);
        searched?;
        self.tell(Event::Mapped, device_id, direction);
        if self.early
            && let Some(range) = self.told.first().copied()
        {
            let target = Target {
                device: device_id,
                range,
                direction,
            };
            self.use_buffer(GrantId::from_raw(next), &target, &mut 0);
        }
        Ok(Attempt::Settled)
    }
}
