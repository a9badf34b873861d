//! A machine under a workload: the driver and the device of one port, and the clients at the other
//! end of the wire. Every frame is verified.

use ringfence_types::{PhysRange, RequesterId};

use super::device::{DeviceStats, NicDevice, QueueDir, Reception};
use super::driver::{DriverStats, Nic};
use super::error::NicError;
use super::flows::Flows;
use super::frame::{Frame, FrameError};
use super::profile::{NicProfile, TxReclaim};
use super::receive::Preemption;
use super::transmit::SendOutcome;
use super::tx_timers::TxTimers;
use crate::api::DmaApi;
use crate::seed::Seed;
use crate::workload::{ClientAction, Packet, Workload};
use crate::{DmaError, Transfer};

/// Environment of a testbed: the driver's DMA API and the device's bus. Only one is borrowed at a
/// time, because both use the same IOMMU.
pub trait Environment {
    /// The API's handle of a mapping.
    type Handle;
    /// Type of the driver's DMA API.
    type Api<'a>: DmaApi<Handle = Self::Handle>
    where
        Self: 'a;
    /// Type of the device's bus.
    type Bus<'a>: Transfer
    where
        Self: 'a;

    /// Returns the driver's DMA API.
    fn api(&mut self) -> Self::Api<'_>;
    /// Returns the device's bus.
    fn bus(&mut self) -> Self::Bus<'_>;
}

/// Reason why a workload stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TestbedError {
    /// Error of the driver.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// The device could not access its rings.
    #[error(transparent)]
    Device(#[from] DmaError),
    /// A received frame differs from the sent one.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame of an unexpected connection or with an unexpected number arrived, or a sent frame
    /// was lost.
    #[error("frame {} of flow {} arrived instead of {expected:?}", .found.number, .found.flow)]
    Order {
        /// The frame that arrived.
        found: Frame,
        /// Expected number in its flow; `None` if the flow does not exist.
        expected: Option<u64>,
    },
    /// The workload cannot continue. Either frames wait for descriptors or the server waits for
    /// entries that never become free, or the clients are silent forever.
    #[error("driver and device wait for each other")]
    Stuck,
}

/// Maximum number of consecutive rounds in which all timers expire. After them the testbed gives
/// up.
const MAX_TIMER_ROUNDS: u32 = 1 << 16;

/// Counters of a testbed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TestbedStats {
    /// Frames received and verified by the server.
    pub received: u64,
    /// Frames sent, each verified by its client.
    pub sent: u64,
    /// Bytes of data in all frames.
    pub bytes: u64,
    /// Receive loops during which a transmit interrupt occurred.
    pub interferences: u64,
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
    /// Transmit rings whose interrupt is due. Empty if the driver polls.
    due: Vec<u16>,
    timers: TxTimers,
}

impl<H> NicTestbed<H> {
    /// Opens a port of `profile` for `device`, with buffers in `memory` (see [`Nic::buffer_bytes`])
    /// and interrupts after `burst` completions.
    ///
    /// # Errors
    /// Returns the driver's error; nothing stays allocated.
    pub fn open<W: Environment<Handle = H>>(
        env: &mut W,
        device: RequesterId,
        profile: NicProfile,
        memory: PhysRange,
        burst: u32,
        seed: u64,
    ) -> Result<Self, TestbedError> {
        let nic = Nic::open(profile, memory, &mut env.api())?;
        let mut device = NicDevice::new(device, &profile, burst);
        for (dir, index, at) in nic.rings() {
            device.program(dir, index, &at);
        }
        let mut testbed = Self {
            nic,
            device,
            seed: Seed::new(seed),
            stats: TestbedStats::default(),
            inbound: Flows::default(),
            outbound: Flows::default(),
            frame: Vec::new(),
            delivered: Vec::new(),
            due: Vec::new(),
            timers: TxTimers::default(),
        };
        for queue in 0..profile.receive.count {
            testbed.ring_doorbell(env, QueueDir::Rx, queue);
        }
        Ok(testbed)
    }

    /// Stops the device and closes the port.
    ///
    /// # Errors
    /// Returns the driver's error. The resources concerned are lost.
    pub fn close<W: Environment<Handle = H>>(mut self, env: &mut W) -> Result<(), TestbedError> {
        self.device.reset();
        Ok(self.nic.close(&mut env.api())?)
    }

    /// Returns the counters.
    pub fn stats(&self) -> &TestbedStats {
        &self.stats
    }

    /// Returns the driver's counters.
    pub fn driver_stats(&self) -> &DriverStats {
        self.nic.stats()
    }

    /// Returns the device's counters.
    pub fn device_stats(&self) -> &DeviceStats {
        self.device.stats()
    }

    /// Returns the driver of the adapter.
    pub fn nic(&self) -> &Nic<H> {
        &self.nic
    }

