//! A machine under a workload: driver and device of one port, and the clients at the other end of
//! the wire, which verify every frame.

use core::fmt;

use ringfence_types::{PhysRange, RequesterId};

use super::device::{DeviceStats, NicDevice, QueueDir, Reception};
use super::driver::{DriverStats, Nic};
use super::error::NicError;
use super::frame::{Frame, FrameError};
use super::profile::Profile;
use super::receive::Preemption;
use super::transmit::SendOutcome;
use crate::api::DmaApi;
use crate::seed::Seed;
use crate::workload::{ClientAction, Packet, Workload};
use crate::{DmaError, Transfer};

/// What a station runs on: the driver's DMA and the device's way to memory, one at a time, since
/// both lead through the same IOMMU.
pub trait Environment {
    /// The API's handle of a mapping.
    type Handle;
    /// DMA for the driver.
    type Api<'a>: DmaApi<Handle = Self::Handle>
    where
        Self: 'a;
    /// The device's way to memory.
    type Bus<'a>: Transfer
    where
        Self: 'a;

    /// DMA for the driver.
    fn api(&mut self) -> Self::Api<'_>;
    /// The device's way to memory.
    fn bus(&mut self) -> Self::Bus<'_>;
}

/// Why a workload did not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TestbedError {
    /// The driver's.
    Nic(NicError),
    /// The device could not reach its rings.
    Device(DmaError),
    /// A frame arrived otherwise than it was sent.
    Frame(FrameError),
    /// A frame of another connection or number arrived, or none where one was sent.
    Order {
        /// What arrived.
        found: Frame,
        /// The number expected in its flow, if the flow exists.
        expected: Option<u64>,
    },
    /// Nobody can go on: frames wait for descriptors, or the server for entries, that never come;
    /// or the clients are silent for good.
    Stuck,
}

impl fmt::Display for TestbedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nic(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Frame(error) => error.fmt(f),
            Self::Order { found, expected } => write!(
                f,
                "frame {} of flow {} where {expected:?} was expected",
                found.number, found.flow
            ),
            Self::Stuck => f.write_str("neither driver nor device can go on"),
        }
    }
}

impl core::error::Error for TestbedError {}

impl From<NicError> for TestbedError {
    fn from(error: NicError) -> Self {
        Self::Nic(error)
    }
}

impl From<DmaError> for TestbedError {
    fn from(error: DmaError) -> Self {
        Self::Device(error)
    }
}

impl From<FrameError> for TestbedError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

/// How often in a row the clients may let all timers run out before they count as gone.
const MAX_TIMER_ROUNDS: u32 = 1 << 16;

/// What a station counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TestbedStats {
    /// Frames received, each verified by the server.
    pub received: u64,
    /// Frames sent, each verified by its client.
    pub sent: u64,
    /// Bytes of data in all of them.
    pub bytes: u64,
    /// Receive loops inside which a transmit interrupt was taken.
    pub interferences: u64,
}

/// Numbers of the frames of each flow, one way.
#[derive(Debug, Default)]
struct Flows {
    sent: Vec<u64>,
    arrived: Vec<u64>,
}

/// Driver and device of one port.
#[derive(Debug)]
pub struct NicTestbed<H> {
    nic: Nic<H>,
    device: NicDevice,
    seed: Seed,
    stats: TestbedStats,
    inbound: Flows,
    outbound: Flows,
    frame: Vec<u8>,
    delivered: Vec<Packet>,
    /// Transmit rings whose interrupt is due.
    due: Vec<u16>,
}

impl<H> NicTestbed<H> {
    /// Opens a port of `profile` for `device`, with buffers in `memory` (see [`Nic::buffer_bytes`])
    /// and interrupts at `burst` completions.
    ///
    /// # Errors
    /// The driver's; nothing stays allocated.
    pub fn open<W: Environment<Handle = H>>(
        world: &mut W,
        device: RequesterId,
        profile: Profile,
        memory: PhysRange,
        burst: u32,
        seed: u64,
    ) -> Result<Self, TestbedError> {
        let nic = Nic::open(profile, memory, &mut world.api())?;
        let mut device = NicDevice::new(device, &profile, burst);
        for (lane, index, at) in nic.rings() {
            device.program(lane, index, &at);
        }
        let mut station = Self {
            nic,
            device,
            seed: Seed::new(seed),
            stats: TestbedStats::default(),
            inbound: Flows::default(),
            outbound: Flows::default(),
            frame: Vec::new(),
            delivered: Vec::new(),
            due: Vec::new(),
        };
        for queue in 0..profile.receive.count {
            station.ring_doorbell(world, QueueDir::Rx, queue);
        }
        Ok(station)
    }

    /// Stops the device and closes the port.
    ///
    /// # Errors
    /// The driver's; what it concerns is lost.
    pub fn close<W: Environment<Handle = H>>(mut self, world: &mut W) -> Result<(), TestbedError> {
        self.device.reset();
        Ok(self.nic.close(&mut world.api())?)
    }

