//! Heap use of a device at its limits: no request makes the host allocate more than they allow.
#![allow(missing_docs, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use ringfence_types::{Access, Iova, IovaRange};
use ringfence_virtio_iommu::{
    Device, EndpointError, EndpointId, LimitReached, Options, VirtioIommuLimits,
};

/// Counts the allocated bytes and their maximum.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator unchanged; the counters are not part of any
// allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller fulfils the allocator's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the allocator's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const PAGE: u64 = 4096;
const LIMITS: VirtioIommuLimits = VirtioIommuLimits {
    mappings: 2048,
    domains: 16,
    endpoints: 24,
    events: 32,
};
const NOMEM: u8 = 8;

/// Bound by the limits: 128 bytes per mapping, 4 KiB per domain, 256 bytes per endpoint, 64 bytes
/// per event.
const BOUND: usize =
    128 * LIMITS.mappings + 4096 * LIMITS.domains + 256 * LIMITS.endpoints + 64 * LIMITS.events;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound
    }
}

/// Sends a request with these ids and addresses. Returns its status.
fn send(device: &mut Device<()>, kind: u8, ids: [u32; 2], addresses: &[u64]) -> u8 {
    let mut request = [0; 64];
    request[0] = kind;
    let mut at = 4;
    let ids = ids.iter().map(|id| id.to_le_bytes().to_vec());
    let ids = ids.take(if kind < 3 { 2 } else { 1 });
    let addresses = addresses.iter().map(|word| word.to_le_bytes().to_vec());
    for bytes in ids.chain(addresses) {
        request[at..at + bytes.len()].copy_from_slice(&bytes);
        at += bytes.len();
    }
    if kind == 3 {
        request[at] = 3;
    }
    let bytes = [0, 20, 20, 36, 28][usize::from(kind)];
    let mut reply = [0xff; 4];
    let handled = device
        .handle(&request[..bytes], &mut reply)
        .expect("no sink");
    assert_eq!(handled.used, 4);
    reply[0]
}

#[test]
fn no_request_makes_the_host_allocate_without_bound() {
    let before = NOW.load(Ordering::Relaxed);
    let options = Options {
        limits: LIMITS,
        ..Options::default()
    };
    let mut device = Device::new(options, ()).expect("sound options");
    for endpoint in 0..LIMITS.endpoints as u32 {
        device
            .add_endpoint(EndpointId::new(endpoint), &[])
            .expect("room");
    }
    // The embedder adds endpoints, so it gets the error.
    let one_more = device.add_endpoint(EndpointId::new(99), &[]);
    assert_eq!(
        one_more,
        Err(EndpointError::LimitReached(LimitReached::Endpoints))
    );
    let mut refused = [0_u32; 2];
    for seed in [1, 3, 5] {
        device.accept_features(device.features());
        let mut random = Random(seed);
        MOST.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);
        for step in 0..120_000 {
            let domain = random.below(2 * LIMITS.domains as u64) as u32;
            let endpoint = random.below(LIMITS.endpoints as u64 + 2) as u32;
            // Distant pages, adjacent pages, and the end of the address space.
            let page = match random.below(4) {
                0 => random.below(1 << 51) << 1,
                1 => u64::MAX / PAGE - random.below(64),
                _ => random.below(8192),
            };
            let (start, last) = (page * PAGE, page * PAGE + (PAGE - 1));
            let phase = step / 20_000 % 2 == 0;
            match random.below(16) {
                // An endpoint that leaves its domain removes the domain and its mappings.
                0 if !phase || step % 20_000 < 500 => {
                    let status = send(&mut device, 1, [domain, endpoint], &[]);
                    refused[0] += u32::from(status == NOMEM);
                }
                1 if !phase => {
                    let _ = send(&mut device, 2, [domain, endpoint], &[]);
                }
                2 => {
                    let byte = IovaRange::new(Iova::new(start), 1).expect("a byte");
                    if let Err(denied) =
                        device.translate(EndpointId::new(endpoint), byte, Access::Write)
                    {
                        device.report(denied);
                    }
                }
                3..=5 if !phase => {
                    let last = last.saturating_add(random.below(64) * PAGE) | (PAGE - 1);
                    let _ = send(&mut device, 4, [domain, 0], &[start, last]);
                }
                _ => {
                    let status = send(&mut device, 3, [domain, 0], &[start, last, start]);
                    refused[1] += u32::from(status == NOMEM);
                }
            }
            assert!(device.mappings() <= LIMITS.mappings && device.domains() <= LIMITS.domains);
        }
        let most = MOST.load(Ordering::Relaxed) - before;
        assert!(most <= BOUND, "{most} bytes, at most {BOUND}");
        assert!(device.events_waiting() <= LIMITS.events && device.events_dropped() > 0);
        device.reset().expect("no sink");
    }
    // The test is meaningless if the limits are never reached.
    assert!(refused.iter().all(|count| *count > 100), "{refused:?}");
}
