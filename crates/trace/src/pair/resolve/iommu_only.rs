//! Mappings that only `iommu:*` lines show.

use ringfence_types::Direction;

use super::{OpContext, PendingMap, ResolveError, Resolver};
use crate::op::{Chunk, DeviceIndex, MapClass, MapFlags};
use crate::pair::window::Piece;
use crate::text::{RawEvent, RawKind};

impl Resolver {
    /// Resolves `iommu:map` lines that no `dma:*` event explains. `device` is `None` before the
    /// first device.
    pub(in crate::pair) fn iommu_map(
        &mut self,
        event: &RawEvent,
        pieces: &[Piece],
        device: Option<DeviceIndex>,
        own_row: bool,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        self.any_iommu = true;
        let identity = pieces.iter().all(|piece| piece.iova == piece.phys);
        let (Some(device), Some(first), Some(last), false) =
            (device, pieces.first(), pieces.last(), identity)
        else {
            self.summary.setup_maps += pieces.len() as u64;
            return Ok(());
        };
        let at = self.at(event, u16::try_from(pieces.len()).unwrap_or(u16::MAX));
        let range = (first.iova, last.iova.wrapping_add(last.size - 1));
        let mut flags = MapFlags::NONE;
        // One device has one IOVA space; the shared row covers several.
        if !own_row {
            for old in self.live.end_iommu_only_of(device, range.0, range.1) {
                self.summary.replaced += 1;
                flags = flags.with(MapFlags::REPLACES);
                self.push_unmap(&old.id, device, OpContext { lines: 0, ..at }, chunk);
            }
        }
        self.summary.iommu_only_maps += 1;
        self.summary.iommu_only_pieces += pieces.len() as u64;
        self.count(device, |counts| counts.maps += 1);
        self.begin_only(device, pieces, flags, at, chunk)
    }

    pub(super) fn begin_only(
        &mut self,
        device: DeviceIndex,
        pieces: &[Piece],
        mut flags: MapFlags,
        at: OpContext,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        self.segments.clear();
        self.segments
            .extend(pieces.iter().map(|piece| (piece.phys, piece.size)));
        let (segments, renamed) = self.add_segments(flags, chunk)?;
        let Some(segments) = segments else {
            return Ok(());
        };
        if renamed {
            flags = flags.with(MapFlags::RENAMED);
            self.summary.renamed += 1;
        }
        self.budget
            .admit(chunk.segments_of(segments), self.progress)?;
        let id = self.live.begin_iommu_only(device, pieces)?;
        let map = PendingMap {
            device,
            direction: Direction::Bidirectional,
            class: MapClass::IommuOnly,
            flags,
        };
        self.push_map(id, map, flags, segments, at, chunk);
        Ok(())
    }

    /// Resolves an `iommu:unmap` line that no `dma:*` event explains. With `cut`, its `dma:*` line
    /// may be cut off.
    pub(in crate::pair) fn iommu_unmap(
        &mut self,
        event: &RawEvent,
        cut: bool,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        let RawKind::IommuUnmap { iova, size } = event.kind else {
            return Ok(());
        };
        self.any_iommu = true;
        let mut at = self.at(event, 1);
        let (first, last) = (iova.get(), iova.get().wrapping_add(size - 1));
        let ended = self.live.end_iommu_only(first, last);
        if ended.is_empty() {
            match cut {
                true => self.summary.cut_lines += 1,
                false => self.summary.unmatched_iommu_unmaps += 1,
            }
            return Ok(());
        }
        // End all mappings before a remainder begins, because a remainder takes the id freed last.
        for only in &ended {
            self.summary.iommu_only_unmaps += 1;
            self.count(only.device, |counts| counts.unmaps += 1);
            self.push_unmap(&only.id, only.device, at, chunk);
            at.lines = 0;
        }
        for only in &ended {
            let below = part(&only.pieces, only.first, first.checked_sub(1));
            let above = match last.checked_add(1) {
                Some(start) => part(&only.pieces, start, Some(only.last)),
                None => Vec::new(),
            };
            for rest in [below, above] {
                if !rest.is_empty() {
                    self.summary.remainders += 1;
                    self.count(only.device, |counts| counts.maps += 1);
                    self.begin_only(only.device, &rest, MapFlags::REMAINDER, at, chunk)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the parts of `pieces` within `first..=last`; empty if `last` is `None` or below `first`.
fn part(pieces: &[Piece], first: u64, last: Option<u64>) -> Vec<Piece> {
    let Some(last) = last.filter(|&last| last >= first) else {
        return Vec::new();
    };
    let parts = pieces.iter().filter_map(|piece| {
        let from = piece.iova.max(first);
        let to = piece.iova.wrapping_add(piece.size - 1).min(last);
        (from <= to).then(|| Piece {
            iova: from,
            phys: piece.phys.wrapping_add(from - piece.iova),
            size: to - from + 1,
        })
    });
    parts.collect()
}
