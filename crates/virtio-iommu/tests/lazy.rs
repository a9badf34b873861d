//! Domains in lazy mode: the requests, their errors, and the translations that the sink's cache may
//! keep. The sink caches like hardware: it drops a translation only when the contract requires it.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use ringfence_virtio_iommu::lazy::{
    IOTLB_FLUSH_BYTES, VIRTIO_IOMMU_ATTACH_F_LAZY, VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH,
    VIRTIO_IOMMU_T_IOTLB_FLUSH,
};
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{
    BypassPolicy, Device, DomainId, EndpointId, Mapping, Options, RequestError, Sink, SinkError,
    SinkHandle, SnapshotError,
};

/// A sink with a cache that is as stale as its contract allows.
#[derive(Debug, Default)]
struct Cache {
    /// Mapped pages by domain.
    tables: BTreeMap<u32, BTreeMap<u64, u64>>,
    lazy: BTreeSet<u32>,
    /// Translations that endpoints of a domain may still use.
    cached: BTreeMap<u32, BTreeSet<(u64, u64)>>,
    /// Translations that the next commit drops.
    to_drop: Vec<(u32, (u64, u64))>,
    flushed: Vec<u32>,
    fails_to_flush: bool,
    blocked: BTreeSet<u32>,
}

impl Cache {
    fn set(&mut self, domain: DomainId, lazy: bool) {
        let fresh = self.tables.insert(domain.get(), BTreeMap::new());
        assert!(fresh.is_none(), "domain {domain} exists");
        if lazy {
            self.lazy.insert(domain.get());
        }
    }

    /// Returns the translations that an endpoint of `domain` may use.
    fn reaches(&self, domain: u32) -> BTreeSet<(u64, u64)> {
        let live = self.tables.get(&domain).into_iter().flatten();
        let live = live.map(|(page, target)| (*page, *target));
        live.chain(self.cached.get(&domain).into_iter().flatten().copied())
            .collect()
    }
}

