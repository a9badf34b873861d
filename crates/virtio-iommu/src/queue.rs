//! The two queues of the device on rust-vmm's `virtio-queue`: reads chains and writes used buffers.

mod region_cache;

use alloc::vec::Vec;
use core::fmt;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use self::region_cache::RegionCache;
use crate::spec::{FAULT_BYTES, MAX_REQUEST_BYTES};
use crate::{Device, RequestOutcome, Sink, SinkError};

/// Maximum number of requests per batch of the sink.
const BATCH: usize = 32;

/// Serves the request queue and the event queue of a device. Contains only scratch buffers.
#[derive(Debug, Default)]
pub struct Queues {
    reply: Vec<u8>,
    /// Device-writable parts of the current chain.
    writable: Vec<(GuestAddress, usize)>,
    /// Heads and used lengths of the current batch.
    done: Vec<(u16, u32)>,
}

/// Progress of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueProgress {
    /// Number of buffers returned.
    pub buffers: usize,
    /// True if the driver wants a notification of them.
    pub notify: bool,
    /// True if the call served as many buffers as the queue is long, and more may be available.
    /// Serve the queue again after other work. A driver whose replies overwrite the ring's index
    /// never runs out of requests.
    pub more: bool,
}

/// Reason why a queue cannot be served further. Buffers returned before stay returned.
#[derive(Debug)]
pub enum ServeError {
    /// The queue's rings are invalid or outside memory. The device needs a reset (virtio 1.3,
    /// section 2.1.2).
    Queue(virtio_queue::Error),
    /// The sink cannot begin. The requests stay in the queue. Serve it again from a thread that
    /// holds no pin.
    Sink(SinkError),
    /// The sink could not commit. The device executed the requests, but endpoints may still access
    /// unmapped addresses. The driver gets no reply. The device needs a reset, as for a broken
    /// queue.
    CommitFailed(SinkError),
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue(error) => write!(f, "the queue: {error}"),
            Self::Sink(error) => write!(f, "the sink: {error}"),
            Self::CommitFailed(error) => write!(f, "commit of the batch failed: {error}"),
        }
    }
}

impl core::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Queue(error) => Some(error),
            Self::Sink(error) | Self::CommitFailed(error) => Some(error),
        }
    }
}

impl From<virtio_queue::Error> for ServeError {
    fn from(error: virtio_queue::Error) -> Self {
        Self::Queue(error)
    }
}

impl Queues {
    /// Handles the available requests in batches, at most as many as the queue is long. Returns
    /// each buffer when its batch is complete. The driver may spin on the used ring: when it sees
    /// the reply, the unmapped range is inaccessible. Calls `seen` with each request and its
    /// outcome, before the reply is published.
    ///
    /// Returns a chain with used length 0 if it is unreadable, has more descriptors than the queue,
    /// or if its reply cannot be written.
    ///
    /// If the device offers `VIRTIO_F_EVENT_IDX`, call `Queue::enable_notification` afterwards, as
    /// usual with that crate. Only the caller knows whether it wants a notification.
    ///
    /// # Errors
    /// The queue is broken, or the sink cannot begin or commit.
    pub fn serve_requests<S: Sink, M: GuestMemory>(
        &mut self,
        device: &mut Device<S>,
        queue: &mut Queue,
        memory: &M,
        seen: impl FnMut(&[u8], &RequestOutcome),
    ) -> Result<QueueProgress, ServeError> {
        match memory.physical_memory() {
            Some(physical) => self.serve(device, queue, &RegionCache::new(physical), seen),
            // Behind another IOMMU, an address is valid only for the access that requested it.
            None => self.serve(device, queue, memory, seen),
        }
    }

