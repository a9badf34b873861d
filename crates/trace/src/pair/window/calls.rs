//! Groups `iommu:map` lines by call and finds the `dma:*` line that takes them.

use super::{Cpu, LineWindow, Piece, Slot, State, Waiting, WaitingFor};
use crate::op::DeviceIndex;
use crate::pair::fifo::FifoSpan;
use crate::text::ExecutionContext;

/// The DMA addresses of a map event, which identify its `iommu:map` lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct MapCall<'a> {
    /// DMA addresses and sizes of the segments.
    pub(super) starts: &'a [u64],
    pub(super) sizes: &'a [u64],
    /// Physical address of the first segment, if known.
    pub(super) phys: Option<u64>,
    /// True if the kernel did not print all segments. Adjacent pieces after the last printed
    /// segment then belong to the call too.
    pub(super) truncated: bool,
}

impl MapCall<'_> {
    /// Returns true if `piece`, which contains the first DMA address, maps it to the known
    /// physical address.
    fn matches_phys(&self, piece: &Piece) -> bool {
        let (Some(first), Some(phys)) = (self.starts.first(), self.phys) else {
            return true;
        };
        first.wrapping_sub(piece.iova).wrapping_add(piece.phys) == phys
    }
}

/// Compares pieces with the segments of a call. Both ascend, so the next segment is nearly always
/// the one that the next piece covers.
struct SegmentCursor<'a> {
    call: &'a MapCall<'a>,
    /// Index of the current segment.
    index: usize,
    /// IOVA after the last piece of the call.
    end: Option<u64>,
}

impl<'a> SegmentCursor<'a> {
    fn new(call: &'a MapCall<'a>) -> Self {
        Self {
            call,
            index: 0,
            end: None,
        }
    }

    /// Returns true if `piece` belongs to the call.
    fn covers(&mut self, piece: &Piece) -> bool {
        let follows = self.call.truncated && self.end == Some(piece.iova);
        let covered = follows || self.overlaps_segment(piece);
        if covered {
            self.end = Some(piece.end());
        }
        covered
    }

    /// Returns true if a segment overlaps `piece`. Searches from the current segment on, and wraps.
    fn overlaps_segment(&mut self, piece: &Piece) -> bool {
        let count = self.call.starts.len().min(self.call.sizes.len());
        for _ in 0..count {
            let segment = self
                .call
                .starts
                .get(self.index)
                .zip(self.call.sizes.get(self.index));
            let Some((&start, &size)) = segment else {
                return false;
            };
            if piece.contains(start) || piece.iova.wrapping_sub(start) < size {
                return true;
            }
            self.index += 1;
            if self.index == count {
                self.index = 0;
            }
        }
        false
    }
}

impl LineWindow {
    /// Returns the call (first slot and IOVA) whose last piece waits in the same context and ends
    /// where `piece` begins.
    pub(super) fn touched(
        &self,
        cpu: usize,
        context: ExecutionContext,
        piece: &Piece,
    ) -> Option<(u64, u64)> {
        let mut waiting = self.cpus.get(cpu)?.waiting.iter().rev();
        match waiting.find(|waiting| waiting.context == context)?.event {
            WaitingFor::Map {
                piece: before,
                head,
                start,
            } if before.end() == piece.iova => Some((head, start)),
            _ => None,
        }
    }

    /// Returns true if a piece adjacent to a call's last one can belong to that call, and not to
    /// another call whose IOVAs happen to follow. A call allocates its IOVAs before its first
    /// piece, so no unmap since then covers them. Linux also aligns an allocation to its size.
    pub(super) fn can_extend(&self, head: u64, start: u64, piece: &Piece) -> bool {
        let mut since = self.unmaps.iter().rev().take_while(|unmap| unmap.0 > head);
        fits_alignment(start, piece.end())
            && !since.any(|&(_, iova, size)| {
                piece.iova.wrapping_sub(iova) < size || start.wrapping_sub(iova) < size
            })
    }

    /// Splits calls at the end of an unmapped range. An unmap of a call's first piece shows where
    /// that call ended. Later waiting pieces of the group belong to another call with adjacent
    /// IOVAs.
    pub(super) fn split_groups(&mut self, iova: u64, size: u64) {
        let within = |address: u64| address.wrapping_sub(iova) < size;
        self.prune();
        for &cpu in &self.busy {
            let Some(cpu) = self.cpus.get_mut(cpu) else {
                continue;
            };
            // The call that was split, and the call of its rest.
            let mut split: Option<(u64, u64, u64)> = None;
            for waiting in &mut cpu.waiting {
                let WaitingFor::Map { piece, head, start } = &mut waiting.event else {
                    continue;
                };
                if !within(*start) || within(piece.iova) {
                    continue;
                }
                let (_, new_head, new_start) = match split {
                    Some(split) if split.0 == *head => split,
                    _ => (*head, waiting.slot, piece.iova),
                };
                split = Some((*head, new_head, new_start));
                (*head, *start) = (new_head, new_start);
            }
        }
    }

