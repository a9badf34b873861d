//! Bounce buffers: the CPU copies data between memory that the device cannot reach and memory that
//! it can (HW15, OS17).
//!
//! Only identity spaces need them. A space with translation allocates I/O virtual addresses below
//! the device's mask.

use alloc::vec::Vec;

use ringfence_types::{Direction, PhysRange};

use crate::flush::FlushPolicy;
use crate::map::{MapArgs, map_error};
use crate::sg_segments::segments;
use crate::space::Space;
use crate::token::{Attachment, BounceSlot, LiveMapping, MapResult};
use crate::{
    Cpu, Dma, MapError, MapReason, Platform, SgMapping, SgRequest, UnmapError, UnmapReason,
};

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Copies `memory` to bounce slots and maps the copy.
    #[cold]
    pub(crate) fn map_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<(B, BounceSlot, MapResult), (B, MapError)> {
        let Some(slot) = self.copied(platform, memory) else {
            let error = map_error(at, Some(memory), MapReason::BeyondMask);
            return Err((buffer, error));
        };
        match self.map_cold(cpu, platform, at, MapArgs::one(&slot.copy, direction), None) {
            Ok(placed) => Ok((buffer, slot, placed)),
            Err(reason) => {
                self.free_slots(&[slot]);
                Err((buffer, map_error(at, Some(memory), reason)))
            }
        }
    }

    fn copied<P: Platform>(&self, platform: &P, memory: PhysRange) -> Option<BounceSlot> {
        self.bounce.as_ref()?.copied(platform.memory(), memory)
    }

    fn free_slots(&self, slots: &[BounceSlot]) {
        if let Some(pool) = &self.bounce {
            slots.iter().for_each(|slot| pool.free(slot));
        }
    }

    /// Maps a list with pieces that the device cannot reach, by copying those pieces. Only for
    /// spaces without a table, where a failure leaves no entries to clear.
    #[cold]
    pub(crate) fn map_list_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let direction = request.direction;
        let mut ranges = Vec::with_capacity(request.pieces.len());
        let mut bounced = Vec::new();
        let mut failed = None;
        for piece in request.pieces {
            let placed =
                match self.map_cold(cpu, platform, at, MapArgs::one(piece, direction), None) {
                    Err(MapReason::BeyondMask) => match self.copied(platform, *piece) {
                        Some(slot) => {
                            bounced.push(slot);
                            self.map_cold(
                                cpu,
                                platform,
                                at,
                                MapArgs::one(&slot.copy, direction),
                                None,
                            )
                        }
                        None => Err(MapReason::BeyondMask),
                    },
                    other => other,
                };
            match placed {
                Ok(placed) => ranges.push(placed.range),
                Err(reason) => {
                    failed = Some((*piece, reason));
                    break;
                }
            }
        }
        let told = segments(ranges.iter().copied(), request.limits, request.out);
        match (failed, ranges.first(), told) {
            (None, Some(first), Some(used)) => {
                let mapping = SgMapping {
                    live: LiveMapping::new(at, *first, direction, request.buffer),
                    contiguous: false,
                    piece_ranges: Vec::new(),
                    bounced,
                    steps: 0,
                };
                Ok((mapping, used))
            }
            (failed, ..) => {
                self.free_slots(&bounced);
                Err(match failed {
                    Some((piece, reason)) => (request.buffer, map_error(at, Some(piece), reason)),
                    None => request.into_map_error(at, MapReason::TooManySegments),
                })
            }
        }
    }

    /// Unmaps a mapping with copies in `slots`, copies the device's data back and frees the slots.
    /// If the domain was detached, no device uses the copies any more.
    #[cold]
    #[inline(never)]
    pub(crate) fn unmap_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: LiveMapping<B>,
        slots: &[BounceSlot],
    ) -> Result<F::Outcome, UnmapError<B>> {
        let direction = live.direction;
        let outcome = self.unmap_common(cpu, platform, at, live);
        match (&outcome, &self.bounce) {
            (Ok(_), Some(pool)) => {
                for slot in slots {
                    pool.finish(platform.memory(), slot, direction);
                }
            }
            (Err(error), _) if matches!(error.reason, UnmapReason::Detached(_)) => {
                self.free_slots(slots);
            }
            _ => {}
        }
        outcome
    }

    /// Unmaps a list with copies. It takes the whole mapping: if the caller took it apart, replays
    /// of ring modes executed 1.3 to 1.5 % more instructions.
    #[cold]
    #[inline(never)]
    pub(crate) fn unmap_sg_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        self.unmap_bounced(cpu, platform, at, mapping.live, &mapping.bounced)
    }
}
