//! Network device (virtio 1.2, section 5.1): queue pairs and a control queue to select their
//! number, no offloads.
//!
//! Frames pass through a buffer of the device, because sending and receiving are host system calls.
//! A frame that the link cannot accept stays in the driver's ring until the link has room.
//!
//! The device holds at most one received frame for which the driver has no buffer, and receives no
//! other until the driver adds one. So neither side can make the device hold more than a frame, and
//! neither loses frames if the other is slow. The device drops and counts frames of invalid length.

mod control;
mod net_state;
mod steering;

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;

use ringfence_vfio_user::fields::copy_part;
use virtio_queue::{Queue, QueueT};

use self::control::{Ack, COMMAND_BYTES};
pub use self::net_state::{NetState, PendingFrameState};
use self::steering::Steering;
pub use self::steering::{FLOWS, NO_PAIR};
use super::DeviceState;
use super::chain::Chain;
use super::quantum::{ChainOutcome, QuantumResult, serve_chains};
use super::{Device, PollSource, QueueBroken, ResetPending};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::link::{MAX_FRAME_BYTES, MIN_FRAME_BYTES, NetLink, ReceiveOutcome, SendOutcome};
use crate::saved_state::HandOverBlocker;

const F_MTU: u64 = 1 << 3;
const F_MAC: u64 = 1 << 5;
const F_CTRL_VQ: u64 = 1 << 17;
const F_MQ: u64 = 1 << 22;

/// Most queue pairs.
pub const MAX_PAIRS: u16 = 8;
const QUEUE_SIZE: u16 = 256;
/// Maximum payload. The driver then makes its buffers as long as the longest frame.
const MTU: u16 = 1500;
/// Size of `virtio_net_hdr_v1`, which precedes every frame (virtio 1.2, section 5.1.6).
const HEADER_BYTES: usize = 12;
/// Byte offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;
/// Most frames that the device drops in sequence before it does other work.
const MAX_DROPS_PER_QUANTUM: usize = 64;

/// A virtio network device over the link `L`.
#[derive(Debug)]
pub struct Net<L> {
    link: L,
    mac: [u8; 6],
    /// Offered queue pairs.
    offered: NonZeroU16,
    /// Queue pairs that the driver uses.
    active: NonZeroU16,
    /// Features that the driver accepted.
    features: u64,
    steering: Steering,
    sizes: Vec<u16>,
    /// Header and frame. The buffer of received frames has one byte more, to detect frames that are
    /// too long.
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// Received frame that the driver has not got yet.
    received: Option<ReceivedFrame>,
    /// True if the link may have a frame to receive.
    readable: bool,
    /// True if the link cannot accept another frame.
    full: bool,
    /// Queues with frames that the link did not accept.
    waiting: BTreeSet<usize>,
    counters: Arc<DeviceCounters>,
}

/// A received frame.
#[derive(Clone, Copy, Debug)]
struct ReceivedFrame {
    bytes: usize,
    /// Queue that the frame belongs to.
    queue: usize,
    /// True once delivery was attempted; the driver rings the doorbell when it adds a buffer.
    attempted: bool,
}

impl<L: NetLink> Net<L> {
    /// Creates a device with this MAC address and `pairs` queue pairs, at most [`MAX_PAIRS`].
    pub fn new(link: L, mac: [u8; 6], pairs: NonZeroU16, counters: Arc<DeviceCounters>) -> Self {
        let offered = pairs.min(NonZeroU16::new(MAX_PAIRS).unwrap_or(NonZeroU16::MIN));
        let queues = usize::from(offered.get()) * 2;
        // A device with a single pair needs no control queue.
        let control = usize::from(offered > NonZeroU16::MIN);
        Self {
            link,
            mac,
            offered,
            active: NonZeroU16::MIN,
            features: 0,
            steering: Steering::default(),
            sizes: vec![QUEUE_SIZE; queues + control],
            outgoing: vec![0; HEADER_BYTES + MAX_FRAME_BYTES],
            incoming: vec![0; HEADER_BYTES + MAX_FRAME_BYTES + 1],
            received: None,
            readable: true,
            full: false,
            waiting: BTreeSet::new(),
            counters,
        }
    }

    /// Returns the link.
    pub fn link(&mut self) -> &mut L {
        &mut self.link
    }

