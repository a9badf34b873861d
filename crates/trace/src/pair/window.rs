//! Puts `iommu:*` lines and `dma:*` lines of one call together.
//!
//! Linux prints `iommu:map` lines just before the `dma:*` line of the same call, `iommu:unmap` before
//! `dma_unmap_phys` but after `dma_unmap_sg` and `dma_free` (those trace on entry). All lines of a call come
//! from one context of one processor, and interrupts nest. So a line waits until its context shows what it
//! belongs to: the next line of the same context takes it or proves that none will; a line of an outer
//! context proves that the inner one has ended.
//!
//! Lines leave in the order they came. What waits too long (512 lines of its processor, or
//! [`Options::look_ahead`](crate::Options) lines of the trace) is decided as unexplained, so memory is
//! bounded by the look-ahead.

use std::collections::VecDeque;

use super::fifo::{Fifo, FifoSpan};
use crate::text::{Context, ListSpan, RawChunk, RawEvent, RawKind};

/// Lines of its own processor that a line waits, at most. A nested network poll is about 300.
const PATIENCE: u64 = 512;

/// One `iommu:map` line: IOVAs from `iova` on lead to addresses from `phys` on. Raw, for arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) iova: u64,
    pub(super) phys: u64,
    pub(super) size: u64,
}

impl Piece {
    /// Whether the IOVA lies in the piece. The range never wraps, but may end at 2^64.
    pub(super) fn contains(&self, iova: u64) -> bool {
        iova.wrapping_sub(self.iova) < self.size
    }

    /// The IOVA behind the piece; 0 at 2^64.
    fn end(&self) -> u64 {
        self.iova.wrapping_add(self.size)
    }
}

/// What leaves the window.
#[derive(Debug, Clone, Copy)]
pub(super) enum Resolved {
    /// A `dma:*` event or a mark, with the `iommu:*` lines that belong to it.
    Event {
        event: RawEvent,
        /// Lists of the event, in [`Window::list`]; see [`Lists`].
        lists: Lists,
        /// The `iommu:map` lines, in [`Window::pieces`].
        pieces: FifoSpan,
        /// Lines the event stands for.
        lines: u16,
    },
    /// `iommu:map` lines that no `dma:*` event explains; one mapping. The pieces are in
    /// [`Window::group`] until the next call of [`Window::pop`].
    Map { event: RawEvent },
    /// An `iommu:unmap` line that no `dma:*` event explains. `cut`: none that the trace shows; it ended before
    /// one was ruled out.
    Unmap { event: RawEvent, cut: bool },
}

/// The lists of a scatterlist event, in the order of its fields.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lists {
    pub(super) dma_addrs: FifoSpan,
    pub(super) sizes: FifoSpan,
    pub(super) phys_addrs: FifoSpan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for its context to tell.
    Waiting,
    /// Leaves as it is.
    Ready,
    /// First piece of an unexplained mapping.
    Head,
    /// Part of something else; leaves silently.
    Absorbed,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    event: RawEvent,
    state: State,
    /// Next piece of the same unexplained mapping.
    next: Option<u64>,
    lists: Lists,
    pieces: FifoSpan,
    lines: u16,
    /// The trace ended before it was decided.
    cut: bool,
}

/// A waiting line.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    slot: u64,
    context: Context,
    /// How many lines its processor had printed.
    at: u64,
    what: Wait,
}

#[derive(Debug, Clone, Copy)]
enum Wait {
    /// `iommu:map`, for the `dma:*` line behind it; `head` is the slot of the first piece that, to all
    /// appearances, belongs to the same call, and `start` its IOVA.
    Map { piece: Piece, head: u64, start: u64 },
    /// `iommu:unmap`, for the `dma_unmap_phys` line behind it.
    Unmap { iova: u64, size: u64 },
    /// `dma_unmap_sg` or `dma_free`, for the `iommu:unmap` line behind it; the IOVA if known.
    FollowUp(Option<u64>),
}

