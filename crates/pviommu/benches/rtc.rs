//! Reverse translation caches against general-purpose maps: the time of a hit and of a mapping's
//! life cycle, in nanoseconds and relative to the flat table. The runs are interleaved.
//!
//! `cargo bench -p ringfence-pviommu --bench rtc -- [--quick] [--check]`: `--quick` takes a fifth
//! of the samples, `--check` fails when a bound is missed.
//!
//! A cache does more than the maps: its hit counts a user and compares direction and length. A hit
//! of a map is only its `get`, and its queue is a `VecDeque` without cycles.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use ringfence_papers::rtc::Rtc;
use ringfence_pviommu::rtc::{Cycles, FlatCache, MappingKey, ResidencyPolicy, ReverseCache};
use ringfence_types::{Direction, Iova, PhysAddr};

/// A measured implementation. Each method takes the whole list of keys, so that the measured time
/// contains no calls through a pointer.
trait Side {
    fn name(&self) -> &'static str;
    /// Inserts all keys.
    fn fill(&mut self, keys: &[MappingKey]);
    /// Looks up each key, in this order; returns a value that depends on all results.
    fn hits(&mut self, keys: &[MappingKey]) -> u64;
    /// Like `hits`, but each position in the list depends on the previous hit.
    fn chained(&mut self, keys: &[MappingKey]) -> u64;
    /// Releases what `hits` acquired.
    fn releases(&mut self, keys: &[MappingKey]);
    /// Expires all mappings.
    fn expire(&mut self);
}

fn giova(at: usize) -> Iova {
    Iova::new((at as u64 + 1) << 12)
}

struct Cached<C>(&'static str, C);

impl<C: ReverseCache> Side for Cached<C> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn fill(&mut self, keys: &[MappingKey]) {
        for (at, key) in keys.iter().enumerate() {
            black_box(self.1.insert(*key, giova(at)).is_ok());
        }
    }

    fn hits(&mut self, keys: &[MappingKey]) -> u64 {
        let found = keys.iter().filter_map(|key| self.1.acquire(*key));
        found.fold(0, |sum, giova| sum ^ giova.get())
    }

    fn chained(&mut self, keys: &[MappingKey]) -> u64 {
        let (mut sum, none) = (0, black_box(0));
        for at in 0..keys.len() {
            let giova = self.1.acquire(keys[at ^ (sum & none) as usize]);
            sum ^= giova.map_or(0, |giova| giova.get());
        }
        sum
    }

    fn releases(&mut self, keys: &[MappingKey]) {
        for key in keys {
            black_box(self.1.release(*key).is_ok());
        }
    }

    fn expire(&mut self) {
        for _ in 0..=Cycles::PAPER.get() {
            self.1.tick(|_, giova| {
                black_box(giova);
            });
        }
    }
}

/// A map from words to words, with the queue that an expiring cache needs.
trait Words {
    const NAME: &'static str;
    fn new() -> Self;
    fn insert(&mut self, key: u64, value: u64);
    fn get(&self, key: u64) -> Option<u64>;
    fn remove(&mut self, key: u64);
}

struct Queued<M> {
    map: M,
    queue: VecDeque<u64>,
}

/// Returns the key of a page and a direction, as a word with the page in its high bits. A map of
/// words can distinguish no more.
fn word(key: MappingKey) -> u64 {
    key.first().get() | key.direction().permissions().bits()
}

impl<M: Words> Side for Queued<M> {
    fn name(&self) -> &'static str {
        M::NAME
    }

    fn fill(&mut self, keys: &[MappingKey]) {
        for (at, key) in keys.iter().enumerate() {
            self.map.insert(word(*key), giova(at).get());
            self.queue.push_back(word(*key));
        }
    }

    fn hits(&mut self, keys: &[MappingKey]) -> u64 {
        let found = keys.iter().filter_map(|key| self.map.get(word(*key)));
        found.fold(0, |sum, giova| sum ^ giova)
    }

    fn chained(&mut self, keys: &[MappingKey]) -> u64 {
        let (mut sum, none) = (0, black_box(0));
        for at in 0..keys.len() {
            sum ^= self
                .map
                .get(word(keys[at ^ (sum & none) as usize]))
                .unwrap_or(0);
        }
        sum
    }

    fn releases(&mut self, _: &[MappingKey]) {}

    fn expire(&mut self) {
        while let Some(key) = self.queue.pop_front() {
            self.map.remove(key);
        }
    }
}

