//! Sessions of a driver, endpoints and an embedder, decoded from bytes. Compares the device and its
//! sink with the reference after every step.
//!
//! | bytes | meaning |
//! |---|---|
//! | 0 | options, as below |
//! | 1 | number of the sink's fallible call that fails, from 1; 0 for none |
//! | 2 | bits 0..=2: the error |
//! | then | steps, see [`Session::step`] |
//!
//! Options: bits 0..=1 granule, 2..=3 size of properties, 4..=5 bypass, 6 MMIO, 7 narrow ranges and
//! low limits.

use ringfence_types::{Access, Iova, IovaRange};
use ringfence_virtio_iommu::{
    AccessTarget, Device, EndpointId, ReservedRegion, ReservedRegionKind, SinkError, SnapshotError,
    TranslationFault,
};

use super::input::{Bytes, ENDPOINTS, Region, address, domain, endpoint, options, range};
use super::model::{Endpoint, ExpectedTarget, Model, Reply, first_bypass};
use super::outcomes::{denied_reason, endpoint_error, request_error, say, snapshot_error};
use super::recorder::{Call, Recorder};

/// Receives the name of each outcome.
pub(crate) type OutcomeHook<'a> = &'a mut dyn FnMut(&'static str);

/// The device, its reference, and the expected events.
struct Session<'a> {
    device: Device<Recorder>,
    model: Model,
    waiting: Vec<TranslationFault>,
    dropped: u64,
    reached: OutcomeHook<'a>,
}

/// Runs one session.
pub(crate) fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let mut bytes = Bytes(data);
    let options = options(bytes.next());
    let fail_in = usize::from(bytes.next());
    let error = match bytes.next() & 7 {
        0 => SinkError::OutOfMemory,
        1 => SinkError::BadAddress(options.input),
        2 => SinkError::Unsupported,
        3 => SinkError::WouldBlock,
        _ => SinkError::Failed,
    };
    let mut session = Session {
        device: Device::new(options, Recorder::default()).expect("sound options"),
        model: Model::new(options),
        waiting: Vec::new(),
        dropped: 0,
        reached,
    };
    for (id, regions) in ENDPOINTS {
        let regions = if options.probe_bytes == 0 {
            &[]
        } else {
            regions
        };
        session.add_endpoint(id, regions);
    }
    session.device.accept_features(!0);
    session.model.features = session.device.features();
    if fail_in > 0 {
        session.device.sink_mut().fail_in = Some((fail_in, error));
    }
    // Enough for any input of interest; the rest of a long input is ignored.
    for _ in 0..256 {
        if bytes.0.is_empty() {
            break;
        }
        session.step(&mut bytes);
        session.check();
    }
}

