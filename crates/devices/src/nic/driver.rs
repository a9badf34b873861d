//! The driver of a network adapter: its rings, its pools, open and close.
//!
//! The driver does not trust what the device writes into shared memory. It validates each
//! completion; an invalid one stops the ring with a typed error.

use ringfence_types::{Direction, PhysAddr, PhysRange};

use super::device::QueueDir;
use super::error::NicError;
use super::frame::{FRAME_HEADER_BYTES, MAX_BODY_BYTES};
use super::layout::{DescriptorSegment, FrameStatus, NicCompletion, SEGMENT_BYTES};
use super::profile::{Fill, NicProfile, Rings};
use super::tx_ring::{TxInfo, TxRing};
use crate::api::{ApiError, DeviceRing, DmaApi, MapFailure};
use crate::buffer::PoolError;
use crate::returns::OrderedCompletions;
use crate::ring::{CompletionFault, OrderedRing, RawCompletion, RingAddresses};
use crate::{Buffer, Pool};

/// Maximum number of buffers per packet.
pub(super) const MAX_BUFFERS: usize = 2;

/// Size of a header buffer: the headers, rounded up to a cache line.
const HEADER_SLOT: u64 = 64;
/// Size of a data buffer and of a whole-frame buffer. Two share a page, as in stock drivers.
const DATA_SLOT: u64 = 2048;

/// A buffer that the device owns.
#[derive(Debug)]
pub(super) struct PendingDescriptor<H> {
    pub(super) handle: H,
    pub(super) at: PhysAddr,
    pub(super) bytes: u32,
}

/// The buffers of one descriptor.
pub(super) type Packet<H> = [Option<PendingDescriptor<H>>; MAX_BUFFERS];

/// A receive ring and the descriptor being armed. A stalled map continues there.
#[derive(Debug)]
pub(super) struct ReceiveRing<H> {
    pub(super) ring: OrderedRing<Packet<H>>,
    pub(super) arming: Packet<H>,
    pub(super) segments: [DescriptorSegment; MAX_BUFFERS],
    pub(super) armed: usize,
}

/// Counters of a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverStats {
    /// Successful maps of a buffer.
    pub maps: u64,
    /// Unmaps of a buffer, including failed ones.
    pub unmaps: u64,
    /// Frames sent in their descriptor.
    pub inlined: u64,
    /// Bursts ended, including those whose invalidation failed.
    pub bursts: u64,
    /// Maps deferred because the layer had no free entry.
    pub stalls: u64,
    /// Maps deferred because the pool was empty or the ring full.
    pub starved: u64,
    /// Completions with a status other than [`FrameStatus::Done`].
    pub failed: u64,
}

/// Buffers of a port. With one buffer per packet, the header pool is absent.
#[derive(Debug)]
pub(super) struct Pools {
    header: Option<Pool>,
    data: Pool,
}

impl Pools {
    /// Returns the pool of buffer `part_index` of a packet.
    #[inline]
    pub(super) fn of(&mut self, part_index: usize) -> &mut Pool {
        match &mut self.header {
            Some(header) if part_index == 0 => header,
            _ => &mut self.data,
        }
    }

    #[inline]
    pub(super) fn return_buffers(&mut self, buffer: Buffer) -> Result<(), NicError> {
        let buffer = match &mut self.header {
            Some(header) => match header.free(buffer) {
                Ok(()) => return Ok(()),
                Err(buffer) => buffer,
            },
            None => buffer,
        };
        self.data
            .free(buffer)
            .map_err(|buffer| NicError::ForeignBuffer { at: buffer.start() })
    }

    fn out(&self) -> usize {
        self.header.as_ref().map_or(0, Pool::in_use) + self.data.in_use()
    }
}

/// The driver of one port. `H` is the API's handle of a mapping.
#[derive(Debug)]
pub struct Nic<H> {
    pub(super) profile: NicProfile,
    pub(super) pools: Pools,
    pub(super) receive: Vec<ReceiveRing<H>>,
    pub(super) transmit: Vec<TxRing<H>>,
    /// Received packets, with the bytes of the frame in each buffer.
    pub(super) arrivals: OrderedCompletions<[u32; MAX_BUFFERS], [Option<Buffer>; MAX_BUFFERS]>,
    pub(super) stats: DriverStats,
    pub(super) scratch: Vec<u8>,
}