impl Words for BTreeMap<u64, u64> {
    const NAME: &'static str = "std BTreeMap";
    fn new() -> Self {
        Self::new()
    }
    fn insert(&mut self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key).copied()
    }
    fn remove(&mut self, key: u64) {
        self.remove(&key);
    }
}

impl Words for HashMap<u64, u64> {
    const NAME: &'static str = "std HashMap";
    fn new() -> Self {
        Self::new()
    }
    fn insert(&mut self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key).copied()
    }
    fn remove(&mut self, key: u64) {
        self.remove(&key);
    }
}

impl Words for rart::AdaptiveRadixTree<rart::ArrayKey<8>, u64> {
    const NAME: &'static str = "rart 0.11";
    fn new() -> Self {
        Self::new()
    }
    fn insert(&mut self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(key).copied()
    }
    fn remove(&mut self, key: u64) {
        self.remove(key);
    }
}

impl Words for blart::TreeMap<[u8; 8], u64> {
    const NAME: &'static str = "blart 0.6";
    fn new() -> Self {
        Self::new()
    }
    fn insert(&mut self, key: u64, value: u64) {
        self.insert(key.to_be_bytes(), value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key.to_be_bytes()).copied()
    }
    fn remove(&mut self, key: u64) {
        self.remove(&key.to_be_bytes());
    }
}

impl Words for congee::Congee<usize, usize> {
    const NAME: &'static str = "congee 0.4";
    fn new() -> Self {
        Self::default()
    }
    fn insert(&mut self, key: u64, value: u64) {
        let guard = self.pin();
        black_box(congee::Congee::insert(self, key as usize, value as usize, &guard).is_ok());
    }
    fn get(&self, key: u64) -> Option<u64> {
        let guard = self.pin();
        congee::Congee::get(self, &(key as usize), &guard).map(|value| value as u64)
    }
    fn remove(&mut self, key: u64) {
        let guard = self.pin();
        congee::Congee::remove(self, &(key as usize), &guard);
    }
}

fn queued<M: Words + 'static>() -> Box<dyn Side> {
    Box::new(Queued {
        map: M::new(),
        queue: VecDeque::new(),
    })
}

const FLAT: &str = "flat";

/// Returns the implementations, the flat table first. The PVIOMMU paper's tree is the fixed one;
/// the published one loses the keys above 32 of a node.
fn sides(limit: usize) -> Vec<Box<dyn Side>> {
    let c = Cycles::PAPER;
    let adaptive = ResidencyPolicy::Adaptive { late: 10 };
    let mut sides: Vec<Box<dyn Side>> = vec![
        Box::new(Cached(
            FLAT,
            FlatCache::new(c, limit, ResidencyPolicy::Fixed),
        )),
        Box::new(Cached("flat, adaptive", FlatCache::new(c, limit, adaptive))),
        Box::new(Cached("the paper's tree", Rtc::new(c, limit))),
    ];
    sides.push(queued::<rart::AdaptiveRadixTree<rart::ArrayKey<8>, u64>>());
    sides.push(queued::<blart::TreeMap<[u8; 8], u64>>());
    sides.push(queued::<congee::Congee<usize, usize>>());
    sides.push(queued::<BTreeMap<u64, u64>>());
    sides.push(queued::<HashMap<u64, u64>>());
    sides
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * bound as u64) >> 32) as usize
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at + 1));
        }
    }
}

/// Returns the keys of `pages` in random order, for reads by the device.
fn keys(random: &mut Random, pages: impl Iterator<Item = u64>) -> Vec<MappingKey> {
    let key = |page| MappingKey::new(PhysAddr::new(page << 12), 1, Direction::ToDevice);
    let mut keys: Vec<MappingKey> = pages.filter_map(key).collect();
    random.shuffle(&mut keys);
    keys
}

fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * share).round() as usize]
}

const COLUMNS: [&str; 4] = ["hit", "hit, chained", "hit + release", "insert + expire"];

