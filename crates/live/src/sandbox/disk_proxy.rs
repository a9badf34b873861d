//! The guest-visible disk, whose requests a sandbox process executes.
//!
//! The proxy waits for the process only in a reset, when Bus Master Enable is cleared, and in a
//! pause for a hand-over. It forwards a doorbell and learns the result when the process reports it.
//! Reports are not trusted: a malformed message, or the end of a turn that the proxy did not start,
//! kills the process. A device without a process sets `DEVICE_NEEDS_RESET`, also after resets.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_types::{Access, Fault, FaultReason, RequesterId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use virtio_queue::{Queue, QueueT};

use super::process::SandboxLink;
use super::wire::{DeviceCommand, DeviceResponse, MAX_BYTES, RingPosition};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::dma_fault_injection::InjectionResult;
use crate::grants::child::Waiter;
use crate::grants::{Grants, ProtocolViolation, StuckProcess};
use crate::iommu::GuestIommu;
use crate::saved_state::HandOverBlocker;
use crate::virtio::blk::{Blk, RequestTooLong};
use crate::virtio::{
    BusMasterStuck, Device, DeviceState, DiskKind, PollSource, QuantumResult, QueueBroken,
    ResetPending,
};

/// The proxy kills a process that has not reset its queues within this time.
const RESET_TIMEOUT: Duration = Duration::from_secs(5);
/// The daemon revokes the windows of a device that has not become idle within this time after Bus
/// Master Enable is cleared. QEMU waits five seconds for the reply to a write.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Most messages handled per readiness event.
const RECEIVE_BATCH: usize = 64;
/// Most faults and over-long requests that a process may report in one turn, for each descriptor of
/// the queues. Each report takes the IOMMU's lock, so the proxy kills a process that exceeds the
/// limit.
const REPORTS_PER_DESCRIPTOR: u32 = 16;

/// An event that the proxy reports to the log.
#[derive(Debug)]
pub enum ProxyEvent<'a> {
    /// The proxy killed the process.
    Ended(&'a ProtocolViolation),
    /// The process made a DMA access that a test injected.
    InjectedDma(&'a InjectionResult),
}

/// Receives the events of a proxy.
pub type ProxyEventHandler = Box<dyn Fn(&ProxyEvent<'_>) + Send>;

/// A queue and the process's work on it.
#[derive(Clone, Copy, Debug, Default)]
struct QueueState {
    /// True if the process has the queue's registers.
    configured: bool,
    /// True if a turn was started and its result is outstanding.
    busy: bool,
    /// Number of the latest turn.
    turn: u64,
    /// True if the driver rang the doorbell during the turn.
    kicked: bool,
    /// Result of the last turn and the ring position after it, until the queue's worker takes it.
    completed: Option<(QuantumResult, RingPosition)>,
    broken: bool,
}

/// A disk that a sandbox process serves.
pub struct DiskProxy {
    /// Local device; answers reads of features and configuration, which are constant.
    disk: Blk,
    link: SandboxLink,
    iommu: GuestIommu,
    device: RequesterId,
    queues: Vec<QueueState>,
    resetting: bool,
    /// Unsolicited reports since the last turn began.
    reports: u32,
    ended: bool,
    /// True if a test injects DMA accesses.
    injects_faults: bool,
    on_event: ProxyEventHandler,
    counters: Arc<DeviceCounters>,
}

impl std::fmt::Debug for DiskProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DiskProxy({}, {:?})", self.device, self.link)
    }
}

impl DiskProxy {
    /// Creates the proxy of the process at `link`. `disk` must have the same configuration as the
    /// process's disk. The proxy reports the process's faults to `iommu` under the requester ID
    /// `device`.
    pub fn new(
        disk: Blk,
        link: SandboxLink,
        iommu: GuestIommu,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
        on_event: ProxyEventHandler,
    ) -> Self {
        let queues = vec![QueueState::default(); disk.queue_sizes().len()];
        Self {
            disk,
            injects_faults: link.injected > 0,
            link,
            iommu,
            device,
            queues,
            resetting: false,
            reports: 0,
            ended: false,
            on_event,
            counters,
        }
    }

    /// Returns true if no turn is in progress.
    pub fn is_idle(&self) -> bool {
        !self.queues.iter().any(|state| state.busy)
    }

