//! virtio-iommu on the virtio PCI transport (virtio 1.3, section 5.13). This file serves its two
//! queues; the crate `ringfence-virtio-iommu` handles the requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ringfence_virtio_iommu::spec;
use ringfence_virtio_iommu::{Queues, RequestOutcome, ServeError, Status};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemory;

use super::DeviceState;
use super::{Device, PollSource, QuantumResult, QueueBroken, ResetPending};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::{Recorder, VirtioIommu};
use crate::limits::BoundedLog;
use crate::saved_state::HandOverBlocker;

const REQUESTS: usize = 0;
/// Event queue, in which the driver posts buffers for faults.
const EVENTS: usize = 1;

/// The virtio-iommu device.
#[derive(Debug)]
pub struct IommuDevice {
    iommu: VirtioIommu,
    queues: Queues,
    faults_due: bool,
    counters: Arc<DeviceCounters>,
    recorder: Option<Recorder>,
    log: BoundedLog,
}

impl IommuDevice {
    /// Creates the device that exposes `iommu` to the guest.
    pub fn new(iommu: VirtioIommu, counters: Arc<DeviceCounters>) -> Self {
        Self {
            iommu,
            queues: Queues::default(),
            faults_due: false,
            counters,
            recorder: None,
            log: BoundedLog::default(),
        }
    }

    /// Sets the log of requests that failed with `NOMEM`.
    pub fn set_log(&mut self, log: BoundedLog) {
        self.log = log;
    }

    /// Records all requests.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }
}

impl Device for IommuDevice {
    const TYPE: u16 = 23;
    // Base system peripheral, IOMMU.
    const CLASS: [u8; 3] = [0x08, 0x06, 0x00];

    fn features(&self) -> u64 {
        self.iommu.unit().features()
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256, 64]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.iommu.unit().read_config(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        // This sink is always ready.
        let _ = self.iommu.unit().write_config(offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.iommu.unit().accept_features(features);
    }

    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        let record = self.recorder.as_ref().map(Recorder::save);
        Ok(DeviceState::Iommu {
            snapshot: self.iommu.unit().snapshot(),
            record: record.transpose()?,
            dmas: self.iommu.dmas().save()?,
        })
    }

    fn end(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.end();
        }
        self.iommu.dmas().end();
    }

    /// Checks for pending faults only: the snapshot contains the negotiated state.
    fn resume(&mut self, _features: u64) {
        self.iommu.poll_faults();
    }

    fn reset(&mut self) -> Result<(), ResetPending> {
        self.iommu.unit().reset().map_err(|_| ResetPending)
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        Some(PollSource::readable(self.iommu.reported()))
    }

    fn on_ready(&mut self) {
        self.iommu.clear_reported();
        self.faults_due = true;
    }

    /// Faults without a buffer stay in the device until the driver rings the doorbell.
    fn due(&mut self) -> Option<usize> {
        std::mem::take(&mut self.faults_due).then_some(EVENTS)
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        dma.with(|memory| {
            let result = if index == REQUESTS {
                self.serve_requests(queue, memory)
            } else {
                self.serve_events(queue, memory)
            };
            match result {
                Ok(turn) => Ok(turn),
                Err(ServeError::Queue(error)) => Err(QueueBroken(error)),
                // Cannot occur: this sink never waits, so it can always begin.
                Err(ServeError::Sink(_)) => Ok(QuantumResult::default()),
                Err(ServeError::CommitFailed(_)) => {
                    Err(QueueBroken(virtio_queue::Error::QueueNotReady))
                }
            }
        })
    }
}

impl IommuDevice {
    fn serve_events<M: GuestMemory>(
        &mut self,
        queue: &mut Queue,
        memory: &M,
    ) -> Result<QuantumResult, ServeError> {
        let mut unit = self.iommu.unit();
        let served = self.queues.serve_events(&mut unit, queue, memory)?;
        queue.enable_notification(memory)?;
        Ok(QuantumResult {
            interrupt: served.notify,
            more: served.more,
        })
    }

    fn serve_requests<M: GuestMemory>(
        &mut self,
        queue: &mut Queue,
        memory: &M,
    ) -> Result<QuantumResult, ServeError> {
        let announced = queue.avail_idx(memory, Ordering::Acquire)?.0 != queue.next_avail();
        let begun = Instant::now();
        let (iommu, counters) = (&self.iommu, &self.counters);
        let (recorder, log) = (&mut self.recorder, &mut self.log);
        let served =
            self.queues
                .serve_requests(&mut iommu.unit(), queue, memory, |request, handled| {
                    counters.count_request(request, handled);
                    if let Err(error) = &handled.result
                        && error.status() == Some(Status::NoMem)
                    {
                        log.log(error);
                    }
                    if let Some(recorder) = recorder {
                        recorder.add(request, handled.result.is_ok());
                    }
                })?;
        // The driver waits for the whole batch, so each request is charged the time of the batch.
        let took = begun.elapsed();
        (0..served.buffers).for_each(|_| counters.service.record(took));
        // The announced request is inaccessible: see `Chain::next`.
        if announced && served.buffers == 0 {
            return Err(virtio_queue::Error::InvalidAvailRingIndex.into());
        }
        Ok(QuantumResult {
            interrupt: served.notify,
            // Requests that arrived before the notification was enabled are left for the next turn.
            more: queue.enable_notification(memory)? || served.more,
        })
    }
}

impl DeviceCounters {
    fn count_request(&self, request: &[u8], handled: &RequestOutcome) {
        self.requests.add(1);
        match request.first() {
            Some(&spec::VIRTIO_IOMMU_T_MAP) => self.maps.add(1),
            Some(&spec::VIRTIO_IOMMU_T_UNMAP) => self.unmaps.add(1),
            _ => {}
        }
        if handled.result.is_err() {
            self.failed.add(1);
        }
    }
}