    /// Returns the device's requester ID.
    pub fn device_id(&self) -> RequesterId {
        self.device.id()
    }

    /// Returns the device, whose registers a test can change.
    pub fn device_mut(&mut self) -> &mut NicDevice {
        &mut self.device
    }

    /// Runs `workload` until at least `packets` more frames have been received and sent. Completes
    /// a receive loop in progress. Frames that the server still has to send stay with the workload.
    /// In a closed loop of many clients there are always some, because others send requests while
    /// it answers.
    ///
    /// # Errors
    /// See [`TestbedError`]; the workload cannot continue.
    pub fn run<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        workload: &mut impl Workload,
        packets: u64,
    ) -> Result<(), TestbedError> {
        let clients = workload.clients() as usize;
        for flows in [&mut self.inbound, &mut self.outbound] {
            flows.grow(clients);
        }
        let target = self.packets().saturating_add(packets);
        let mut silences = 0;
        while self.packets() < target {
            let before = (self.packets(), *self.nic.stats());
            match self.arrivals(env, workload)? {
                StallReason::Due => {}
                StallReason::Waiting => self.receive_all(env, workload)?,
                reason @ (StallReason::Silence | StallReason::Pause) => {
                    silences += 1;
                    if silences == MAX_TIMER_ROUNDS {
                        return Err(TestbedError::Stuck);
                    }
                    self.idle(env, reason)?;
                    continue;
                }
            }
            silences = 0;
            self.send_until(target, env, workload)?;
            if before == (self.packets(), *self.nic.stats()) {
                return Err(TestbedError::Stuck);
            }
        }
        Ok(())
    }

    fn packets(&self) -> u64 {
        self.stats.received + self.stats.sent
    }

    /// Receives frames from the wire until an interrupt has been handled or no frame is left.
    fn arrivals<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        workload: &mut impl Workload,
    ) -> Result<StallReason, TestbedError> {
        loop {
            if let Some(pause) = self.arrival(env, workload)? {
                return Ok(pause);
            }
        }
    }

    /// Receives one frame from the wire, if any.
    fn arrival<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        workload: &mut impl Workload,
    ) -> Result<Option<StallReason>, TestbedError> {
        self.expire_timers(env, self.packets())?;
        let packet = match workload.offer() {
            ClientAction::Packet(packet) => packet,
            ClientAction::Waiting => return Ok(Some(StallReason::Waiting)),
            ClientAction::Silence => return Ok(Some(StallReason::Silence)),
            ClientAction::Pause => return Ok(Some(StallReason::Pause)),
        };
        let queue = self.queue(QueueDir::Rx, packet.client);
        self.inbound.build(packet, &mut self.frame);
        let mut loops = 0;
        while self.device.receive(&mut env.bus(), queue, &self.frame)? == Reception::NoDescriptor {
            // The wire holds the frame back until the driver has made room. A layer that withholds
            // entries until the end of a burst makes room only in the following loop.
            if loops == 2 {
                return Err(TestbedError::Stuck);
            }
            loops += 1;
            self.receive_loop(env, workload, queue)?;
        }
        if self.device.interrupt_due(QueueDir::Rx, queue) {
            self.receive_loop(env, workload, queue)?;
            return Ok(Some(StallReason::Due));
        }
        Ok(None)
    }

    /// Expires the interrupt timers of all receive rings. Those of transmit rings expire during the
    /// loops.
    fn receive_all<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        workload: &mut impl Workload,
    ) -> Result<(), TestbedError> {
        self.due.clear();
        let interrupts = self.nic.profile().tx_reclaim == TxReclaim::Interrupt;
        let transmit = self.nic.profile().transmit.count;
        for queue in (0..transmit).take_while(|_| interrupts) {
            if self.device.unannounced(QueueDir::Tx, queue) > 0 {
                self.due.push(queue);
            }
        }
        for queue in 0..self.nic.profile().receive.count {
            if self.device.unannounced(QueueDir::Rx, queue) > 0 {
                self.receive_loop(env, workload, queue)?;
            }
        }
        // Transmit rings that had no loop to interrupt.
        self.idle(env, StallReason::Silence)
    }

    /// Expires the timers that are shorter than an idle time of the clients: those of interrupts in
    /// a silence, and all in a pause.
    fn idle<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        reason: StallReason,
    ) -> Result<(), TestbedError> {
        match (self.nic.profile().tx_reclaim, reason) {
            (TxReclaim::Interrupt, _) => self.reclaim_all(env),
            (TxReclaim::Poll { .. }, StallReason::Pause) => self.expire_timers(env, u64::MAX),
            (TxReclaim::Poll { .. }, _) => Ok(()),
        }
    }

    /// Polls the transmit rings whose timer expires until `now`. A ring with frames in flight
    /// starts its timer again.
    fn expire_timers<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        now: u64,
    ) -> Result<(), TestbedError> {
        for _ in 0..self.nic.profile().transmit.count {
            let Some(queue) = self.timers.expired(now) else {
                break;
            };
            self.nic.reclaim(&mut env.api(), queue, u32::MAX)?;
            if self.nic.in_flight(queue) > 0 {
                self.start_timer(queue);
            }
        }
        Ok(())
    }

    /// Starts the timer of a transmit ring, if the driver polls and it does not run.
    fn start_timer(&mut self, queue: u16) {
        if let TxReclaim::Poll { timeout, .. } = self.nic.profile().tx_reclaim {
            let now = self.packets();
            self.timers.start(queue, now, timeout.max(1));
        }
    }

    /// Handles one interrupt of a receive ring.
    fn receive_loop<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
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
                &mut env.api(),
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
        self.ring_doorbell(env, QueueDir::Rx, queue);
        for packet in self.delivered.drain(..) {
            self.stats.received += 1;
            self.stats.bytes += u64::from(packet.bytes);
            workload.received(packet);
        }
        Ok(())
    }

    /// Sends the server's frames, up to `target` frames in total. For each sent frame, one frame
    /// arrives if a client has one.
    fn send_until<W: Environment<Handle = H>>(
        &mut self,
        target: u64,
        env: &mut W,
        workload: &mut impl Workload,
    ) -> Result<(), TestbedError> {
        while self.packets() < target
            && let Some(packet) = workload.send()
        {
            // Take an interrupt between two frames. One that is due after the last frame occurs
            // during the next receive loop.
            while let Some(queue) = self.due.pop() {
                self.reclaim(env, queue)?;
            }
            let queue = self.queue(QueueDir::Tx, packet.client);
            let mut frame = core::mem::take(&mut self.frame);
            self.outbound.build(packet, &mut frame);
            let mut tries = 0;
            while self.nic.send(&mut env.api(), queue, &frame)? == SendOutcome::Full {
                if tries == 2 {
                    return Err(TestbedError::Stuck);
                }
                tries += 1;
                self.reclaim(env, queue)?;
            }
            self.frame = frame;
            self.ring_doorbell(env, QueueDir::Tx, queue);
            self.start_timer(queue);
            self.nic.xmit_poll(&mut env.api(), queue)?;
            self.transmit(env, workload, queue)?;
            let interrupts = self.nic.profile().tx_reclaim == TxReclaim::Interrupt;
            if interrupts
                && self.device.interrupt_due(QueueDir::Tx, queue)
                && !self.due.contains(&queue)
            {
                self.due.push(queue);
            }
            if let Some(reason @ (StallReason::Silence | StallReason::Pause)) =
                self.arrival(env, workload)?
            {
                self.idle(env, reason)?;
            }
        }
        Ok(())
    }

    /// Transmits the offered frames, which the clients verify.
    fn transmit<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        workload: &mut impl Workload,
        queue: u16,
    ) -> Result<(), TestbedError> {
        let (outbound, stats) = (&mut self.outbound, &mut self.stats);
        let mut wrong = Ok(());
        self.device
            .transmit(&mut env.bus(), queue, |frame| match outbound.check(frame) {
                Ok(packet) => {
                    stats.sent += 1;
                    stats.bytes += u64::from(packet.bytes);
                    workload.answered(packet);
                }
                Err(error) => wrong = Err(error),
            })?;
        wrong
    }

    /// Expires the timers of all transmit rings.
    fn reclaim_all<W: Environment<Handle = H>>(&mut self, env: &mut W) -> Result<(), TestbedError> {
        for queue in 0..self.nic.profile().transmit.count {
            self.reclaim(env, queue)?;
        }
        Ok(())
    }

    /// Handles the interrupt of a transmit ring.
    fn reclaim<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        queue: u16,
    ) -> Result<(), TestbedError> {
        self.due.retain(|due| *due != queue);
        if self.device.take_interrupt(QueueDir::Tx, queue) > 0 {
            self.nic.reclaim(&mut env.api(), queue, u32::MAX)?;
        }
        Ok(())
    }

    fn ring_doorbell<W: Environment<Handle = H>>(
        &mut self,
        env: &mut W,
        dir: QueueDir,
        queue: u16,
    ) {
        if let Some(tail) = self.nic.sync_map(&mut env.api(), dir, queue) {
            self.device.doorbell(dir, queue, tail);
        }
    }

    fn queue(&self, dir: QueueDir, client: u32) -> u16 {
        let count = match dir {
            QueueDir::Rx => self.nic.profile().receive.count,
            QueueDir::Tx => self.nic.profile().transmit.count,
        };
        (client % u32::from(count.max(1))) as u16
    }
}

/// Reason why no more frames arrive.
enum StallReason {
    /// An interrupt was due and has been handled.
    Due,
    /// All clients wait for the server.
    Waiting,
    /// All clients are silent.
    Silence,
    /// All clients are silent for longer than any timer.
    Pause,
}
