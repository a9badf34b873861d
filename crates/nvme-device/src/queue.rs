//! Positions in the queues (base specification, section 4.1).

use ringfence_types::Iova;

use crate::command::{COMMAND_BYTES, COMPLETION_BYTES, NvmeCompletion, RawCompletion};

/// A submission queue. The host adds entries at `tail`, the controller fetches them at `head`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SubmissionQueue {
    base: Iova,
    entries: u32,
    head: u32,
    tail: u32,
    /// Identifier of the completion queue.
    pub(crate) completions: u16,
}

impl SubmissionQueue {
    pub(crate) const fn new(base: Iova, entries: u32, completions: u16) -> Self {
        Self {
            base,
            entries,
            head: 0,
            tail: 0,
            completions,
        }
    }

    /// Writes the tail doorbell. Returns false if the queue has no such entry.
    pub(crate) fn set_tail(&mut self, tail: u32) -> bool {
        let is_valid = tail < self.entries;
        if is_valid {
            self.tail = tail;
        }
        is_valid
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    pub(crate) fn head(&self) -> u16 {
        self.head as u16
    }

    /// Returns the address of the entry at the head; `None` if it exceeds the address space.
    pub(crate) fn front(&self) -> Option<Iova> {
        entry(self.base, self.head, COMMAND_BYTES)
    }

    pub(crate) fn advance(&mut self) {
        self.head = next(self.head, self.entries);
    }
}

/// A completion queue. The controller adds entries at `tail`, the host consumes them at `head`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletionQueue {
    base: Iova,
    entries: u32,
    head: u32,
    tail: u32,
    /// Phase tag of the entries of this pass (section 4.6).
    phase: bool,
    /// Interrupt vector; `None` without interrupts.
    pub(crate) vector: Option<u16>,
}

impl CompletionQueue {
    pub(crate) const fn new(base: Iova, entries: u32, vector: Option<u16>) -> Self {
        Self {
            base,
            entries,
            head: 0,
            tail: 0,
            phase: true,
            vector,
        }
    }

    /// Writes the head doorbell. Returns false if the queue has no such entry.
    pub(crate) fn set_head(&mut self, head: u32) -> bool {
        let is_valid = head < self.entries;
        if is_valid {
            self.head = head;
        }
        is_valid
    }

    /// Returns true if an entry would overwrite one that the host has not consumed.
    pub(crate) fn is_full(&self) -> bool {
        next(self.tail, self.entries) == self.head
    }

    /// Returns the address of the entry at the tail; `None` if it exceeds the address space.
    pub(crate) fn back(&self) -> Option<Iova> {
        entry(self.base, self.tail, COMPLETION_BYTES)
    }

    /// Encodes a completion with the phase of the entry at the tail.
    pub(crate) fn encode(&self, completion: &NvmeCompletion) -> RawCompletion {
        let phase = u128::from(self.phase) << 112;
        (u128::from_le_bytes(completion.encode()) | phase).to_le_bytes()
    }

    pub(crate) fn advance(&mut self) {
        self.tail = next(self.tail, self.entries);
        self.phase ^= self.tail == 0;
    }
}

fn next(index: u32, entries: u32) -> u32 {
    match index.wrapping_add(1) {
        end if end >= entries => 0,
        inside => inside,
    }
}

fn entry(base: Iova, index: u32, bytes: usize) -> Option<Iova> {
    let at = base.checked_add(u64::from(index) * bytes as u64)?;
    at.checked_add(bytes as u64 - 1).map(|_| at)
}
