//! `riommu-` over recorded traces, on memory that lags behind. The unit sees only lines that were
//! written back and waited for; before that it sees wrong entries. Each recorded device follows its
//! own maps and unmaps, uses each buffer just before its unmap, and attacks in between.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;

use ringfence_devices::api::{AttackHook, DeviceRing, DmaApi, MapFailure};
use ringfence_devices::nic::Environment;
use ringfence_devices::{Pool, Racer, Replayer, Reuse, Straddler};
use ringfence_dma::ring::{RingSetup, SlotChoice};
use ringfence_pgtable::Coherency;
use ringfence_trace::{
    Chunk, DeviceIndex, MapClass, MappingId, Op, OpKind, Operations, SAMPLE, TraceOptions,
    TraceSource,
};
use ringfence_types::{Direction, Iova, Nanos, PhysRange};

// The machine, and the judge of all accesses, from the tests of the `devices` crate.
#[allow(dead_code, reason = "its own tests use more of it")]
#[path = "../../crates/devices/tests/devices/hardware.rs"]
mod hardware;
#[allow(dead_code, reason = "its own tests use more of it")]
#[path = "../../crates/devices/tests/devices/judge.rs"]
mod judge;
#[allow(dead_code, reason = "its own tests use more of it")]
#[path = "../../crates/devices/tests/devices/rig.rs"]
mod rig;

/// Maximum size of a buffer in bytes; larger ones in a trace are truncated.
const SLOT: u64 = 16 << 10;
/// Maximum duration of a burst.
const BURST: Nanos = Nanos(50_000);
/// Number of buffers that a device uses before the test stops it. Traces can be long, and a test
/// build is slow.
const USES: u64 = 20_000;
/// Number of bytes that a device transfers per buffer.
const PIECE: usize = 64;

/// The recorded operations of a device.
#[derive(Debug, Default)]
struct Recorded {
    ops: Vec<(Op, Vec<PhysRange>)>,
}

/// Returns the streaming mappings by device.
fn recorded<R: Read>(mut operations: Operations<R>) -> BTreeMap<DeviceIndex, Recorded> {
    let mut chunk = Chunk::default();
    let mut devices: BTreeMap<DeviceIndex, Recorded> = BTreeMap::new();
    let mut streaming: HashMap<MappingId, bool> = HashMap::new();
    while operations.next_chunk(&mut chunk).unwrap() {
        for op in &chunk.ops {
            let (taken, pieces) = match op.kind {
                OpKind::Map {
                    id,
                    class,
                    segments,
                    ..
                } => {
                    let taken = matches!(class, MapClass::Single | MapClass::Sg);
                    streaming.insert(id, taken);
                    let first = segments.first as usize;
                    let pieces = &chunk.segments[first..first + segments.count as usize];
                    (taken, pieces.to_vec())
                }
                OpKind::Unmap { id } => (streaming[&id], Vec::new()),
            };
            if taken {
                devices
                    .entry(op.device)
                    .or_default()
                    .ops
                    .push((*op, pieces));
            }
        }
    }
    devices
}

impl Recorded {
    /// Returns the number of slots of each ring: the power of two from twice the maximum of live
    /// pieces (decision 0012).
    fn rings(&self) -> Vec<(DeviceRing, u32)> {
        let mut alive: HashMap<MappingId, (Direction, u32)> = HashMap::new();
        let mut counts: BTreeMap<u8, (Direction, u32, u32)> = BTreeMap::new();
        for (op, pieces) in &self.ops {
            match op.kind {
                OpKind::Map { id, direction, .. } => {
                    alive.insert(id, (direction, pieces.len() as u32));
                    let (_, now, most) = counts.entry(direction as u8).or_insert((direction, 0, 0));
                    *now += pieces.len() as u32;
                    *most = (*most).max(*now);
                }
                OpKind::Unmap { id } => {
                    let (direction, pieces) = alive.remove(&id).unwrap();
                    counts.get_mut(&(direction as u8)).unwrap().1 -= pieces;
                }
            }
        }
        let ring = |direction| DeviceRing {
            queue: 0,
            direction,
        };
        let rings = counts.values();
        rings
            .map(|(direction, _, most)| (ring(*direction), (2 * most).next_power_of_two()))
            .collect()
    }
}

type Attackers = AttackHook<((Replayer, Straddler), Racer)>;

/// Results of a device.
#[derive(Debug, Default, Clone, Copy)]
struct Came {
    uses: u64,
    attempts: u64,
    refused: u64,
}

struct Driven {
    world: rig::RingRig<Attackers>,
    pool: Pool,
    /// Rings with maps since their last doorbell.
    untold: Vec<DeviceRing>,
    /// Rings with pending unmaps, and the start of their burst.
    bursts: Vec<(DeviceRing, Nanos)>,
    came: Came,
}

type Handle = <rig::RingRig<Attackers> as Environment>::Handle;

impl Driven {
    fn new(rings: Vec<(DeviceRing, u32)>) -> Self {
        let setup = RingSetup {
            choice: SlotChoice::Tail,
            coherency: Coherency::NonCoherent,
        };
        let attackers = ((Replayer::new(Reuse::Page), Straddler), Racer::new());
        Self {
            world: rig::RingRig::rings(rings, setup, AttackHook(attackers)),
            pool: Pool::new(rig::buffers(rig::TABLES - (1 << 20)), SLOT).unwrap(),
            untold: Vec::new(),
            bursts: Vec::new(),
            came: Came::default(),
        }
    }