    fn serve<S: Sink, M: GuestMemory>(
        &mut self,
        device: &mut Device<S>,
        queue: &mut Queue,
        memory: &M,
        mut seen: impl FnMut(&[u8], &RequestOutcome),
    ) -> Result<QueueProgress, ServeError> {
        let mut buffers = 0;
        let most = usize::from(queue.size());
        while buffers < most {
            self.done.clear();
            let mut batch = device.batch().map_err(ServeError::Sink)?;
            // Reserve room before taking a chain from the ring.
            let room = BATCH.min(most - buffers);
            let mut chains = queue.iter(memory)?;
            while self.done.len() < room
                && let Some(chain) = chains.next()
            {
                let head = chain.head_index();
                let reply_bytes = batch.max_reply_bytes();
                let mut request = [0; MAX_REQUEST_BYTES];
                let (read, writable_bytes) =
                    self.gather(chain, memory, &mut request, reply_bytes, most);
                let request = request.get(..read).unwrap_or_default();
                self.reply.resize(reply_bytes, 0);
                let reply = self.reply.get_mut(..writable_bytes).unwrap_or_default();
                let handled = batch.handle(request, reply);
                seen(request, &handled);
                let used = self.scatter(memory, handled.used);
                self.done.push((head, used));
            }
            batch.commit().map_err(ServeError::CommitFailed)?;
            for &(head, used) in &self.done {
                queue.add_used(memory, head, used)?;
            }
            buffers += self.done.len();
            if self.done.len() < BATCH {
                break;
            }
        }
        Self::served(queue, memory, buffers)
    }

    /// Writes waiting fault reports into the driver's buffers, one per buffer. Returns a buffer
    /// that is too small with used length 0.
    ///
    /// # Errors
    /// The queue is broken.
    pub fn serve_events<S: Sink, M: GuestMemory>(
        &mut self,
        device: &mut Device<S>,
        queue: &mut Queue,
        memory: &M,
    ) -> Result<QueueProgress, ServeError> {
        let longest = usize::from(queue.size());
        let mut buffers = 0;
        while device.events_waiting() > 0 {
            let Some(chain) = queue.iter(memory)?.next() else {
                break;
            };
            let head = chain.head_index();
            let (_, writable_bytes) = self.gather(chain, memory, &mut [], FAULT_BYTES, longest);
            self.reply.resize(writable_bytes.max(self.reply.len()), 0);
            let buffer = self.reply.get_mut(..writable_bytes).unwrap_or_default();
            let used = device.next_event(buffer).ok().flatten().unwrap_or(0);
            let used = self.scatter(memory, used);
            queue.add_used(memory, head, used)?;
            buffers += 1;
        }
        Self::served(queue, memory, buffers)
    }

    fn served<M: GuestMemory>(
        queue: &mut Queue,
        memory: &M,
        buffers: usize,
    ) -> Result<QueueProgress, ServeError> {
        let notify = buffers > 0 && queue.needs_notification(memory)?;
        let more = buffers >= usize::from(queue.size());
        Ok(QueueProgress {
            buffers,
            notify,
            more,
        })
    }

    /// Reads the device-readable part of `chain` into `request` and records the device-writable
    /// parts. Returns the number of bytes read and of bytes writable, at most `most`. Nothing is
    /// writable if a part is unreadable or if the chain has more than `longest` descriptors. (An
    /// indirect table may hold 65536 empty descriptors; virtio 1.3, section 2.7.5.3.1 forbids
    /// chains longer than the queue.)
    #[inline]
    fn gather<'m, M: GuestMemory>(
        &mut self,
        chain: virtio_queue::DescriptorChain<&'m M>,
        memory: &'m M,
        request: &mut [u8],
        most: usize,
        longest: usize,
    ) -> (usize, usize) {
        self.writable.clear();
        let mut read = 0;
        let mut writable_bytes = 0;
        for (before, descriptor) in chain.enumerate() {
            if before >= longest {
                return (0, 0);
            }
            let bytes = descriptor.len() as usize;
            if descriptor.is_write_only() {
                let bytes = bytes.min(most.saturating_sub(writable_bytes));
                if bytes > 0 {
                    self.writable.push((descriptor.addr(), bytes));
                    writable_bytes += bytes;
                }
            } else if let Some(space) = request.get_mut(read..) {
                let bytes = bytes.min(space.len());
                let space = space.get_mut(..bytes).unwrap_or_default();
                if memory.read_slice(space, descriptor.addr()).is_err() {
                    return (0, 0);
                }
                read += bytes;
            }
        }
        (read, writable_bytes)
    }

    /// Writes the first `used` bytes of the reply to the current chain. Returns the used length.
    #[inline]
    fn scatter<M: GuestMemory>(&self, memory: &M, used: usize) -> u32 {
        let mut rest = self.reply.get(..used).unwrap_or_default();
        for &(at, bytes) in &self.writable {
            let (part, tail) = rest.split_at(bytes.min(rest.len()));
            if !part.is_empty() && memory.write_slice(part, at).is_err() {
                return 0;
            }
            rest = tail;
        }
        u32::try_from(used).unwrap_or(0)
    }
}
