//! The unit as the sink of a virtio-iommu device: what the guest's driver asks for is what readers
//! translate by.
//!
//! A batch of requests waits once. Its changes are made as they come, and [`commit`](Sink::commit)
//! returns when no reader holds what any of them took away; only then do the replies reach the
//! driver.

use std::collections::BTreeMap;

use ringfence_types as types;
use ringfence_types::RequesterId;
use ringfence_virtio_iommu::{DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle};

use crate::endpoint::AttachedDomain;
use crate::error::{IommuError, MapError, MapReason};
use crate::iommu::{SoftIommu, SoftIommuLimits, may_wait};
use crate::reader::Reader;

/// A [`SoftIommu`] under the guest's names for endpoints and domains. Endpoints that it was not
/// told of exist for the device only: they have no readers.
pub struct IommuSink<M> {
    unit: SoftIommu<M>,
    endpoints: BTreeMap<EndpointId, RequesterId>,
    /// The driver's domains have numbers of 32 bits, the unit's are those of an IOTLB tag.
    domains: BTreeMap<DomainId, types::DomainId>,
    unused: Vec<u16>,
}

impl<M> IommuSink<M> {
    /// A unit without endpoints, over `memory`.
    pub fn new(limits: SoftIommuLimits, memory: M) -> Self {
        let domains = u16::try_from(limits.domains).unwrap_or(u16::MAX);
        Self {
            unit: SoftIommu::new(limits, memory),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            unused: (0..domains).rev().collect(),
        }
    }

    /// The guest calls `device` by the name `endpoint`. Say so before the virtio-iommu device hears
    /// of it.
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

    /// The endpoint is gone: when this returns, its readers are denied everything for good.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId) -> Result<(), IommuError> {
        if let Some(device) = self.endpoints.get(&endpoint) {
            self.unit.remove_endpoint(*device)?;
            self.endpoints.remove(&endpoint);
        }
        Ok(())
    }

    /// A reader for one thread that accesses memory for `device`.
    pub fn reader(&self, device: RequesterId) -> Result<Reader<M>, IommuError> {
        self.unit.reader(device)
    }

    /// Puts other memory behind all translations. When this returns, no reader holds anything of
    /// the memory before.
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

/// The right to change the [`IommuSink`] of a virtio-iommu device:
/// [`Device::sink_mut`](ringfence_virtio_iommu::Device::sink_mut).
///
/// The sinks of two devices cannot change places:
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
    /// As [`IommuSink::add_endpoint`].
    ///
    /// # Errors
    /// The endpoint is there already, or one too many.
    pub fn add_endpoint(
        &mut self,
        endpoint: EndpointId,
        device: RequesterId,
    ) -> Result<(), IommuError> {
        self.sink.add_endpoint(endpoint, device)
    }

    /// As [`IommuSink::remove_endpoint`].
    ///
    /// # Errors
    /// This thread is a reader: nothing has changed.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId) -> Result<(), IommuError> {
        self.sink.remove_endpoint(endpoint)
    }

    /// As [`IommuSink::set_memory`].
    ///
    /// # Errors
    /// This thread is a reader: nothing has changed.
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
        // An endpoint that is not there reaches nothing.
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

    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        let domain = self.domain(domain)?;
        self.unit
            .domain(domain)
            .map_err(changed)?
            .clear(&mapping.iova);
        Ok(())
    }

    /// Refused if the thread has become a reader since [`begin`](Sink::begin): it would wait for
    /// itself.
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

fn mapped(error: &MapError) -> SinkError {
    match error.reason {
        MapReason::OutOfTables => SinkError::OutOfMemory,
        MapReason::BadMemory { .. } => SinkError::BadAddress(error.range),
        MapReason::NotPages | MapReason::BeyondWidth => SinkError::Unsupported,
        MapReason::ReadSectionOpen => SinkError::WouldBlock,
        MapReason::Mapped { .. } => SinkError::Failed,
    }
}