    /// Returns the index of the control queue, which follows all pairs that the driver can use.
    fn control_queue(&self) -> usize {
        if self.features & F_MQ != 0 {
            usize::from(self.offered.get()) * 2
        } else {
            2
        }
    }

    fn drop_frame(&self) {
        self.counters.frames_dropped.add(1);
    }

    /// Receives a frame and returns its queue. `None` if the link has no frame.
    fn receive(&mut self) -> Option<usize> {
        for _ in 0..MAX_DROPS_PER_QUANTUM {
            let buffer = self.incoming.get_mut(HEADER_BYTES..).unwrap_or_default();
            match self.link.receive(buffer) {
                ReceiveOutcome::Frame(bytes) => {
                    let frame = buffer.get(..bytes).unwrap_or(&[]);
                    let queue = usize::from(self.steering.pair(frame, self.active)) * 2;
                    self.received = Some(ReceivedFrame {
                        bytes,
                        queue,
                        attempted: true,
                    });
                    return Some(queue);
                }
                ReceiveOutcome::Dropped => self.drop_frame(),
                ReceiveOutcome::Nothing => {
                    self.readable = false;
                    return None;
                }
            }
        }
        None
    }

    /// Delivers the pending frame if it belongs to this queue and the queue has a buffer.
    fn deliver<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let Some(held) = self.received.filter(|held| held.queue == index) else {
            return Ok(QuantumResult::default());
        };
        // No flags, no offload, one buffer (virtio 1.2, section 5.1.6.4.1).
        let bytes = HEADER_BYTES + held.bytes;
        let (incoming, counters) = (&mut self.incoming, &self.counters);
        if let Some(header) = incoming.get_mut(..HEADER_BYTES) {
            header.fill(0);
            copy_part(&1u16.to_le_bytes(), 0, &mut header[NUM_BUFFERS..]);
        }
        let packet = incoming.get(..bytes).unwrap_or(&[]);
        let interrupt = dma.with(|memory| {
            // Check again after enabling notifications, for buffers that the driver added before.
            let mut found = Chain::next(queue, memory)?;
            if found.is_none() && queue.enable_notification(memory)? {
                found = Chain::next(queue, memory)?;
            }
            let Some(chain) = found else {
                return Ok(None);
            };
            let fits = !chain.malformed && chain.writable.bytes() >= bytes as u64;
            let written = fits && chain.writable.write(memory, packet).is_ok();
            if written {
                counters.frames_received.add(1);
                counters.bytes_read.add(held.bytes as u64);
            } else {
                counters.malformed.add(1);
                counters.frames_dropped.add(1);
            }
            let used = if written { bytes } else { 0 };
            queue.add_used(memory, chain.head, u32::try_from(used).unwrap_or(0))?;
            queue
                .needs_notification(memory)
                .map(Some)
                .map_err(QueueBroken)
        })?;
        if interrupt.is_some() {
            self.received = None;
        }
        Ok(QuantumResult {
            interrupt: interrupt.unwrap_or(false),
            more: false,
        })
    }

    /// Sends the frames that the driver has made available on this queue.
    fn transmit<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        if self.full {
            self.waiting.insert(index);
            return Ok(QuantumResult::default());
        }
        let counters = Arc::clone(&self.counters);
        serve_chains(queue, dma, &counters, |chain, dma| {
            let sending = match take_frame(chain, &mut self.outgoing, dma) {
                Some(frame) => {
                    // The cast is exact: there are at most `MAX_PAIRS` pairs.
                    self.steering.learn(frame, (index / 2) as u16);
                    counters.bytes_written.add(frame.len() as u64);
                    self.link.send(frame)
                }
                None => {
                    counters.malformed.add(1);
                    SendOutcome::Lost
                }
            };
            match sending {
                SendOutcome::Taken => counters.frames_sent.add(1),
                SendOutcome::Lost => counters.frames_dropped.add(1),
                SendOutcome::Full => {
                    self.full = true;
                    self.waiting.insert(index);
                    return ChainOutcome::Later;
                }
            }
            ChainOutcome::Used(0)
        })
    }

    fn control<A: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let counters = Arc::clone(&self.counters);
        serve_chains(queue, dma, &counters, |chain, dma| {
            ChainOutcome::Used(self.command(chain, dma))
        })
    }

    /// Executes one command. Returns the number of bytes written to its writable part.
    fn command<A: Dma>(&mut self, chain: &mut Chain, dma: &mut A) -> u32 {
        let Some(ack_at) = chain.writable.take_front(1) else {
            self.counters.malformed.add(1);
            return 0;
        };
        let mut command = [0; COMMAND_BYTES as usize];
        let whole = chain.readable.bytes() == u64::from(COMMAND_BYTES) && !chain.malformed;
        let read = whole
            && dma
                .with(|memory| chain.readable.read(memory, &mut command))
                .is_ok();
        let pairs = Some(&command)
            .filter(|_| read && self.features & F_MQ != 0)
            .and_then(|command| control::pairs(command, self.offered));
        let ack = match pairs {
            Some(pairs) => {
                self.active = pairs;
                self.steer_again();
                Ack::Ok
            }
            None => {
                self.counters.failed.add(1);
                Ack::Error
            }
        };
        let acknowledged = dma.with(|memory| ack_at.write(memory, &[ack as u8]));
        u32::from(acknowledged.is_ok())
    }

    /// Steers the pending frame again, because its pair may not be in use any more.
    fn steer_again(&mut self) {
        let Some(mut held) = self.received else {
            return;
        };
        let frame = self.held_frame(held);
        held.queue = usize::from(self.steering.pair(frame, self.active)) * 2;
        held.attempted = false;
        self.received = Some(held);
    }
}

