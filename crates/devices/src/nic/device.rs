//! The device side of a network adapter. It fetches descriptors that the doorbell offers, moves
//! bytes as they direct, writes completions, and interrupts. All its accesses are translated,
//! including those to descriptors (rIOMMU Fig. 5).

use ringfence_types::RequesterId;

use super::frame::{FRAME_HEADER_BYTES, MAX_BODY_BYTES};
use super::layout::{
    DESCRIPTOR_BYTES, DescriptorSegment, FrameStatus, NicCompletion, SEGMENT_BYTES,
};
use super::profile::NicProfile;
use crate::ring::{Coalesce, CompletionWriter, RingAddresses, RingBase};
use crate::{DmaError, Transfer};

/// Direction of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueueDir {
    /// From the wire to memory.
    Rx,
    /// From memory to the wire.
    Tx,
}

/// Result of a frame from the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reception {
    /// A descriptor was used for the frame. Its completion has the status.
    Taken,
    /// No descriptor is available. The wire holds the frame back.
    NoDescriptor,
}

/// Counters of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Received frames that were completed.
    pub received: u64,
    /// Transmitted frames that were completed.
    pub transmitted: u64,
    /// Frames with a blocked access to a buffer.
    pub stopped: u64,
    /// Frames that did not fit their buffers.
    pub misfits: u64,
    /// Doorbells that offered more descriptors than the ring holds; ignored.
    pub bad_doorbells: u64,
    /// Interrupts taken that announced at least one completion.
    pub interrupts: u64,
}

#[derive(Debug)]
struct DescriptorRing {
    descriptors: RingBase,
    completions: CompletionWriter,
    head: u32,
    tail: u32,
    coalesce: Coalesce,
}

/// A network adapter.
#[derive(Debug)]
pub struct NicDevice {
    id: RequesterId,
    segments: usize,
    burst: u32,
    receive: Vec<Option<DescriptorRing>>,
    transmit: Vec<Option<DescriptorRing>>,
    stats: DeviceStats,
    frame: Vec<u8>,
}

/// Maximum number of segments per descriptor.
const MAX_SEGMENTS: usize = 2;
/// Size of the device's internal buffer.
const FRAME_BYTES: usize = FRAME_HEADER_BYTES + MAX_BODY_BYTES;

impl NicDevice {
    /// Creates an adapter for descriptors of the driver of `profile`. It interrupts after `burst`
    /// completions of a ring.
    pub fn new(id: RequesterId, profile: &NicProfile, burst: u32) -> Self {
        let none = |count| (0..count).map(|_| None).collect();
        Self {
            id,
            segments: profile.buffers_per_packet.clamp(1, MAX_SEGMENTS),
            burst,
            receive: none(profile.receive.count),
            transmit: none(profile.transmit.count),
            stats: DeviceStats::default(),
            frame: Vec::new(),
        }
    }

    /// Returns the requester ID.
    pub fn id(&self) -> RequesterId {
        self.id
    }

    /// Returns the counters.
    pub fn stats(&self) -> &DeviceStats {
        &self.stats
    }

    #[inline]
    fn queue(&mut self, dir: QueueDir, index: u16) -> Option<&mut DescriptorRing> {
        let queues = match dir {
            QueueDir::Rx => &mut self.receive,
            QueueDir::Tx => &mut self.transmit,
        };
        queues.get_mut(usize::from(index))?.as_mut()
    }

    /// Writes the base and size registers of a ring, which starts empty. Ignores a ring that does
    /// not exist.
    pub fn program(&mut self, dir: QueueDir, index: u16, at: &RingAddresses) {
        let burst = self.burst;
        let queues = match dir {
            QueueDir::Rx => &mut self.receive,
            QueueDir::Tx => &mut self.transmit,
        };
        if let Some(slot) = queues.get_mut(usize::from(index)) {
            *slot = Some(DescriptorRing {
                descriptors: at.descriptors,
                completions: CompletionWriter::new(at.completions),
                head: 0,
                tail: 0,
                coalesce: Coalesce::new(burst),
            });
        }
    }

