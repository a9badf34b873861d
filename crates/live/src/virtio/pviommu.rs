//! The para-virtual IOMMU on the virtio PCI transport (`docs/PVIOMMU.md`). This file serves its two
//! queues; [`crate::pviommu`] handles the requests.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ringfence_pviommu::wire::{EVENT_BYTES, PAGES_LIMIT, Status};
use ringfence_vfio_user::fields::{copy_part, u32_at};
use virtio_queue::{Queue, QueueT};

use super::DeviceState;
use super::quantum::{ChainOutcome, QuantumResult, serve_chains};
use super::{Device, PollSource, QueueBroken, ResetPending};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::grants::StuckProcess;
use crate::pviommu::PvIommu;
use crate::saved_state::HandOverBlocker;
use crate::virtio::chain::Chain;

const REQUESTS: usize = 0;
/// Event queue, in which the driver posts buffers for events.
const EVENTS: usize = 1;
/// `PVIOMMU_F_EVENTS`: the device has an event queue.
const F_EVENTS: u64 = 1;
/// Bytes of the largest valid request.
const REQUEST_BYTES: u64 = 24 + 16 * PAGES_LIMIT as u64;
/// Exceeds the time that a driver waits (`docs/PVIOMMU.md`, "Requests").
const TOO_LONG: Duration = Duration::from_secs(12);

/// For tests: faulty replies from a given request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedReply {
    /// Requests that the device answers correctly before the fault.
    pub after: u64,
    /// Fault of the reply that follows.
    pub how: ReplyFault,
}

/// Fault of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyFault {
    /// The device sends no reply.
    Never,
    /// The device replies after the driver has stopped waiting.
    Late,
    /// The device returns the same descriptor twice.
    Twice,
    /// The device returns a descriptor that the driver did not make available.
    Foreign,
}

impl std::str::FromStr for InjectedReply {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (how, after) = text.split_once(':').unwrap_or((text, "0"));
        let how = match how {
            "never" => Some(ReplyFault::Never),
            "late" => Some(ReplyFault::Late),
            "twice" => Some(ReplyFault::Twice),
            "foreign" => Some(ReplyFault::Foreign),
            _ => None,
        };
        let after = after.parse().ok();
        how.zip(after)
            .map(|(how, after)| Self { after, how })
            .ok_or_else(|| "expected HOW:N: never, late, twice or foreign, after N requests".into())
    }
}

/// The para-virtual IOMMU device.
#[derive(Debug)]
pub struct PvIommuDevice {
    iommu: PvIommu,
    events_due: bool,
    counters: Arc<DeviceCounters>,
    inject_reply: Option<InjectedReply>,
}

impl PvIommuDevice {
    /// Creates the device that exposes `iommu` to the guest.
    pub fn new(iommu: PvIommu, counters: Arc<DeviceCounters>) -> Self {
        Self {
            iommu,
            events_due: false,
            counters,
            inject_reply: None,
        }
    }

    /// Makes the device reply incorrectly, to test the driver.
    pub fn inject_reply(&mut self, inject_reply: InjectedReply) {
        self.inject_reply = Some(inject_reply);
    }

    /// Handles the request in `chain` and writes its status. `None` if the chain is malformed, has
    /// no room for the status, or is inaccessible.
    fn serve<A: Dma>(&mut self, chain: &mut Chain, dma: &mut A) -> Option<()> {
        let answer = chain.writable.take_front(1).filter(|_| !chain.malformed)?;
        let bytes = chain.readable.bytes();
        let status = if bytes > REQUEST_BYTES {
            Status::Malformed
        } else {
            let mut request = vec![0; usize::try_from(bytes).ok()?];
            dma.with(|memory| chain.readable.read(memory, &mut request))
                .ok()?;
            let status = self.iommu.unit().handle(&request);
            self.counters.count_pv_request(&request, status);
            status
        };
        dma.with(|memory| answer.write(memory, &[status.raw()]))
            .ok()
    }