#[derive(Debug, Default)]
struct Cpu {
    lines: u64,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
pub(super) struct Window {
    slots: VecDeque<Slot>,
    /// Number of `slots[0]` since the beginning.
    base: u64,
    limit: usize,
    cpus: Vec<Cpu>,
    words: Fifo<u64>,
    pieces: Fifo<Piece>,
    group: Vec<Piece>,
    /// By device: whether an `iommu:map` line ever belonged to one of its maps.
    translated: Vec<bool>,
    /// The `iommu:unmap` lines in the window: slot, IOVA, size.
    unmaps: VecDeque<(u64, u64, u64)>,
}

impl Window {
    pub(super) fn new(look_ahead: usize) -> Self {
        Self {
            slots: VecDeque::new(),
            base: 0,
            limit: look_ahead.max(1),
            cpus: Vec::new(),
            words: Fifo::default(),
            pieces: Fifo::default(),
            group: Vec::new(),
            translated: Vec::new(),
            unmaps: VecDeque::new(),
        }
    }

    pub(super) fn list(&self, span: FifoSpan) -> &[u64] {
        self.words.get(span)
    }

    pub(super) fn pieces(&self, span: FifoSpan) -> &[Piece] {
        self.pieces.get(span)
    }

    pub(super) fn group(&self) -> &[Piece] {
        &self.group
    }

    /// Whether an `iommu:map` line ever belonged to a map of the device.
    pub(super) fn is_translated(&self, device: usize) -> bool {
        self.translated.get(device).copied().unwrap_or(false)
    }

    /// Takes the next event of the trace; its lists are in `chunk`.
    pub(super) fn push(&mut self, event: &RawEvent, chunk: &RawChunk) {
        let cpu = usize::from(event.cpu);
        if self.cpus.len() <= cpu {
            self.cpus.resize_with(cpu + 1, Cpu::default);
        }
        if let Some(cpu) = self.cpus.get_mut(cpu) {
            cpu.lines += 1;
        }
        let number = self.base.wrapping_add(self.slots.len() as u64);
        let mut slot = Slot {
            event: *event,
            state: State::Ready,
            next: None,
            lists: Lists::default(),
            pieces: FifoSpan::default(),
            lines: 1,
            cut: false,
        };
        let mut wait = None;
        match event.kind {
            RawKind::IommuMap { iova, phys, size } => {
                let piece = Piece {
                    iova: iova.get(),
                    phys: phys.get(),
                    size,
                };
                let before = self.touched(cpu, event.context, &piece);
                self.close_ended(cpu, event.context, before.is_some());
                let (head, start) = before
                    .filter(|&(head, start)| self.can_go_on(head, start, &piece))
                    .unwrap_or((number, piece.iova));
                wait = Some(Wait::Map { piece, head, start });
            }
            RawKind::IommuUnmap { iova, size } => {
                let iova = iova.get();
                self.split_groups(iova, size);
                self.unmaps.push_back((number, iova, size));
                if self.follow_up(cpu, event.context, iova) {
                    slot.state = State::Absorbed;
                } else {
                    wait = Some(Wait::Unmap { iova, size });
                }
                self.close_ended(cpu, event.context, false);
            }
            RawKind::Map {
                device,
                iova,
                size,
                phys,
                ..
            } => {
                slot.pieces = self.take_pieces(
                    cpu,
                    event.context,
                    &[iova.get()],
                    &[size],
                    Some(phys.get()),
                    false,
                );
                self.settle_map(&mut slot, device.index());
                self.close_ended(cpu, event.context, false);
            }
            RawKind::Alloc {
                device,
                iova,
                size,
                phys_addrs,
                ..
            } => {
                slot.lists.phys_addrs = self.keep(chunk, phys_addrs);
                slot.pieces =
                    self.take_pieces(cpu, event.context, &[iova.get()], &[size], None, false);
                self.settle_map(&mut slot, device.index());
                self.close_ended(cpu, event.context, false);
            }
            RawKind::MapSg {
                device,
                ents,
                dma_addrs,
                sizes,
                phys_addrs,
                ..
            } => {
                slot.lists = Lists {
                    dma_addrs: self.keep(chunk, dma_addrs),
                    sizes: self.keep(chunk, sizes),
                    phys_addrs: self.keep(chunk, phys_addrs),
                };
                let first = chunk.list(phys_addrs).first().copied();
                slot.pieces = self.take_pieces(
                    cpu,
                    event.context,
                    chunk.list(dma_addrs),
                    chunk.list(sizes),
                    first,
                    ents > dma_addrs.count,
                );
                self.settle_map(&mut slot, device.index());
                self.close_ended(cpu, event.context, false);
            }
            RawKind::Unmap { iova, .. } => {
                if self.take_unmap(cpu, event.context, iova.get()) {
                    slot.lines = 2;
                }
                self.close_ended(cpu, event.context, false);
            }
            RawKind::UnmapSg {
                device, phys_addrs, ..
            } => {
                slot.lists.phys_addrs = self.keep(chunk, phys_addrs);
                self.close_ended(cpu, event.context, false);
                if self.is_translated(device.index()) {
                    wait = Some(Wait::FollowUp(None));
                }
            }
            RawKind::Free { device, iova, .. } => {
                self.close_ended(cpu, event.context, false);
                if self.is_translated(device.index()) {
                    wait = Some(Wait::FollowUp(Some(iova.get())));
                }
            }
            RawKind::Sync { .. } | RawKind::Void { .. } | RawKind::Mark(_) => {
                self.close_ended(cpu, event.context, false);
            }
        }
        if let Some(what) = wait
            && let Some(cpu) = self.cpus.get_mut(cpu)
        {
            slot.state = State::Waiting;
            cpu.waiting.push(Waiting {
                slot: number,
                context: event.context,
                at: cpu.lines,
                what,
            });
        }
        self.slots.push_back(slot);
        self.run_out_of_patience(cpu);
    }