impl<H> Nic<H> {
    /// Returns the buffer memory that a port of `profile` needs, in bytes. It covers full rings and
    /// two bursts of packets, because the layer withholds buffers while their successors are
    /// mapped.
    pub fn buffer_bytes(profile: &NicProfile, burst: u32) -> u64 {
        let packets = profile.live_at_most() / profile.buffers_per_packet as u64
            + 2 * u64::from(burst)
            + u64::from(profile.receive.count);
        let slots = if profile.buffers_per_packet > 1 {
            HEADER_SLOT + DATA_SLOT
        } else {
            DATA_SLOT
        };
        // A page between the pools, so that headers and data share no page.
        packets * slots + 4096
    }

    /// Opens a port: allocates its rings and fills the receive rings. Buffers come from `memory`,
    /// which must be page-aligned, have [`buffer_bytes`](Self::buffer_bytes) bytes, and have no
    /// other user.
    ///
    /// # Errors
    /// Nothing stays allocated.
    pub fn open<A: DmaApi<Handle = H>>(
        profile: NicProfile,
        memory: PhysRange,
        api: &mut A,
    ) -> Result<Self, NicError> {
        let mut nic = Self {
            profile,
            pools: pools(&profile, memory)?,
            receive: Vec::new(),
            transmit: Vec::new(),
            arrivals: OrderedCompletions::default(),
            stats: DriverStats::default(),
            scratch: Vec::new(),
        };
        match nic.allocate(api) {
            Ok(()) => Ok(nic),
            Err(error) => {
                nic.close(api)?;
                Err(error)
            }
        }
    }

    fn allocate<A: DmaApi<Handle = H>>(&mut self, api: &mut A) -> Result<(), NicError> {
        let Rings { count, size } = self.profile.transmit;
        for queue in 0..count {
            let ring = ring(QueueDir::Tx, queue);
            let entry_bytes = self.profile.tx_entry_bytes();
            self.transmit.push(TxRing::new(OrderedRing::alloc(
                api,
                ring,
                size,
                entry_bytes,
            )?));
        }
        let Rings { count, size } = self.profile.receive;
        let entry_bytes = (self.profile.buffers_per_packet * SEGMENT_BYTES) as u32;
        for queue in 0..count {
            let ring = ring(QueueDir::Rx, queue);
            self.receive.push(ReceiveRing {
                ring: OrderedRing::alloc(api, ring, size, entry_bytes)?,
                arming: [const { None }; MAX_BUFFERS],
                segments: [DescriptorSegment::NONE; MAX_BUFFERS],
                armed: 0,
            });
            if self.profile.fill == Fill::RingByRing {
                self.refill(api, queue)?;
            }
        }
        if self.profile.fill == Fill::InTurns {
            self.fill_in_turns(api)?;
        }
        Ok(())
    }

    /// Returns every ring with the values for the device's base registers.
    pub fn rings(&self) -> impl Iterator<Item = (QueueDir, u16, RingAddresses)> {
        let receive = self.receive.iter().map(|receive| receive.ring.addresses());
        let transmit = self
            .transmit
            .iter()
            .map(|transmit| transmit.ring.addresses());
        let numbered = |dir| move |(index, at): (usize, RingAddresses)| (dir, index as u16, at);
        receive
            .enumerate()
            .map(numbered(QueueDir::Rx))
            .chain(transmit.enumerate().map(numbered(QueueDir::Tx)))
    }