/// Returns the nanoseconds per operation: a hit, a hit that depends on the one before, a hit with
/// its release, and an insert with its expiry.
fn sample(side: &mut dyn Side, keys: &[MappingKey]) -> [f64; 4] {
    let each = |start: Instant| start.elapsed().as_nanos() as f64 / keys.len() as f64;
    let start = Instant::now();
    side.fill(keys);
    let filled = each(start);
    side.releases(keys);
    let start = Instant::now();
    black_box(side.hits(keys));
    let hit = each(start);
    side.releases(keys);
    let start = Instant::now();
    black_box(side.chained(keys));
    let chained = each(start);
    side.releases(keys);
    let start = Instant::now();
    black_box(side.hits(keys));
    side.releases(keys);
    let pair = each(start);
    let start = Instant::now();
    side.expire();
    [hit, chained, pair, filled + each(start)]
}

fn main() -> ExitCode {
    let asked = |flag: &str| std::env::args().any(|argument| argument == flag);
    let (quick, check) = (asked("--quick"), asked("--check"));
    let rounds = if quick { 5 } else { 25 };
    let mut random = Random(0x5eed);
    const MANY: usize = 64 * 1024;
    // A guest of 8 GiB has 2^21 pages. Use a random page of every 32, or adjacent pages.
    let scattered: Vec<u64> = (0..MANY as u64)
        .map(|at| at * 32 + random.below(32) as u64)
        .collect();
    let cases = [
        (
            "64K pages scattered over 8 GiB, random order",
            keys(&mut random, scattered.iter().copied()),
        ),
        (
            "64K neighbouring pages, random order",
            keys(&mut random, 0x8_0000..0x8_0000 + MANY as u64),
        ),
        (
            "1K neighbouring pages, random order",
            keys(&mut random, 0x8_0000..0x8_0400),
        ),
    ];
    let mut missed = Vec::new();
    for (title, keys) in &cases {
        let mut sides = sides(keys.len());
        let mut samples = vec![[const { Vec::new() }; 4]; sides.len()];
        let repeat = (MANY / keys.len()).min(8);
        for round in 0..rounds + 1 {
            for (side, samples) in sides.iter_mut().zip(&mut samples) {
                for _ in 0..repeat {
                    let measured = sample(side.as_mut(), keys);
                    // The first round is a warm-up.
                    for (samples, one) in samples.iter_mut().zip(measured).filter(|_| round > 0) {
                        samples.push(one);
                    }
                }
            }
        }
        println!("\n{title}: ns, median (10% to 90%), ratio to {FLAT}");
        print!("  {:<30}", "");
        COLUMNS.iter().for_each(|name| print!(" {name:>28}"));
        println!();
        let mut medians = Vec::new();
        for (side, samples) in sides.iter().zip(&mut samples) {
            let at = |samples: &mut Vec<f64>, share| quantile(samples, share);
            let row = samples
                .each_mut()
                .map(|one| (at(one, 0.5), at(one, 0.1), at(one, 0.9)));
            medians.push((side.name(), row.map(|(median, _, _)| median)));
            print!("  {:<30}", side.name());
            for ((median, low, high), first) in row.iter().zip(medians[0].1) {
                print!(
                    " {:>28}",
                    format!("{median:.1} ({low:.1}-{high:.1}) {:.2}", median / first)
                );
            }
            println!();
        }
        if keys.len() == MANY {
            judge(title, &medians, &mut missed);
        }
    }
    for line in &missed {
        println!("\nmissed: {line}");
    }
    match check && !missed.is_empty() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// Bounds: a hit takes at most 10 ns and less than all others, an insert with its expiry at most 40
/// ns.
fn judge(title: &str, medians: &[(&str, [f64; 4])], missed: &mut Vec<String>) {
    let (_, [hit, _, _, residency]) = medians[0];
    if hit > 10.0 {
        missed.push(format!("{title}: a hit takes {hit:.1} ns"));
    }
    if residency > 40.0 {
        missed.push(format!("{title}: insert and expiry take {residency:.1} ns"));
    }
    for (name, [other, ..]) in medians.iter().filter(|(name, _)| !name.starts_with(FLAT)) {
        if *other <= hit {
            missed.push(format!(
                "{title}: a hit takes {hit:.1} ns, of {name} {other:.1}"
            ));
        }
    }
}