impl SinkHandle for Cache {
    type Handle<'s> = &'s mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for Cache {
    fn create(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.set(domain, false);
        Ok(())
    }

    fn create_lazy(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.set(domain, true);
        Ok(())
    }

    fn iotlb_flush(&mut self, domain: DomainId) -> Result<(), SinkError> {
        assert!(self.lazy.contains(&domain.get()), "domain {domain}");
        if self.fails_to_flush {
            return Err(SinkError::Failed);
        }
        self.flushed.push(domain.get());
        Ok(())
    }

    fn destroy(&mut self, domain: DomainId) {
        self.tables.remove(&domain.get()).expect("it exists");
        self.lazy.remove(&domain.get());
        self.cached.remove(&domain.get());
        self.to_drop.retain(|(of, _)| *of != domain.get());
    }

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

    fn block(&mut self, endpoint: EndpointId) {
        self.blocked.insert(endpoint.get());
    }

    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        let table = self.tables.get_mut(&domain.get()).expect("it exists");
        table.insert(mapping.iova.start().get(), mapping.physical.get());
        Ok(())
    }

    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError> {
        let entry = (mapping.iova.start().get(), mapping.physical.get());
        let table = self.tables.get_mut(&domain.get()).expect("it exists");
        assert_eq!(table.remove(&entry.0), Some(entry.1));
        self.cached.entry(domain.get()).or_default().insert(entry);
        if !self.lazy.contains(&domain.get()) {
            self.to_drop.push((domain.get(), entry));
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        for (domain, entry) in self.to_drop.drain(..) {
            if let Some(cached) = self.cached.get_mut(&domain) {
                cached.remove(&entry);
            }
        }
        for domain in self.flushed.drain(..) {
            self.cached.remove(&domain);
        }
        Ok(())
    }
}

fn offered() -> Options {
    Options {
        unattached: BypassPolicy::DriverDecides {
            bypass_at_first: false,
        },
        lazy_domains: true,
        ..Options::default()
    }
}

fn device(options: Options) -> Device<Cache> {
    let mut device = Device::new(options, Cache::default()).unwrap();
    for endpoint in 1..=3 {
        device.add_endpoint(EndpointId::new(endpoint), &[]).unwrap();
    }
    device.accept_features(device.features());
    device
}

fn attach(domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
    let mut request = vec![VIRTIO_IOMMU_T_ATTACH, 0, 0, 0];
    for field in [domain, endpoint, flags, 0] {
        request.extend(field.to_le_bytes());
    }
    request
}

fn map(domain: u32, page: u64) -> Vec<u8> {
    let mut request = vec![VIRTIO_IOMMU_T_MAP, 0, 0, 0];
    request.extend(domain.to_le_bytes());
    for field in [page << 12, page << 12 | 0xfff, (page + 16) << 12] {
        request.extend(field.to_le_bytes());
    }
    request.extend(VIRTIO_IOMMU_MAP_F_READ.to_le_bytes());
    request
}

fn unmap(domain: u32, page: u64) -> Vec<u8> {
    let mut request = map(domain, page)[..24].to_vec();
    request[0] = VIRTIO_IOMMU_T_UNMAP;
    request.extend([0; 4]);
    request
}

fn flush(domain: u32) -> Vec<u8> {
    let mut request = vec![0; IOTLB_FLUSH_BYTES];
    request[0] = VIRTIO_IOMMU_T_IOTLB_FLUSH;
    request[4..8].copy_from_slice(&domain.to_le_bytes());
    request
}

/// The status, if the device wrote one, and the result.
type Answer = (Option<u8>, Result<(), RequestError>);

/// Sends a request. Returns the status and the error; no status if the device wrote none.
fn send(device: &mut Device<Cache>, request: &[u8]) -> Answer {
    let mut reply = [0xee; 4];
    let handled = device.handle(request, &mut reply).unwrap();
    ((handled.used == 4).then_some(reply[0]), handled.result)
}

const LAZY: u32 = VIRTIO_IOMMU_ATTACH_F_LAZY;
const BYPASS: u32 = VIRTIO_IOMMU_ATTACH_F_BYPASS;

#[test]
fn only_a_negotiated_feature_gives_lazy_domains() {
    let bit = 1 << VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH;
    let mut stock = device(Options::default());
    assert_eq!(stock.features() & bit, 0);
    let mut declined = device(offered());
    assert_eq!(declined.features() & bit, bit);
    declined.accept_features(!bit);
    for device in [&mut stock, &mut declined] {
        let (status, error) = send(device, &attach(1, 1, LAZY));
        assert_eq!(status, Some(VIRTIO_IOMMU_S_INVAL));
        assert_eq!(error, Err(RequestError::UnknownFlags(LAZY)));
        send(device, &attach(1, 1, 0)).1.unwrap();
        let unknown = RequestError::UnknownType(VIRTIO_IOMMU_T_IOTLB_FLUSH);
        assert_eq!(send(device, &flush(1)), (None, Err(unknown)));
    }
}

#[test]
fn the_mode_of_a_domain_is_that_of_its_first_attach() {
    use RequestError::{BypassMismatch, LazyMismatch, NoDomain, NotLazy};
    let mut device = device(offered());
    let id = DomainId::new;
    let done: Answer = (Some(0), Ok(()));
    let inval = |error| -> Answer { (Some(VIRTIO_IOMMU_S_INVAL), Err(error)) };
    let absent: Answer = (Some(VIRTIO_IOMMU_S_NOENT), Err(NoDomain(id(1))));
    let bytes = IOTLB_FLUSH_BYTES - 1;
    let short: Answer = (None, Err(RequestError::TooShort { bytes }));
    let cases: &[(Vec<u8>, Answer)] = &[
        (attach(1, 1, LAZY | BYPASS), inval(LazyMismatch(id(1)))),
        (flush(1), absent),
        (attach(1, 1, LAZY), done),
        (attach(1, 2, 0), inval(LazyMismatch(id(1)))),
        (attach(1, 2, BYPASS), inval(BypassMismatch(id(1)))),
        (attach(1, 2, LAZY), done),
        (attach(2, 3, 0), done),
        (attach(2, 1, LAZY), inval(LazyMismatch(id(2)))),
        (flush(1), done),
        (flush(2), inval(NotLazy(id(2)))),
        (flush(1)[..bytes].to_vec(), short),
        (attach(3, 3, BYPASS), done),
        (flush(3), inval(NotLazy(id(3)))),
    ];
    for (request, answer) in cases {
        assert_eq!(send(&mut device, request), *answer, "{request:?}");
    }
}

#[test]
fn a_flush_that_fails_blocks_the_domain() {
    let mut device = device(offered());
    for request in [
        attach(1, 1, LAZY),
        attach(1, 2, LAZY),
        map(1, 1),
        unmap(1, 1),
    ] {
        send(&mut device, &request).1.unwrap();
    }
    device.sink_mut().fails_to_flush = true;
    let blocked = Err(RequestError::Blocked(DomainId::new(1)));
    for request in [flush(1), flush(1), map(1, 2)] {
        let answer = send(&mut device, &request);
        assert_eq!(answer, (Some(VIRTIO_IOMMU_S_DEVERR), blocked));
    }
    assert_eq!(device.sink().blocked, BTreeSet::from([1, 2, 3]));
    assert!(device.sink().reaches(1).is_empty());
}

#[test]
fn a_snapshot_keeps_the_mode() {
    let mut source = device(offered());
    for request in [attach(1, 1, LAZY), map(1, 7), attach(2, 2, 0), map(2, 9)] {
        send(&mut source, &request).1.unwrap();
    }
    let snapshot = source.snapshot();
    let mut copy = device(offered());
    copy.reset().unwrap();
    copy.restore(&snapshot).unwrap();
    assert_eq!(copy.snapshot(), snapshot);
    assert_eq!(copy.sink().lazy, BTreeSet::from([1]));
    send(&mut copy, &flush(1)).1.unwrap();
    assert!(send(&mut copy, &flush(2)).1.is_err());
    // A device without the feature refuses the accepted features, and the domain.
    let mut stock = device(Options {
        lazy_domains: false,
        ..offered()
    });
    stock.reset().unwrap();
    let bit = 1 << VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH;
    assert_eq!(stock.restore(&snapshot), Err(SnapshotError::Features(bit)));
    let mut declined = snapshot;
    declined[12..20].copy_from_slice(&(source.accepted() & !bit).to_le_bytes());
    let refused = SnapshotError::Lazy(DomainId::new(1));
    assert_eq!(stock.restore(&declined), Err(refused));
}

/// The reference: translations that endpoints of a domain may use.
#[derive(Debug, Default)]
struct Domain {
    live: BTreeSet<u64>,
    stale: BTreeSet<u64>,
}

const PAGES: u64 = 4;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Domain 1 is strict, domains 2 and 3 are lazy. After each batch, a strict domain reaches its
    /// mappings only, and a lazy one also what was unmapped since the batch of its last flush.
    #[test]
    fn unmapped_pages_stay_until_the_flush_of_their_domain(
        steps in prop::collection::vec((0_u8..8, 1_u32..4, 0..PAGES), 0..200),
    ) {
        let mut device = device(offered());
        for domain in 1..=3 {
            let flags = if domain == 1 { 0 } else { LAZY };
            send(&mut device, &attach(domain, domain, flags)).1.unwrap();
        }
        let fresh = (1..=3).map(|id| (id, Domain::default()));
        let mut domains: BTreeMap<u32, Domain> = fresh.collect();
        for batch in steps.chunk_by(|(kind, ..), _| *kind != 7) {
            let mut requests = device.batch().unwrap();
            let mut flushed = BTreeSet::new();
            for (kind, id, page) in batch {
                let request = match kind {
                    0..=3 => map(*id, *page),
                    4 | 5 => unmap(*id, *page),
                    _ => flush(*id),
                };
                let mut reply = [0; 4];
                let result = requests.handle(&request, &mut reply).result;
                let domain = domains.get_mut(id).unwrap();
                match kind {
                    0..=3 => prop_assert_eq!(result.is_ok(), domain.live.insert(*page)),
                    4 | 5 => {
                        prop_assert_eq!(result, Ok(()));
                        if domain.live.remove(page) {
                            domain.stale.insert(*page);
                        }
                    }
                    _ => {
                        prop_assert_eq!(result.is_ok(), *id != 1);
                        flushed.insert(*id);
                    }
                }
            }
            requests.commit().unwrap();
            for (id, domain) in &mut domains {
                if *id == 1 || flushed.contains(id) {
                    domain.stale.clear();
                }
                let pages = domain.live.union(&domain.stale);
                let expected = pages.map(|page| (page << 12, (page + 16) << 12)).collect();
                prop_assert_eq!(device.sink().reaches(*id), expected, "domain {}", id);
            }
        }
    }
}
