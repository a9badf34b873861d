//! Snapshot and restore of a device. Restore first validates the whole snapshot: requests must be
//! able to produce its state on this device.

use alloc::vec::Vec;

use super::Device;
use super::map::map_flags;
use crate::domain::{Domain, DomainKind};
use crate::endpoint::{AttachState, Endpoint};
use crate::lazy::VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH;
use crate::snapshot::{Reader, SnapshotError, Writer, bad_value};
use crate::spec::VIRTIO_IOMMU_F_BYPASS_CONFIG;
use crate::store::{Entry, InsertError, MappingStore};
use crate::{DomainId, EndpointId, LimitReached, RequestError, Sink, SinkError, TranslationFault};

/// Validated content of a snapshot.
struct Parsed {
    accepted: u64,
    bypass: bool,
    dropped: u64,
    /// Attachment of each endpoint, in the device's order.
    states: Vec<AttachState>,
    domains: Vec<Domain>,
    mappings: usize,
    events: Vec<TranslationFault>,
}

impl<S: Sink> Device<S> {
    /// Encodes the state of the device, except its sink: features, `bypass`, attachments, domains
    /// with their mappings, and waiting events. The embedder transfers options and endpoints
    /// itself.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.u64(self.accepted);
        out.u8(u8::from(self.bypass));
        out.u64(self.events.dropped());
        out.count(self.endpoints.len());
        for endpoint in &self.endpoints {
            let (state, domain) = match endpoint.state {
                AttachState::Unattached { bypasses } => (u8::from(bypasses), 0),
                AttachState::Attached(domain) => (2, domain.get()),
            };
            out.u32(endpoint.id.get());
            out.u8(state);
            out.u32(domain);
        }
        out.count(self.domains.len());
        for domain in &self.domains {
            out.u32(domain.id.get());
            match &domain.kind {
                DomainKind::Bypass => {
                    out.u8(0);
                    out.count(0);
                }
                DomainKind::Mapped(store) => {
                    out.u8(if domain.lazy { 3 } else { 1 });
                    out.count(store.len());
                    store.iter().for_each(|entry| out.entry(entry));
                }
                DomainKind::Blocked => {
                    out.u8(2);
                    out.count(0);
                }
            }
        }
        out.count(self.events.waiting());
        self.events.iter().for_each(|event| out.event(event));
        out.0
    }

    /// Restores a snapshot and replays it to the sink. The device must have been reset, with the
    /// endpoints of the snapshot.
    ///
    /// # Errors
    /// The device is unchanged, with two exceptions. If the sink fails, the device blocks endpoints
    /// whose bypass the sink then refuses. If only the sink's `commit` fails, the snapshot is
    /// restored, with the consequences described at [`handle`](Self::handle).
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        if !self.domains.is_empty() || self.accepted != 0 {
            return Err(SnapshotError::NotReset);
        }
        let mut parsed = self.parse(bytes)?;
        self.begin().map_err(SnapshotError::Sink)?;
        let replayed = self.replay_to_sink(&mut parsed);
        if replayed.is_err() {
            for endpoint in &mut self.endpoints {
                endpoint.detach(self.bypass, &mut self.sink);
            }
            for domain in &parsed.domains {
                if let DomainKind::Mapped(_) = domain.kind
                    && domain.endpoints > 0
                {
                    self.sink.destroy(domain.id);
                }
            }
        } else {
            self.accepted = parsed.accepted;
            self.bypass = parsed.bypass;
            for (endpoint, state) in self.endpoints.iter_mut().zip(parsed.states) {
                endpoint.state = state;
            }
            self.domains = parsed.domains;
            self.mappings = parsed.mappings;
            self.hot = 0;
            self.events.clear();
            self.events.set_dropped(parsed.dropped);
            parsed
                .events
                .into_iter()
                .for_each(|event| self.events.push(event));
        }
        let committed = self.commit();
        replayed.and(committed).map_err(SnapshotError::Sink)
    }

    /// Replays the domains and attachments to the sink. On error, sets `endpoints` to 0 in the
    /// domains that the sink has not created.
    fn replay_to_sink(&mut self, parsed: &mut Parsed) -> Result<(), SinkError> {
        let mut replayed = 0;
        let result = parsed.domains.iter().try_for_each(|domain| {
            if let DomainKind::Mapped(store) = &domain.kind {
                if domain.lazy {
                    self.sink.create_lazy(domain.id)?;
                } else {
                    self.sink.create(domain.id)?;
                }
                replayed += 1;
                store
                    .iter()
                    .filter_map(Entry::mapping)
                    .try_for_each(|mapping| self.sink.map(domain.id, &mapping))
            } else {
                replayed += 1;
                Ok(())
            }
        });
        if result.is_err() {
            for domain in parsed.domains.iter_mut().skip(replayed) {
                domain.endpoints = 0;
            }
            return result;
        }
        for (endpoint, state) in self.endpoints.iter().zip(&mut parsed.states) {
            match *state {
                AttachState::Unattached { bypasses: false } => self.sink.block(endpoint.id),
                AttachState::Unattached { bypasses: true } => self.sink.bypass(endpoint.id)?,
                AttachState::Attached(id) => {
                    let domain = parsed.domains.iter().find(|domain| domain.id == id);
                    match domain.map(|domain| &domain.kind) {
                        Some(DomainKind::Bypass) => self.sink.bypass(endpoint.id)?,
                        Some(DomainKind::Mapped(store)) => {
                            let mut mappings = store.iter().filter_map(Entry::mapping);
                            self.sink.attach(endpoint.id, id, &mut mappings)?;
                        }
                        Some(DomainKind::Blocked) | None => self.sink.block(endpoint.id),
                    }
                }
            }
        }
        Ok(())
    }

    fn parse(&self, bytes: &[u8]) -> Result<Parsed, SnapshotError> {
        let mut input = Reader::new(bytes)?;
        let accepted = input.u64()?;
        if accepted & !self.features() != 0 {
            return Err(SnapshotError::Features(accepted & !self.features()));
        }
        let bypass = input.flag("bypass")?;
        if bypass && self.features() >> VIRTIO_IOMMU_F_BYPASS_CONFIG & 1 == 0 {
            return Err(SnapshotError::Bypass);
        }
        let dropped = input.u64()?;
        let states = self.parse_endpoints(&mut input, bypass)?;

        let count = input.count()?;
        if count > self.options.limits.domains {
            return Err(RequestError::LimitReached(LimitReached::Domains).into());
        }
        let mut domains: Vec<Domain> = Vec::new();
        domains
            .try_reserve_exact(count)
            .map_err(|_| SnapshotError::OutOfMemory)?;
        let mut mappings = 0;
        for _ in 0..count {
            let domain = self.parse_domain(&mut input, &states, &mut mappings)?;
            if domains.last().is_some_and(|below| below.id >= domain.id) {
                return Err(SnapshotError::Domain(domain.id));
            }
            domains.push(domain);
        }
        for state in &states {
            if let AttachState::Attached(id) = state
                && domains
                    .binary_search_by_key(id, |domain| domain.id)
                    .is_err()
            {
                return Err(SnapshotError::Domain(*id));
            }
        }
        let events = self.parse_events(&mut input)?;
        input.end()?;
        Ok(Parsed {
            accepted,
            bypass,
            dropped,
            states,
            domains,
            mappings,
            events,
        })
    }

    fn parse_endpoints(
        &self,
        input: &mut Reader<'_>,
        bypass: bool,
    ) -> Result<Vec<AttachState>, SnapshotError> {
        let count = input.count()?;
        let mut states = Vec::new();
        states
            .try_reserve_exact(self.endpoints.len())
            .map_err(|_| SnapshotError::OutOfMemory)?;
        for endpoint in &self.endpoints {
            if states.len() >= count {
                return Err(SnapshotError::Endpoint(endpoint.id));
            }
            if input.u32()? != endpoint.id.get() {
                return Err(SnapshotError::Endpoint(endpoint.id));
            }
            let state = input.u8()?;
            let domain = input.u32()?;
            states.push(match (state, domain) {
                (0, 0) => AttachState::Unattached { bypasses: false },
                (1, 0) if bypass => AttachState::Unattached { bypasses: true },
                (1, 0) => return Err(SnapshotError::Bypass),
                (2, domain) => AttachState::Attached(DomainId::new(domain)),
                (0 | 1, value) => {
                    let field = "domain of an endpoint that is not attached";
                    return Err(SnapshotError::BadValue { field, value });
                }
                _ => return Err(bad_value("state of an endpoint", state)),
            });
        }
        if states.len() < count {
            return Err(SnapshotError::Endpoint(EndpointId::new(input.u32()?)));
        }
        Ok(states)
    }

    /// Decodes one domain. `mappings` counts the mappings of all domains.
    fn parse_domain(
        &self,
        input: &mut Reader<'_>,
        states: &[AttachState],
        mappings: &mut usize,
    ) -> Result<Domain, SnapshotError> {
        let id = DomainId::new(input.u32()?);
        if !self.options.domains.contains(id) {
            return Err(RequestError::DomainOutOfRange(id).into());
        }
        let kind = input.u8()?;
        let count = input.count()?;
        if count > 0 && !matches!(kind, 1 | 3) {
            return Err(SnapshotError::Mappings(id));
        }
        let attached = || {
            self.endpoints
                .iter()
                .zip(states)
                .filter(|(_, state)| **state == AttachState::Attached(id))
                .map(|(endpoint, _)| endpoint)
        };
        let endpoints = attached().count();
        if endpoints == 0 {
            return Err(SnapshotError::Domain(id));
        }
        let mut reserved = Vec::new();
        for region in attached().flat_map(|endpoint: &Endpoint| &endpoint.reserved) {
            if !reserved.contains(&region.range) {
                reserved
                    .try_reserve(1)
                    .map_err(|_| SnapshotError::OutOfMemory)?;
                reserved.push(region.range);
            }
        }
        let lazy = kind == 3;
        let kind = match kind {
            0 if self.features() >> VIRTIO_IOMMU_F_BYPASS_CONFIG & 1 == 0 => {
                return Err(SnapshotError::Bypass);
            }
            0 => DomainKind::Bypass,
            3 if self.features() >> VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH & 1 == 0 => {
                return Err(SnapshotError::Lazy(id));
            }
            1 | 3 => DomainKind::Mapped(MappingStore::default()),
            2 => DomainKind::Blocked,
            value => return Err(bad_value("kind of a domain", value)),
        };
        let mut domain = Domain {
            id,
            kind,
            lazy,
            endpoints,
            reserved,
        };
        let DomainKind::Mapped(store) = &mut domain.kind else {
            return Ok(domain);
        };
        let mut above = None;
        for _ in 0..count {
            if *mappings >= self.options.limits.mappings {
                return Err(RequestError::LimitReached(LimitReached::Mappings).into());
            }
            let entry = input.entry()?;
            let unknown_flags = entry.flags & !map_flags(self.features());
            if unknown_flags != 0 {
                return Err(RequestError::UnknownFlags(unknown_flags).into());
            }
            let range = self
                .options
                .check_mapping(entry.start, entry.last, entry.physical)?;
            if above.is_some_and(|above| entry.start < above) {
                return Err(SnapshotError::Mappings(id));
            }
            if domain.reserved.iter().any(|region| region.overlaps(&range)) {
                return Err(RequestError::Reserved(range).into());
            }
            store.insert(entry).map_err(|error| match error {
                InsertError::Overlap => RequestError::Overlap(range).into(),
                InsertError::OutOfMemory => SnapshotError::OutOfMemory,
            })?;
            above = Some(entry.start);
            *mappings += 1;
        }
        Ok(domain)
    }

    fn parse_events(&self, input: &mut Reader<'_>) -> Result<Vec<TranslationFault>, SnapshotError> {
        let count = input.count()?;
        if count > self.options.limits.events {
            return Err(SnapshotError::Events(count));
        }
        // Allocate the list of events here, so that installing it later cannot run out of memory.
        let mut events = Vec::new();
        for _ in 0..count {
            let event = input.event()?;
            if self.find_endpoint(event.endpoint).is_err() {
                return Err(SnapshotError::Endpoint(event.endpoint));
            }
            events
                .try_reserve(1)
                .map_err(|_| SnapshotError::OutOfMemory)?;
            events.push(event);
        }
        Ok(events)
    }
}
