//! Maps, and maps that wait for a slot of their ring.

use ringfence_devices::{Attacker, DeviceMapping as Target, DriverEvent};
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{DmaSegment, MapReason, SgLimits, SgRequest};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, Iova, IovaRange, PfnRange, PhysRange};

use super::CheckedReplay;
use crate::error::LabError;
use crate::hardware::Hardware;
use crate::oracle::GrantId;
use crate::replay::stalled::ring_number;
use crate::replay::{MappingToken, StalledMap};

/// The result of a map.
enum MapAttempt {
    /// The map succeeded, or the layer refused it for good.
    Settled,
    /// The ring is full.
    Full,
}

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> CheckedReplay<H, S, F, X> {
    /// Maps a buffer. If the ring is full or other maps wait for it, queues the map.
    pub(super) fn map_in_turn(
        &mut self,
        id: MappingId,
        device: DeviceIndex,
        cpu: u16,
        direction: Direction,
        pieces: &[PhysRange],
    ) -> Result<(), LabError> {
        let waits = self.stalled.queues(device, direction)
            || matches!(
                self.map(id, device, cpu, direction, pieces)?,
                MapAttempt::Full
            );
        if waits {
            self.outcomes.stalls += 1;
            self.outcomes.ring(ring_number(device, direction)).stalls += 1;
            let pieces = pieces.into();
            self.stalled
                .push_back(device, direction, StalledMap { id, cpu, pieces });
        }
        Ok(())
    }

    /// Performs the waiting maps of a ring in order until the ring is full.
    #[inline]
    pub(super) fn retry(
        &mut self,
        device: DeviceIndex,
        direction: Direction,
    ) -> Result<(), LabError> {
        while let Some(first) = self.stalled.pop(device, direction) {
            let StalledMap { id, cpu, pieces } = &first;
            if let MapAttempt::Full = self.map(*id, device, *cpu, direction, pieces)? {
                self.stalled.push_front(device, direction, first);
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
    ) -> Result<MapAttempt, LabError> {
        while self.cpus.len() <= usize::from(cpu) {
            self.cpus.push(self.dma.cpu());
        }
        if self.tokens.len() <= id.index() {
            self.tokens
                .resize_with(id.index() + 1, MappingToken::default);
        }
        let (Some(Some(attached)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) else {
            return Err(LabError::Internal("attachment"));
        };
        let at = attached.for_direction(direction);
        // The DMA layer carries the grant ID as the buffer. The oracle can add the grant only once
        // the addresses are known, so take its ID in advance.
        let next = self.oracle.next();
        let mapped = if let [piece] = pieces {
            self.dma
                .map_single(own, &mut self.machine, at, next, *piece, direction)
                .map(|(mapping, placed)| (MappingToken::Single(mapping), placed.steps))
        } else {
            if let (Some(first), true) = (pieces.first(), self.segments.len() < pieces.len()) {
                let range = IovaRange::new(Iova::new(first.start().get()), 1)
                    .ok_or(LabError::Internal("segment"))?;
                self.segments.resize(pieces.len(), DmaSegment { range });
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
                    (MappingToken::List(mapping), steps)
                })
        };
        let (held, steps) = match mapped {
            Ok(made) => made,
            Err((_, error)) if matches!(error.reason, MapReason::RingFull(_)) => {
                return Ok(MapAttempt::Full);
            }
            Err((_, error)) => {
                self.outcomes.refused_maps += 1;
                self.outcomes.ring(ring_number(device, direction)).refused += 1;
                self.outcomes.first_refusal.get_or_insert(error);
                let kept = self.windows.kept();
                self.search.refused(kept, &self.limits)?;
                return Ok(MapAttempt::Settled);
            }
        };
        let device_id = at.device();
        self.device_ranges.clear();
        let granted = if self.is_apart() {
            match &held {
                MappingToken::Single(mapping) => self.device_ranges.push(mapping.range()),
                MappingToken::List(list) if S::CACHES_UNMAPPED => {
                    self.device_ranges.extend(list.piece_ranges())
                }
                _ => {
                    let segments = self.segments.iter().take(pieces.len());
                    self.device_ranges
                        .extend(segments.map(|segment| segment.range));
                }
            }
            let (row, told) = (device.index(), &self.device_ranges);
            if S::CACHES_UNMAPPED {
                let now = self.machine.now;
                for range in told {
                    self.windows
                        .reuse(at.domain(), PfnRange::covering(range), now);
                }
            }
            self.oracle.grant_per_segment(row, told, pieces, direction)
        } else {
            // With identity addresses, the range of the first segment represents the list.
            let alone =
                |piece: &PhysRange| IovaRange::new(Iova::new(piece.start().get()), piece.bytes());
            let range = held.range().or_else(|| pieces.first().and_then(alone));
            let range = range.ok_or(LabError::Internal("mapping without range"))?;
            self.device_ranges.push(range);
            self.oracle.grant(device.index(), range, pieces, direction)
        };
        debug_assert_eq!(granted.to_raw(), next);
        self.tokens[id.index()] = held;
        self.live += 1;
        let outcomes = &mut self.outcomes;
        outcomes.maps += 1;
        outcomes.live_max = outcomes.live_max.max(self.live);
        outcomes.search_steps += u64::from(steps);
        outcomes.search_max = outcomes.search_max.max(steps);
        let kept = self.windows.kept();
        let searched = self
            .search
            .mapped(&self.device_ranges, steps, kept, &self.limits);
        searched?;
        self.attack_event(DriverEvent::Mapped, device_id, direction);
        if self.early
            && let Some(range) = self.device_ranges.first().copied()
        {
            let target = Target {
                device: device_id,
                range,
                direction,
            };
            self.use_buffer(GrantId::from_raw(next), &target, &mut 0);
        }
        Ok(MapAttempt::Settled)
    }
}