    /// The next line whose part is known.
    pub(super) fn pop(&mut self) -> Option<Resolved> {
        loop {
            let front = self.slots.front()?;
            if front.state == State::Waiting {
                if self.slots.len() <= self.limit {
                    return None;
                }
                let (cpu, number) = (usize::from(front.event.cpu), self.base);
                self.close(cpu, |waiting| waiting.slot == number);
                continue;
            }
            let slot = self.slots.pop_front()?;
            let number = self.base;
            self.base = self.base.wrapping_add(1);
            while self.unmaps.front().is_some_and(|unmap| unmap.0 < self.base) {
                self.unmaps.pop_front();
            }
            match slot.state {
                State::Absorbed | State::Waiting => {}
                State::Head => {
                    self.gather(&slot, number);
                    return Some(Resolved::Map { event: slot.event });
                }
                State::Ready => {
                    if let RawKind::IommuUnmap { .. } = slot.event.kind {
                        return Some(Resolved::Unmap {
                            event: slot.event,
                            cut: slot.cut,
                        });
                    }
                    return Some(Resolved::Event {
                        event: slot.event,
                        lists: slot.lists,
                        pieces: slot.pieces,
                        lines: slot.lines,
                    });
                }
            }
        }
    }

    /// Gives the memory of an event's lists and pieces back.
    pub(super) fn release(&mut self, lists: Lists, pieces: FifoSpan) {
        for span in [lists.dma_addrs, lists.sizes, lists.phys_addrs] {
            if span.len() > 0 {
                self.words.release(span);
            }
        }
        if pieces.len() > 0 {
            self.pieces.release(pieces);
        }
    }

