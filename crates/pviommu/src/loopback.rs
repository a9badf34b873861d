//! A queue whose device is a backend in the same process, for replays and tests.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::backend::{Backend, GuestBacking, IoTables};
use crate::frontend::{Queue, QueueFull, RequestId, Used};

/// A queue to a [`Backend`] in the same process. The backend executes a request when the driver
/// polls for its answer, so the host is never slower than its guest.
#[derive(Debug)]
pub struct Loopback<B, T> {
    backend: Backend<B, T>,
    /// Available requests. The device knows of the first `kicked` of them.
    available: VecDeque<(RequestId, Vec<u8>)>,
    kicked: usize,
    /// Buffers of answered requests, for reuse.
    spare: Vec<Vec<u8>>,
    capacity: usize,
    next: u32,
}

impl<B: GuestBacking, T: IoTables> Loopback<B, T> {
    /// Creates a queue of `capacity` chains to `backend`.
    pub fn new(backend: Backend<B, T>, capacity: u16) -> Self {
        Self {
            backend,
            available: VecDeque::new(),
            kicked: 0,
            spare: Vec::new(),
            capacity: usize::from(capacity),
            next: 0,
        }
    }

    /// Returns the backend that executes the requests.
    pub const fn backend(&mut self) -> &mut Backend<B, T> {
        &mut self.backend
    }
}

impl<B: GuestBacking, T: IoTables> Queue for Loopback<B, T> {
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull> {
        if self.available.len() >= self.capacity {
            return Err(QueueFull);
        }
        let id = RequestId(self.next);
        self.next = self.next.wrapping_add(1);
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(request);
        self.available.push_back((id, bytes));
        Ok(id)
    }

    fn kick(&mut self) {
        self.kicked = self.available.len();
    }

    fn poll(&mut self) -> Option<Used> {
        self.kicked = self.kicked.checked_sub(1)?;
        let (id, request) = self.available.pop_front()?;
        let status = self.backend.handle(&request).raw();
        self.spare.push(request);
        if self.kicked == 0 {
            self.backend.maintain();
        }
        Some(Used { id, status })
    }
}
