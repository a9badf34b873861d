//! Connects the unit to a virtio-iommu device as its sink: the driver's requests become the
//! mappings that readers use.
//!
//! A batch of requests waits for readers once. Requests take effect immediately, and
//! [`commit`](Sink::commit) returns when no reader holds anything that they removed. Only then does
//! the device send the replies to the driver.

use std::collections::BTreeMap;

use ringfence_types as types;
use ringfence_types::RequesterId;
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle};

use crate::endpoint::AttachedDomain;
use crate::error::{DomainMapError, DomainMapReason, IommuError};
use crate::iommu::{SoftIommu, SoftIommuLimits, may_wait};
use crate::reader::Reader;

/// A [`SoftIommu`] addressed by the guest's endpoint and domain ids. An endpoint that was not added
/// here exists only in the virtio-iommu device and has no readers.
pub struct IommuSink<M> {
    unit: SoftIommu<M>,
    endpoints: BTreeMap<EndpointId, RequesterId>,
    /// Maps the driver's 32-bit domain ids to the unit's 16-bit ids.
    domains: BTreeMap<DomainId, types::DomainId>,
    unused: Vec<u16>,
}

impl<M> IommuSink<M> {
    /// Creates a unit over `memory` without endpoints.
    pub fn new(limits: SoftIommuLimits, memory: M) -> Self {
        let domains = u16::try_from(limits.domains).unwrap_or(u16::MAX);
        Self {
            unit: SoftIommu::new(limits, memory),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            unused: (0..domains).rev().collect(),
        }
    }

    /// Adds `device`, which the guest addresses as `endpoint`. Call this before adding the endpoint
    /// to the virtio-iommu device.
    pub fn add_endpoint(
        &mut self,
        endpoint: EndpointId,
        device: RequesterId,
    ) -> Result<(), IommuError> {
        if self.endpoints.contains_key(&endpoint) {
            return Err(IommuError::EndpointExists(device));
        }
        self.unit.add_endpoint(device)?;
        self.endpoints.insert(endpoint, device);
        Ok(())
    }

    /// Removes an endpoint. On return, its readers are blocked permanently.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId) -> Result<(), IommuError> {
        if let Some(device) = self.endpoints.get(&endpoint) {
            self.unit.remove_endpoint(*device)?;
            self.endpoints.remove(&endpoint);
        }
        Ok(())
    }

    /// Creates a reader for one thread that accesses memory for `device`.
    pub fn reader(&self, device: RequesterId) -> Result<Reader<M>, IommuError> {
        self.unit.reader(device)
    }

    /// Replaces the memory that physical addresses refer to. On return, no reader can access the
    /// old memory. An offline [`Reader`] still owns a reference until it next goes online.
    pub fn set_memory(&mut self, memory: M) -> Result<(), IommuError> {
        self.unit.set_memory(memory)
    }

    fn device(&self, endpoint: EndpointId) -> Result<RequesterId, SinkError> {
        let device = self.endpoints.get(&endpoint).copied();
        device.ok_or(SinkError::Unsupported)
    }

    fn domain(&self, domain: DomainId) -> Result<types::DomainId, SinkError> {
        let domain = self.domains.get(&domain).copied();
        domain.ok_or(SinkError::Failed)
    }
}

impl<M> SinkHandle for IommuSink<M> {
    type Handle<'s>
        = IommuSinkMut<'s, M>
    where
        Self: 's;

    fn handle(&mut self) -> IommuSinkMut<'_, M> {
        IommuSinkMut { sink: self }
    }
}

/// Exclusive access to the [`IommuSink`] of a virtio-iommu device:
/// [`Device::sink_mut`](ringfence_virtio_iommu::Device::sink_mut).
///
/// A caller cannot swap the sinks of two devices:
/// ```compile_fail,E0614
/// # use ringfence_softiommu::IommuSink;
/// # use ringfence_virtio_iommu::Device;
/// fn exchange(a: &mut Device<IommuSink<()>>, b: &mut Device<IommuSink<()>>) {
///     core::mem::swap(&mut *a.sink_mut(), &mut *b.sink_mut());
/// }
/// ```
pub struct IommuSinkMut<'s, M> {
    sink: &'s mut IommuSink<M>,
}