    /// Decides everything: the trace has ended. Drops `iommu:map` lines that still wait, for whether a `dma:*`
    /// line would have followed is cut off, and says how many.
    pub(super) fn finish(&mut self) -> u64 {
        let mut cut = 0;
        for cpu in 0..self.cpus.len() {
            let waiting = match self.cpus.get_mut(cpu) {
                Some(cpu) => std::mem::take(&mut cpu.waiting),
                None => continue,
            };
            for one in waiting {
                let Some(slot) = self.slot_mut(one.slot) else {
                    continue;
                };
                slot.cut = true;
                slot.state = match one.what {
                    Wait::Map { .. } => {
                        cut += 1;
                        State::Absorbed
                    }
                    Wait::Unmap { .. } | Wait::FollowUp(_) => State::Ready,
                };
            }
        }
        cut
    }

    fn keep(&mut self, chunk: &RawChunk, span: ListSpan) -> FifoSpan {
        self.words.push(chunk.list(span))
    }

    fn slot_mut(&mut self, number: u64) -> Option<&mut Slot> {
        let index = number.checked_sub(self.base)?;
        self.slots.get_mut(usize::try_from(index).ok()?)
    }

    /// The call (first slot and IOVA) whose last piece, waiting in the same context, ends where this one
    /// begins.
    fn touched(&self, cpu: usize, context: Context, piece: &Piece) -> Option<(u64, u64)> {
        let mut waiting = self.cpus.get(cpu)?.waiting.iter().rev();
        match waiting.find(|waiting| waiting.context == context)?.what {
            Wait::Map {
                piece: before,
                head,
                start,
            } if before.end() == piece.iova => Some((head, start)),
            _ => None,
        }
    }

    /// Whether a piece that touches a call's last one can be of that call, or is of another that happens to
    /// lie behind it. A call allocates its IOVAs before its first piece, so none of them was unmapped since;
    /// and Linux aligns an allocation to its size.
    fn can_go_on(&self, head: u64, start: u64, piece: &Piece) -> bool {
        let mut since = self.unmaps.iter().rev().take_while(|unmap| unmap.0 > head);
        fits_alignment(start, piece.end())
            && !since.any(|&(_, iova, size)| {
                piece.iova.wrapping_sub(iova) < size || start.wrapping_sub(iova) < size
            })
    }

