//! Hits of reverse translation caches on recorded traces (X22), and the exposure that they cost.
//!
//! `cargo run --release -p ringfence-trace --example rtc_exposure -- TRACE...`
//!
//! Each device has a cache. Each physically contiguous piece of a mapping is a key. Coherent
//! buffers are not cached. After the end of the trace, the clock runs until the last mapping has
//! expired: mappings that a machine keeps when it becomes idle are part of the cost. Exposure is
//! the sum of pages times seconds in which a page is mapped but no driver uses it.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use ringfence_pviommu::rtc::{
    Cycles, FlatCache, MappingKey, NotCached, ResidencyPolicy, ReverseCache,
};
use ringfence_trace::{Chunk, DeviceIndex, MapClass, OpKind, Operations, TraceOptions};
use ringfence_types::{Iova, Nanos};

/// One policy for keeping mappings: cycles of `cycle_ns`, at most C of them.
#[derive(Clone, Copy)]
struct Policy {
    name: &'static str,
    cycle_ns: u64,
    cycles: u8,
    residency: ResidencyPolicy,
}

const MS: u64 = 1_000_000;

/// The policy of the PVIOMMU paper, shorter ones, and two adaptive ones with its bound: 40 s = 160
/// ms x 250.
const POLICIES: [Policy; 6] = [
    fixed("T = 10 s, C = 3", 10_000 * MS, 3),
    fixed("T = 1 s, C = 3", 1_000 * MS, 3),
    fixed("T = 160 ms, C = 1", 160 * MS, 1),
    fixed("T = 10 ms, C = 1", 10 * MS, 1),
    adaptive("adaptive, 1 in 1000 late", 1),
    adaptive("adaptive, 10 in 1000 late", 10),
];

const fn fixed(name: &'static str, cycle_ns: u64, cycles: u8) -> Policy {
    Policy {
        name,
        cycle_ns,
        cycles,
        residency: ResidencyPolicy::Fixed,
    }
}

const fn adaptive(name: &'static str, late: u16) -> Policy {
    Policy {
        name,
        cycle_ns: 160 * MS,
        cycles: 249,
        residency: ResidencyPolicy::Adaptive { late },
    }
}

/// Capacity larger than the number of mappings in any of the traces.
const LIMIT: usize = 1 << 20;

/// The cache of a device, and its exposure.
struct Watched {
    cache: FlatCache,
    users: HashMap<MappingKey, u32>,
    /// Pages that are mapped but unused, the time of their last change, and their integral over
    /// time so far.
    pages: u64,
    since: u64,
    page_ns: u128,
    most: u64,
    tick_at: u64,
    batches: u64,
}

impl Watched {
    fn new(policy: Policy, cycles: Cycles) -> Self {
        Self {
            cache: FlatCache::new(cycles, LIMIT, policy.residency),
            users: HashMap::new(),
            pages: 0,
            since: 0,
            page_ns: 0,
            most: 0,
            tick_at: policy.cycle_ns,
            batches: 0,
        }
    }

    /// Advances the clock to `now` and ends the cycles that pass.
    fn advance(&mut self, now: u64, cycle_ns: u64) {
        while self.tick_at <= now {
            self.expose(self.tick_at);
            let (mut pages, mut batch) = (0, 0);
            let users = &mut self.users;
            self.cache.tick(|key, _| {
                users.remove(&key);
                pages += key.pages();
                batch = 1;
            });
            self.pages -= pages;
            self.batches += batch;
            self.tick_at += cycle_ns;
        }
        self.expose(now);
    }

    fn expose(&mut self, now: u64) {
        self.page_ns += u128::from(self.pages) * u128::from(now - self.since);
        self.since = now;
    }

    fn take(&mut self, key: MappingKey) -> Result<(), NotCached> {
        if self.cache.acquire(key).is_none() {
            self.cache
                .insert(key, Iova::new(key.first().get() & ((1 << 56) - 1)))?;
        } else if self.users.get(&key) == Some(&0) {
            self.pages -= key.pages();
        }
        *self.users.entry(key).or_default() += 1;
        Ok(())
    }

    fn release(&mut self, key: MappingKey) {
        if let (Ok(_), Some(users)) = (self.cache.release(key), self.users.get_mut(&key)) {
            *users -= 1;
            if *users == 0 {
                self.pages += key.pages();
                self.most = self.most.max(self.pages);
            }
        }
    }
}

