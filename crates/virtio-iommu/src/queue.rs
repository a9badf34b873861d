//! The two queues of the device over rust-vmm's `virtio-queue`: chains to bytes, and bytes to used
//! buffers.

mod region_cache;

use alloc::vec::Vec;
use core::fmt;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use self::region_cache::RegionCache;
use crate::spec::{FAULT_BYTES, MAX_REQUEST_BYTES};
use crate::{Device, RequestOutcome, Sink, SinkError};

/// Requests handled before their sink's readers are waited for and their buffers are returned.
const BATCH: usize = 32;

/// Serves the request queue and the event queue of one device. It holds nothing but space to work
/// in.
#[derive(Debug, Default)]
pub struct Queues {
    reply: Vec<u8>,
    /// Device-writable parts of the chain in hand.
    writable: Vec<(GuestAddress, usize)>,
    /// Heads and used lengths of the batch in hand.
    done: Vec<(u16, u32)>,
}

/// What was done to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueProgress {
    /// Buffers that were returned.
    pub buffers: usize,
    /// Whether the driver wants to be notified of them.
    pub notify: bool,
    /// As many were served as the queue is long, and there may be others: serve it again, after
    /// whoever else waits. A driver that lets answers fall on the ring's index never runs out of
    /// requests.
    pub more: bool,
}

/// Why a queue is not served any further. Buffers returned before stay returned.
#[derive(Debug)]
pub enum ServeError {
    /// The queue's rings are not what they have to be, or not in memory: the device needs a reset
    /// (virtio 1.3, section 2.1.2).
    Queue(virtio_queue::Error),
    /// The sink cannot begin. The requests stay in the queue: serve it again from a thread that
    /// holds no pin.
    Sink(SinkError),
    /// The sink could not commit: requests were done, what they took away may still be in reach,
    /// and the driver gets no answer to them. The device needs a reset, as if the queue were
    /// broken.
    CommitFailed(SinkError),
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue(error) => write!(f, "the queue: {error}"),
            Self::Sink(error) => write!(f, "the sink: {error}"),
            Self::CommitFailed(error) => write!(f, "the sink, at the end: {error}"),
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
    /// Handles the requests that are available, at most as many as the queue is long, in batches,
    /// and returns each buffer when its batch is complete: the driver spins on the used ring, and
    /// what it unmapped is out of reach when it sees the answer. `seen` is shown every request and
    /// what became of it, before the answer is published.
    ///
    /// A chain that cannot be read, that has more descriptors than the queue, or whose reply cannot
    /// be written, is returned with used length 0.
    ///
    /// Whoever offers `VIRTIO_F_EVENT_IDX` asks `Queue::enable_notification` afterwards, as always
    /// with that crate: what is written there says when the next notification is wanted, and only
    /// the caller knows whether one is.
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
            // Behind another IOMMU an address is only good for the access it was asked for.
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
            // The places first: whatever is asked of the ring must have one.
            let room = BATCH.min(most - buffers);
            let mut chains = queue.iter(memory)?;
            while self.done.len() < room
                && let Some(chain) = chains.next()
            {
                let head = chain.head_index();
                let reply_bytes = batch.max_reply_bytes();
                let mut request = [0; MAX_REQUEST_BYTES];
                let (read, given) = self.gather(chain, memory, &mut request, reply_bytes, most);
                let request = request.get(..read).unwrap_or_default();
                self.reply.resize(reply_bytes, 0);
                let reply = self.reply.get_mut(..given).unwrap_or_default();
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

    /// Hands waiting fault reports to the driver, one a buffer, as long as there are both. A buffer
    /// that is too small goes back with used length 0.
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
            let (_, given) = self.gather(chain, memory, &mut [], FAULT_BYTES, longest);
            self.reply.resize(given.max(self.reply.len()), 0);
            let buffer = self.reply.get_mut(..given).unwrap_or_default();
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

    /// Reads the device-readable part of `chain` into `request` and notes where the device-writable
    /// one is: how many bytes were read, and how many can be written, at most `most`. If a part
    /// cannot be read, or the chain has more than `longest` descriptors, there is nothing to write
    /// either. (An indirect table may hold 65536 descriptors of no bytes: virtio 1.3, section
    /// 2.7.5.3.1 forbids what is longer than the queue.)
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
        let mut given = 0;
        for (before, descriptor) in chain.enumerate() {
            if before >= longest {
                return (0, 0);
            }
            let bytes = descriptor.len() as usize;
            if descriptor.is_write_only() {
                let bytes = bytes.min(most.saturating_sub(given));
                if bytes > 0 {
                    self.writable.push((descriptor.addr(), bytes));
                    given += bytes;
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
        (read, given)
    }

    /// Writes the first `used` bytes of the reply where the chain in hand wants them: the used
    /// length.
    #[inline]
    fn scatter<M: GuestMemory>(&self, memory: &M, used: usize) -> u32 {
        let mut rest = self.reply.get(..used).unwrap_or_default();
        for &(at, bytes) in &self.writable {
            let (now, later) = rest.split_at(bytes.min(rest.len()));
            if !now.is_empty() && memory.write_slice(now, at).is_err() {
                return 0;
            }
            rest = later;
        }
        u32::try_from(used).unwrap_or(0)
    }
}