    /// An unmap of a call's first piece shows where that call ended: waiting pieces behind it that were taken
    /// for its own are of another call, which happens to lie there.
    fn split_groups(&mut self, iova: u64, size: u64) {
        let within = |address: u64| address.wrapping_sub(iova) < size;
        for cpu in &mut self.cpus {
            // The call that was split, and the one that its rest is.
            let mut split: Option<(u64, u64, u64)> = None;
            for waiting in &mut cpu.waiting {
                let Wait::Map { piece, head, start } = &mut waiting.what else {
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
    /// Searched on the event's own processor, and, if a task was moved between the lines, among the lines of
    /// the same task elsewhere. `phys` is where the first segment leads, if known. With `rest`, the list of
    /// segments was cut and pieces that go on behind the last one belong to it too.
    fn take_pieces(
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
        let leads = |waiting: &Waiting| match &waiting.what {
            Wait::Map { piece, .. } => {
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
            None if context.pid == 0 || !self.cpus.iter().any(|cpu| !cpu.waiting.is_empty()) => {
                return mark;
            }
            None => {
                let moved = |cpu: &Cpu| {
                    let mut waiting = cpu.waiting.iter();
                    waiting.any(|waiting| waiting.context == context && leads(waiting))
                };
                match self.cpus.iter().position(moved) {
                    Some(cpu) => (cpu, context),
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
            let Wait::Map { piece, .. } = &waiting.what else {
                return true;
            };
            if waiting.context != context {
                return true;
            }
            // Pieces and segments ascend together, so the next segment is nearly always the right one.
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

    /// Notes what a map's pieces say.
    fn settle_map(&mut self, slot: &mut Slot, device: usize) {
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

    /// Takes the `iommu:unmap` that waits for the `dma_unmap_phys` of `iova`.
    fn take_unmap(&mut self, cpu: usize, context: Context, iova: u64) -> bool {
        let belongs = |waiting: &Waiting| match waiting.what {
            Wait::Unmap { iova: start, size } => {
                waiting.context == context && iova.wrapping_sub(start) < size
            }
            _ => false,
        };
        self.take_one(cpu, belongs).is_some_and(|number| {
            if let Some(slot) = self.slot_mut(number) {
                slot.state = State::Absorbed;
            }
            true
        })
    }

    /// Gives an `iommu:unmap` to the `dma_unmap_sg` or `dma_free` that waits for it.
    fn follow_up(&mut self, cpu: usize, context: Context, start: u64) -> bool {
        let belongs = |waiting: &Waiting| match waiting.what {
            Wait::FollowUp(iova) => {
                waiting.context == context
                    && iova.is_none_or(|iova| iova & !0xfff == start & !0xfff)
            }
            _ => false,
        };
        self.take_one(cpu, belongs).is_some_and(|number| {
            if let Some(slot) = self.slot_mut(number) {
                slot.state = State::Ready;
                slot.lines = 2;
            }
            true
        })
    }

    fn take_one(&mut self, cpu: usize, belongs: impl Fn(&Waiting) -> bool) -> Option<u64> {
        let waiting = &mut self.cpus.get_mut(cpu)?.waiting;
        let index = waiting.iter().rposition(belongs)?;
        Some(waiting.remove(index).slot)
    }

    /// Decides what a line of `context` shows to have ended: the rest of this context, and contexts inside
    /// it or beside it that cannot be alive. Where the trace does not print the level, nothing is shown.
    /// With `keep`, this context goes on.
    fn close_ended(&mut self, cpu: usize, context: Context, keep: bool) {
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

    fn run_out_of_patience(&mut self, cpu: usize) {
        let Some(this) = self.cpus.get(cpu) else {
            return;
        };
        if let Some(first) = this.waiting.first()
            && this.lines.wrapping_sub(first.at) > PATIENCE
        {
            let last = this.lines.wrapping_sub(PATIENCE);
            self.close(cpu, |waiting| waiting.at < last);
        }
    }

    /// Decides the waiting lines that `ended` picks, as unexplained. The pieces of one call become one mapping.
    fn close(&mut self, cpu: usize, ended: impl Fn(&Waiting) -> bool) {
        let Some(this) = self.cpus.get_mut(cpu) else {
            return;
        };
        if this.waiting.is_empty() {
            return;
        }
        let (slots, base) = (&mut self.slots, self.base);
        // Head and last slot of the mapping that the last closed piece belongs to.
        let mut open: Option<(u64, u64)> = None;
        this.waiting.retain(|waiting| {
            if !ended(waiting) {
                return true;
            }
            let at = |number: u64| number.wrapping_sub(base) as usize;
            let state = match waiting.what {
                Wait::Unmap { .. } | Wait::FollowUp(_) => State::Ready,
                Wait::Map { head, .. } => {
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

    /// Collects the pieces of the unexplained mapping that begins with `head`, slot `number`, into `group`.
    fn gather(&mut self, head: &Slot, number: u64) {
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

/// How deep a context nests: task 0, soft interrupt 1, hard interrupt 2, NMI 3; `None` if unknown.
fn rank(context: Context) -> Option<u8> {
    match context.level {
        b'.' => Some(0),
        b's' => Some(1),
        b'h' | b'H' => Some(2),
        b'z' | b'Z' => Some(3),
        _ => None,
    }
}

/// Whether one IOVA allocation can span `start..end`: Linux aligns each to its size rounded up to a power of
/// two (`iova_size_aligned` in `alloc_iova_fast`). What does not fit is two requests that happen to touch.
fn fits_alignment(start: u64, end: u64) -> bool {
    let size = end.wrapping_sub(start);
    size.checked_next_power_of_two()
        .is_some_and(|aligned| start & (aligned - 1) == 0)
}
