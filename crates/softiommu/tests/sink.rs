//! The unit as the sink of a virtio-iommu device: after every reply, readers translate as the
//! device reports.
#![cfg(feature = "virtio-iommu")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;
use ringfence_softiommu::{IommuSink, Reader, SoftIommuLimits, Width};
use ringfence_types::{Access, Iova, IovaRange, PhysRange, RequesterId};
use ringfence_virtio_iommu::{AccessTarget, BypassPolicy, Device, EndpointId, Options, SinkError};

const PAGE: u64 = 1 << 12;
const ENDPOINTS: [(u32, u16); 2] = [(8, 0x20), (0x1_0000, 0x28)];

/// Requests of virtio 1.3, section 5.13.6. Few distinct numbers, so that requests collide.
#[derive(Debug, Clone)]
enum Request {
    Attach {
        domain: u32,
        endpoint: usize,
        flags: u32,
    },
    Detach {
        domain: u32,
        endpoint: usize,
    },
    Map {
        domain: u32,
        page: u64,
        pages: u64,
        memory: u64,
        flags: u32,
    },
    Unmap {
        domain: u32,
        page: u64,
        pages: u64,
    },
    Bypass {
        on: bool,
    },
    Reset,
}

fn request() -> impl Strategy<Value = Request> {
    let domain = || prop::sample::select(vec![0, 1, u32::MAX]);
    prop_oneof![
        4 => (domain(), 0..2_usize, prop_oneof![9 => Just(0), 1 => Just(1_u32)])
            .prop_map(|(domain, endpoint, flags)| Request::Attach { domain, endpoint, flags }),
        2 => (domain(), 0..2_usize)
            .prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        8 => (domain(), 0..8_u64, 1..4_u64, 0..100_u64, 1..4_u32).prop_map(
            |(domain, page, pages, memory, flags)| Request::Map {
                domain,
                page,
                pages,
                memory,
                flags,
            }
        ),
        4 => (domain(), 0..8_u64, 1..9_u64)
            .prop_map(|(domain, page, pages)| Request::Unmap { domain, page, pages }),
        1 => any::<bool>().prop_map(|on| Request::Bypass { on }),
        1 => Just(Request::Reset),
    ]
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut head = |kind: u8, domain: u32| {
            bytes.extend([kind, 0, 0, 0]);
            bytes.extend(domain.to_le_bytes());
        };
        match *self {
            Self::Attach {
                domain,
                endpoint,
                flags,
            } => {
                head(1, domain);
                bytes.extend(ENDPOINTS[endpoint].0.to_le_bytes());
                bytes.extend(flags.to_le_bytes());
                bytes.extend([0; 4]);
            }
            Self::Detach { domain, endpoint } => {
                head(2, domain);
                bytes.extend(ENDPOINTS[endpoint].0.to_le_bytes());
                bytes.extend([0; 8]);
            }
            Self::Map {
                domain,
                page,
                pages,
                memory,
                flags,
            } => {
                head(3, domain);
                bytes.extend((page * PAGE).to_le_bytes());
                bytes.extend(((page + pages) * PAGE - 1).to_le_bytes());
                bytes.extend((memory * PAGE).to_le_bytes());
                bytes.extend(flags.to_le_bytes());
            }
            Self::Unmap {
                domain,
                page,
                pages,
            } => {
                head(4, domain);
                bytes.extend((page * PAGE).to_le_bytes());
                bytes.extend(((page + pages) * PAGE - 1).to_le_bytes());
                bytes.extend([0; 4]);
            }
            Self::Bypass { .. } | Self::Reset => {}
        }
        bytes
    }
}

struct Guest {
    device: Device<IommuSink<()>>,
    readers: [Reader<()>; 2],
}

impl Guest {
    fn new() -> Self {
        let limits = SoftIommuLimits {
            width: Width::BITS_39,
            tables: 8,
            domains: 2,
            ..SoftIommuLimits::default()
        };
        let mut sink = IommuSink::new(limits, ());
        for (endpoint, device) in ENDPOINTS {
            let device = RequesterId::new(device);
            sink.add_endpoint(EndpointId::new(endpoint), device)
                .unwrap();
        }
        let options = Options {
            unattached: BypassPolicy::DriverDecides {
                bypass_at_first: false,
            },
            ..Options::default()
        };
        let readers = ENDPOINTS.map(|(_, device)| sink.reader(RequesterId::new(device)).unwrap());
        let mut device = Device::new(options, sink).unwrap();
        for (endpoint, _) in ENDPOINTS {
            device.add_endpoint(EndpointId::new(endpoint), &[]).unwrap();
        }
        device.accept_features(device.features());
        Self { device, readers }
    }

    fn send(&mut self, request: &Request) {
        match request {
            Request::Bypass { on } => {
                // Field `bypass` (virtio 1.3, section 5.13.4).
                self.device.write_config(36, &[u8::from(*on)]).unwrap();
            }
            Request::Reset => {
                self.device.reset().unwrap();
                self.device.accept_features(self.device.features());
            }
            _ => {
                self.device.handle(&request.bytes(), &mut [0; 4]).unwrap();
            }
        }
    }

