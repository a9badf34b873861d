//! The disk as the guest's registers know it, while a process does its work.
//!
//! Nothing here waits for the process, but a reset: a doorbell is passed on, and what became of the
//! turn is heard when the process says so. What it says is not trusted: a turn that nobody asked
//! for, or what is no message, ends it. A device whose process has ended asks to be reset, and
//! stays so.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_types::RequesterId;
use ringfence_virtio_iommu::TranslationFaultReason;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use virtio_queue::{Queue, QueueT};

use super::child::Waiter;
use super::grants::{Grants, StuckProcess};
use super::process::SandboxLink;
use super::supervisor::ProtocolViolation;
use super::wire::{DeviceCommand, DeviceResponse, MAX_BYTES, RingPosition};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::dma_fault_injection::InjectionResult;
use crate::handover::{DeviceState, DiskKind, HandOverBlocker};
use crate::iommu::GuestIommu;
use crate::virtio::blk::{Blk, RequestTooLong};
use crate::virtio::{BusMasterStuck, Device, PollSource, QuantumResult, QueueBroken};

/// A process that has not forgotten its rings by then is ended.
const RESET_TIMEOUT: Duration = Duration::from_secs(5);
/// One that has not left its work by then has it taken away. QEMU waits five seconds for the answer
/// to a write.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Most messages that are heard at a time.
const RECEIVE_BATCH: usize = 64;
/// Most accesses that were stopped, or requests that were too long, in one turn, for each
/// descriptor of the queue. Every one takes the IOMMU's lock: a process that says more speaks for
/// no device.
const REPORTS_PER_DESCRIPTOR: u32 = 16;

