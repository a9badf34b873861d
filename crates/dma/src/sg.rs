//! `map_sg` and `unmap_sg`: scatterlists.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysRange};

use crate::flush::Flush;
use crate::layer::GRANULE;
use crate::map::{Shape, refused};
use crate::mapping::Custody;
use crate::space::Space;
use crate::{Attachment, BounceSlot, Cpu, Dma, MapError, MapReason, Platform, Segment, UnmapError};

/// What a device accepts as one segment. A piece that is longer than `max_bytes` is passed on as it is: who makes the list knows the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgLimits {
    /// Longest segment in bytes that pieces are merged into.
    pub max_bytes: u64,
    /// A segment never crosses a multiple of this power of two, 4 KiB or more; `None` for no such limit. A piece that would cross one
    /// where it is placed becomes several segments.
    pub boundary: Option<u64>,
}

impl SgLimits {
    /// Whether the boundary is a power of two that pages do not cross.
    fn are_valid(&self) -> bool {
        self.boundary
            .is_none_or(|b| b.is_power_of_two() && b >= GRANULE.bytes())
    }
}

impl Default for SgLimits {
    /// 64 KiB segments that cross no 4 GiB boundary: Linux's defaults.
    fn default() -> Self {
        Self {
            max_bytes: 65536,
            boundary: Some(1 << 32),
        }
    }
}

/// A live scatterlist mapping; owns the driver's buffer until unmap, and leaks it if dropped.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct SgMapping<B> {
    pub(crate) range: IovaRange,
    pub(crate) domain: DomainId,
    pub(crate) direction: Direction,
    pub(crate) buffer: Custody<B>,
    /// Copies of pieces that the device cannot reach; none behind a table.
    pub(crate) bounced: Vec<BounceSlot>,
    /// Steps that the allocator's search took.
    pub steps: u32,
}

impl<B> SgMapping<B> {
    /// The I/O virtual pages of the whole list, as bytes from the first byte of the first segment to the last of the last.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// What stands for the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// The direction.
    pub fn direction(&self) -> Direction {
        self.direction
    }
}

/// Writes the device's segments into `out`, merging those that are contiguous as far as `limits` allow and splitting those that
/// cross a boundary.
pub(crate) fn segments(
    ranges: impl Iterator<Item = IovaRange>,
    limits: SgLimits,
    out: &mut [Segment],
) -> Option<usize> {
    let mut used = 0_usize;
    for range in ranges.flat_map(|range| split(range, limits.boundary)) {
        if let Some(last) = used.checked_sub(1).and_then(|i| out.get_mut(i))
            && last.range.last().checked_add(1) == Some(range.start())
            && let Some(merged) = IovaRange::inclusive(last.range.start(), range.last())
            && merged.bytes() <= limits.max_bytes
            && within(&merged, limits.boundary)
        {
            last.range = merged;
            continue;
        }
        *out.get_mut(used)? = Segment { range };
        used += 1;
    }
    Some(used)
}

/// The parts of a range between multiples of `boundary`.
fn split(range: IovaRange, boundary: Option<u64>) -> impl Iterator<Item = IovaRange> {
    let mut rest = Some(range);
    core::iter::from_fn(move || {
        let whole = rest.take()?;
        if within(&whole, boundary) {
            return Some(whole);
        }
        let block = boundary?;
        let last = whole.start().align_down(block).wrapping_add(block - 1);
        rest = IovaRange::inclusive(last.checked_add(1)?, whole.last());
        IovaRange::inclusive(whole.start(), last)
    })
}

/// Whether the range stays between two multiples of `boundary`.
fn within(range: &IovaRange, boundary: Option<u64>) -> bool {
    boundary.is_none_or(|b| range.start().align_down(b) == range.last().align_down(b))
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Makes the pieces of a scatterlist reachable, at consecutive pages unless the space has other ideas. Returns the mapping and how many entries of `out` describe
    /// it to the device: as many as there are pieces, fewer where contiguous ones merge, more where one crosses a boundary.
    ///
    /// # Errors
    /// The buffer comes back; the layer is as before. Nothing is mapped if `out` is too short: it needs room for as many
    /// segments as there are pieces, unless they merge.
    #[allow(clippy::too_many_arguments)]
    pub fn map_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        pieces: &[PhysRange],
        direction: Direction,
        limits: SgLimits,
        out: &mut [Segment],
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let first = pieces.first().copied();
        if !limits.are_valid() {
            return Err((buffer, refused(at, first, MapReason::BadLimits)));
        }
        // What no placement could make fit is refused before anything is mapped.
        let anywhere = SgLimits {
            boundary: None,
            ..limits
        };
        let Some(space) = self.spaces.get(at.index) else {
            return Err((buffer, refused(at, first, MapReason::NotAttached)));
        };
        if out.len() < pieces.len()
            && segments(space.pieces(Iova::ZERO, pieces), anywhere, out).is_none()
        {
            return Err((buffer, refused(at, first, MapReason::TooManySegments)));
        }
        match self.place(cpu, platform, at, Shape::List, pieces, direction) {
            Ok(found) => {
                let told = segments(space.pieces(found.range.start(), pieces), limits, out);
                let Some(used) = told else {
                    // Where the addresses lie decides what crosses a boundary. No descriptor was written, but the device may have
                    // guessed: the range is invalidated before it is free again.
                    let reason = match self.withdraw(cpu, platform, at, found.range) {
                        Ok(()) => MapReason::TooManySegments,
                        Err(failed) => MapReason::NotUndone(failed),
                    };
                    return Err((buffer, refused(at, first, reason)));
                };
                Ok((
                    SgMapping {
                        range: found.range,
                        domain: at.domain(),
                        direction,
                        buffer: ManuallyDrop::new(buffer),
                        bounced: Vec::new(),
                        steps: found.steps,
                    },
                    used,
                ))
            }
            Err(MapReason::BeyondMask) => {
                self.map_list_bounced(cpu, platform, at, buffer, pieces, direction, limits, out)
            }
            Err(reason) => Err((buffer, refused(at, first, reason))),
        }
    }

    /// Takes a scatterlist mapping down.
    ///
    /// # Errors
    /// As for [`unmap_single`](Self::unmap_single).
    #[inline]
    pub fn unmap_sg<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        if !mapping.bounced.is_empty() {
            return self.unmap_list_bounced(cpu, platform, at, mapping);
        }
        let SgMapping {
            range,
            domain,
            direction,
            buffer,
            ..
        } = mapping;
        self.take_down(cpu, platform, at, domain, range, direction, buffer)
    }
}
