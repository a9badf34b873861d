//! The unit against a brute-force model: a map from page to page for each domain.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use ringfence_softiommu::{
    DomainMapReason, DomainUnmapError, IommuError, Reader, SoftIommu, SoftIommuLimits, Width,
};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Iova, IovaRange, Permissions, PhysAddr, PhysRange,
    RequesterId,
};

const PAGE: u64 = 1 << 12;
const WIDTH: u32 = 33;
/// Small, so that tables run out.
const TABLES: usize = 7;
const DEVICES: [RequesterId; 2] = [RequesterId::new(0x20), RequesterId::new(0x28)];
const DOMAINS: [DomainId; 2] = [DomainId::new(1), DomainId::new(2)];

#[derive(Debug, Clone)]
enum Step {
    Map {
        domain: usize,
        page: u64,
        pages: u64,
        memory: u64,
        permissions: Permissions,
    },
    Unmap {
        domain: usize,
        ranges: Vec<(u64, u64)>,
    },
    Attach {
        device: usize,
        domain: usize,
    },
    Detach {
        device: usize,
    },
    Bypass {
        device: usize,
    },
    Access {
        device: usize,
        start: u64,
        bytes: u64,
        access: Access,
    },
}

/// Pages near the boundaries of tables, of both upper levels, and of the address width.
fn page() -> impl Strategy<Value = u64> {
    let anchors = prop::sample::select(vec![
        0,
        510,
        512,
        1024,
        (1 << 18) - 2,
        1 << 18,
        1 << 19,
        (1 << (WIDTH - 12)) - 3,
    ]);
    (anchors, 0..4_u64).prop_map(|(anchor, more)| anchor + more)
}

fn step() -> impl Strategy<Value = Step> {
    let permissions = prop::sample::select(vec![
        Permissions::READ,
        Permissions::WRITE,
        Permissions::READ_WRITE,
    ]);
    let pages = prop_oneof![8 => 1..6_u64, 1 => 500..1100_u64, 1 => Just(1 << 40)];
    let range = (page(), pages.clone());
    prop_oneof![
        6 => (0..2_usize, page(), pages, 0..1000_u64, permissions).prop_map(
            |(domain, page, pages, memory, permissions)| Step::Map {
                domain,
                page,
                pages,
                memory,
                permissions,
            }
        ),
        3 => (0..2_usize, prop::collection::vec(range, 1..4))
            .prop_map(|(domain, ranges)| Step::Unmap { domain, ranges }),
        2 => (0..2_usize, 0..2_usize).prop_map(|(device, domain)| Step::Attach { device, domain }),
        1 => (0..2_usize).prop_map(|device| Step::Detach { device }),
        1 => (0..2_usize).prop_map(|device| Step::Bypass { device }),
        8 => (0..2_usize, page(), 0..PAGE, prop_oneof![1..9_u64, 1..4 * PAGE, Just(u64::MAX / 2)],
            prop::sample::select(vec![Access::Read, Access::Write])
        ).prop_map(|(device, page, offset, bytes, access)| Step::Access {
            device,
            start: page * PAGE + offset,
            bytes,
            access,
        }),
    ]
}

type Pages = BTreeMap<u64, (u64, Permissions)>;

/// Attachment of an endpoint.
#[derive(Clone, Copy)]
enum Attached {
    Blocked,
    Bypass,
    Domain(usize),
}

/// Returns the number of tables that `pages` need: one per distinct prefix of each level, and the
/// root.
fn tables(pages: impl Iterator<Item = u64> + Clone) -> usize {
    let level = |shift: u32| {
        let prefixes: BTreeSet<u64> = pages.clone().map(|page| page >> shift).collect();
        prefixes.len()
    };
    1 + level(9) + level(18)
}