    fn serve_requests<A: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let counters = Arc::clone(&self.counters);
        let mut broken = false;
        let turn = serve_chains(queue, dma, &counters, |chain, dma| {
            broken |= self.serve(chain, dma).is_none();
            ChainOutcome::Used(1)
        })?;
        // A chain was malformed, without room for the status, or inaccessible.
        if broken {
            return Err(virtio_queue::Error::InvalidChain.into());
        }
        self.iommu.unit().maintain();
        Ok(turn)
    }

    fn serve_events<A: Dma>(
        &mut self,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        let iommu = self.iommu.clone();
        let counters = DeviceCounters::default();
        serve_chains(queue, dma, &counters, |chain, dma| {
            if chain.malformed || chain.writable.bytes() < EVENT_BYTES as u64 {
                return ChainOutcome::Used(0);
            }
            // Release the lock before the memory access that writes the event.
            let event = iommu.unit().next_event();
            let Some(event) = event else {
                return ChainOutcome::Later;
            };
            let written = dma.with(|memory| chain.writable.write(memory, &event.encode()));
            ChainOutcome::Used(written.map_or(0, |()| EVENT_BYTES as u32))
        })
    }

    /// Answers the next request with the fault `how` and handles no other request in this turn.
    fn inject_next_reply<A: Dma>(
        &mut self,
        how: ReplyFault,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        if how == ReplyFault::Never {
            return Ok(QuantumResult::default());
        }
        if how == ReplyFault::Late {
            thread::sleep(TOO_LONG);
            self.inject_reply = None;
        }
        let Some(mut chain) = dma.with(|memory| Chain::next(queue, memory))? else {
            return Ok(QuantumResult::default());
        };
        let _ = self.serve(&mut chain, dma);
        self.counters.requests.add(1);
        let heads = match how {
            ReplyFault::Twice => vec![chain.head; 2],
            ReplyFault::Foreign => vec![queue.size() - 1 - chain.head],
            _ => vec![chain.head],
        };
        for head in heads {
            dma.with(|memory| queue.add_used(memory, head, 1))?;
        }
        Ok(QuantumResult::default())
    }
}

impl Device for PvIommuDevice {
    const TYPE: u16 = 63;
    // Base system peripheral, IOMMU.
    const CLASS: [u8; 3] = [0x08, 0x06, 0x00];

    fn features(&self) -> u64 {
        F_EVENTS
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256, 64]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        copy_part(&self.iommu.unit().config().encode(), offset, data);
    }

    fn activate(&mut self, _features: u64) {
        self.iommu.unit().start();
    }

    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        if self.inject_reply.is_some() {
            return Err(HandOverBlocker::Unsupported(
                "an IOMMU with an injected reply",
            ));
        }
        self.iommu.unit().save().map(DeviceState::PvIommu)
    }

    /// Checks for pending events only: the saved records contain the mappings.
    fn resume(&mut self, _features: u64) {
        self.iommu.poll_events();
    }

    fn reset(&mut self) -> Result<(), ResetPending> {
        let reset = self.iommu.unit().reset();
        reset.map_err(|StuckProcess| ResetPending)
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        Some(PollSource::readable(self.iommu.reported()))
    }

    fn on_ready(&mut self) {
        self.iommu.clear_reported();
        self.events_due = true;
    }

    /// Events without a buffer stay in the device until the driver rings the doorbell.
    fn due(&mut self) -> Option<usize> {
        std::mem::take(&mut self.events_due).then_some(EVENTS)
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        if index != REQUESTS {
            return self.serve_events(queue, dma);
        }
        match self.inject_reply {
            Some(wrong) if self.counters.requests.get() >= wrong.after => {
                self.inject_next_reply(wrong.how, queue, dma)
            }
            _ => self.serve_requests(queue, dma),
        }
    }
}

impl DeviceCounters {
    fn count_pv_request(&self, request: &[u8], status: Status) {
        match u32_at(request, 8) {
            Some(0) => self.maps.add(1),
            Some(1) => self.unmaps.add(1),
            _ => {}
        }
        if status != Status::Ok {
            self.failed.add(1);
        }
    }
}
