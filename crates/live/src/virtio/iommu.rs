//! virtio-iommu on this transport (virtio 1.3, section 5.13). What it does is the crate `virtio-iommu`'s; here are its two queues.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_virtio_iommu::spec;
use ringfence_virtio_iommu::{Handled, Queues, ServeError};
use virtio_queue::{Queue, QueueT};

use super::{Device, QueueBroken, Turn};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::Iommu;

const REQUESTS: usize = 0;
/// The queue in which the driver waits for faults.
const EVENTS: usize = 1;

/// The device.
#[derive(Debug)]
pub struct IommuDevice {
    iommu: Iommu,
    queues: Queues,
    counters: Arc<DeviceCounters>,
}

impl IommuDevice {
    /// A face for `iommu`.
    pub fn new(iommu: Iommu, counters: Arc<DeviceCounters>) -> Self {
        Self {
            iommu,
            queues: Queues::default(),
            counters,
        }
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

    fn reset(&mut self) {
        let _ = self.iommu.unit().reset();
    }

    fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        Some(self.iommu.reported())
    }

    /// What the driver has no buffer for waits in the device until it rings.
    fn came(&mut self) -> usize {
        self.iommu.clear_reported();
        EVENTS
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<Turn, QueueBroken> {
        let Self {
            iommu,
            queues,
            counters,
        } = self;
        let served = dma.with(|memory| {
            if index != REQUESTS {
                let served = queues.serve_events(&mut iommu.unit(), queue, memory)?;
                queue.enable_notification(memory)?;
                return Ok(served);
            }
            let mut served =
                queues.serve_requests(&mut iommu.unit(), queue, memory, |request, handled| {
                    counters.count_request(request, handled);
                })?;
            // What came before the driver was asked to ring again is left for the next turn.
            served.more |= queue.enable_notification(memory)?;
            Ok(served)
        });
        match served {
            Ok(served) => Ok(Turn {
                interrupt: served.notify,
                more: served.more,
            }),
            Err(ServeError::Queue(error)) => Err(QueueBroken(error)),
            // Cannot be: nothing here holds what a sink would wait for.
            Err(ServeError::Sink(_)) => Ok(Turn::default()),
        }
    }
}

impl DeviceCounters {
    fn count_request(&self, request: &[u8], handled: &Handled) {
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