fn expected(
    pages: &Pages,
    device: RequesterId,
    range: IovaRange,
    access: Access,
) -> Result<Vec<PhysRange>, Fault> {
    let fault = |iova: u64, reason| Fault {
        device,
        iova: Iova::new(iova),
        access,
        reason,
    };
    let (start, last) = (range.start().get(), range.last().get());
    if last >> WIDTH != 0 {
        return Err(fault(
            start.max(1 << WIDTH),
            FaultReason::AddressBeyondWidth,
        ));
    }
    let mut pieces: Vec<PhysRange> = Vec::new();
    let mut at = start;
    loop {
        let end = last.min(at | (PAGE - 1));
        let Some((memory, permissions)) = pages.get(&(at / PAGE)) else {
            return Err(fault(at, FaultReason::NotPresent));
        };
        if !permissions.allows(access) {
            let reason = match access {
                Access::Read => FaultReason::ReadDenied,
                Access::Write => FaultReason::WriteDenied,
            };
            return Err(fault(at, reason));
        }
        let first = memory * PAGE + at % PAGE;
        let piece = |start| PhysRange::new(PhysAddr::new(start), end - at + 1).unwrap();
        match pieces.last_mut() {
            Some(before) if before.last().get() + 1 == first => {
                *before = PhysRange::new(before.start(), before.bytes() + end - at + 1).unwrap();
            }
            _ => pieces.push(piece(first)),
        }
        if end == last {
            return Ok(pieces);
        }
        at = end + 1;
    }
}

struct Both {
    unit: SoftIommu<()>,
    readers: [Reader<()>; 2],
    domains: [Pages; 2],
    attached: [Attached; 2],
}

impl Both {
    fn new() -> Self {
        let limits = SoftIommuLimits {
            width: Width::new(WIDTH).unwrap(),
            tables: TABLES,
            domains: 2,
            endpoints: 2,
            readers: 1,
        };
        let mut unit = SoftIommu::new(limits, ());
        for device in DEVICES {
            unit.add_endpoint(device).unwrap();
        }
        for domain in DOMAINS {
            unit.create_domain(domain).unwrap();
        }
        Self {
            readers: DEVICES.map(|device| unit.reader(device).unwrap()),
            unit,
            domains: [Pages::new(), Pages::new()],
            attached: [Attached::Blocked; 2],
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Map {
                domain,
                page,
                pages,
                memory,
                permissions,
            } => self.map(domain, page, pages, memory, permissions),
            Step::Unmap { domain, ref ranges } => {
                let mut removed = 0;
                for (page, pages) in ranges {
                    let mapped: Vec<u64> = self.domains[domain]
                        .range(page..&(page + pages))
                        .map(|(page, _)| *page)
                        .collect();
                    removed += mapped.len() as u64;
                    for page in mapped {
                        self.domains[domain].remove(&page);
                    }
                }
                let ranges = ranges.iter().map(|(page, pages)| range(*page, *pages));
                let unmapped = self.unit.domain(DOMAINS[domain]).unwrap().unmap_all(ranges);
                assert_eq!(unmapped, Ok(removed));
            }
            Step::Attach { device, domain } => {
                self.unit.attach(DEVICES[device], DOMAINS[domain]).unwrap();
                self.attached[device] = Attached::Domain(domain);
            }
            Step::Detach { device } => {
                self.unit.detach(DEVICES[device]).unwrap();
                self.attached[device] = Attached::Blocked;
            }
            Step::Bypass { device } => {
                self.unit.bypass(DEVICES[device]).unwrap();
                self.attached[device] = Attached::Bypass;
            }
            Step::Access {
                device,
                start,
                bytes,
                access,
            } => self.access(
                device,
                IovaRange::new(Iova::new(start), bytes).unwrap(),
                access,
            ),
        }
        for domain in DOMAINS {
            assert!(self.unit.domain(domain).unwrap().tables() <= TABLES);
        }
    }

    fn map(&mut self, domain: usize, page: u64, pages: u64, memory: u64, permissions: Permissions) {
        let requests = range(page, pages);
        let model = &mut self.domains[domain];
        let first = model
            .range(page..page + pages)
            .next()
            .map(|(page, _)| *page);
        let result = self.unit.domain(DOMAINS[domain]).unwrap().map(
            requests,
            PhysAddr::new(memory * PAGE),
            permissions,
        );
        let result = result.map_err(|error| error.reason);
        if page + pages > 1 << (WIDTH - 12) {
            assert_eq!(result, Err(DomainMapReason::BeyondWidth));
        } else if let Some(first) = first {
            let iova = Iova::new(first * PAGE);
            assert_eq!(result, Err(DomainMapReason::Mapped { iova }));
        } else if tables(model.keys().copied().chain(page..page + pages)) > TABLES {
            assert_eq!(result, Err(DomainMapReason::OutOfTables));
        } else {
            assert_eq!(result, Ok(()));
            model.extend((0..pages).map(|n| (page + n, (memory + n, permissions))));
        }
    }

