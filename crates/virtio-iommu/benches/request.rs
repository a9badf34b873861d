//! Cost of a whole request through `virtio-queue`: with this crate's store, with no store, and with
//! a balanced tree.
//!
//! The driver notifies for each request, like Linux in strict mode. A request covers the driver's
//! index, the chain, its bytes, the store, the status, the used ring, and the check whether to
//! notify. UNMAP and MAP of a random page alternate, so the number of mappings stays constant.
//!
//! Samples of each store alternate with samples without a store; the ratio of the medians is the
//! result. The tree has a separate pass, so that neither store evicts the other from the caches.
//! The loop without a store is the shortest correct loop over the queue: it reads the request,
//! checks its type and writes OK.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use ringfence_virtio_iommu::{Device, EndpointId, Options, Queues, VirtioIommuLimits};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap};

const PAGE: u64 = 4096;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const READABLE: u64 = 0x1_0000;
const WRITABLE: u64 = 0x2_0000;
/// Requests per sample: an UNMAP and a MAP for each of half as many pages.
const REQUESTS: u16 = 128;
const REPETITIONS: usize = 401;

/// The driver's side of a queue.
struct Rings {
    memory: GuestMemoryMmap,
    queue: Queue,
    avail: u16,
}

impl Rings {
    fn new() -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4_0000)]).expect("memory");
        let mut chains = Vec::new();
        for number in 0..REQUESTS {
            let (at, to) = (address(READABLE, number), address(WRITABLE, number));
            chains.push(Descriptor::new(at.0, 36, NEXT, number * 2 + 1));
            chains.push(Descriptor::new(to.0, 4, WRITE, 0));
        }
        let raw: Vec<RawDescriptor> = chains.into_iter().map(RawDescriptor::from).collect();
        let rings = MockSplitQueue::new(&memory, 256);
        rings.build_multiple_desc_chains(&raw).expect("chains");
        let mut queue: Queue = rings.create_queue().expect("a queue");
        // At the mock's address, the used ring of a long queue overlaps the available ring.
        queue.set_used_ring_address(Some(0x8000), Some(0));
        // The second half of the ring contains the same chains again.
        for slot in 0..256_u16 {
            let head = slot % REQUESTS * 2;
            let at = GuestAddress(queue.avail_ring() + 4 + u64::from(slot) * 2);
            memory.write_obj(head, at).expect("in memory");
        }
        memory
            .write_obj(0_u16, GuestAddress(queue.avail_ring() + 2))
            .expect("in memory");
        Self {
            memory,
            queue,
            avail: 0,
        }
    }

    /// Writes the requests of a sample.
    fn prepare(&self, pages: &[u64]) {
        for (number, page) in (0..).step_by(2).zip(pages) {
            let unmap = request(4, *page);
            let map = request(3, *page);
            for (number, bytes) in [(number, unmap), (number + 1, map)] {
                self.memory
                    .write_slice(&bytes, address(READABLE, number))
                    .expect("in memory");
            }
        }
    }

    /// Makes one more chain available.
    #[inline]
    fn publish(&mut self) {
        self.avail = self.avail.wrapping_add(1);
        let at = GuestAddress(self.queue.avail_ring() + 2);
        self.memory
            .store(self.avail, at, std::sync::atomic::Ordering::Release)
            .expect("in memory");
    }
}

fn address(base: u64, number: u16) -> GuestAddress {
    GuestAddress(base + u64::from(number) * 64)
}

fn request(kind: u8, page: u64) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    bytes.extend((page * PAGE).to_le_bytes());
    bytes.extend((page * PAGE + (PAGE - 1)).to_le_bytes());
    bytes.extend((page * PAGE).to_le_bytes());
    bytes.extend([3, 0, 0, 0]);
    bytes
}

/// A straightforward service loop, with `store` as the request handler.
#[inline]
fn plain<M: GuestMemory>(queue: &mut Queue, memory: &M, mut store: impl FnMut(&[u8; 36]) -> u8) {
    while let Some(chain) = queue.iter(memory).expect("sound").next() {
        let head = chain.head_index();
        let mut request = [0; 36];
        let mut used = 0;
        for descriptor in chain {
            if descriptor.is_write_only() {
                let status = store(&request);
                memory
                    .write_slice(&[status, 0, 0, 0], descriptor.addr())
                    .expect("in memory");
                used = 4;
            } else {
                let bytes = (descriptor.len() as usize).min(36);
                memory
                    .read_slice(&mut request[..bytes], descriptor.addr())
                    .expect("in memory");
            }
        }
        queue.add_used(memory, head, used).expect("in memory");
    }
    black_box(queue.needs_notification(memory).expect("in memory"));
}

fn le64(request: &[u8; 36], at: usize) -> u64 {
    u64::from_le_bytes(request[at..at + 8].try_into().expect("8 bytes"))
}

/// MAP and UNMAP in a balanced tree, with the necessary checks.
fn tree(mappings: &mut BTreeMap<u64, (u64, u64, u32)>, request: &[u8; 36]) -> u8 {
    let (start, last) = (le64(request, 8), le64(request, 16));
    let overlaps = |mappings: &BTreeMap<u64, (u64, u64, u32)>| {
        mappings
            .range(..=last)
            .next_back()
            .is_some_and(|(_, mapping)| mapping.0 >= start)
    };
    match request[0] {
        3 if overlaps(mappings) => 4,
        3 => {
            mappings.insert(start, (last, le64(request, 24), 3));
            0
        }
        _ => match mappings.remove(&start) {
            Some((end, ..)) if end == last => 0,
            _ => 5,
        },
    }
}

