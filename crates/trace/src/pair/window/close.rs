//! Decides waiting lines: their partner arrived, their context ended, or they waited too long.

use super::{LineWindow, MAX_WAIT_LINES, Piece, Slot, State, Waiting, WaitingFor};
use crate::op::DeviceIndex;
use crate::text::{ExecutionContext, RawKind};

impl LineWindow {
    /// Takes the `iommu:unmap` that waits for the `dma_unmap_phys` of `iova` of `device`.
    pub(super) fn take_unmap(
        &mut self,
        cpu: usize,
        context: ExecutionContext,
        iova: u64,
        device: DeviceIndex,
    ) -> bool {
        let belongs = |waiting: &Waiting| match waiting.event {
            WaitingFor::Unmap { iova: start, size } => {
                waiting.context == context && iova.wrapping_sub(start) < size
            }
            _ => false,
        };
        self.take_one(cpu, belongs).is_some_and(|number| {
            if let Some(slot) = self.slot_mut(number) {
                slot.state = State::Absorbed;
                if let RawKind::IommuUnmap { iova, size } = slot.event.kind {
                    slot.call = Some((device, iova.get().wrapping_add(size)));
                }
            }
            true
        })
    }

    /// Assigns an `iommu:unmap` to the `dma_unmap_sg` or `dma_free` that waits for it. Returns the
    /// device of that line.
    pub(super) fn follow_up(
        &mut self,
        cpu: usize,
        context: ExecutionContext,
        start: u64,
    ) -> Option<DeviceIndex> {
        let belongs = |waiting: &Waiting| match waiting.event {
            WaitingFor::FollowUp(iova) => {
                waiting.context == context
                    && iova.is_none_or(|iova| iova & !0xfff == start & !0xfff)
            }
            _ => false,
        };
        let number = self.take_one(cpu, belongs)?;
        let slot = self.slot_mut(number)?;
        slot.state = State::Ready;
        slot.lines = 2;
        slot.event.kind.device()
    }

    pub(super) fn take_one(
        &mut self,
        cpu: usize,
        belongs: impl Fn(&Waiting) -> bool,
    ) -> Option<u64> {
        let waiting = &mut self.cpus.get_mut(cpu)?.waiting;
        let index = waiting.iter().rposition(belongs)?;
        Some(waiting.remove(index).slot)
    }

    /// Decides the lines whose context has ended, as a line of `context` shows. These are the
    /// waiting lines of `context` itself, of contexts nested inside it, and of other interrupt
    /// contexts of the same level. If the trace does not print the level, a line shows nothing.
    /// With `keep`, the lines of `context` continue to wait.
    pub(super) fn close_ended(&mut self, cpu: usize, context: ExecutionContext, keep: bool) {
        let level = rank(context);
        self.close(cpu, |waiting| {
            let Some((level, inner)) = level.zip(rank(waiting.context)) else {
                return false;
            };
            match waiting.context == context {
                true => !keep,
                false => inner > level || (inner == level && inner > 0),
            }
        });
    }

    pub(super) fn close_overdue(&mut self, cpu: usize) {
        let Some(this) = self.cpus.get(cpu) else {
            return;
        };
        if let Some(first) = this.waiting.first()
            && this.lines.wrapping_sub(first.line) > MAX_WAIT_LINES
        {
            let last = this.lines.wrapping_sub(MAX_WAIT_LINES);
            self.close(cpu, |waiting| waiting.line < last);
        }
    }

    /// Decides the waiting lines for which `ended` returns true, as unexplained. The pieces of one
    /// call become one mapping.
    pub(super) fn close(&mut self, cpu: usize, ended: impl Fn(&Waiting) -> bool) {
        let Some(this) = self.cpus.get_mut(cpu) else {
            return;
        };
        if this.waiting.is_empty() {
            return;
        }
        let (slots, base) = (&mut self.slots, self.base);
        // Head and last slot of the mapping of the last closed piece.
        let mut open: Option<(u64, u64)> = None;
        this.waiting.retain(|waiting| {
            if !ended(waiting) {
                return true;
            }
            let at = |number: u64| number.wrapping_sub(base) as usize;
            let state = match waiting.event {
                WaitingFor::Unmap { .. } | WaitingFor::FollowUp(_) => State::Ready,
                WaitingFor::Map { head, .. } => {
                    let before = open.filter(|open| open.0 == head).map(|open| open.1);
                    open = Some((head, waiting.slot));
                    match before {
                        Some(before) => {
                            if let Some(slot) = slots.get_mut(at(before)) {
                                slot.next = Some(waiting.slot);
                            }
                            State::Absorbed
                        }
                        None => State::Head,
                    }
                }
            };
            if let Some(slot) = slots.get_mut(at(waiting.slot)) {
                slot.state = state;
            }
            false
        });
    }

    /// Collects the pieces of the unexplained mapping that begins with `head`, slot `number`, into
    /// `group`.
    pub(super) fn collect_group(&mut self, head: &Slot, number: u64) {
        self.group.clear();
        let mut next = Some((*head, number));
        while let Some((slot, number)) = next {
            if let RawKind::IommuMap { iova, phys, size } = slot.event.kind {
                self.group.push(Piece {
                    iova: iova.get(),
                    phys: phys.get(),
                    size,
                });
            }
            next = slot
                .next
                .filter(|&next| next > number)
                .and_then(|next| Some((*self.slot_mut(next)?, next)));
        }
    }
}

/// Returns the nesting level of a context: task 0, softirq 1, hard interrupt 2, NMI 3; `None` if
/// unknown.
fn rank(context: ExecutionContext) -> Option<u8> {
    match context.level {
        b'.' => Some(0),
        b's' => Some(1),
        b'h' | b'H' => Some(2),
        b'z' | b'Z' => Some(3),
        _ => None,
    }
}