    fn access(&mut self, device: usize, range: IovaRange, access: Access) {
        let name = DEVICES[device];
        let expected = match self.attached[device] {
            Attached::Domain(domain) => expected(&self.domains[domain], name, range, access),
            Attached::Bypass => {
                let start = PhysAddr::new(range.start().get());
                Ok(vec![PhysRange::new(start, range.bytes()).unwrap()])
            }
            Attached::Blocked => Err(Fault {
                device: name,
                iova: range.start(),
                access,
                reason: FaultReason::Blocked,
            }),
        };
        let mut burst = self.readers[device].online();
        let got = burst.guard().translate(range, access);
        assert_eq!(got.map(|pieces| pieces.iter().collect()), expected);
    }
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn unit_and_model_agree(steps in prop::collection::vec(step(), 1..60)) {
        let mut both = Both::new();
        for step in &steps {
            both.step(step);
        }
        // Finally, every page of the model is mapped correctly, and no other page is mapped.
        for domain in 0..2 {
            both.step(&Step::Attach { device: 0, domain });
            for page in [0, 509, 510, 511, 512, 513, 514, 515, 1024, 1 << 18, 1 << 19] {
                both.access(0, range(page, 1), Access::Read);
                both.access(0, range(page, 1), Access::Write);
            }
        }
    }
}

/// The writer's walk cache must not lead to tables that it has reclaimed since.
#[test]
fn tables_that_were_taken_back_are_linked_again() {
    let mut both = Both::new();
    both.step(&Step::Attach {
        device: 0,
        domain: 0,
    });
    // The root, one table below it, and one leaf table per page: as many as the limit allows.
    for page in (0..TABLES as u64 - 2).map(|table| table * 512) {
        both.map(0, page, 1, 7, Permissions::READ);
        let ranges = vec![(page, 1)];
        both.step(&Step::Unmap { domain: 0, ranges });
    }
    // Each at a different index, so that a lookup in a wrong table finds no entry.
    let pages = [TABLES as u64 * 512, 1, 512 + 2, 1024 + 3];
    for page in pages {
        both.map(0, page, 1, page, Permissions::READ);
    }
    for page in pages {
        both.access(0, range(page, 1), Access::Read);
    }
}

#[test]
fn pinned_readers_do_not_affect_results() {
    let mut both = Both::new();
    both.map(0, 0, 1, 7, Permissions::READ);
    both.step(&Step::Attach {
        device: 0,
        domain: 0,
    });
    let [first, second] = &mut both.readers;
    // At any endpoint: two threads that each hold a guard where the other one waits would wait
    // forever.
    for reader in [first, second] {
        let burst = reader.online();
        let unit = &mut both.unit;
        assert!(matches!(
            unit.detach(DEVICES[0]),
            Err(IommuError::ReadSectionOpen(_))
        ));
        assert!(matches!(
            unit.bypass(DEVICES[0]),
            Err(IommuError::ReadSectionOpen(_))
        ));
        assert!(matches!(
            unit.attach(DEVICES[0], DOMAINS[1]),
            Err(IommuError::ReadSectionOpen(_))
        ));
        assert!(matches!(
            unit.set_memory(()),
            Err(IommuError::ReadSectionOpen(_))
        ));
        let mut domain = unit.domain(DOMAINS[0]).unwrap();
        assert!(matches!(
            domain.unmap(range(0, 1)),
            Err(DomainUnmapError::ReadSectionOpen(_))
        ));
        let error = domain
            .map(range(3, 1), PhysAddr::ZERO, Permissions::READ)
            .unwrap_err();
        assert_eq!(error.reason, DomainMapReason::ReadSectionOpen);
        drop(burst);
    }
    both.access(0, range(0, 1), Access::Read);
    assert_eq!(
        both.unit.domain(DOMAINS[0]).unwrap().unmap(range(0, 1)),
        Ok(1)
    );
}