    /// Stops every ring: the device makes no access after this.
    pub fn reset(&mut self) {
        self.receive.fill_with(|| None);
        self.transmit.fill_with(|| None);
    }

    /// Writes the tail register of a ring. The tail is free-running.
    #[inline]
    pub fn doorbell(&mut self, dir: QueueDir, index: u16, tail: u32) {
        let mut bad = false;
        if let Some(queue) = self.queue(dir, index) {
            bad = tail.wrapping_sub(queue.head) > queue.descriptors.size.entries();
            if !bad {
                queue.tail = tail;
            }
        }
        self.stats.bad_doorbells += u64::from(bad);
    }

    /// Returns the number of a ring's completions since its last interrupt.
    #[inline]
    pub fn unannounced(&mut self, dir: QueueDir, index: u16) -> u32 {
        self.queue(dir, index)
            .map_or(0, |queue| queue.coalesce.unannounced())
    }

    /// Returns true if an interrupt of a ring is due.
    #[inline]
    pub fn interrupt_due(&mut self, dir: QueueDir, index: u16) -> bool {
        self.queue(dir, index)
            .is_some_and(|queue| queue.coalesce.due())
    }

    /// Takes the ring's interrupt, either due or by its timer. Returns the number of completions
    /// that it announces, possibly 0.
    #[inline]
    pub fn take_interrupt(&mut self, dir: QueueDir, index: u16) -> u32 {
        let announced = match self.queue(dir, index) {
            Some(queue) => queue.coalesce.acknowledge(),
            None => 0,
        };
        self.stats.interrupts += u64::from(announced > 0);
        announced
    }

    /// Puts every frame that a transmit ring offers onto `wire`. Returns the number of frames.
    ///
    /// # Errors
    /// The device could not fetch a descriptor or write a completion. The ring stops.
    pub fn transmit<T: Transfer>(
        &mut self,
        bus: &mut T,
        index: u16,
        mut wire: impl FnMut(&[u8]),
    ) -> Result<u32, DmaError> {
        let (id, segments) = (self.id, self.segments);
        let mut frame = core::mem::take(&mut self.frame);
        let mut stats = self.stats;
        let mut sent = 0;
        let result = (|| {
            let Some(queue) = self.queue(QueueDir::Tx, index) else {
                return Ok(());
            };
            while queue.head != queue.tail {
                let raw = queue.fetch(bus, id)?;
                let descriptor = segments_of(&raw);
                let status = match descriptor[0].inline_bytes() {
                    Some(bytes) => copy_inline(&raw, bytes, &mut frame),
                    None => gather(bus, id, &descriptor[..segments], &mut frame),
                };
                stats.transmitted += 1;
                stats.count(status);
                let (mut bytes, mut first) = (0, 0);
                if status == FrameStatus::Done {
                    bytes = frame.len() as u32;
                    first = descriptor[0].bytes.min(bytes);
                    wire(&frame);
                    sent += 1;
                }
                queue.complete(bus, id, bytes, first, status)?;
            }
            Ok(())
        })();
        self.frame = frame;
        self.stats = stats;
        result.map(|()| sent)
    }

    /// Receives a frame from the wire into the next descriptor of a receive ring. With two
    /// segments, the headers go into the first one.
    ///
    /// # Errors
    /// The device could not fetch a descriptor or write a completion. The ring stops and the frame
    /// is lost.
    pub fn receive<T: Transfer>(
        &mut self,
        bus: &mut T,
        index: u16,
        frame: &[u8],
    ) -> Result<Reception, DmaError> {
        let (id, segments) = (self.id, self.segments);
        let Some(queue) = self.queue(QueueDir::Rx, index) else {
            return Ok(Reception::NoDescriptor);
        };
        if queue.head == queue.tail {
            return Ok(Reception::NoDescriptor);
        }
        let descriptor = segments_of(&queue.fetch(bus, id)?);
        let split = if segments == 1 {
            frame.len()
        } else {
            frame.len().min(FRAME_HEADER_BYTES)
        };
        let (first, second) = frame.split_at(split);
        let status = scatter(bus, id, &descriptor, [first, second]);
        let (bytes, first) = match status {
            FrameStatus::Done => (frame.len() as u32, split as u32),
            FrameStatus::Stopped | FrameStatus::Size => (0, 0),
        };
        queue.complete(bus, id, bytes, first, status)?;
        self.stats.received += 1;
        self.stats.count(status);
        Ok(Reception::Taken)
    }
}