    fn doorbells(&mut self) {
        for ring in std::mem::take(&mut self.untold) {
            self.world.api().sync_map(ring);
        }
    }

    fn end_bursts(&mut self, over: impl Fn(DeviceRing, Nanos) -> bool) {
        let ended: Vec<DeviceRing> = self
            .bursts
            .extract_if(.., |(ring, since)| over(*ring, *since))
            .map(|(ring, _)| ring)
            .collect();
        for ring in ended {
            let pool = &mut self.pool;
            let back = |buffer| pool.free(buffer).unwrap();
            self.world.api().end_burst(ring, back).unwrap();
        }
    }

    /// Maps the pieces; skips pieces without a free slot.
    fn map(&mut self, ring: DeviceRing, pieces: &[PhysRange]) -> Vec<(Iova, usize, Handle)> {
        self.end_bursts(|of, _| of == ring);
        let mut held = Vec::new();
        for piece in pieces {
            let buffer = self.pool.alloc().expect("as many as any trace holds");
            let bytes = piece.bytes().min(SLOT);
            let memory = self.pool.range(&buffer, bytes).unwrap();
            match self.world.api().map(ring, buffer, memory) {
                Ok(mapped) => held.push((mapped.iova, bytes as usize, mapped.handle)),
                Err(refused) => {
                    assert_eq!(refused.failure, MapFailure::Busy);
                    self.pool.free(refused.buffer).unwrap();
                    self.came.refused += 1;
                }
            }
        }
        if !self.untold.contains(&ring) {
            self.untold.push(ring);
        }
        held
    }

    /// The device uses its buffers and must not be stopped; then they are unmapped.
    fn unmap(&mut self, ring: DeviceRing, now: Nanos, held: Vec<(Iova, usize, Handle)>) {
        for (iova, bytes, handle) in held {
            let mut piece = [0x5a; PIECE];
            let piece = &mut piece[..bytes.min(PIECE)];
            let mut bus = self.world.bus();
            let used = match ring.direction {
                Direction::ToDevice => bus.read(rig::NIC, iova, piece),
                _ => bus.write(rig::NIC, iova, piece),
            };
            used.expect("mapped, and the doorbell rang");
            self.came.uses += 1;
            if let Some(buffer) = self.world.api().unmap(ring, handle).unwrap() {
                self.pool.free(buffer).unwrap();
            }
        }
        if !self.bursts.iter().any(|(of, _)| *of == ring) {
            self.bursts.push((ring, now));
        }
    }

    fn drive(mut self, recorded: &Recorded) -> Came {
        let mut alive = HashMap::new();
        for (op, pieces) in &recorded.ops {
            if self.came.uses >= USES {
                break;
            }
            self.end_bursts(|_, since| op.time.0 >= since.0 + BURST.0);
            match op.kind {
                OpKind::Map { id, direction, .. } => {
                    let ring = DeviceRing {
                        queue: 0,
                        direction,
                    };
                    let held = self.map(ring, pieces);
                    alive.insert(id, (ring, held));
                }
                OpKind::Unmap { id } => {
                    self.doorbells();
                    let (ring, held) = alive.remove(&id).unwrap();
                    self.unmap(ring, op.time, held);
                }
            }
        }
        self.doorbells();
        for (ring, held) in alive.into_values() {
            self.unmap(ring, Nanos(0), held);
        }
        self.end_bursts(|_, _| true);
        assert_eq!(self.pool.in_use(), 0);
        let judge = &self.world.machine.judge;
        assert_eq!(
            (judge.violations, judge.colocated, judge.false_faults),
            (0, 0, 0)
        );
        assert_eq!((judge.live(), judge.overwritten), (0, 0));
        self.came.attempts = judge.accesses + judge.faults - self.came.uses;
        self.came
    }
}

fn every_device<R: Read>(name: &str, operations: Operations<R>) -> Came {
    let mut all = Came::default();
    for (device, recorded) in recorded(operations) {
        let came = Driven::new(recorded.rings()).drive(&recorded);
        println!("{name}, device {}: {came:?}", device.0);
        all.uses += came.uses;
        all.attempts += came.attempts;
        all.refused += came.refused;
    }
    all
}

#[test]
fn sample_on_non_coherent_memory() {
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    let came = every_device(
        "sample",
        Operations::new("sample", source, TraceOptions::default()),
    );
    assert!(came.uses > 1000 && came.attempts > came.uses, "{came:?}");
}

/// All traces of a directory: `RINGFENCE_TRACES=../shared/traces/raw cargo test -p ringfence-tests
/// --test across ring::non_coherent -- --include-ignored`.
#[test]
#[ignore = "needs recorded traces"]
fn recorded_traces_on_non_coherent_memory() {
    let directory = std::env::var_os("RINGFENCE_TRACES").expect("RINGFENCE_TRACES");
    // Cargo runs tests in the directory of their package; the variable is relative to the
    // repository.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let directory = std::path::Path::new(root).join(directory);
    let mut all = Came::default();
    let mut paths: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    paths.sort();
    for path in paths {
        let operations = Operations::open(&path, TraceOptions::default()).unwrap();
        let came = every_device(&path.display().to_string(), operations);
        all.uses += came.uses;
        all.attempts += came.attempts;
        all.refused += came.refused;
    }
    println!("all: {all:?}, nothing reached, nothing denied");
    assert!(all.attempts > 0);
}