/// What a front tells the log.
#[derive(Debug)]
pub enum ProxyEvent<'a> {
    /// The process was ended.
    Ended(&'a ProtocolViolation),
    /// It misbehaved, as it was told to.
    InjectedDma(&'a InjectionResult),
}

/// Takes what a front says.
pub type ProxyEventHandler = Box<dyn Fn(&ProxyEvent<'_>) + Send>;

/// A queue, and the process's work on it.
#[derive(Clone, Copy, Debug, Default)]
struct QueueState {
    /// The process has its registers.
    configured: bool,
    /// A turn was asked for and is not over.
    busy: bool,
    /// Its number.
    turn: u64,
    /// The driver rang meanwhile.
    kicked: bool,
    /// What became of the last turn, and where it has ended.
    completed: Option<(QuantumResult, RingPosition)>,
    broken: bool,
}

/// A disk in a process of its own.
pub struct DiskProxy {
    /// Answers for what does not change: features and configuration.
    disk: Blk,
    link: SandboxLink,
    iommu: GuestIommu,
    device: RequesterId,
    queues: Vec<QueueState>,
    resetting: bool,
    /// Such reports since the last turn began.
    reports: u32,
    ended: bool,
    /// It was told to, for tests.
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
    /// The front of the process at `link`, whose `disk` is like this one. What it says of stopped
    /// accesses is told as `device`'s.
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

    /// Whether no turn is under way.
    pub fn is_idle(&self) -> bool {
        !self.queues.iter().any(|lane| lane.busy)
    }

    fn send_command(&mut self, order: &DeviceCommand) {
        if self.ended {
            return;
        }
        // There is room for all that can be unanswered; a process for which there is not does not
        // listen.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if send(&self.link.socket, &order.encode(), flags).is_err() {
            self.end(&ProtocolViolation::Exited);
        }
    }

    fn end(&mut self, breach: &ProtocolViolation) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.link.child.kill();
        for lane in &mut self.queues {
            lane.busy = false;
            lane.broken = true;
        }
        (self.on_event)(&ProxyEvent::Ended(breach));
    }

    /// Hears one message, if there is one.
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
        let report = bytes.get(..got).and_then(DeviceResponse::decode);
        if report.and_then(|report| self.handle(report)).is_none() {
            self.end(&ProtocolViolation::MalformedMessage);
        }
        true
    }

    /// Hears it until it has said enough, or has ended. False if it has not by then.
    fn receive_until(&mut self, deadline: Instant, enough: impl Fn(&Self) -> bool) -> bool {
        while !enough(self) && !self.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).ok();
            let mut ready = [PollFd::new(&self.link.socket, PollFlags::IN)];
            // Whoever never stops talking is not listened to for ever.
            if left.is_zero() || poll(&mut ready, limit.as_ref()) == Ok(0) {
                return false;
            }
            self.receive();
        }
        true
    }

    /// Hears it until it has said enough, has ended, or has had the device wait for long enough.
    /// False if it has not by then.
    fn wait_for_reply(&mut self, most: Duration, enough: impl Fn(&Self) -> bool) -> bool {
        let begun = Instant::now();
        let patience = most.min(self.link.child.patience(Waiter::Device));
        let heard = self.receive_until(begun + patience, enough);
        if self
            .link
            .child
            .charge(Waiter::Device, begun.elapsed())
            .is_err()
        {
            self.end(&ProtocolViolation::AllowanceExceeded);
        }
        heard
    }

    /// Waits for turns that are under way. False if one is not over by then.
    fn wait_idle(&mut self, until: Instant) -> bool {
        let ended = self.receive_until(until, Self::is_idle);
        self.requeue_kicks();
        ended
    }

    /// Whoever rang during a turn that is over does not ring again.
    fn requeue_kicks(&mut self) {
        for lane in &mut self.queues {
            if let Some((turn, _)) = &mut lane.completed {
                turn.more |= std::mem::take(&mut lane.kicked);
            }
        }
    }

    /// Takes what the process says. None if it may not say that now.
    fn handle(&mut self, report: DeviceResponse) -> Option<()> {
        match report {
            DeviceResponse::Turn {
                index,
                round,
                turn,
                at,
                counted,
            } => {
                let lane = self.busy_queue(index, round)?;
                lane.completed = Some((turn, at));
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
                let reason = if permission {
                    TranslationFaultReason::Permission
                } else {
                    TranslationFaultReason::NotMapped
                };
                self.iommu.report(self.device, iova, access, reason);
            }
            DeviceResponse::Injected {
                errant,
                access,
                iova,
                stopped,
            } => {
                // Each is tried once; the log is not the process's to fill.
                self.link.injected = self.link.injected.checked_sub(1)?;
                (self.on_event)(&ProxyEvent::InjectedDma(&InjectionResult {
                    injected: errant,
                    access,
                    iova,
                    stopped,
                }));
            }
            // It is said as often as the log bears it.
            DeviceResponse::TooLong { bytes, most } => {
                self.count_response()?;
                self.disk.complain(RequestTooLong { bytes, limit: most });
            }
            DeviceResponse::Ready | DeviceResponse::Confined | DeviceResponse::ResetDone => {
                return None;
            }
        }
        Some(())
    }

    /// One more report that nobody asked for. None if it is one too many.
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

    /// The lane whose turn is over.
    fn busy_queue(&mut self, index: u16, round: u64) -> Option<&mut QueueState> {
        let lane = self.queues.get_mut(usize::from(index))?;
        let asked = std::mem::take(&mut lane.busy) && lane.turn == round;
        asked.then_some(lane)
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

    /// What the process knows beside the rings stands in the registers: its requests are done, and
    /// its grants are the IOMMU's state. One that was ended goes as well: its driver is asked to
    /// begin again, elsewhere with another process.
    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        if self.injects_faults {
            return Err(HandOverBlocker::Keeps("a disk that misbehaves"));
        }
        // Nor is one over that its queue does not know of.
        if !self.is_idle() || self.queues.iter().any(|lane| lane.completed.is_some()) {
            return Err(HandOverBlocker::Keeps("a disk in the middle of a turn"));
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

    /// The process is dead when this returns true, and reaches nothing.
    fn release(&mut self) -> bool {
        self.link.child.kill_and_wait()
    }

    /// When it returns the process has let go of its rings, or is to be dead.
    fn reset(&mut self) {
        let used = self.queues.iter().any(|lane| lane.configured);
        self.resetting = used && !self.ended;
        if self.resetting {
            self.send_command(&DeviceCommand::Reset);
        }
        // A turn that is under way ends first, and is of no interest any more.
        if !self.wait_for_reply(RESET_TIMEOUT, |front| !front.resetting) {
            self.end(&ProtocolViolation::Late);
        }
        for lane in &mut self.queues {
            *lane = QueueState {
                turn: lane.turn,
                broken: self.ended,
                ..QueueState::default()
            };
        }
    }

    fn set_bus_master(&mut self) {
        self.iommu.with_grants(self.device, Grants::release);
    }

    /// Asks first, so that no access is made in part; then what is mapped is gone, whoever the
    /// process listens to.
    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        self.iommu
            .with_grants(self.device, |grants| grants.call_off());
        self.wait_for_reply(STOP_TIMEOUT, Self::is_idle);
        self.requeue_kicks();
        match self.iommu.with_grants(self.device, Grants::hold) {
            Some(Err(StuckProcess)) => Err(BusMasterStuck),
            _ => Ok(()),
        }
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        (!self.ended).then(|| PollSource {
            fd: self.link.socket.as_fd(),
            input: true,
            output: false,
        })
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
            .position(|lane| lane.completed.is_some() || (lane.broken && lane.configured))
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        _dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let broken = || QueueBroken(virtio_queue::Error::QueueNotReady);
        let number = u16::try_from(index).map_err(|_| broken())?;
        let lane = self.queues.get_mut(index).ok_or_else(broken)?;
        if lane.broken {
            // Said once.
            lane.configured = false;
            return Err(broken());
        }
        let over = lane.completed.take().map(|(turn, at)| {
            // For another process, if one is to go on.
            queue.set_next_avail(at.next_available);
            queue.set_next_used(at.next_used);
            turn
        });
        if lane.busy {
            lane.kicked = true;
            return Ok(QuantumResult::default());
        }
        if let Some(turn) = over
            && !std::mem::take(&mut lane.kicked)
        {
            return Ok(turn);
        }
        let told = std::mem::replace(&mut lane.configured, true);
        lane.busy = true;
        lane.turn = lane.turn.wrapping_add(1);
        let round = lane.turn;
        self.reports = 0;
        if !told {
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
