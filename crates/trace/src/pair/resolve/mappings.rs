//! Begins and ends mappings as operations.

use ringfence_types::{PhysAddr, PhysRange};

use super::{OpContext, PendingMap, ResolveError, Resolver};
use crate::op::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Op, OpKind, SegmentSpan};
use crate::options::PageEvents;
use crate::pair::live_mappings::Key;

impl Resolver {
    /// Begins the mapping whose raw segments are in `self.segments`.
    pub(super) fn begin(
        &mut self,
        map: PendingMap,
        key: Key,
        iova: u64,
        at: OpContext,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        let (segments, renamed) = self.add_segments(map.flags, chunk)?;
        let Some(segments) = segments else {
            return Ok(());
        };
        let mut flags = map.flags;
        if renamed {
            flags = flags.with(MapFlags::RENAMED);
            self.summary.renamed += 1;
        }
        if let Some(old) = self.live.replaced(key, iova) {
            self.live.end_replaced(old);
            self.free_fresh_frames(old);
            self.summary.replaced += 1;
            flags = flags.with(MapFlags::REPLACES);
            // Not counted as an unmap, because the trace shows none.
            self.push(
                Op {
                    time: at.time,
                    device: map.device,
                    cpu: at.cpu,
                    lines: 0,
                    kind: OpKind::Unmap { id: old },
                },
                chunk,
            );
        }
        self.budget
            .admit(chunk.segments_of(segments), self.progress)?;
        let id = self.live.begin(map.device, map.class, key, iova)?;
        if flags.contains(MapFlags::FRESH_FRAMES)
            && let Some(range) = chunk.segments_of(segments).first()
        {
            self.fresh.insert(id, (range.start(), range.bytes()));
        }
        self.summary.maps += 1;
        if map.class != MapClass::Coherent {
            self.count(map.device, |counts| counts.maps += 1);
        }
        self.push_map(id, map, flags, segments, at, chunk);
        Ok(())
    }

    pub(super) fn push_map(
        &mut self,
        id: MappingId,
        map: PendingMap,
        flags: MapFlags,
        segments: SegmentSpan,
        at: OpContext,
        chunk: &mut Chunk,
    ) {
        self.summary.live_max = self.summary.live_max.max(self.live.count());
        self.budget.map(id.index(), chunk.segments_of(segments));
        self.push(
            Op {
                time: at.time,
                device: map.device,
                cpu: at.cpu,
                lines: at.lines,
                kind: OpKind::Map {
                    id,
                    direction: map.direction,
                    class: map.class,
                    flags,
                    segments,
                },
            },
            chunk,
        );
    }

    /// Appends `self.segments` to the chunk; the span is `None` if there are no segments.
    pub(super) fn add_segments(
        &mut self,
        flags: MapFlags,
        chunk: &mut Chunk,
    ) -> Result<(Option<SegmentSpan>, bool), ResolveError> {
        let before = chunk.segments.len();
        let mut renamed = false;
        for &(start, bytes) in &self.segments {
            let Some(range) = PhysRange::new(PhysAddr::new(start), bytes) else {
                // A guessed length of a hostile list can wrap; such a segment is invalid.
                chunk.segments.truncate(before);
                return Err(ResolveError::SegmentWraps {
                    start: PhysAddr::new(start),
                });
            };
            if flags.contains(MapFlags::FRESH_FRAMES) || self.page_events == PageEvents::Keep {
                chunk.segments.push(range);
                continue;
            }
            match self.arena.rename_into_arena(range, &mut chunk.segments) {
                Ok(moved) => renamed |= moved,
                Err(exhausted) => {
                    chunk.segments.truncate(before);
                    return Err(exhausted.into());
                }
            }
        }
        let count = chunk.segments.len() - before;
        let span = match (u32::try_from(before), u32::try_from(count)) {
            (Ok(first), Ok(count)) if count > 0 => Some(SegmentSpan { first, count }),
            _ => None,
        };
        Ok((span, renamed))
    }

    /// Ends the mapping of `key`. Returns false if no such mapping is live.
    pub(super) fn end(&mut self, key: Key, at: OpContext, chunk: &mut Chunk) -> bool {
        let Some((id, mapping)) = self.live.end(key) else {
            return false;
        };
        self.free_fresh_frames(id);
        self.summary.unmaps += 1;
        if mapping.class != MapClass::Coherent {
            self.count(mapping.device, |counts| counts.unmaps += 1);
        }
        self.push(
            Op {
                time: at.time,
                device: mapping.device,
                cpu: at.cpu,
                lines: at.lines,
                kind: OpKind::Unmap { id },
            },
            chunk,
        );
        true
    }

    pub(super) fn push_unmap(
        &mut self,
        id: &MappingId,
        device: DeviceIndex,
        at: OpContext,
        chunk: &mut Chunk,
    ) {
        self.push(
            Op {
                time: at.time,
                device,
                cpu: at.cpu,
                lines: at.lines,
                kind: OpKind::Unmap { id: *id },
            },
            chunk,
        );
    }

    pub(super) fn push(&mut self, op: Op, chunk: &mut Chunk) {
        if let OpKind::Unmap { id } = op.kind {
            self.budget.unmap(id.index());
        }
        chunk.ops.push(op);
        if self.page_events == PageEvents::Keep {
            chunk.positions.push(self.position);
        }
    }

    pub(super) fn free_fresh_frames(&mut self, id: MappingId) {
        if let Some((start, bytes)) = self.fresh.remove(&id) {
            self.arena.free_frames(start, bytes);
        }
    }
}