    fn send_command(&mut self, command: &DeviceCommand) {
        if self.ended {
            return;
        }
        // The socket buffer holds all messages that can be outstanding. If it is full, the process
        // has stopped reading.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if send(&self.link.socket, &command.encode(), flags).is_err() {
            self.end(&ProtocolViolation::Exited);
        }
    }

    fn end(&mut self, violation: &ProtocolViolation) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.link.child.kill();
        for state in &mut self.queues {
            state.busy = false;
            state.broken = true;
        }
        (self.on_event)(&ProxyEvent::Ended(violation));
    }

    /// Receives and handles one message. Returns false if none was available or the process has
    /// ended.
    fn receive(&mut self) -> bool {
        if self.ended {
            return false;
        }
        let mut bytes = [0; MAX_BYTES + 1];
        let got = match recv(&self.link.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((got, _)) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return false,
            Err(_) => 0,
        };
        if got == 0 {
            self.end(&ProtocolViolation::Exited);
            return false;
        }
        let response = bytes.get(..got).and_then(DeviceResponse::decode);
        if response
            .and_then(|response| self.handle(response))
            .is_none()
        {
            self.end(&ProtocolViolation::MalformedMessage);
        }
        true
    }

    /// Handles messages until `enough` holds or the process has ended. Returns false at `deadline`.
    fn receive_until(&mut self, deadline: Instant, enough: impl Fn(&Self) -> bool) -> bool {
        while !enough(self) && !self.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).ok();
            let mut ready = [PollFd::new(&self.link.socket, PollFlags::IN)];
            // A process that keeps sending must not extend the deadline.
            if left.is_zero() || poll(&mut ready, limit.as_ref()) == Ok(0) {
                return false;
            }
            self.receive();
        }
        true
    }

    /// Like [`receive_until`](Self::receive_until) with a limit of `most`, or of the device's
    /// remaining allowance if that is shorter. Charges the wait; ends the process if the allowance
    /// is exhausted.
    fn wait_for_reply(&mut self, most: Duration, enough: impl Fn(&Self) -> bool) -> bool {
        let begun = Instant::now();
        let patience = most.min(self.link.child.patience(Waiter::Device));
        let replied = self.receive_until(begun + patience, enough);
        if self
            .link
            .child
            .charge(Waiter::Device, begun.elapsed())
            .is_err()
        {
            self.end(&ProtocolViolation::AllowanceExceeded);
        }
        replied
    }

    /// Waits for turns in progress. Returns false if one is still in progress at `until`.
    fn wait_idle(&mut self, until: Instant) -> bool {
        let ended = self.receive_until(until, Self::is_idle);
        self.requeue_kicks();
        ended
    }

    /// Marks completed turns as having more work if the driver rang the doorbell during them: the
    /// driver will not ring again.
    fn requeue_kicks(&mut self) {
        for state in &mut self.queues {
            if let Some((turn, _)) = &mut state.completed {
                turn.more |= std::mem::take(&mut state.kicked);
            }
        }
    }

    /// Handles one report. `None` if the protocol does not permit it in the current state.
    fn handle(&mut self, response: DeviceResponse) -> Option<()> {
        match response {
            DeviceResponse::Turn {
                index,
                round,
                turn,
                at,
                counted,
            } => {
                let state = self.busy_queue(index, round)?;
                state.completed = Some((turn, at));
                self.counters.add_all(&counted);
            }
            DeviceResponse::Broken { index, round } => self.busy_queue(index, round)?.broken = true,
            DeviceResponse::ResetDone if self.resetting => self.resetting = false,
            DeviceResponse::Fault {
                iova,
                access,
                permission,
            } => {
                self.count_response()?;
                let reason = match (permission, access) {
                    (false, _) => FaultReason::NotPresent,
                    (true, Access::Read) => FaultReason::ReadDenied,
                    (true, Access::Write) => FaultReason::WriteDenied,
                };
                self.iommu.report_fault(&Fault {
                    device: self.device,
                    iova,
                    access,
                    reason,
                });
            }
            DeviceResponse::Injected {
                injected,
                access,
                iova,
                stopped,
            } => {
                // Each class is tried once, so the process cannot flood the log.
                self.link.injected = self.link.injected.checked_sub(1)?;
                (self.on_event)(&ProxyEvent::InjectedDma(&InjectionResult {
                    injected,
                    access,
                    iova,
                    stopped,
                }));
            }
            // The disk's log is bounded.
            DeviceResponse::TooLong { bytes, most } => {
                self.count_response()?;
                self.disk
                    .log_too_long(RequestTooLong { bytes, limit: most });
            }
            DeviceResponse::Ready | DeviceResponse::Confined | DeviceResponse::ResetDone => {
                return None;
            }
        }
        Some(())
    }

    /// Counts an unsolicited report. `None` if the limit for one turn is exceeded.
    fn count_response(&mut self) -> Option<()> {
        let descriptors = self.disk.queue_sizes().iter().copied().map(u32::from);
        let most = descriptors
            .sum::<u32>()
            .saturating_mul(REPORTS_PER_DESCRIPTOR);
        self.reports = self
            .reports
            .checked_add(1)
            .filter(|reports| *reports <= most)?;
        Some(())
    }

    /// Ends the turn of queue `index` and returns the queue. `None` if turn `round` is not in
    /// progress.
    fn busy_queue(&mut self, index: u16, round: u64) -> Option<&mut QueueState> {
        let state = self.queues.get_mut(usize::from(index))?;
        let asked = std::mem::take(&mut state.busy) && state.turn == round;
        asked.then_some(state)
    }
}