/// Copies the frame of a chain to `buffer`. `None` if the frame's length is invalid or the header
/// requests an offload.
fn take_frame<'b, A: Dma>(
    chain: &mut Chain,
    buffer: &'b mut [u8],
    dma: &mut A,
) -> Option<&'b [u8]> {
    let bytes = usize::try_from(chain.readable.bytes()).ok()?;
    let frame = bytes.checked_sub(HEADER_BYTES)?;
    if chain.malformed || !(MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&frame) {
        return None;
    }
    let packet = buffer.get_mut(..bytes)?;
    dma.with(|memory| chain.readable.read(memory, packet))
        .ok()?;
    let (header, frame) = packet.split_at_checked(HEADER_BYTES)?;
    // Flags and GSO type; if both are 0, the other header fields have no meaning.
    header.starts_with(&[0, 0]).then_some(frame)
}

impl<L: NetLink> Device for Net<L> {
    const TYPE: u16 = 1;
    // Network controller, Ethernet.
    const CLASS: [u8; 3] = [0x02, 0x00, 0x00];

    fn features(&self) -> u64 {
        let several = self.offered > NonZeroU16::MIN;
        F_MTU | F_MAC | if several { F_CTRL_VQ | F_MQ } else { 0 }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = self.mac.to_vec();
        // The link status feature is not offered: the link is always up.
        config.extend([0; 2]);
        config.extend(self.offered.get().to_le_bytes());
        config.extend(MTU.to_le_bytes());
        copy_part(&config, offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.features = features;
    }

    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        self.state().map(|state| DeviceState::Net(Box::new(state)))
    }

    fn reset(&mut self) -> Result<(), ResetPending> {
        self.features = 0;
        self.active = NonZeroU16::MIN;
        self.steering = Steering::default();
        // Drop a frame that was received for the previous driver.
        if self.received.take().is_some() {
            self.drop_frame();
        }
        self.waiting.clear();
        self.full = false;
        self.readable = true;
        Ok(())
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        self.link.waits_for(self.received.is_none(), self.full)
    }

    fn on_ready(&mut self) {
        self.link.on_ready();
        self.full = false;
        self.readable = true;
    }

    fn busy(&self) -> bool {
        self.received.is_none() && self.readable
    }

    /// Frames that the link refused come first, then received ones.
    fn due(&mut self) -> Option<usize> {
        if !self.full
            && let Some(queue) = self.waiting.pop_first()
        {
            return Some(queue);
        }
        match &mut self.received {
            Some(held) if held.attempted => None,
            Some(held) => {
                held.attempted = true;
                Some(held.queue)
            }
            None if self.readable => self.receive(),
            None => None,
        }
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        if index == self.control_queue() && self.features & F_CTRL_VQ != 0 {
            self.control(queue, dma)
        } else if index / 2 >= usize::from(self.offered.get()) {
            Ok(QuantumResult::default())
        } else if index.is_multiple_of(2) {
            self.deliver(index, queue, dma)
        } else {
            self.transmit(index, queue, dma)
        }
    }
}
