//! Combines the `iommu:*` and `dma:*` lines of one call.
//!
//! Linux prints `iommu:map` lines just before the `dma:*` line of the same call. It prints
//! `iommu:unmap` before `dma_unmap_phys`, but after `dma_unmap_sg` and `dma_free`, which trace on
//! entry. All lines of a call come from one context of one CPU, and interrupts nest. A line
//! therefore waits for a decision by its context. The next line of the same context takes it, or
//! proves that no line will. A line of an outer context proves that the inner context has ended.
//!
//! Lines leave in order of arrival. A line that waits too long (512 lines of its CPU, or
//! [`TraceOptions::look_ahead`](crate::TraceOptions) lines of the trace) becomes unexplained, so
//! the look-ahead bounds the memory.

mod calls;
mod close;

use std::collections::{BTreeSet, VecDeque};

use self::calls::MapCall;
use super::fifo::{Fifo, FifoSpan};
use crate::op::DeviceIndex;
use crate::options::Addresses;
use crate::text::{ExecutionContext, ListSpan, RawChunk, RawEvent, RawKind};

/// Maximum wait of a line, in lines of its own CPU. A nested network poll has about 300.
const MAX_WAIT_LINES: u64 = 512;

/// One `iommu:map` line: maps the IOVAs from `iova` on to the addresses from `phys` on. Raw
/// numbers, for arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) iova: u64,
    pub(super) phys: u64,
    pub(super) size: u64,
}

impl Piece {
    /// Returns true if the IOVA lies in the piece. The range never wraps, but may end at 2^64.
    pub(super) fn contains(&self, iova: u64) -> bool {
        iova.wrapping_sub(self.iova) < self.size
    }

    /// Returns the IOVA after the piece; 0 at 2^64.
    pub(super) fn end(&self) -> u64 {
        self.iova.wrapping_add(self.size)
    }
}

/// Output of the window.
#[derive(Debug, Clone, Copy)]
pub(super) enum WindowOutput {
    /// A `dma:*` event or a mark, with the `iommu:*` lines that belong to it.
    Event {
        event: RawEvent,
        /// Lists of the event, in [`LineWindow::list`]; see [`Lists`].
        lists: Lists,
        /// The `iommu:map` lines, in [`LineWindow::pieces`].
        pieces: FifoSpan,
        /// Number of lines that the event represents.
        lines: u16,
    },
    /// `iommu:map` lines that no `dma:*` event explains; they form one mapping. Its pieces are in
    /// [`LineWindow::group`] until the next call of [`LineWindow::pop`].
    Map { event: RawEvent },
    /// An `iommu:unmap` line that no `dma:*` event explains. `cut` is true if the trace ended
    /// before the window could rule out a `dma:*` line.
    Unmap { event: RawEvent, cut: bool },
    /// An `iommu:*` line that a `dma:*` line of `device` explains: the first piece of a map, or an
    /// unmap. `end` is the IOVA after the call's range. Only with [`Addresses::Keep`].
    Address {
        event: RawEvent,
        device: DeviceIndex,
        end: u64,
    },
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
    /// The line waits for a decision by its context.
    Waiting,
    /// The line is decided and leaves.
    Ready,
    /// The line is the first piece of an unexplained mapping.
    Head,
    /// The line belongs to another line and is not emitted.
    Absorbed,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    event: RawEvent,
    state: State,
    /// Slot of the next piece of the same unexplained mapping.
    next: Option<u64>,
    lists: Lists,
    pieces: FifoSpan,
    lines: u16,
    /// True if the trace ended before the line was decided.
    cut: bool,
    /// Device and end of the call, if the line is the first `iommu:*` line of an explained call.
    call: Option<(DeviceIndex, u64)>,
}

impl Slot {
    fn ready(event: &RawEvent) -> Self {
        Self {
            event: *event,
            state: State::Ready,
            next: None,
            lists: Lists::default(),
            pieces: FifoSpan::default(),
            lines: 1,
            cut: false,
            call: None,
        }
    }
}

/// A waiting line.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    slot: u64,
    context: ExecutionContext,
    /// Number of lines of its CPU at that time.
    line: u64,
    event: WaitingFor,
}

#[derive(Debug, Clone, Copy)]
enum WaitingFor {
    /// `iommu:map`, waits for the `dma:*` line after it. `head` is the slot of the first piece that
    /// probably belongs to the same call, and `start` its IOVA.
    Map { piece: Piece, head: u64, start: u64 },
    /// `iommu:unmap`, waits for the `dma_unmap_phys` line after it.
    Unmap { iova: u64, size: u64 },
    /// `dma_unmap_sg` or `dma_free`, waits for the `iommu:unmap` line after it; the IOVA if known.
    FollowUp(Option<u64>),
}