    /// Makes the mappings of a ring visible to the hardware. Returns the value for its tail
    /// register; `None` if the ring does not exist. Makes no call if the ring has no new mapping,
    /// because all new frames are inlined.
    #[inline]
    pub fn sync_map<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        dir: QueueDir,
        index: u16,
    ) -> Option<u32> {
        let queue = usize::from(index);
        let tail = match dir {
            QueueDir::Rx => self.receive.get(queue)?.ring.tail(),
            QueueDir::Tx => {
                let transmit = self.transmit.get_mut(queue)?;
                if !core::mem::take(&mut transmit.unsynced) {
                    return Some(transmit.ring.tail());
                }
                transmit.ring.tail()
            }
        };
        api.sync_map(ring(dir, index));
        Some(tail)
    }

    /// Returns the counters.
    pub fn stats(&self) -> &DriverStats {
        &self.stats
    }

    /// Returns the profile.
    pub fn profile(&self) -> &NicProfile {
        &self.profile
    }

    /// Returns the number of buffers outside their pool: mapped, withheld, or lost.
    pub fn buffers_in_use(&self) -> usize {
        self.pools.out()
    }

    /// Maps buffer `part_index` of a descriptor; the device may access its first `bytes` bytes.
    /// `None` if the layer has no free entry now.
    #[inline]
    pub(super) fn map<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        part_index: usize,
        buffer: Buffer,
        bytes: u32,
    ) -> Result<Option<(PendingDescriptor<H>, DescriptorSegment)>, NicError> {
        let at = buffer.start();
        let Some(memory) = self.pools.of(part_index).range(&buffer, u64::from(bytes)) else {
            self.pools.return_buffers(buffer)?;
            return Err(NicError::FrameLength {
                bytes: bytes as usize,
            });
        };
        match api.map(ring, buffer, memory) {
            Ok(mapped) => {
                self.stats.maps += 1;
                let held = PendingDescriptor {
                    handle: mapped.handle,
                    at,
                    bytes,
                };
                let segment = DescriptorSegment {
                    iova: mapped.iova,
                    bytes,
                };
                Ok(Some((held, segment)))
            }
            Err(refused) => {
                self.pools.return_buffers(refused.buffer)?;
                match refused.failure {
                    MapFailure::Busy => {
                        self.stats.stalls += 1;
                        Ok(None)
                    }
                    MapFailure::NoSuchRing => Err(ApiError::NoSuchRing(ring).into()),
                    MapFailure::Failed(error) => Err(ApiError::Map(error).into()),
                }
            }
        }
    }

    /// Unmaps all buffers of `packet`. Buffers that are returned at once go to their pools.
    pub(super) fn release<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        packet: Packet<H>,
    ) -> Result<(), NicError> {
        let mut result = Ok(());
        for held in packet.into_iter().flatten() {
            self.stats.unmaps += 1;
            let done = match api.unmap(ring, held.handle) {
                Ok(Some(buffer)) => self.pools.return_buffers(buffer),
                Ok(None) => Ok(()),
                Err(error) => Err(error.into()),
            };
            result = result.and(done);
        }
        result
    }

    /// Closes the port, whose device must have been reset: unmaps everything and frees the rings.
    /// Continues after errors.
    ///
    /// # Errors
    /// Returns the first error. The buffers concerned are lost; all others are returned.
    pub fn close<A: DmaApi<Handle = H>>(mut self, api: &mut A) -> Result<(), NicError> {
        let mut result = Ok(());
        let mut freed = Ok(());
        for mut receive in core::mem::take(&mut self.receive) {
            let ring = receive.ring.ring();
            let mut packets = Vec::new();
            receive.ring.drain(|packet| packets.push(packet));
            packets.push(receive.arming);
            for packet in packets {
                result = result.and(self.release(api, ring, packet));
            }
            result = result.and(self.end_last_burst(api, ring));
            freed = freed.and(receive.ring.free(api));
        }
        for mut transmit in core::mem::take(&mut self.transmit) {
            let ring = transmit.ring.ring();
            let mut sent = Vec::new();
            transmit.ring.drain(|info| sent.push(info));
            for info in sent {
                if let TxInfo::Mapped(packet) = info {
                    result = result.and(self.release(api, ring, packet));
                }
            }
            result = result.and(self.end_last_burst(api, ring));
            freed = freed.and(transmit.ring.free(api));
        }
        let mut given = Ok(());
        let pools = &mut self.pools;
        self.arrivals
            .abandon(|buffer| given = given.and(pools.return_buffers(buffer)));
        let lost = match self.pools.out() {
            0 => Ok(()),
            buffers => Err(NicError::Lost { buffers }),
        };
        result
            .and(freed.map_err(NicError::from))
            .and(given)
            .and(lost)
    }

    /// Ends a burst. Withheld buffers of received packets go to their packets, all others to their
    /// pools.
    pub(super) fn end_burst<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
    ) -> Result<(), NicError> {
        let (arrivals, pools) = (&mut self.arrivals, &mut self.pools);
        let mut given = Ok(());
        let ended = api.end_burst(ring, |buffer| {
            let done = match ring.direction {
                Direction::FromDevice => match arrivals.released(buffer) {
                    Ok(()) => Ok(()),
                    Err(buffer) => pools.return_buffers(buffer),
                },
                Direction::ToDevice | Direction::Bidirectional => pools.return_buffers(buffer),
            };
            given = given.and(done);
        });
        self.stats.bursts += 1;
        ended?;
        given
    }
}

