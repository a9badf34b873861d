//! Features, the configuration, endpoints, and resets (virtio 1.3, sections 5.13.3 to 5.13.5).

use super::Device;
use crate::domain::DomainKind;
use crate::endpoint::{AttachState, Endpoint, ReservedRegion, validated_regions};
use crate::lazy::VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH;
use crate::options::{BypassPolicy, Options};
use crate::spec::{
    CONFIG_BYPASS, CONFIG_BYTES, CONFIG_DOMAIN_RANGE, CONFIG_INPUT_RANGE, CONFIG_PAGE_SIZE_MASK,
    CONFIG_PROBE_SIZE, VIRTIO_IOMMU_F_BYPASS_CONFIG, VIRTIO_IOMMU_F_DOMAIN_RANGE,
    VIRTIO_IOMMU_F_INPUT_RANGE, VIRTIO_IOMMU_F_MAP_UNMAP, VIRTIO_IOMMU_F_MMIO,
    VIRTIO_IOMMU_F_PROBE,
};
use crate::{EndpointError, EndpointId, LimitReached, Sink, SinkError};

/// Feature bits of the device type. Higher bits belong to the transport (virtio 1.3, section 2.2).
const DEVICE_FEATURES: u64 = (1 << 24) - 1;

impl Options {
    pub(super) const fn bypass_at_first(&self) -> bool {
        match self.unattached {
            BypassPolicy::Deny => false,
            BypassPolicy::DriverDecides { bypass_at_first } => bypass_at_first,
        }
    }

    /// Returns the feature bits of the device type. `VIRTIO_IOMMU_F_BYPASS` is never set.
    pub const fn features(&self) -> u64 {
        let mut bits = 1 << VIRTIO_IOMMU_F_INPUT_RANGE
            | 1 << VIRTIO_IOMMU_F_DOMAIN_RANGE
            | 1 << VIRTIO_IOMMU_F_MAP_UNMAP;
        if self.probe_bytes > 0 {
            bits |= 1 << VIRTIO_IOMMU_F_PROBE;
        }
        if self.mmio {
            bits |= 1 << VIRTIO_IOMMU_F_MMIO;
        }
        if self.lazy_domains {
            bits |= 1 << VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH;
        }
        if let BypassPolicy::DriverDecides { .. } = self.unattached {
            bits |= 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG;
        }
        bits
    }
}

impl<S: Sink> Device<S> {
    /// Returns the offered feature bits of the device type.
    pub const fn features(&self) -> u64 {
        self.options.features()
    }

    /// Records that the driver accepts `features`. Ignores bits of the transport and bits that were
    /// not offered.
    pub fn accept_features(&mut self, features: u64) {
        self.accepted = features & DEVICE_FEATURES & self.features();
    }