impl Device for DiskProxy {
    const TYPE: u16 = Blk::TYPE;
    const CLASS: [u8; 3] = Blk::CLASS;

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.disk.queue_sizes()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.disk.read_config(offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.send_command(&DeviceCommand::Begin { features });
    }

    /// Saves the disk as [`DiskKind::Sandboxed`]. The process's remaining state needs no saving:
    /// its requests are complete, and its grants derive from the IOMMU's state. A disk whose killed
    /// process has exited can be saved as well: the destination starts another process, and the
    /// driver resets the device.
    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        if self.injects_faults {
            return Err(HandOverBlocker::Unsupported("a disk with injected DMA"));
        }
        // It could not be released, and no process would serve the devices.
        if self.link.child.is_stuck() {
            return Err(HandOverBlocker::ProcessStuck);
        }
        // A completed turn whose result the queue has not received also prevents a save.
        if !self.is_idle() || self.queues.iter().any(|state| state.completed.is_some()) {
            return Err(HandOverBlocker::Unsupported(
                "a disk with a turn in progress",
            ));
        }
        let mut own = self.disk.save()?;
        if let DeviceState::Blk { kind, .. } = &mut own {
            *kind = DiskKind::Sandboxed;
        }
        Ok(own)
    }

    fn pause(&mut self, until: Instant) -> bool {
        self.wait_idle(until)
    }

    /// Kills the process. Returns true if it has exited and released its memory.
    fn release(&mut self) -> bool {
        self.link.child.kill_and_wait()
    }

    /// Resets the process's queues. On return it has released its rings or was killed. Always
    /// succeeds: the IOMMU answers for the pages of a killed process.
    fn reset(&mut self) -> Result<(), ResetPending> {
        let used = self.queues.iter().any(|state| state.configured);
        self.resetting = used && !self.ended;
        if self.resetting {
            self.send_command(&DeviceCommand::Reset);
        }
        // A turn in progress ends first; its result is discarded.
        if !self.wait_for_reply(RESET_TIMEOUT, |proxy| !proxy.resetting) {
            self.end(&ProtocolViolation::Late);
        }
        for state in &mut self.queues {
            *state = QueueState {
                turn: state.turn,
                broken: self.ended,
                ..QueueState::default()
            };
        }
        Ok(())
    }

    fn set_bus_master(&mut self) {
        self.iommu.with_grants(self.device, Grants::release);
    }

    /// First asks the process to stop, so that it makes no access in part. Then revokes all
    /// windows, even if the process ignored the request.
    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        self.iommu
            .with_grants(self.device, |grants| grants.cancel_requests());
        self.wait_for_reply(STOP_TIMEOUT, Self::is_idle);
        self.requeue_kicks();
        match self.iommu.with_grants(self.device, Grants::hold) {
            Some(Err(StuckProcess)) => Err(BusMasterStuck),
            _ => Ok(()),
        }
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        (!self.ended).then(|| PollSource::readable(self.link.socket.as_fd()))
    }

    fn on_ready(&mut self) {
        for _ in 0..RECEIVE_BATCH {
            if !self.receive() {
                break;
            }
        }
    }

    fn due(&mut self) -> Option<usize> {
        self.queues
            .iter()
            .position(|state| state.completed.is_some() || (state.broken && state.configured))
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        _dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let broken = || QueueBroken(virtio_queue::Error::QueueNotReady);
        let number = u16::try_from(index).map_err(|_| broken())?;
        let state = self.queues.get_mut(index).ok_or_else(broken)?;
        if state.broken {
            // Report the broken queue only once.
            state.configured = false;
            return Err(broken());
        }
        let over = state.completed.take().map(|(turn, at)| {
            // The destination process continues from these positions after a hand-over.
            queue.set_next_avail(at.next_available);
            queue.set_next_used(at.next_used);
            turn
        });
        if state.busy {
            state.kicked = true;
            return Ok(QuantumResult::default());
        }
        if let Some(turn) = over
            && !std::mem::take(&mut state.kicked)
        {
            return Ok(turn);
        }
        let configured = std::mem::replace(&mut state.configured, true);
        state.busy = true;
        state.turn = state.turn.wrapping_add(1);
        let round = state.turn;
        self.reports = 0;
        if !configured {
            self.send_command(&DeviceCommand::queue(number, &queue.state()));
        }
        self.send_command(&DeviceCommand::Kick {
            index: number,
            round,
        });
        let interrupt = over.is_some_and(|turn| turn.interrupt);
        Ok(QuantumResult {
            interrupt,
            more: false,
        })
    }
}

#[cfg(test)]
mod tests;