    /// Moves the waiting pieces that cover the segments of `call` to the piece arena, in their
    /// order.
    fn take_pieces(
        &mut self,
        cpu: usize,
        context: ExecutionContext,
        device: DeviceIndex,
        call: &MapCall<'_>,
    ) -> FifoSpan {
        let mark = self.pieces.mark();
        let Some((cpu, context)) = self.find_call(cpu, context, call) else {
            return mark;
        };
        let Some(cpu) = self.cpus.get_mut(cpu) else {
            return mark;
        };
        let (slots, base, pieces) = (&mut self.slots, self.base, &mut self.pieces);
        let mut segments = SegmentCursor::new(call);
        // First slot of the call, and the IOVA after its last piece.
        let mut extent: Option<(usize, u64)> = None;
        cpu.waiting.retain(|waiting| {
            let WaitingFor::Map { piece, .. } = &waiting.event else {
                return true;
            };
            if waiting.context != context || !segments.covers(piece) {
                return true;
            }
            pieces.push_one(*piece);
            let index = waiting.slot.wrapping_sub(base) as usize;
            if let Some(slot) = slots.get_mut(index) {
                slot.state = State::Absorbed;
            }
            let first = extent.map_or(index, |(first, _)| first);
            extent = Some((first, piece.end()));
            false
        });
        if let Some((first, end)) = extent
            && let Some(slot) = slots.get_mut(first)
        {
            slot.call = Some((device, end));
        }
        self.pieces.since(mark)
    }

    /// Returns the CPU and context in which the first piece of `call` waits.
    ///
    /// The search covers the event's own CPU, and then lines of the same task on other CPUs,
    /// because the kernel can migrate the task between the lines.
    fn find_call(
        &mut self,
        cpu: usize,
        context: ExecutionContext,
        call: &MapCall<'_>,
    ) -> Option<(usize, ExecutionContext)> {
        let first = *call.starts.first()?;
        let is_first_piece = |waiting: &&Waiting| match &waiting.event {
            WaitingFor::Map { piece, .. } => piece.contains(first) && call.matches_phys(piece),
            _ => false,
        };
        let on_own_cpu = self
            .cpus
            .get(cpu)
            .and_then(|own| own.waiting.iter().rev().find(is_first_piece));
        if let Some(waiting) = on_own_cpu {
            return Some((cpu, waiting.context));
        }
        // PID 0 is the idle task of every CPU and does not migrate.
        if context.pid == 0 {
            return None;
        }
        self.prune();
        let has_first_piece = |cpu: &Cpu| {
            let mut waiting = cpu.waiting.iter();
            waiting.any(|waiting| waiting.context == context && is_first_piece(&waiting))
        };
        let mut busy = self.busy.iter();
        let other = busy.find(|&&cpu| self.cpus.get(cpu).is_some_and(has_first_piece))?;
        Some((*other, context))
    }

    /// Moves the pieces of a map event to its slot. Records its number of lines, and that its
    /// device is translated.
    pub(super) fn assign_pieces(
        &mut self,
        slot: &mut Slot,
        device: DeviceIndex,
        call: &MapCall<'_>,
    ) {
        let (cpu, context) = (usize::from(slot.event.cpu), slot.event.context);
        slot.pieces = self.take_pieces(cpu, context, device, call);
        let count = slot.pieces.len();
        if count == 0 {
            return;
        }
        slot.lines = u16::try_from(count + 1).unwrap_or(u16::MAX);
        let device = device.index();
        if self.translated.len() <= device {
            self.translated.resize(device + 1, false);
        }
        if let Some(translated) = self.translated.get_mut(device) {
            *translated = true;
        }
    }
}

/// Returns true if one IOVA allocation can span `start..end`. Linux aligns each allocation to its
/// size rounded up to a power of two (`size_aligned` of `alloc_iova`). A range that is
/// not so aligned consists of two adjacent requests.
fn fits_alignment(start: u64, end: u64) -> bool {
    let size = end.wrapping_sub(start);
    size.checked_next_power_of_two()
        .is_some_and(|aligned| start & (aligned - 1) == 0)
}