#[derive(Debug, Default)]
struct Cpu {
    lines: u64,
    waiting: Vec<Waiting>,
    /// True if [`LineWindow::busy`] contains it.
    busy: bool,
}

#[derive(Debug)]
pub(super) struct LineWindow {
    slots: VecDeque<Slot>,
    /// Number of `slots[0]` since the beginning.
    base: u64,
    limit: usize,
    addresses: Addresses,
    cpus: Vec<Cpu>,
    /// CPUs that may have waiting lines, ascending: a trace can name 65536 CPUs.
    busy: BTreeSet<usize>,
    words: Fifo<u64>,
    pieces: Fifo<Piece>,
    group: Vec<Piece>,
    /// By device: true if an `iommu:map` line ever belonged to one of its maps.
    translated: Vec<bool>,
    /// The `iommu:unmap` lines in the window: slot, IOVA, size.
    unmaps: VecDeque<(u64, u64, u64)>,
}

impl LineWindow {
    pub(super) fn new(look_ahead: usize, addresses: Addresses) -> Self {
        Self {
            slots: VecDeque::new(),
            base: 0,
            limit: look_ahead.max(1),
            addresses,
            cpus: Vec::new(),
            busy: BTreeSet::new(),
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

    /// Returns true if an `iommu:map` line ever belonged to a map of the device.
    pub(super) fn is_translated(&self, device: usize) -> bool {
        self.translated.get(device).copied().unwrap_or(false)
    }

    /// Adds the next event of the trace; its lists are in `chunk`.
    pub(super) fn push(&mut self, event: &RawEvent, chunk: &RawChunk) {
        let cpu = usize::from(event.cpu);
        if let RawKind::Page(_) = event.kind {
            // A map can allocate pages, so such a line says nothing about the lines that wait.
            self.slots.push_back(Slot::ready(event));
            return;
        }
        if self.cpus.len() <= cpu {
            self.cpus.resize_with(cpu + 1, Cpu::default);
        }
        if let Some(cpu) = self.cpus.get_mut(cpu) {
            cpu.lines += 1;
        }
        let number = self.base.wrapping_add(self.slots.len() as u64);
        let mut slot = Slot::ready(event);
        let partner = match event.kind {
            RawKind::IommuMap { .. } | RawKind::IommuUnmap { .. } => {
                self.add_iommu_line(number, &mut slot)
            }
            _ => self.add_dma_line(&mut slot, chunk),
        };
        if let Some(partner) = partner
            && let Some(own) = self.cpus.get_mut(cpu)
        {
            slot.state = State::Waiting;
            own.waiting.push(Waiting {
                slot: number,
                context: event.context,
                line: own.lines,
                event: partner,
            });
            if !own.busy {
                own.busy = true;
                self.busy.insert(cpu);
            }
        }
        self.slots.push_back(slot);
        self.close_overdue(cpu);
    }

    /// Finds the call of an `iommu:*` line. Returns the line that it waits for, or `None` if it is
    /// decided.
    fn add_iommu_line(&mut self, number: u64, slot: &mut Slot) -> Option<WaitingFor> {
        let (cpu, context) = (usize::from(slot.event.cpu), slot.event.context);
        match slot.event.kind {
            RawKind::IommuMap { iova, phys, size } => {
                let piece = Piece {
                    iova: iova.get(),
                    phys: phys.get(),
                    size,
                };
                let before = self.touched(cpu, context, &piece);
                self.close_ended(cpu, context, before.is_some());
                let (head, start) = before
                    .filter(|&(head, start)| self.can_extend(head, start, &piece))
                    .unwrap_or((number, piece.iova));
                Some(WaitingFor::Map { piece, head, start })
            }
            RawKind::IommuUnmap { iova, size } => {
                let iova = iova.get();
                self.split_groups(iova, size);
                self.unmaps.push_back((number, iova, size));
                let follows = self.follow_up(cpu, context, iova);
                self.close_ended(cpu, context, false);
                if let Some(device) = follows {
                    slot.call = Some((device, iova.wrapping_add(size)));
                    slot.state = State::Absorbed;
                    return None;
                }
                Some(WaitingFor::Unmap { iova, size })
            }
            _ => None,
        }
    }

    /// Gives a `dma:*` line, or a mark, the `iommu:*` lines before it. Returns the line that it
    /// waits for, or `None` if it is decided.
    fn add_dma_line(&mut self, slot: &mut Slot, chunk: &RawChunk) -> Option<WaitingFor> {
        let (cpu, context) = (usize::from(slot.event.cpu), slot.event.context);
        let mut partner = None;
        match slot.event.kind {
            RawKind::Map {
                device,
                iova,
                size,
                phys,
                ..
            } => {
                let call = MapCall {
                    starts: &[iova.get()],
                    sizes: &[size],
                    phys: Some(phys.get()),
                    truncated: false,
                };
                self.assign_pieces(slot, device, &call);
            }
            RawKind::Alloc {
                device,
                iova,
                size,
                phys_addrs,
                ..
            } => {
                slot.lists.phys_addrs = self.copy_list(chunk, phys_addrs);
                let call = MapCall {
                    starts: &[iova.get()],
                    sizes: &[size],
                    phys: None,
                    truncated: false,
                };
                self.assign_pieces(slot, device, &call);
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
                    dma_addrs: self.copy_list(chunk, dma_addrs),
                    sizes: self.copy_list(chunk, sizes),
                    phys_addrs: self.copy_list(chunk, phys_addrs),
                };
                let call = MapCall {
                    starts: chunk.list(dma_addrs),
                    sizes: chunk.list(sizes),
                    phys: chunk.list(phys_addrs).first().copied(),
                    truncated: ents > dma_addrs.count,
                };
                self.assign_pieces(slot, device, &call);
            }
            RawKind::Unmap { device, iova, .. } => {
                if self.take_unmap(cpu, context, iova.get(), device) {
                    slot.lines = 2;
                }
            }
            RawKind::UnmapSg {
                device, phys_addrs, ..
            } => {
                slot.lists.phys_addrs = self.copy_list(chunk, phys_addrs);
                if self.is_translated(device.index()) {
                    partner = Some(WaitingFor::FollowUp(None));
                }
            }
            RawKind::Free { device, iova, .. } => {
                if self.is_translated(device.index()) {
                    partner = Some(WaitingFor::FollowUp(Some(iova.get())));
                }
            }
            RawKind::Sync { .. }
            | RawKind::Access { .. }
            | RawKind::Void { .. }
            | RawKind::Page(_)
            | RawKind::Mark(_)
            | RawKind::IommuMap { .. }
            | RawKind::IommuUnmap { .. } => {}
        }
        self.close_ended(cpu, context, false);
        partner
    }

    /// Returns the next decided line.
    pub(super) fn pop(&mut self) -> Option<WindowOutput> {
        loop {
            let oldest = self.slots.front()?;
            if oldest.state == State::Waiting {
                if self.slots.len() <= self.limit {
                    return None;
                }
                let (cpu, number) = (usize::from(oldest.event.cpu), self.base);
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
                State::Absorbed => {
                    if let (Some((device, end)), Addresses::Keep) = (slot.call, self.addresses) {
                        let event = slot.event;
                        return Some(WindowOutput::Address { event, device, end });
                    }
                }
                // The loop passed no waiting line.
                State::Waiting => debug_assert!(false, "a waiting line leaves the window"),
                State::Head => {
                    self.collect_group(&slot, number);
                    return Some(WindowOutput::Map { event: slot.event });
                }
                State::Ready => {
                    if let RawKind::IommuUnmap { .. } = slot.event.kind {
                        return Some(WindowOutput::Unmap {
                            event: slot.event,
                            cut: slot.cut,
                        });
                    }
                    return Some(WindowOutput::Event {
                        event: slot.event,
                        lists: slot.lists,
                        pieces: slot.pieces,
                        lines: slot.lines,
                    });
                }
            }
        }
    }

    /// Releases the memory of an event's lists and pieces.
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

    /// Decides all waiting lines at the end of the trace. Drops `iommu:map` lines that still wait,
    /// because their `dma:*` line may be cut off, and returns their number.
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
                slot.state = match one.event {
                    WaitingFor::Map { .. } => {
                        cut += 1;
                        State::Absorbed
                    }
                    WaitingFor::Unmap { .. } | WaitingFor::FollowUp(_) => State::Ready,
                };
            }
        }
        cut
    }

    /// Removes CPUs without waiting lines from `busy`. The window bounds the number of waiting
    /// lines, and thereby the number of CPUs that stay.
    fn prune(&mut self) {
        let cpus = &mut self.cpus;
        self.busy.retain(|&cpu| {
            let cpu = cpus.get_mut(cpu);
            cpu.is_some_and(|cpu| {
                cpu.busy = !cpu.waiting.is_empty();
                cpu.busy
            })
        });
    }

    fn copy_list(&mut self, chunk: &RawChunk, span: ListSpan) -> FifoSpan {
        self.words.push(chunk.list(span))
    }

    fn slot_mut(&mut self, number: u64) -> Option<&mut Slot> {
        let index = number.checked_sub(self.base)?;
        self.slots.get_mut(usize::try_from(index).ok()?)
    }
}