impl<H> Nic<H> {
    /// Ends the last burst of a ring. Retries a failed invalidation once, because the failure may
    /// be a full queue.
    fn end_last_burst<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
    ) -> Result<(), NicError> {
        self.end_burst(api, ring)
            .or_else(|_| self.end_burst(api, ring))
    }
}

/// Creates the pools inside `memory`.
fn pools(profile: &NicProfile, memory: PhysRange) -> Result<Pools, NicError> {
    if profile.buffers_per_packet < MAX_BUFFERS {
        let data = Pool::new(memory, DATA_SLOT).map_err(NicError::Pool)?;
        let data = data.with_order(profile.reuse);
        return Ok(Pools { header: None, data });
    }
    // The same number of headers and data buffers.
    let error = NicError::Pool(PoolError {
        region: memory,
        slot_bytes: HEADER_SLOT + DATA_SLOT,
    });
    let packets = memory.bytes().saturating_sub(4096) / (HEADER_SLOT + DATA_SLOT);
    let header = PhysRange::new(memory.start(), packets * HEADER_SLOT).ok_or(error)?;
    let data_offset = (packets * HEADER_SLOT).next_multiple_of(4096);
    let data = PhysRange::new(
        memory.start().wrapping_add(data_offset),
        packets * DATA_SLOT,
    );
    let data = data.filter(|data| memory.contains(data)).ok_or(error)?;
    let pool = |memory, slot_bytes| {
        let pool = Pool::new(memory, slot_bytes).map_err(NicError::Pool)?;
        Ok::<_, NicError>(pool.with_order(profile.reuse))
    };
    Ok(Pools {
        header: Some(pool(header, HEADER_SLOT)?),
        data: pool(data, DATA_SLOT)?,
    })
}

/// Returns the API's ring of a queue.
pub(super) const fn ring(dir: QueueDir, queue: u16) -> DeviceRing {
    DeviceRing {
        queue,
        direction: match dir {
            QueueDir::Rx => Direction::FromDevice,
            QueueDir::Tx => Direction::ToDevice,
        },
    }
}

/// Returns the length of buffer `part_index` in a receive descriptor.
pub(super) const fn offered(profile: &NicProfile, part_index: usize) -> u32 {
    let bytes = if profile.buffers_per_packet < MAX_BUFFERS {
        FRAME_HEADER_BYTES + MAX_BODY_BYTES
    } else if part_index == 0 {
        FRAME_HEADER_BYTES
    } else {
        MAX_BODY_BYTES
    };
    bytes as u32
}

/// Returns the lengths of a packet's buffers in bytes; 0 for an absent one.
#[inline]
pub(super) fn lengths<H>(packet: &Packet<H>) -> [u32; MAX_BUFFERS] {
    packet
        .each_ref()
        .map(|held| held.as_ref().map_or(0, |held| held.bytes))
}

/// Validates a completion against the driver's record of the descriptor, whose parts are at most
/// `lengths` bytes long.
#[inline]
pub(super) fn check(
    raw: &RawCompletion,
    head: u32,
    lengths: [u32; MAX_BUFFERS],
) -> Result<(NicCompletion, FrameStatus), CompletionFault> {
    let claim = NicCompletion::decode(raw);
    if claim.descriptor != head {
        return Err(CompletionFault::OutOfOrder {
            found: claim.descriptor,
            oldest: head,
        });
    }
    let status =
        FrameStatus::from_raw(claim.status).ok_or(CompletionFault::Status(claim.status))?;
    let [first, rest] = lengths;
    let too_long = |found, at_most| Err(CompletionFault::Length { found, at_most });
    let Some(second) = claim.bytes.checked_sub(claim.first) else {
        return too_long(claim.first, claim.bytes);
    };
    if claim.first > first {
        return too_long(claim.first, first);
    }
    if second > rest {
        return too_long(second, rest);
    }
    Ok((claim, status))
}