impl<M> IommuSinkMut<'_, M> {
    /// Adds an endpoint as [`IommuSink::add_endpoint`] does.
    ///
    /// # Errors
    /// The endpoint already exists, or the unit has its maximum number of endpoints.
    pub fn add_endpoint(
        &mut self,
        endpoint: EndpointId,
        device: RequesterId,
    ) -> Result<(), IommuError> {
        self.sink.add_endpoint(endpoint, device)
    }

    /// Removes an endpoint as [`IommuSink::remove_endpoint`] does.
    ///
    /// # Errors
    /// This thread has a read section open. Nothing has changed.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId) -> Result<(), IommuError> {
        self.sink.remove_endpoint(endpoint)
    }

    /// Replaces the memory as [`IommuSink::set_memory`] does.
    ///
    /// # Errors
    /// This thread has a read section open. Nothing has changed.
    pub fn set_memory(&mut self, memory: M) -> Result<(), IommuError> {
        self.sink.set_memory(memory)
    }
}

impl<M> Sink for IommuSink<M> {
    fn begin(&mut self) -> Result<(), SinkError> {
        may_wait().map_err(|_| SinkError::WouldBlock)
    }

    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        if self.domains.contains_key(&domain) {
            return Err(SinkError::Failed);
        }
        let number = self.unused.pop().ok_or(SinkError::OutOfMemory)?;
        let id = types::DomainId::new(number);
        if let Err(error) = self.unit.create_domain(id) {
            self.unused.push(number);
            return Err(changed(error));
        }
        self.domains.insert(domain, id);
        Ok(())
    }

    fn destroy(&mut self, domain: DomainId) {
        if let Some(id) = self.domains.remove(&domain) {
            self.unit.drop_domain(id);
            self.unused.push(id.get());
        }
    }

    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        _mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        let (device, domain) = (self.device(endpoint)?, self.domain(domain)?);
        self.unit.attach_nosync(device, domain).map_err(changed)
    }

    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError> {
        let device = self.device(endpoint)?;
        self.unit
            .change(device, AttachedDomain::Bypass, None)
            .map_err(changed)
    }

    fn block(&mut self, endpoint: EndpointId) {
        // An endpoint without readers cannot access memory.
        if let Ok(device) = self.device(endpoint) {
            let _ = self.unit.change(device, AttachedDomain::Blocked, None);
        }
    }

    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        let domain = self.domain(domain)?;
        let mut domain = self.unit.domain(domain).map_err(changed)?;
        domain
            .map(mapping.iova, mapping.physical, mapping.permissions)
            .map_err(|error| mapped(&error))
    }

    /// Readers may use the mapping until [`commit`](Sink::commit) has waited for them.
    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        let domain = self.domain(domain)?;
        self.unit
            .domain(domain)
            .map_err(changed)?
            .unmap_nosync(&mapping.iova);
        Ok(())
    }

    /// Fails if the thread has opened a read section since [`begin`](Sink::begin): it would wait
    /// for itself.
    fn commit(&mut self) -> Result<(), SinkError> {
        may_wait().map_err(|_| SinkError::CommitFailed)?;
        self.unit.synchronize();
        Ok(())
    }
}

fn changed(error: IommuError) -> SinkError {
    match error {
        IommuError::TooManyDomains(_)
        | IommuError::TooManyEndpoints(_)
        | IommuError::NoMemory(_) => SinkError::OutOfMemory,
        IommuError::ReadSectionOpen(_) => SinkError::WouldBlock,
        _ => SinkError::Failed,
    }
}

fn mapped(error: &DomainMapError) -> SinkError {
    match error.reason {
        DomainMapReason::OutOfTables => SinkError::OutOfMemory,
        DomainMapReason::BadMemory { .. } => SinkError::BadAddress(error.range),
        DomainMapReason::NotPages | DomainMapReason::BeyondWidth => SinkError::Unsupported,
        DomainMapReason::ReadSectionOpen => SinkError::WouldBlock,
        DomainMapReason::Mapped { .. } => SinkError::Failed,
    }
}
