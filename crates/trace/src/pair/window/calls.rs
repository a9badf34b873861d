//! Groups `iommu:map` lines by call and finds the `dma:*` line that takes them.

use super::{Cpu, Piece, Slot, State, Waiting, WaitingFor, Window};
use crate::pair::fifo::FifoSpan;
use crate::text::Context;

impl Window {
    /// Returns the call (first slot and IOVA) whose last piece waits in the same context and ends
    /// where `piece` begins.
    pub(super) fn touched(
        &self,
        cpu: usize,
        context: Context,
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

    /// Moves the waiting pieces that cover the DMA segments to the piece arena, in their order.
    ///
    /// The search covers the event's own CPU, and then lines of the same task on other CPUs,
    /// because the kernel can migrate the task between the lines. `phys` is the physical address of
    /// the first segment, if known. With `rest`, the list of segments was truncated, and adjacent
    /// pieces after the last segment belong to it too.
    pub(super) fn take_pieces(
        &mut self,
        cpu: usize,
        context: Context,
        starts: &[u64],
        sizes: &[u64],
        phys: Option<u64>,
        rest: bool,
    ) -> FifoSpan {
        let mark = self.pieces.mark();
        let Some(&first) = starts.first() else {
            return mark;
        };
        let leads = |waiting: &Waiting| match &waiting.event {
            WaitingFor::Map { piece, .. } => {
                piece.contains(first)
                    && phys.is_none_or(|phys| {
                        first.wrapping_sub(piece.iova).wrapping_add(piece.phys) == phys
                    })
            }
            _ => false,
        };
        let here = self
            .cpus
            .get(cpu)
            .and_then(|here| here.waiting.iter().rev().find(|waiting| leads(waiting)));
        let (cpu, context) = match here {
            Some(waiting) => (cpu, waiting.context),
            None if context.pid == 0 => return mark,
            None => {
                let moved = |cpu: &Cpu| {
                    let mut waiting = cpu.waiting.iter();
                    waiting.any(|waiting| waiting.context == context && leads(waiting))
                };
                self.prune();
                let mut busy = self.busy.iter();
                match busy.find(|&&cpu| self.cpus.get(cpu).is_some_and(moved)) {
                    Some(&cpu) => (cpu, context),
                    None => return mark,
                }
            }
        };
        let mut segments = starts.iter().zip(sizes).cycle();
        let mut segment = segments.next();
        let mut end = None;
        let (slots, base, pieces) = (&mut self.slots, self.base, &mut self.pieces);
        let Some(cpu) = self.cpus.get_mut(cpu) else {
            return mark;
        };
        cpu.waiting.retain(|waiting| {
            let WaitingFor::Map { piece, .. } = &waiting.event else {
                return true;
            };
            if waiting.context != context {
                return true;
            }
            // Pieces and segments both ascend, so the next segment is nearly always the right one.
            let mut taken = rest && end == Some(piece.iova);
            for _ in 0..=starts.len() {
                let Some((&start, &size)) = segment else {
                    break;
                };
                let overlap = piece.contains(start) || piece.iova.wrapping_sub(start) < size;
                if overlap {
                    taken = true;
                    break;
                }
                if taken {
                    break;
                }
                segment = segments.next();
            }
            if !taken {
                return true;
            }
            end = Some(piece.end());
            pieces.push_one(*piece);
            let index = waiting.slot.wrapping_sub(base) as usize;
            if let Some(slot) = slots.get_mut(index) {
                slot.state = State::Absorbed;
            }
            false
        });
        self.pieces.since(mark)
    }

    /// Records the pieces of a map: its number of lines, and that its device is translated.
    pub(super) fn record_map_pieces(&mut self, slot: &mut Slot, device: usize) {
        let count = slot.pieces.len();
        if count == 0 {
            return;
        }
        slot.lines = u16::try_from(count + 1).unwrap_or(u16::MAX);
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
