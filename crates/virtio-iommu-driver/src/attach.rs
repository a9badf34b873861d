//! Attaching and detaching endpoints, and their properties.

use alloc::vec::Vec;

use ringfence_types::{DomainId, FrameSource, PhysMemory, RequesterId};
use ringfence_virtio_iommu::ReservedRegion;

use crate::error::{Failure, Feature, UnitError};
use crate::probe;
use crate::request::{DomainKind, Request};
use crate::requests::Receiver;
use crate::transport::Transport;
use crate::unit::Unit;

impl<T: Transport, M: PhysMemory, S: FrameSource> Unit<T, M, S> {
    /// Confines `device` to the mappings of `domain`, present and future ones.
    ///
    /// # Errors
    /// It is attached already, or the device refuses. Then it stays blocked, unless the error is
    /// [`UnitError::Failed`], after which its rights are unknown until
    /// [`recover`](Self::recover).
    pub fn attach(&mut self, device: RequesterId, domain: DomainId) -> Result<(), UnitError> {
        self.attach_as(device, domain, DomainKind::Mapped)
    }

    /// Lets `device` reach all physical memory, in `domain`, which has no mappings.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn pass_through(&mut self, device: RequesterId, domain: DomainId) -> Result<(), UnitError> {
        if !self.capabilities().has_bypass() {
            return Err(UnitError::Unsupported(Feature::BypassConfig));
        }
        self.attach_as(device, domain, DomainKind::Bypass)
    }

    fn attach_as(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        kind: DomainKind,
    ) -> Result<(), UnitError> {
        self.requests.check()?;
        self.capabilities().check_domain(domain)?;
        if self.domains.of_device(device).is_some() {
            return Err(UnitError::Attached(device));
        }
        let is_first = self.domains.of_kind(domain, kind)?.endpoints.is_empty();
        let attached = self.send_attach(device, domain, kind, is_first);
        if attached.is_ok()
            && let Some(domain) = self.domains.get_mut(domain)
        {
            domain.endpoints.push(device);
        }
        self.domains.tidy(domain);
        attached
    }

    fn send_attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        kind: DomainKind,
        is_first: bool,
    ) -> Result<(), UnitError> {
        // Not before an UNMAP of an earlier domain with this id.
        self.drain()?;
        let endpoint = self.endpoint(device);
        self.execute(&Request::Attach {
            domain,
            endpoint,
            kind,
        })?;
        if !is_first {
            return Ok(());
        }
        // The domain is new to the device.
        let Some(known) = self.domains.get(domain) else {
            return Ok(());
        };
        let maps: Vec<_> = known.mappings().map(|m| m.request(domain)).collect();
        let mapped = self.execute_all(&maps, |_| ());
        if mapped.is_err() && self.requests.check().is_ok() {
            let detached = self.execute(&Request::Detach { domain, endpoint });
            if detached.is_err() {
                self.requests.fail(Failure::Refusals);
            }
        }
        mapped
    }

    /// Blocks `device`. When this returns, it reaches nothing, and no access that began earlier is
    /// under way.
    ///
    /// # Errors
    /// The device refuses or fails: `device` may still reach its domain.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), UnitError> {
        self.requests.check()?;
        let domain = self.domains.of_device(device);
        let domain = domain.ok_or(UnitError::NotAttached(device))?;
        // An UNMAP after the last DETACH would find no domain.
        self.drain()?;
        let endpoint = self.endpoint(device);
        self.execute(&Request::Detach { domain, endpoint })?;
        if let Some(known) = self.domains.get_mut(domain) {
            known.endpoints.retain(|other| *other != device);
            if known.endpoints.is_empty() {
                self.requests.forget_refused(domain);
            }
        }
        self.domains.tidy(domain);
        Ok(())
    }

    /// Returns the addresses that `device` cannot map. The caller keeps its allocator away from
    /// them.
    ///
    /// # Errors
    /// The device lacks PROBE, refuses, or its reply is malformed.
    pub fn probe(&mut self, device: RequesterId) -> Result<Vec<ReservedRegion>, UnitError> {
        let bytes = self.capabilities().probe_bytes;
        let bytes = bytes.ok_or(UnitError::Unsupported(Feature::Probe))?;
        let endpoint = self.endpoint(device);
        self.execute(&Request::Probe { endpoint })?;
        let properties = self.requests.properties(&self.memory, bytes);
        probe::reserved_regions(&properties.map_err(Failure::from)?)
    }

    /// Sends one request and waits for its answer.
    pub(crate) fn execute(&mut self, request: &Request) -> Result<(), UnitError> {
        let mut result = Ok(());
        self.execute_all(core::slice::from_ref(request), |_| ())
            .unwrap_or_else(|error| result = Err(error));
        result
    }

    /// Sends `requests` in bursts of one notification, and waits for all answers. Passes the
    /// accepted ones to `accepted`.
    ///
    /// # Errors
    /// The first refusal; later requests of the same burst may have been accepted. Or the device
    /// fails.
    pub(crate) fn execute_all(
        &mut self,
        requests: &[Request],
        mut accepted: impl FnMut(&Request),
    ) -> Result<(), UnitError> {
        let mut rest = requests;
        while !rest.is_empty() {
            let room = self.wait_for_room()?;
            let (burst, later) = rest.split_at(room.min(rest.len()));
            rest = later;
            let mut slots = Vec::new();
            for request in burst {
                slots.push(
                    self.requests
                        .queue(&self.memory, request, Receiver::Caller)?,
                );
            }
            self.requests.kick(&self.memory, &mut self.transport)?;
            let mut refusal = None;
            for (slot, request) in slots.into_iter().zip(burst) {
                match self.requests.wait(&self.memory, &self.transport, slot)? {
                    Ok(()) => accepted(request),
                    Err(status) => refusal = refusal.or(Some(status)),
                }
            }
            if let Some(status) = refusal {
                return Err(status.into());
            }
        }
        Ok(())
    }

    /// Waits until the queue has a free slot. Returns their number.
    fn wait_for_room(&mut self) -> Result<usize, UnitError> {
        if self.requests.free_slots() == 0 {
            self.requests.kick(&self.memory, &mut self.transport)?;
        }
        let room = self
            .requests
            .wait_until(&self.memory, &self.transport, |queue| {
                let free = queue.free_slots();
                (free != 0).then_some(free)
            })?;
        Ok(room)
    }

    /// Waits until all requests are answered.
    pub(crate) fn drain(&mut self) -> Result<(), UnitError> {
        self.requests.kick(&self.memory, &mut self.transport)?;
        self.requests
            .wait_until(&self.memory, &self.transport, |queue| {
                queue.is_idle().then_some(())
            })?;
        Ok(())
    }
}
