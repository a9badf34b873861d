//! A device: its start, recovery and end.

use alloc::vec::Vec;

use ringfence_types::{FrameSource, PhysMemory, RequesterId};
use ringfence_virtio_iommu::EndpointId;
use ringfence_virtio_iommu::spec::{EVENTQ, REQUESTQ};

use crate::capabilities::{self, Capabilities, Configuration};
use crate::domain::Domains;
use crate::error::{Failure, UnitError};
use crate::events::EventQueue;
use crate::fault::FaultRecord;
use crate::frames::QueueFrames;
use crate::request::Request;
use crate::requests::{RequestQueue, check_status};
use crate::transport::{ABSENT, ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, Transport};

/// Options of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Endpoint number of requester id 0, from the VIOT table or the device tree. The number of
    /// another device is this number plus its requester id, so it is at most 2^32 - 2^16.
    pub first_endpoint: u32,
    /// Polls without progress after which a wait for the device fails.
    pub poll_limit: u32,
}

/// The driver of one virtio-iommu device. All endpoints are blocked until they are attached.
///
/// It is the device's only driver. The embedder serialises its calls.
#[derive(Debug)]
pub struct Unit<T, M, S> {
    pub(crate) transport: T,
    pub(crate) memory: M,
    frames: S,
    queue_frames: QueueFrames,
    capabilities: Capabilities,
    pub(crate) requests: RequestQueue,
    events: EventQueue,
    pub(crate) domains: Domains,
    options: Options,
}

impl<T: Transport, M: PhysMemory, S: FrameSource> Unit<T, M, S> {
    /// Resets the device, negotiates features, blocks endpoints without a domain and enables both
    /// queues (virtio 1.3, section 3.1.1).
    ///
    /// # Errors
    /// The device is absent, lacks a feature, is misconfigured or does not answer; or no frame is
    /// left. All frames were freed, unless the device may still use them because it does not reset.
    pub fn new(
        mut transport: T,
        memory: M,
        frames: S,
        options: &Options,
    ) -> Result<Self, UnitError> {
        if options.first_endpoint > u32::MAX - u32::from(u16::MAX) {
            return Err(UnitError::EndpointNumbers);
        }
        if !transport.is_present() {
            return Err(UnitError::Absent);
        }
        let negotiated = negotiate(&mut transport, options.poll_limit);
        let capabilities = negotiated.inspect_err(|_| give_up(&mut transport))?;
        let sizes = [REQUESTQ, EVENTQ].map(|queue| transport.queue_size(queue));
        let allocated = QueueFrames::alloc(&memory, &frames, capabilities.probe_bytes.is_some());
        let queue_frames = allocated.inspect_err(|_| give_up(&mut transport))?;
        let queues = make_queues(&queue_frames, sizes, &capabilities, options);
        let (requests, events) = match queues {
            Ok(queues) => queues,
            Err(error) => {
                // No queue was enabled.
                queue_frames.free(&frames);
                give_up(&mut transport);
                return Err(error);
            }
        };
        let mut unit = Self {
            transport,
            memory,
            frames,
            queue_frames,
            capabilities,
            requests,
            events,
            domains: Domains::default(),
            options: *options,
        };
        match unit.start() {
            Ok(()) => Ok(unit),
            Err(error) => {
                // The first error is the one to report.
                let _ = unit.disable();
                Err(error)
            }
        }
    }

    /// Enables the empty queues of a device whose features are negotiated.
    fn start(&mut self) -> Result<(), UnitError> {
        self.requests.clear(&self.memory)?;
        self.events.fill(&self.memory)?;
        for ring in [self.requests.ring(), self.events.ring()] {
            self.transport.enable_queue(ring.number(), &ring.parts());
        }
        let transport = &mut self.transport;
        transport.write_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        check_status(transport.status())?;
        transport.notify(EVENTQ);
        Ok(())
    }

    /// Returns the device's features and configuration.
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Returns the oldest fault event, and its buffer to the device. A device without a free buffer
    /// drops the fault silently.
    pub fn next_fault(&mut self) -> Option<FaultRecord> {
        let base = self.options.first_endpoint;
        self.events.next(&self.memory, &mut self.transport, base)
    }