impl DeviceStats {
    #[inline]
    fn count(&mut self, status: FrameStatus) {
        match status {
            FrameStatus::Done => {}
            FrameStatus::Stopped => self.stopped += 1,
            FrameStatus::Size => self.misfits += 1,
        }
    }
}

impl DescriptorRing {
    #[inline]
    fn fetch<T: Transfer>(&self, bus: &mut T, id: RequesterId) -> Result<RawDescriptor, DmaError> {
        let mut raw = [0; DESCRIPTOR_BYTES];
        let bytes = (self.descriptors.entry_bytes as usize).min(DESCRIPTOR_BYTES);
        bus.read(id, self.descriptors.entry(self.head), &mut raw[..bytes])?;
        Ok(raw)
    }

    #[inline]
    fn complete<T: Transfer>(
        &mut self,
        bus: &mut T,
        id: RequesterId,
        bytes: u32,
        first: u32,
        status: FrameStatus,
    ) -> Result<(), DmaError> {
        let completion = NicCompletion {
            bytes,
            first,
            descriptor: self.head,
            status: status as u16,
        };
        self.completions.post(bus, id, completion.encode())?;
        self.head = self.head.wrapping_add(1);
        self.coalesce.completed();
        Ok(())
    }
}

/// A descriptor as it is in memory, with zeros after its end.
type RawDescriptor = [u8; DESCRIPTOR_BYTES];

fn segments_of(raw: &RawDescriptor) -> [DescriptorSegment; MAX_SEGMENTS] {
    let (segments, _) = raw.as_chunks::<SEGMENT_BYTES>();
    core::array::from_fn(|index| DescriptorSegment::decode(&segments[index]))
}

/// Copies the frame that a descriptor holds into `frame`.
fn copy_inline(raw: &RawDescriptor, bytes: u32, frame: &mut Vec<u8>) -> FrameStatus {
    frame.clear();
    match raw[SEGMENT_BYTES..].get(..bytes as usize) {
        Some(held) => {
            frame.extend_from_slice(held);
            FrameStatus::Done
        }
        None => FrameStatus::Size,
    }
}

/// Reads the segments of a descriptor into `frame`.
fn gather<T: Transfer>(
    bus: &mut T,
    id: RequesterId,
    segments: &[DescriptorSegment],
    frame: &mut Vec<u8>,
) -> FrameStatus {
    frame.clear();
    for segment in segments.iter().filter(|segment| segment.bytes > 0) {
        let start = frame.len();
        let end = start.saturating_add(segment.bytes as usize);
        if end > FRAME_BYTES {
            return FrameStatus::Size;
        }
        frame.resize(end, 0);
        if bus.read(id, segment.iova, &mut frame[start..]).is_err() {
            frame.clear();
            return FrameStatus::Stopped;
        }
    }
    FrameStatus::Done
}

/// Writes the parts of a frame into the segments of a descriptor.
fn scatter<T: Transfer>(
    bus: &mut T,
    id: RequesterId,
    segments: &[DescriptorSegment],
    parts: [&[u8]; MAX_SEGMENTS],
) -> FrameStatus {
    for (segment, part) in segments.iter().zip(parts) {
        if part.len() > segment.bytes as usize {
            return FrameStatus::Size;
        }
        if !part.is_empty() && bus.write(id, segment.iova, part).is_err() {
            return FrameStatus::Stopped;
        }
    }
    FrameStatus::Done
}