    /// The counters.
    pub fn stats(&self) -> &TestbedStats {
        &self.stats
    }

    /// The driver's counters.
    pub fn driver_stats(&self) -> &DriverStats {
        self.nic.stats()
    }

    /// The device's counters.
    pub fn device_stats(&self) -> &DeviceStats {
        self.device.stats()
    }

    /// The driver.
    pub fn nic(&self) -> &Nic<H> {
        &self.nic
    }

    /// Runs `workload` until `packets` more frames have been received and sent together, or a few
    /// more: a receive loop that has begun is finished. What the server still has to send then
    /// stays with the workload; in a closed loop of many clients that is never nothing, for while
    /// it sends, others ask.
    ///
    /// # Errors
    /// See [`TestbedError`]; the workload cannot go on.
    pub fn run<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
        packets: u64,
    ) -> Result<(), TestbedError> {
        let clients = workload.clients() as usize;
        for flows in [&mut self.inbound, &mut self.outbound] {
            flows.sent.resize(clients.max(flows.sent.len()), 0);
            flows.arrived.resize(clients.max(flows.arrived.len()), 0);
        }
        let target = self.packets().saturating_add(packets);
        let mut silences = 0;
        while self.packets() < target {
            let before = (self.packets(), *self.nic.stats());
            match self.arrivals(world, workload)? {
                StallReason::Due => {}
                StallReason::Waiting => self.receive_all(world, workload)?,
                StallReason::Silence => {
                    silences += 1;
                    if silences == MAX_TIMER_ROUNDS {
                        return Err(TestbedError::Stuck);
                    }
                    self.reclaim_all(world)?;
                    continue;
                }
            }
            silences = 0;
            self.send_until(target, world, workload)?;
            if before == (self.packets(), *self.nic.stats()) {
                return Err(TestbedError::Stuck);
            }
        }
        Ok(())
    }

    fn packets(&self) -> u64 {
        self.stats.received + self.stats.sent
    }

    /// Frames from the wire, until an interrupt has been handled or there are no more.
    fn arrivals<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
    ) -> Result<StallReason, TestbedError> {
        loop {
            if let Some(pause) = self.arrival(world, workload)? {
                return Ok(pause);
            }
        }
    }

    /// One frame from the wire, unless there is none.
    fn arrival<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
    ) -> Result<Option<StallReason>, TestbedError> {
        let packet = match workload.offer() {
            ClientAction::Packet(packet) => packet,
            ClientAction::Waiting => return Ok(Some(StallReason::Waiting)),
            ClientAction::Silence => return Ok(Some(StallReason::Silence)),
        };
        let queue = self.queue(QueueDir::Rx, packet.client);
        self.inbound.build(packet, &mut self.frame);
        let mut loops = 0;
        while self.device.receive(&mut world.bus(), queue, &self.frame)? == Reception::NoDescriptor
        {
            // The wire holds the frame back until the driver has made room. A layer that withholds
            // entries until the end of a burst makes room with the loop after that one.
            if loops == 2 {
                return Err(TestbedError::Stuck);
            }
            loops += 1;
            self.receive_loop(world, workload, queue)?;
        }
        if self.device.interrupt_due(QueueDir::Rx, queue) {
            self.receive_loop(world, workload, queue)?;
            return Ok(Some(StallReason::Due));
        }
        Ok(None)
    }

    /// The timers of all receive rings run out, and those of transmit rings while the loops run.
    fn receive_all<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
    ) -> Result<(), TestbedError> {
        self.due.clear();
        for queue in 0..self.nic.profile().transmit.count {
            if self.device.unannounced(QueueDir::Tx, queue) > 0 {
                self.due.push(queue);
            }
        }
        for queue in 0..self.nic.profile().receive.count {
            if self.device.unannounced(QueueDir::Rx, queue) > 0 {
                self.receive_loop(world, workload, queue)?;
            }
        }
        // Those that found no loop to interrupt.
        self.reclaim_all(world)
    }

    /// One interrupt of a receive ring.
    fn receive_loop<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
        queue: u16,
    ) -> Result<(), TestbedError> {
        let announced = self.device.take_interrupt(QueueDir::Rx, queue);
        let preemption = self.due.pop().map(|queue| {
            let per_packet = self.nic.profile().buffers_per_packet as u64;
            let calls = 2 * per_packet * u64::from(announced);
            Preemption {
                before_call: self.seed.below(calls) as u32,
                queue,
                budget: u32::MAX,
            }
        });
        let (inbound, delivered) = (&mut self.inbound, &mut self.delivered);
        let mut wrong = Ok(());
        let done =
            self.nic.receive(
                &mut world.api(),
                queue,
                u32::MAX,
                preemption,
                |frame| match inbound.check(frame) {
                    Ok(packet) => delivered.push(packet),
                    Err(error) => wrong = Err(error),
                },
            )?;
        wrong?;
        match preemption {
            Some(preemption) if done.preempted => {
                self.device.take_interrupt(QueueDir::Tx, preemption.queue);
                self.stats.interferences += 1;
            }
            Some(preemption) => self.due.push(preemption.queue),
            None => {}
        }
        self.ring_doorbell(world, QueueDir::Rx, queue);
        for packet in self.delivered.drain(..) {
            self.stats.received += 1;
            self.stats.bytes += u64::from(packet.bytes);
            workload.received(packet);
        }
        Ok(())
    }

    /// What the server has to send, up to `target` frames in all; meanwhile a frame arrives for
    /// each that is sent, if a client has one.
    fn send_until<W: Environment<Handle = H>>(
        &mut self,
        target: u64,
        world: &mut W,
        workload: &mut impl Workload,
    ) -> Result<(), TestbedError> {
        while self.packets() < target
            && let Some(packet) = workload.send()
        {
            // An interrupt falls between two frames. One that is due after the last frame falls
            // into the next receive loop.
            while let Some(queue) = self.due.pop() {
                self.reclaim(world, queue)?;
            }
            let queue = self.queue(QueueDir::Tx, packet.client);
            let mut frame = core::mem::take(&mut self.frame);
            self.outbound.build(packet, &mut frame);
            let mut tries = 0;
            while self.nic.send(&mut world.api(), queue, &frame)? == SendOutcome::Full {
                if tries == 2 {
                    return Err(TestbedError::Stuck);
                }
                tries += 1;
                self.reclaim(world, queue)?;
            }
            self.frame = frame;
            self.ring_doorbell(world, QueueDir::Tx, queue);
            self.transmit(world, workload, queue)?;
            if self.device.interrupt_due(QueueDir::Tx, queue) && !self.due.contains(&queue) {
                self.due.push(queue);
            }
            if let Some(StallReason::Silence) = self.arrival(world, workload)? {
                self.reclaim_all(world)?;
            }
        }
        Ok(())
    }

    /// The device puts on the wire what it was offered, and the clients verify it.
    fn transmit<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        workload: &mut impl Workload,
        queue: u16,
    ) -> Result<(), TestbedError> {
        let (outbound, stats) = (&mut self.outbound, &mut self.stats);
        let mut wrong = Ok(());
        self.device.transmit(&mut world.bus(), queue, |frame| {
            match outbound.check(frame) {
                Ok(packet) => {
                    stats.sent += 1;
                    stats.bytes += u64::from(packet.bytes);
                    workload.answered(packet);
                }
                Err(error) => wrong = Err(error),
            }
        })?;
        wrong
    }

    /// The timers of all transmit rings run out.
    fn reclaim_all<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
    ) -> Result<(), TestbedError> {
        for queue in 0..self.nic.profile().transmit.count {
            self.reclaim(world, queue)?;
        }
        Ok(())
    }

    /// The interrupt of a transmit ring.
    fn reclaim<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        queue: u16,
    ) -> Result<(), TestbedError> {
        self.due.retain(|due| *due != queue);
        if self.device.take_interrupt(QueueDir::Tx, queue) > 0 {
            self.nic.reclaim(&mut world.api(), queue, u32::MAX)?;
        }
        Ok(())
    }

    fn ring_doorbell<W: Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        lane: QueueDir,
        queue: u16,
    ) {
        if let Some(tail) = self.nic.sync_map(&mut world.api(), lane, queue) {
            self.device.doorbell(lane, queue, tail);
        }
    }

    fn queue(&self, lane: QueueDir, client: u32) -> u16 {
        let count = match lane {
            QueueDir::Rx => self.nic.profile().receive.count,
            QueueDir::Tx => self.nic.profile().transmit.count,
        };
        (client % u32::from(count.max(1))) as u16
    }
}

/// Why frames stopped arriving.
enum StallReason {
    /// An interrupt was due, and has been handled.
    Due,
    /// The clients wait.
    Waiting,
    /// Nothing happens.
    Silence,
}

impl Flows {
    /// Writes the next frame of a flow.
    fn build(&mut self, packet: Packet, into: &mut Vec<u8>) {
        let mut number = 0;
        if let Some(next) = self.sent.get_mut(packet.client as usize) {
            number = *next;
            *next += 1;
        }
        let frame = Frame {
            flow: packet.client,
            number,
            body: packet.bytes,
        };
        frame.build(into);
    }

    /// Verifies that `frame` is the next one of its flow.
    fn check(&mut self, frame: &[u8]) -> Result<Packet, TestbedError> {
        let found = Frame::verify(frame)?;
        let expected = self.arrived.get_mut(found.flow as usize);
        match expected {
            Some(number) if *number == found.number => {
                *number += 1;
                Ok(Packet {
                    client: found.flow,
                    bytes: found.body,
                })
            }
            other => Err(TestbedError::Order {
                found,
                expected: other.copied(),
            }),
        }
    }
}