fn device(live: u64) -> Device<()> {
    let options = Options {
        limits: VirtioIommuLimits {
            mappings: 1 << 21,
            ..VirtioIommuLimits::default()
        },
        ..Options::default()
    };
    let mut device = Device::new(options, ()).expect("sound options");
    device
        .add_endpoint(EndpointId::new(1), &[])
        .expect("an endpoint");
    device.accept_features(device.features());
    let mut reply = [0; 4];
    let attach = [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    device.handle(&attach, &mut reply).expect("no sink");
    for page in 0..live {
        device
            .handle(&request(3, page * 2), &mut reply)
            .expect("no sink");
        assert_eq!(reply, [0; 4]);
    }
    device
}

/// Returns the nanoseconds per request.
fn timed(rings: &mut Rings, mut serve: impl FnMut(&mut Queue, &GuestMemoryMmap)) -> f64 {
    let start = Instant::now();
    for _ in 0..REQUESTS {
        rings.publish();
        serve(&mut rings.queue, &rings.memory);
    }
    start.elapsed().as_nanos() as f64 / f64::from(REQUESTS)
}

/// Returns the median and the 10th and 90th percentile.
fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [50, 10, 90].map(|percent| {
        let at = values.len() * percent / 100;
        values.get(at).copied().unwrap_or(f64::NAN)
    })
}

/// Random pages among the `live` ones, to unmap and map again.
struct Pages {
    random: u64,
    live: u64,
}

impl Pages {
    fn next(&mut self) -> Vec<u64> {
        (0..REQUESTS / 2)
            .map(|_| {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                self.random % self.live * 2
            })
            .collect()
    }
}

fn timed_nothing(rings: &mut Rings) -> f64 {
    timed(rings, |queue, memory| {
        plain(queue, memory, |request| black_box(u8::from(request[0] > 5)));
    })
}

/// Samples without a store, of this crate through a queue, and of this crate without a queue.
fn pass_of_ours(pages: &mut Pages, repetitions: usize) -> [Vec<f64>; 3] {
    let mut rings = [Rings::new(), Rings::new()];
    let mut device = device(pages.live);
    let mut queues = Queues::default();
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..repetitions {
        let pages = pages.next();
        rings.iter().for_each(|rings| rings.prepare(&pages));
        let [nothing, ours] = &mut rings;
        samples[0].push(timed_nothing(nothing));
        samples[1].push(timed(ours, |queue, memory| {
            let served = queues
                .serve_requests(&mut device, queue, memory, |_, handled| {
                    assert_eq!(handled.result, Ok(()));
                })
                .expect("a sound queue");
            black_box(served);
        }));
        let requests: Vec<Vec<u8>> = pages
            .iter()
            .flat_map(|page| [request(4, *page), request(3, *page)])
            .collect();
        let start = Instant::now();
        for request in &requests {
            let mut reply = [0; 4];
            black_box(device.handle(request, &mut reply).expect("no sink"));
        }
        samples[2].push(start.elapsed().as_nanos() as f64 / requests.len() as f64);
    }
    samples
}

/// Samples without a store and of the tree.
fn pass_of_the_tree(pages: &mut Pages, repetitions: usize) -> [Vec<f64>; 2] {
    let mut rings = [Rings::new(), Rings::new()];
    let mut mappings: BTreeMap<_, _> = (0..pages.live)
        .map(|page| (page * 2 * PAGE, (page * 2 * PAGE + PAGE - 1, 0, 3)))
        .collect();
    let mut samples = [const { Vec::new() }; 2];
    for _ in 0..repetitions {
        let pages = pages.next();
        rings.iter().for_each(|rings| rings.prepare(&pages));
        let [nothing, other] = &mut rings;
        samples[0].push(timed_nothing(nothing));
        samples[1].push(timed(other, |queue, memory| {
            plain(queue, memory, |request| tree(&mut mappings, request));
        }));
    }
    samples
}

/// Prints medians, spread, and ratios to the first.
fn print(mut samples: impl AsMut<[Vec<f64>]>) {
    let mut first = f64::NAN;
    for side in samples.as_mut() {
        let [median, low, high] = spread(side);
        if first.is_nan() {
            first = median;
        }
        let ratio = median / first;
        print!(
            "{:>26}",
            format!("{median:.1} ({low:.1}-{high:.1}) {ratio:.2}")
        );
    }
}

fn main() {
    // `cargo test --benches` also runs this; one repetition is enough there.
    let repetitions = if std::env::args().any(|arg| arg == "--bench") {
        REPETITIONS
    } else {
        1
    };
    println!("nanoseconds a request, medians of {repetitions} (10% to 90%), ratio to no store");
    print!("{:>8}", "live");
    for side in [
        "no store",
        "this crate",
        "without a queue",
        "no store",
        "tree",
    ] {
        print!("{side:>26}");
    }
    println!();
    for live in [1, 64, 1 << 10, 16 << 10, 1 << 20] {
        let random = 0x9e37_79b9_7f4a_7c15;
        let mut pages = Pages { random, live };
        print!("{live:>8}");
        print(pass_of_ours(&mut pages, repetitions));
        print(pass_of_the_tree(&mut pages, repetitions));
        println!();
    }
}
