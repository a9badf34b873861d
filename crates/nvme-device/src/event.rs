//! Asynchronous events (base specification, section 5.2) and the error log (section 5.14.1.1).

use alloc::vec::Vec;

/// Most outstanding asynchronous event requests (`AERL`, less one in the identify data).
pub(crate) const MAX_REQUESTS: usize = 4;

/// Bytes of an entry of the error log.
pub(crate) const ERROR_ENTRY_BYTES: usize = 64;

/// Log page of an error event, in bits 23:16 of the event's result.
const ERROR_LOG: u32 = 1 << 16;

/// Error status events (Figure 148).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ErrorEvent {
    /// The doorbell of a queue that does not exist.
    InvalidDoorbellRegister = 0,
    /// A value that is no entry of the queue.
    InvalidDoorbellValue = 1,
}

/// Requests of the host for events, and the event that waits for one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events {
    requests: Vec<u16>,
    pending: Option<ErrorEvent>,
    /// True from the report of an event until the host reads the log page.
    is_masked: bool,
    errors: u64,
    /// Queue of the last error.
    queue: u16,
}

impl Events {
    /// Keeps a request. Returns false if there are too many.
    pub(crate) fn request(&mut self, id: u16) -> bool {
        let has_room = self.requests.len() < MAX_REQUESTS;
        if has_room {
            self.requests.push(id);
        }
        has_room
    }

    /// Removes the request with this command identifier. Returns false if there is none.
    pub(crate) fn abort(&mut self, id: u16) -> bool {
        let found = self.requests.iter().position(|request| *request == id);
        found.map(|at| self.requests.remove(at)).is_some()
    }

    /// Records an error of the host at a queue.
    pub(crate) fn error(&mut self, event: ErrorEvent, queue: u16) {
        self.errors = self.errors.wrapping_add(1);
        self.queue = queue;
        if !self.is_masked && self.pending.is_none() {
            self.pending = Some(event);
        }
    }

    /// Returns true if a request can complete.
    pub(crate) fn is_due(&self) -> bool {
        self.pending.is_some() && !self.requests.is_empty()
    }

    /// Takes a request to complete, and its result.
    pub(crate) fn take(&mut self) -> Option<(u16, u32)> {
        if !self.is_due() {
            return None;
        }
        let event = self.pending.take()?;
        self.is_masked = true;
        Some((
            self.requests.remove(0),
            u32::from(event as u8) << 8 | ERROR_LOG,
        ))
    }

    /// The host has read the error log: further errors are events again.
    pub(crate) fn unmask(&mut self) {
        self.is_masked = false;
    }

    /// Encodes the newest entry of the error log: the number of errors, the queue, and no command
    /// (identifier FFFFh).
    pub(crate) fn log(&self) -> [u8; ERROR_ENTRY_BYTES] {
        let mut raw = [0; ERROR_ENTRY_BYTES];
        if self.errors > 0 {
            raw[0..8].copy_from_slice(&self.errors.to_le_bytes());
            raw[8..10].copy_from_slice(&self.queue.to_le_bytes());
            raw[10..12].copy_from_slice(&[0xff; 2]);
        }
        raw
    }
}