    /// Resets the device, and attaches and maps everything again. All earlier invalidations then
    /// complete, because a reset device has no mappings. Meanwhile all endpoints are blocked.
    ///
    /// # Errors
    /// The device does not reset, has changed, or refuses what it accepted before. The driver keeps
    /// its domains and mappings. All calls fail until a later recovery succeeds.
    pub fn recover(&mut self) -> Result<(), UnitError> {
        // If this recovery fails, later calls report the first failure.
        if self.requests.check().is_ok() {
            self.requests.fail(Failure::TimedOut);
        }
        let negotiated = negotiate(&mut self.transport, self.options.poll_limit)?;
        if negotiated != self.capabilities {
            return Err(UnitError::CapabilitiesChanged);
        }
        for ring in [self.requests.ring(), self.events.ring()] {
            if self.transport.queue_size(ring.number()) < ring.size() {
                return Err(UnitError::Queue(ring.number()));
            }
        }
        let restored = self.start().and_then(|()| self.restore());
        if let Err(error) = &restored
            && self.requests.check().is_ok()
        {
            self.requests.fail(match error {
                UnitError::Failed(failure) => *failure,
                _ => Failure::Refusals,
            });
        }
        restored
    }

    /// Sends the requests that lead from a reset device to the driver's state.
    fn restore(&mut self) -> Result<(), UnitError> {
        let mut all = Vec::new();
        for domain in self.domains.iter() {
            if domain.endpoints.is_empty() {
                continue;
            }
            all.extend(domain.endpoints.iter().map(|device| Request::Attach {
                domain: domain.id,
                endpoint: endpoint_of(&self.options, *device),
                kind: domain.kind,
            }));
            all.extend(domain.mappings().map(|mapping| mapping.request(domain.id)));
        }
        // A device may execute requests in any order, and a domain exists after its first ATTACH.
        let is_attach = |request: &Request| matches!(request, Request::Attach { .. });
        let (attaches, maps): (Vec<_>, Vec<_>) = all.into_iter().partition(is_attach);
        for part in [attaches, maps] {
            self.execute_all(&part, |_| ())?;
        }
        Ok(())
    }

    /// Resets the device, which then has no domain, and frees its frames. Endpoints without a
    /// domain stay blocked if the device has the field `bypass`.
    ///
    /// # Errors
    /// [`UnitError::ResetTimedOut`], or [`UnitError::Absent`] if the status reads as all ones. The
    /// frames stay allocated, because the device may use them.
    pub fn disable(mut self) -> Result<(), UnitError> {
        reset(&mut self.transport, self.options.poll_limit)?;
        self.queue_frames.free(&self.frames);
        Ok(())
    }

    pub(crate) const fn endpoint(&self, device: RequesterId) -> EndpointId {
        endpoint_of(&self.options, device)
    }
}

const fn endpoint_of(options: &Options, device: RequesterId) -> EndpointId {
    EndpointId::new(options.first_endpoint.wrapping_add(device.get() as u32))
}

fn make_queues(
    frames: &QueueFrames,
    [requests, events]: [u16; 2],
    capabilities: &Capabilities,
    options: &Options,
) -> Result<(RequestQueue, EventQueue), UnitError> {
    let probe_bytes = capabilities.probe_bytes.unwrap_or(0);
    let requests = RequestQueue::new(frames, requests, probe_bytes, options.poll_limit)?;
    Ok((requests, EventQueue::new(frames, events)?))
}

/// Writes 0 to the status and waits until it reads as 0 (section 4.1.4.3.2).
fn reset(transport: &mut impl Transport, poll_limit: u32) -> Result<(), UnitError> {
    transport.write_status(0);
    for _ in 0..=poll_limit {
        match transport.status() {
            0 => return Ok(()),
            ABSENT => return Err(UnitError::Absent),
            _ => core::hint::spin_loop(),
        }
    }
    Err(UnitError::ResetTimedOut)
}

/// Resets the device, negotiates features, reads the configuration and blocks endpoints without a
/// domain.
fn negotiate(transport: &mut impl Transport, poll_limit: u32) -> Result<Capabilities, UnitError> {
    reset(transport, poll_limit)?;
    transport.write_status(ACKNOWLEDGE);
    transport.write_status(ACKNOWLEDGE | DRIVER);
    let features = capabilities::choose(transport.offered_features())?;
    transport.accept_features(features);
    transport.write_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
    match transport.status() {
        ABSENT => return Err(UnitError::Absent),
        status if status & FEATURES_OK == 0 => return Err(UnitError::FeaturesRejected),
        _ => {}
    }
    let config = Configuration::read(transport)?;
    let found = Capabilities::decode(features, &config)?;
    if found.has_bypass() {
        capabilities::block_unattached(transport)?;
    }
    Ok(found)
}

/// Tells the device that the driver gave up (section 2.1.1).
fn give_up(transport: &mut impl Transport) {
    let status = transport.status();
    if status != ABSENT {
        transport.write_status(status | FAILED);
    }
}