/// An action of a driver: at `at`, `device` mapped or unmapped a key.
struct Event {
    at: u64,
    device: DeviceIndex,
    key: MappingKey,
    map: bool,
}

fn events(name: &str) -> Result<Vec<Event>, Box<dyn Error>> {
    let mut operations = Operations::open(Path::new(name), TraceOptions::default())?;
    let (mut chunk, mut events) = (Chunk::default(), Vec::new());
    let mut live: HashMap<u32, Vec<MappingKey>> = HashMap::new();
    while operations.next_chunk(&mut chunk)? {
        for op in &chunk.ops {
            let Nanos(at) = op.time;
            let event = |map| {
                move |key| Event {
                    at,
                    device: op.device,
                    key,
                    map,
                }
            };
            match op.kind {
                OpKind::Map {
                    class: MapClass::Coherent,
                    ..
                } => {}
                OpKind::Map {
                    id,
                    direction,
                    segments,
                    ..
                } => {
                    let segments = chunk.segments_of(segments);
                    let keys = segments
                        .iter()
                        .filter_map(|piece| MappingKey::covering(piece, direction));
                    let keys: Vec<MappingKey> = keys.collect();
                    events.extend(keys.iter().copied().map(event(true)));
                    live.insert(id.0, keys);
                }
                OpKind::Unmap { id } => {
                    let keys = live.remove(&id.0).unwrap_or_default();
                    events.extend(keys.into_iter().map(event(false)));
                }
            }
        }
    }
    // Mappings that are live at the end stay in use.
    Ok(events)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut sums = [[0.0; 3]; POLICIES.len()];
    let mut traces = 0.0;
    for name in std::env::args().skip(1) {
        let events = events(&name)?;
        let (Some(first), Some(last)) = (events.first(), events.last()) else {
            println!("{name}: no streaming mappings");
            continue;
        };
        let (start, end) = (first.at, last.at - first.at);
        let mut uses: HashMap<MappingKey, u64> = HashMap::new();
        for event in events.iter().filter(|event| event.map) {
            *uses.entry(event.key).or_default() += 1;
        }
        let takes: u64 = uses.values().sum();
        println!(
            "{name}: {takes} maps of {} keys, {:.1} each, {:.1} s",
            uses.len(),
            takes as f64 / uses.len() as f64,
            end as f64 / 1e9
        );
        let mut of_document = None;
        for (policy, sums) in POLICIES.into_iter().zip(&mut sums) {
            let cycles = Cycles::new(policy.cycles).ok_or("no such C")?;
            let mut devices: HashMap<DeviceIndex, Watched> = HashMap::new();
            for event in &events {
                let device = devices.entry(event.device);
                let device = device.or_insert_with(|| Watched::new(policy, cycles));
                device.advance(event.at - start, policy.cycle_ns);
                if event.map {
                    device.take(event.key)?;
                } else {
                    device.release(event.key);
                }
            }
            let (mut hits, mut exposed, mut most, mut batches) = (0, 0.0, 0, 0);
            for device in devices.values_mut() {
                let idle = policy.cycle_ns * (u64::from(policy.cycles) + 2);
                device.advance(end + idle, policy.cycle_ns);
                hits += device.cache.stats().hits;
                exposed += device.page_ns as f64 / 1e9;
                most += device.most;
                batches += device.batches;
            }
            let rate = hits as f64 / takes as f64;
            let relative = exposed / *of_document.get_or_insert(exposed);
            println!(
                "  {:<26} hits {:>7.3}%  map requests {:>7}  batches {batches:>5}  exposed \
                {exposed:>12.1} page s ({relative:>7.4})  at most {most:>6} pages",
                policy.name,
                100.0 * rate,
                takes - hits
            );
            for (sum, value) in sums.iter_mut().zip([rate, relative, relative.ln()]) {
                *sum += value;
            }
        }
        traces += 1.0;
    }
    println!(
        "all {traces} traces: mean hit rate, mean and geometric mean of exposure relative to the \
        document's"
    );
    for (policy, [rate, relative, log]) in POLICIES.iter().zip(sums) {
        println!(
            "  {:<26} {:>7.3}%  {:>7.4}  {:>7.4}",
            policy.name,
            100.0 * rate / traces,
            relative / traces,
            (log / traces).exp()
        );
    }
    Ok(())
}
