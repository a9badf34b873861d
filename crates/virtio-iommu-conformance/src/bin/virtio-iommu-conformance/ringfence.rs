//! Ringfence's device, called directly.

use ringfence_types::{Access as DeviceAccess, Iova, IovaRange};
use ringfence_virtio_iommu::{
    AccessTarget, Device, DomainId, EndpointId, Mapping, Sink, SinkError, SinkHandle,
};
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};

use super::options::{ENDPOINTS, options, regions};

/// A sink with one reader, which ends its access when the sink waits for it in `commit`.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    pub(crate) outstanding: bool,
    /// Flaw: the sink does not wait.
    pub(crate) hasty: bool,
}

impl SinkHandle for Reader {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for Reader {
    fn create(&mut self, _: DomainId) -> Result<(), SinkError> {
        Ok(())
    }

    fn destroy(&mut self, _: DomainId) {}

    fn attach(
        &mut self,
        _: EndpointId,
        _: DomainId,
        _: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        Ok(())
    }

    fn bypass(&mut self, _: EndpointId) -> Result<(), SinkError> {
        Ok(())
    }

    fn block(&mut self, _: EndpointId) {}

    fn map(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        Ok(())
    }

    fn unmap(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        if !self.hasty {
            self.outstanding = false;
        }
        Ok(())
    }
}

pub(crate) struct Direct {
    pub(crate) device: Device<Reader>,
}

impl Direct {
    pub(crate) fn new(setup: &Setup) -> Self {
        let mut device = Device::new(options(setup), Reader::default()).expect("sound options");
        for id in ENDPOINTS {
            device
                .add_endpoint(EndpointId::new(id), &regions(setup, id))
                .expect("an endpoint");
        }
        Self { device }
    }

    /// Returns the target of an access, without a report.
    pub(crate) fn peek(&self, endpoint: u32, iova: u64, access: Access) -> Option<u64> {
        let range = IovaRange::new(Iova::new(iova), 1)?;
        match self
            .device
            .translate(EndpointId::new(endpoint), range, kind(access))
        {
            Ok(AccessTarget::Memory { physical, .. }) => Some(physical.start().get()),
            Ok(AccessTarget::Doorbell { .. }) | Err(_) => None,
        }
    }
}

const fn kind(access: Access) -> DeviceAccess {
    match access {
        Access::Read => DeviceAccess::Read,
        Access::Write => DeviceAccess::Write,
    }
}

impl Subject for Direct {
    fn endpoints(&self) -> [u32; 3] {
        ENDPOINTS
    }

    fn offered(&self) -> u64 {
        self.device.features()
    }

    fn accept(&mut self, features: u64) {
        self.device.accept_features(features);
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        self.device.read_config(offset, bytes);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        self.device
            .write_config(offset, bytes)
            .expect("the sink begins");
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        let handled = self.device.handle(readable, writable);
        Ok(handled.expect("the sink begins").used)
    }

    fn reset(&mut self) {
        self.device.reset().expect("the sink begins");
    }

    fn reset_system(&mut self) -> bool {
        self.device.reset_system().expect("the sink begins");
        true
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        let Some(range) = IovaRange::new(Iova::new(iova), 1) else {
            return Outcome::Blocked;
        };
        let endpoint_id = EndpointId::new(endpoint);
        if let Err(denied) = self.device.translate(endpoint_id, range, kind(access)) {
            self.device.report(denied);
        }
        let reached = self.peek(endpoint, iova, access);
        reached.map_or(Outcome::Blocked, Outcome::Reached)
    }

    fn begin_access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<bool> {
        let allowed = self.peek(endpoint, iova, access).is_some();
        self.device.sink_mut().outstanding = allowed;
        Some(allowed)
    }

    fn access_is_outstanding(&self) -> bool {
        self.device.sink().outstanding
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.device.next_event(buffer).unwrap_or(Some(0))
    }

    fn dropped_events(&self) -> Option<u64> {
        Some(self.device.events_dropped())
    }
}