    /// Compares readers and the device on every page in use and some beyond.
    fn compare(&mut self) {
        for (reader, (endpoint, _)) in self.readers.iter_mut().zip(ENDPOINTS) {
            let mut burst = reader.online();
            let pin = burst.guard();
            for page in 0..13 {
                for access in [Access::Read, Access::Write] {
                    let range = IovaRange::new(Iova::new(page * PAGE + 8), 16).unwrap();
                    let told = self
                        .device
                        .translate(EndpointId::new(endpoint), range, access)
                        .ok()
                        .map(|translation| match translation {
                            AccessTarget::Memory { physical, .. } => physical,
                            AccessTarget::Doorbell { .. } => panic!("no doorbells here"),
                        });
                    let found: Option<PhysRange> = pin
                        .translate(range, access)
                        .ok()
                        .and_then(|pieces| pieces.only());
                    assert_eq!(found, told, "{endpoint} {range} {access}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn readers_follow_the_device(requests in prop::collection::vec(request(), 1..80)) {
        let mut guest = Guest::new();
        guest.compare();
        for request in &requests {
            guest.send(request);
            guest.compare();
        }
    }

    #[test]
    fn readers_follow_batches(
        batches in prop::collection::vec(prop::collection::vec(request(), 1..8), 1..12),
    ) {
        let mut guest = Guest::new();
        for requests in &batches {
            let mut batch = guest.device.batch().unwrap();
            for request in requests {
                let bytes = request.bytes();
                if !bytes.is_empty() {
                    batch.handle(&bytes, &mut [0; 4]);
                }
            }
            batch.commit().unwrap();
            guest.compare();
        }
    }
}

/// A thread that serves the request queue must not be in a read section.
#[test]
fn a_reader_handles_no_requests() {
    let mut guest = Guest::new();
    let attach = Request::Attach {
        domain: 1,
        endpoint: 0,
        flags: 0,
    };
    let [reader, _] = &mut guest.readers;
    let burst = reader.online();
    let refused = guest.device.handle(&attach.bytes(), &mut [0; 4]);
    assert_eq!(refused.err(), Some(SinkError::WouldBlock));
    drop(burst);
    guest.compare();
    guest.send(&attach);
    guest.compare();
}

/// A thread that goes online in the middle of a batch cannot commit it, but can commit it later.
#[test]
fn a_batch_does_not_end_while_its_thread_is_a_reader() {
    let mut guest = Guest::new();
    guest.send(&Request::Attach {
        domain: 1,
        endpoint: 0,
        flags: 0,
    });
    let detach = Request::Detach {
        domain: 1,
        endpoint: 0,
    };
    let mut batch = guest.device.batch().unwrap();
    let handled = batch.handle(&detach.bytes(), &mut [0; 4]);
    assert_eq!(handled.result, Ok(()));
    let burst = guest.readers[0].online();
    assert_eq!(batch.commit(), Err(SinkError::CommitFailed));
    let other = Request::Reset;
    assert_eq!(guest.device.reset(), Err(SinkError::WouldBlock));
    drop(burst);
    guest.send(&other);
    guest.compare();
}

/// The reply to UNMAP and DETACH, alone or in a batch, waits until no guard is held.
#[test]
fn a_reply_waits_for_pins() {
    for last in [
        Request::Unmap {
            domain: 1,
            page: 0,
            pages: 1,
        },
        Request::Detach {
            domain: 1,
            endpoint: 0,
        },
        Request::Bypass { on: true },
        Request::Reset,
    ] {
        let mut guest = Guest::new();
        guest.send(&Request::Attach {
            domain: 1,
            endpoint: 0,
            flags: 0,
        });
        guest.send(&Request::Map {
            domain: 1,
            page: 0,
            pages: 1,
            memory: 5,
            flags: 1,
        });
        let Guest {
            mut device,
            readers: [mut reader, other],
        } = guest;
        let mut burst = reader.online();
        let pin = burst.guard();
        let replied = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&replied);
        let what = format!("{last:?}");
        let (request, bypass) = (last.bytes(), matches!(last, Request::Bypass { .. }));
        let server = thread::spawn(move || {
            if !request.is_empty() {
                device.handle(&request, &mut [0; 4]).unwrap();
            } else if bypass {
                device.write_config(36, &[1]).unwrap();
            } else {
                device.reset().unwrap();
            }
            theirs.store(true, Ordering::Release);
        });
        for _ in 0..300 {
            thread::yield_now();
            assert!(!replied.load(Ordering::Acquire), "{what}");
        }
        let _ = pin;
        drop(burst);
        server.join().unwrap();
        drop(other);
    }
}

/// Running out of tables returns NOMEM to the driver and changes nothing.
#[test]
fn full_table_fails_the_request() {
    let mut guest = Guest::new();
    guest.send(&Request::Attach {
        domain: 1,
        endpoint: 0,
        flags: 0,
    });
    let mut reply = [0; 4];
    // Each page is in a different GiB and needs two tables, of eight including the root.
    let statuses: Vec<u8> = (0..5)
        .map(|n| {
            let map = Request::Map {
                domain: 1,
                page: n << 18,
                pages: 1,
                memory: 1,
                flags: 3,
            };
            guest.device.handle(&map.bytes(), &mut reply).unwrap();
            reply[0]
        })
        .collect();
    // VIRTIO_IOMMU_S_OK and VIRTIO_IOMMU_S_NOMEM (virtio 1.3, section 5.13.6.2).
    assert_eq!(statuses, [0, 0, 0, 8, 8]);
    guest.send(&Request::Unmap {
        domain: 1,
        page: 0,
        pages: 1,
    });
    guest.send(&Request::Map {
        domain: 1,
        page: 1 << 20,
        pages: 1,
        memory: 2,
        flags: 1,
    });
    let range = IovaRange::new(Iova::new(PAGE << 20), PAGE).unwrap();
    let [reader, _] = &mut guest.readers;
    assert!(
        reader
            .online()
            .guard()
            .translate(range, Access::Read)
            .is_ok()
    );
}