impl Session<'_> {
    /// Runs one step. Its low four bits select the operation; the following bytes are arguments.
    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.next() & 15 {
            0..=3 => {
                let mut request = vec![3, 0, 0, 0];
                request.extend(domain(bytes.next()).to_le_bytes());
                let (start, last) = range(bytes, self.granule());
                request.extend(start.to_le_bytes());
                request.extend(last.to_le_bytes());
                let physical = address(bytes.next(), self.granule());
                request.extend(physical.to_le_bytes());
                request.extend(u32::from(bytes.next() & 15).to_le_bytes());
                self.request(&request, 4);
            }
            4 | 5 => {
                let mut request = vec![4, 1, 2, 3];
                request.extend(domain(bytes.next()).to_le_bytes());
                let (start, last) = range(bytes, self.granule());
                request.extend(start.to_le_bytes());
                request.extend(last.to_le_bytes());
                request.extend([bytes.next(), 0, 0, 0]);
                self.request(&request, 4);
            }
            kind @ (6 | 7) => {
                let mut request = vec![kind - 5, 0, 0, 0];
                request.extend(domain(bytes.next()).to_le_bytes());
                request.extend(endpoint(bytes.next()).to_le_bytes());
                let flags = bytes.next();
                request.extend([flags & 3, 0, 0, 0, flags >> 6 & 1, 0, 0, 0]);
                self.request(&request, 4);
            }
            8 => {
                let mut request = vec![5, 0, 0, 0];
                request.extend(endpoint(bytes.next()).to_le_bytes());
                request.extend([0xaa; 64]);
                let room = usize::from(bytes.next()) * 3;
                self.request(&request, room);
            }
            9 => {
                let length = usize::from(bytes.next());
                let room = usize::from(bytes.next() & 7);
                let request = bytes.take(length).to_vec();
                self.request(&request, room);
            }
            10 => {
                let offset = usize::from(bytes.next());
                let length = usize::from(bytes.next() & 15);
                let value = bytes.take(length).to_vec();
                self.write_config(offset, &value);
            }
            11 => self.reset(bytes.next()),
            12 => {
                let endpoint = endpoint(bytes.next());
                let at = address(bytes.next(), self.granule())
                    .wrapping_add(u64::from(bytes.next()) << 4);
                let length = u64::from(bytes.next()) << 6 | 1;
                self.access(endpoint, at, length);
            }
            13 => self.next_event(usize::from(bytes.next() & 31)),
            14 => self.snapshot(bytes),
            _ => self.endpoints(bytes),
        }
    }

    fn granule(&self) -> u64 {
        1 << self.device.options().page_size_mask.trailing_zeros()
    }

    fn request(&mut self, request: &[u8], room: usize) {
        let mut reply = vec![0xee; room];
        let handled = self.device.handle(request, &mut reply);
        let failure = self.device.sink_mut().failure();
        let Ok(handled) = handled else {
            (self.reached)("not begun");
            assert_eq!(failure.map(|failure| failure.call), Some(Call::Begin));
            assert!(reply.iter().all(|byte| *byte == 0xee));
            return;
        };
        (self.reached)(match handled.result {
            Ok(()) => "done",
            Err(error) => {
                say(&error);
                request_error(error)
            }
        });
        let expected = self.model.request(request, room, failure);
        let (used, rest) = reply.split_at(handled.used);
        assert!(rest.iter().all(|byte| *byte == 0xee), "written past used");
        match expected {
            Reply::Unwritten => assert!(used.is_empty(), "{handled:?}"),
            Reply::Tail(status) => assert_eq!(used, [status, 0, 0, 0], "{handled:?}"),
            Reply::Probe(bytes) => assert_eq!(used, bytes, "{handled:?}"),
        }
        let told = handled.result.err().and_then(|error| error.status());
        assert_eq!(
            told.map_or(0, |status| status.code()),
            used.get(used.len().wrapping_sub(4)).copied().unwrap_or(0)
        );
    }

    fn write_config(&mut self, offset: usize, value: &[u8]) {
        let before = self.config();
        let result = self.device.write_config(offset, value);
        let failure = self.device.sink_mut().failure();
        let byte = 36_usize.checked_sub(offset).and_then(|at| value.get(at));
        let negotiated = self.model.features & 1 << 6 != 0;
        let mut expected = before;
        if let (Some(&wanted @ (0 | 1)), true, Ok(())) = (byte, negotiated, result) {
            expected[36] = wanted;
            if before[36] != wanted {
                self.model.bypass = wanted == 1;
                self.unattached_again(failure.map(|failure| failure.earlier));
            }
        }
        assert_eq!(self.config(), expected);
    }

    /// Updates the access of every unattached endpoint in the model. The sink refuses the bypass of
    /// number `refused`.
    fn unattached_again(&mut self, refused: Option<usize>) {
        let free = self
            .model
            .endpoints
            .values_mut()
            .filter(|endpoint| endpoint.domain.is_none());
        for (number, endpoint) in free.enumerate() {
            endpoint.bypasses = self.model.bypass && refused != Some(number);
        }
    }

    fn config(&self) -> [u8; 40] {
        let mut config = [0; 40];
        self.device.read_config(0, &mut config);
        config
    }

    fn reset(&mut self, how: u8) {
        let result = match how & 3 {
            0 => {
                let features = u64::from(how >> 2) * 3;
                self.device.accept_features(features);
                self.model.features = features & self.device.features();
                return;
            }
            1 => self.device.reset_system(),
            _ => self.device.reset(),
        };
        let failure = self.device.sink_mut().failure();
        if result.is_err() {
            (self.reached)("not begun");
            return;
        }
        if how & 3 == 1 {
            self.model.bypass = first_bypass(&self.model.options);
        }
        self.model.features = 0;
        self.model.domains.clear();
        for endpoint in self.model.endpoints.values_mut() {
            endpoint.domain = None;
        }
        self.unattached_again(failure.map(|failure| failure.earlier));
        self.waiting.clear();
        if how & 4 != 0 {
            self.device.accept_features(!0);
            self.model.features = self.device.features();
        }
    }

    /// Makes an access piece by piece, and reports the faults.
    fn access(&mut self, endpoint: u32, at: u64, length: u64) {
        let Some(mut range) = IovaRange::new(Iova::new(at), length) else {
            return;
        };
        for access in [Access::Read, Access::Write] {
            loop {
                let start = range.start().get();
                let expected = self.model.access(endpoint, start, access);
                let found = self
                    .device
                    .translate(EndpointId::new(endpoint), range, access);
                let bytes = match found {
                    Ok(AccessTarget::Memory { physical, .. }) => {
                        assert_eq!(expected, ExpectedTarget::To(physical.start().get()));
                        let last = start + (physical.last().get() - physical.start().get());
                        let end = self.model.access(endpoint, last, access);
                        assert_eq!(end, ExpectedTarget::To(physical.last().get()));
                        physical.bytes()
                    }
                    Ok(AccessTarget::Doorbell { at }) => {
                        assert_eq!(expected, ExpectedTarget::Doorbell);
                        assert_eq!(at.start(), range.start());
                        at.bytes()
                    }
                    Err(denied) => {
                        say(&denied);
                        (self.reached)(denied_reason(denied.reason));
                        assert_eq!(expected, ExpectedTarget::Nowhere);
                        assert_eq!((denied.iova.get(), denied.access), (start, access));
                        self.report(denied);
                        break;
                    }
                };
                let last = range.last();
                let next = range.start().checked_add(bytes);
                match next.and_then(|next| IovaRange::inclusive(next, last)) {
                    Some(rest) => range = rest,
                    None => break,
                }
            }
            let Some(whole) = IovaRange::new(Iova::new(at), length) else {
                return;
            };
            range = whole;
        }
    }

    fn report(&mut self, denied: TranslationFault) {
        self.device.report(denied);
        let known = self.model.endpoints.contains_key(&denied.endpoint.get());
        if known && self.waiting.len() < self.model.options.limits.events {
            self.waiting.push(denied);
        } else {
            (self.reached)("event dropped");
            self.dropped += 1;
        }
    }

    fn next_event(&mut self, room: usize) {
        let mut buffer = vec![0xee; room];
        match self.device.next_event(&mut buffer) {
            Ok(None) => assert!(self.waiting.is_empty()),
            Ok(Some(used)) => {
                (self.reached)("event");
                assert_eq!(used, 24);
                let denied = self.waiting.remove(0);
                assert_eq!(buffer[8..12], denied.endpoint.get().to_le_bytes());
                assert_eq!(buffer[16..24], denied.iova.get().to_le_bytes());
                assert!(buffer[1..4].iter().chain(&buffer[12..16]).all(|b| *b == 0));
                assert!(buffer[0] <= 2 && buffer[4..8] != [0; 4]);
            }
            Err(error) => {
                say(&error);
                (self.reached)("buffer too small");
                assert!(room < 24 && !self.waiting.is_empty());
            }
        }
    }

    /// Restores a snapshot, valid or corrupted, on another device. A device that accepts it must
    /// produce the same snapshot.
    fn snapshot(&mut self, bytes: &mut Bytes<'_>) {
        let mut snapshot = self.device.snapshot();
        let how = bytes.next();
        let offset = usize::from(bytes.next()) | usize::from(bytes.next()) << 8;
        let length = snapshot.len();
        match how & 7 {
            0 | 1 => {}
            2 => snapshot.truncate(offset % (length + 1)),
            3 => snapshot.push(bytes.next()),
            4 => snapshot = bytes.take(offset & 255).to_vec(),
            _ => {
                snapshot[offset % length] ^= bytes.next();
            }
        }
        let mut other = Device::new(*self.device.options(), Recorder::default()).expect("sound");
        for (id, endpoint) in &self.model.endpoints {
            let regions: Vec<ReservedRegion> = endpoint
                .reserved
                .iter()
                .map(|(start, end, kind)| reserved(*start as u64, (*end - 1) as u64, *kind))
                .collect();
            other
                .add_endpoint(EndpointId::new(*id), &regions)
                .expect("as in the other");
        }
        if how & 8 != 0 {
            other.sink_mut().fail_in = Some((usize::from(how >> 4) + 1, SinkError::Failed));
        }
        if how & 7 == 1 {
            other.accept_features(!0);
        }
        let before = other.snapshot();
        match other.restore(&snapshot) {
            Ok(()) => {
                (self.reached)("restored");
                assert_eq!(other.snapshot(), snapshot);
                if how & 7 == 0 {
                    // Continue with the copy, which must behave like the original.
                    let fail_in = self.device.sink().fail_in;
                    self.device = other;
                    self.device.sink_mut().fail_in = fail_in;
                }
            }
            Err(error) => {
                say(&error);
                (self.reached)(snapshot_error(error));
                assert!(how & 15 != 0, "an unspoiled snapshot was refused: {error}");
                // A sink that refused to restore an endpoint's bypass has left it blocked.
                if !matches!(error, SnapshotError::Sink(_)) {
                    assert_eq!(other.snapshot(), before);
                }
                assert_eq!((other.domains(), other.mappings()), (0, 0));
            }
        }
    }

    /// Adds or removes an endpoint.
    fn endpoints(&mut self, bytes: &mut Bytes<'_>) {
        let what = bytes.next();
        let id = endpoint(what >> 2);
        if what & 3 == 0 {
            let result = self.device.remove_endpoint(EndpointId::new(id));
            let failure = self.device.sink_mut().failure();
            match result {
                Ok(()) => {
                    self.model.leave(id, failure.is_some());
                    self.model.endpoints.remove(&id);
                    let before = self.waiting.len();
                    self.waiting.retain(|denied| denied.endpoint.get() != id);
                    self.dropped += (before - self.waiting.len()) as u64;
                }
                Err(error) => {
                    say(&error);
                    (self.reached)(endpoint_error(error));
                }
            }
            return;
        }
        const MSI: ReservedRegionKind = ReservedRegionKind::Msi;
        let regions: &[Region] = match bytes.next() & 3 {
            0 => &[],
            1 => &[(0x1000, 0x1fff, MSI), (0x1800, 0x27ff, MSI)],
            2 => &[(0x1000, 0x1fff, MSI), (0x3000, 0x3fff, MSI)],
            _ => &[
                (0x3000, 0x3fff, MSI),
                (u64::MAX, u64::MAX, ReservedRegionKind::Reserved),
                (0x1_0000, 0x1_0fff, ReservedRegionKind::Reserved),
            ],
        };
        self.add_endpoint(id, regions);
    }

    fn add_endpoint(&mut self, id: u32, regions: &[Region]) {
        let given: Vec<ReservedRegion> = regions
            .iter()
            .map(|(start, last, kind)| reserved(*start, *last, *kind))
            .collect();
        let result = self.device.add_endpoint(EndpointId::new(id), &given);
        let failure = self.device.sink_mut().failure();
        if let Err(error) = result {
            say(&error);
            (self.reached)(endpoint_error(error));
            return;
        }
        let bypasses = self.model.bypass && failure.is_none();
        let before = self.model.endpoints.insert(
            id,
            Endpoint {
                reserved: regions
                    .iter()
                    .map(|(start, last, kind)| (u128::from(*start), u128::from(*last) + 1, *kind))
                    .collect(),
                domain: None,
                bypasses,
            },
        );
        assert_eq!(before, None);
    }

    /// Checks that device, reference and sink agree at every address where a range begins or ends.
    fn check(&self) {
        assert_eq!(self.device.mappings(), self.model.mappings());
        assert_eq!(self.device.domains(), self.model.domains.len());
        assert_eq!(self.device.events_waiting(), self.waiting.len());
        assert_eq!(self.device.events_dropped(), self.dropped);
        let mut addresses = vec![0, 0x2_0000, 0xfee0_0000, u64::MAX];
        for domain in self.model.domains.values() {
            if let super::model::Domain::Mapped(mappings) = domain {
                for mapped in mappings {
                    addresses.push(mapped.start as u64);
                    addresses.push((mapped.start as u64).wrapping_sub(1));
                    addresses.push((mapped.end - 1) as u64);
                    addresses.push(mapped.end as u64);
                }
            }
        }
        for &id in self.model.endpoints.keys() {
            for &address in &addresses {
                for access in [Access::Read, Access::Write] {
                    let expected = self.model.access(id, address, access);
                    let range = IovaRange::new(Iova::new(address), 1).expect("a byte");
                    let found = match self.device.translate(EndpointId::new(id), range, access) {
                        Ok(AccessTarget::Memory { physical, .. }) => {
                            ExpectedTarget::To(physical.start().get())
                        }
                        Ok(AccessTarget::Doorbell { .. }) => ExpectedTarget::Doorbell,
                        Err(_) => ExpectedTarget::Nowhere,
                    };
                    assert_eq!(found, expected, "endpoint {id}, {address:#x}, {access}");
                    // The sink does not know doorbells, and no mapping overlaps them.
                    let reached = self.device.sink().reaches(id, address, access);
                    let expected = match expected {
                        ExpectedTarget::To(at) => Some(at),
                        ExpectedTarget::Nowhere | ExpectedTarget::Doorbell => None,
                    };
                    assert_eq!(reached, expected, "sink: endpoint {id}, {address:#x}");
                }
            }
        }
    }
}

fn reserved(start: u64, last: u64, kind: ReservedRegionKind) -> ReservedRegion {
    ReservedRegion {
        range: IovaRange::inclusive(Iova::new(start), Iova::new(last)).expect("a range"),
        kind,
    }
}