    /// Returns the features that the driver has accepted.
    pub const fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Copies the configuration from `offset` on into `bytes`. Bytes past its end read as 0.
    pub fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        let config = self.config();
        let from = config.get(offset..).unwrap_or_default();
        let (copied, rest) = bytes.split_at_mut(from.len().min(bytes.len()));
        copied.copy_from_slice(from.get(..copied.len()).unwrap_or_default());
        rest.fill(0);
    }

    /// Writes `bytes` at `offset` for the driver. Only `bypass` is writable, only with 0 or 1, and
    /// only after the driver has accepted `VIRTIO_IOMMU_F_BYPASS_CONFIG`. All other writes are
    /// ignored.
    ///
    /// # Errors
    /// If the sink cannot begin, nothing was written. With [`SinkError::CommitFailed`], the write
    /// took place, with the consequences described at [`handle`](Self::handle).
    pub fn write_config(&mut self, offset: usize, bytes: &[u8]) -> Result<(), SinkError> {
        let value = CONFIG_BYPASS
            .checked_sub(offset)
            .and_then(|at| bytes.get(at));
        let bypass = match value {
            Some(0) => false,
            Some(1) => true,
            _ => return Ok(()),
        };
        if !self.has(VIRTIO_IOMMU_F_BYPASS_CONFIG) || self.bypass == bypass {
            return Ok(());
        }
        self.begin()?;
        self.bypass = bypass;
        for endpoint in &mut self.endpoints {
            if let AttachState::Unattached { .. } = endpoint.state {
                endpoint.detach(bypass, &mut self.sink);
            }
        }
        self.commit()
    }

    /// Encodes `struct virtio_iommu_config`.
    fn config(&self) -> [u8; CONFIG_BYTES] {
        let options = &self.options;
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |offset: usize, field: &[u8]| {
            if let Some(slot) = bytes.get_mut(offset..offset + field.len()) {
                slot.copy_from_slice(field);
            }
        };
        put(CONFIG_PAGE_SIZE_MASK, &options.page_size_mask.to_le_bytes());
        put(
            CONFIG_INPUT_RANGE,
            &options.input.start().get().to_le_bytes(),
        );
        put(
            CONFIG_INPUT_RANGE + 8,
            &options.input.last().get().to_le_bytes(),
        );
        put(
            CONFIG_DOMAIN_RANGE,
            &options.domains.first.get().to_le_bytes(),
        );
        put(
            CONFIG_DOMAIN_RANGE + 4,
            &options.domains.last.get().to_le_bytes(),
        );
        put(CONFIG_PROBE_SIZE, &options.probe_bytes.to_le_bytes());
        put(CONFIG_BYPASS, &[u8::from(self.bypass)]);
        bytes
    }

    /// Adds an endpoint, attached to no domain. A PROBE returns its regions in `reserved`, and no
    /// MAP may cover them.
    ///
    /// # Errors
    /// No endpoint was added, except if [`Sink::commit`](crate::Sink::commit) failed.
    pub fn add_endpoint(
        &mut self,
        id: EndpointId,
        reserved: &[ReservedRegion],
    ) -> Result<(), EndpointError> {
        let Err(at) = self.find_endpoint(id) else {
            return Err(EndpointError::Exists(id));
        };
        if self.endpoints.len() >= self.options.limits.endpoints {
            return Err(EndpointError::LimitReached(LimitReached::Endpoints));
        }
        let reserved = validated_regions(reserved, self.options.most_reserved())?;
        self.endpoints
            .try_reserve(1)
            .map_err(|_| EndpointError::LimitReached(LimitReached::Memory))?;
        self.begin()?;
        let mut endpoint = Endpoint {
            id,
            reserved,
            state: AttachState::Unattached { bypasses: false },
        };
        endpoint.detach(self.bypass, &mut self.sink);
        self.endpoints.insert(at, endpoint);
        Ok(self.commit()?)
    }

    /// Removes an endpoint. The last endpoint of a domain removes the domain too. Drops the
    /// endpoint's faults, because reports must contain valid endpoints.
    ///
    /// # Errors
    /// The endpoint does not exist, or the sink cannot begin; nothing has changed. With
    /// [`SinkError::CommitFailed`] the endpoint is removed, but may still have access.
    pub fn remove_endpoint(&mut self, id: EndpointId) -> Result<(), EndpointError> {
        let Ok(at) = self.find_endpoint(id) else {
            return Err(EndpointError::NoEndpoint(id));
        };
        self.begin()?;
        if let Some(domain) = self.endpoints.get(at).and_then(Endpoint::domain) {
            self.leave_domain(at, domain);
        }
        self.sink.block(id);
        self.endpoints.remove(at);
        self.events.drop_endpoint(id);
        Ok(self.commit()?)
    }

    /// Resets the device for the driver: detaches all endpoints and clears the accepted features,
    /// even if an earlier commit failed. Field `bypass` is kept.
    ///
    /// # Errors
    /// If the sink cannot begin, nothing has changed. With [`SinkError::CommitFailed`] the device
    /// is reset, but endpoints may still have access.
    pub fn reset(&mut self) -> Result<(), SinkError> {
        self.reset_to(self.bypass)
    }

    /// Resets the device with the machine: like [`reset`](Self::reset), but `bypass` returns to its
    /// initial value.
    ///
    /// # Errors
    /// If the sink cannot begin, nothing has changed. With [`SinkError::CommitFailed`] the device
    /// is reset, but endpoints may still have access.
    pub fn reset_system(&mut self) -> Result<(), SinkError> {
        self.reset_to(self.options.bypass_at_first())
    }

    fn reset_to(&mut self, bypass: bool) -> Result<(), SinkError> {
        // A reset only takes access away, also after a commit that failed: its own commit then
        // stands for both.
        self.sink.begin()?;
        self.accepted = 0;
        self.bypass = bypass;
        self.events.clear();
        for endpoint in &mut self.endpoints {
            endpoint.detach(bypass, &mut self.sink);
        }
        for domain in self.domains.drain(..) {
            if let DomainKind::Mapped(_) = domain.kind {
                self.sink.destroy(domain.id);
            }
        }
        self.mappings = 0;
        self.hot = 0;
        self.commit()
    }
}
