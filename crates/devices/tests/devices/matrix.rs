//! The guarantee of the fixed ring modes: every mode under every attacker on every workload. No
//! access reaches a byte outside a live buffer, and no access inside one is blocked. All data
//! arrive, and the attackers tried both directions.

use ringfence_devices::api::AttackHook;
use ringfence_devices::block::{Operation, PseudoScsi};
use ringfence_devices::nic::{Nic, NicProfile, NicTestbed};
use ringfence_devices::workload::{
    Apache, BURST, Memcached, NetperfStream, RequestResponse, Workload,
};
use ringfence_devices::{
    Attacker, DmaPort, DmaRequest, DriverEvent, Neighbour, Passive, Racer, Replayer, Reuse,
    Straddler,
};
use ringfence_dma::Mapping;
use ringfence_dma::ring::{RingSetup, SlotChoice};
use ringfence_pgtable::Coherency;
use ringfence_types::Access;

use super::disks;
use super::rig::{self, RingRig};

const MODES: [(&str, SlotChoice, Coherency); 3] = [
    ("riommu", SlotChoice::Tail, Coherency::Coherent),
    ("riommu-", SlotChoice::Tail, Coherency::NonCoherent),
    ("riommu-ooo", SlotChoice::NextFree, Coherency::Coherent),
];

/// Attackers. A ring's cache holds only the last access, so the order of a replayer and a racer
/// matters; the tests try both.
#[derive(Debug, Clone)]
enum Who {
    Passive(Passive),
    Replayer((Replayer, (Neighbour, Straddler))),
    RacerLast((Replayer, Racer)),
    RacerFirst((Racer, Replayer)),
}

impl Who {
    fn all() -> [Self; 4] {
        let replayer = || Replayer::new(Reuse::Page);
        [
            Self::Passive(Passive),
            Self::Replayer((replayer(), (Neighbour, Straddler))),
            Self::RacerLast((replayer(), Racer::new())),
            Self::RacerFirst((Racer::new(), replayer())),
        ]
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Passive(_) => "passive",
            Self::Replayer(_) => "replayer",
            Self::RacerLast(_) => "racer",
            Self::RacerFirst(_) => "racer first",
        }
    }
}

/// An attacker, with the number of its reads and writes.
#[derive(Debug, Clone)]
pub(crate) struct Counted {
    who: Who,
    tried: [u64; 2],
}

impl Attacker for Counted {
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        let tried = &mut self.tried;
        let mut port = |request: &DmaRequest| {
            tried[usize::from(request.access == Access::Write)] += 1;
            port.access(request)
        };
        match &mut self.who {
            Who::Passive(attacker) => attacker.on(event, &mut port),
            Who::Replayer(attacker) => attacker.on(event, &mut port),
            Who::RacerLast(attacker) => attacker.on(event, &mut port),
            Who::RacerFirst(attacker) => attacker.on(event, &mut port),
        }
    }
}

type World = RingRig<AttackHook<Counted>>;

/// A cell of the matrix: a workload and its rings.
struct Cell {
    name: String,
    rings: Vec<(ringfence_devices::api::DeviceRing, u32)>,
    run: Box<dyn Fn(&mut World)>,
    /// True for each direction of data, as reads and writes of the device.
    ways: [bool; 2],
}

fn network(profile: NicProfile, name: &str, packets: u64, make: fn() -> Box<dyn Workload>) -> Cell {
    let run = move |env: &mut World| {
        let bytes = Nic::<Mapping<ringfence_devices::Buffer>>::buffer_bytes(&profile, BURST);
        let memory = rig::buffers(bytes);
        let mut testbed = NicTestbed::open(env, rig::NIC, profile, memory, BURST, 1).unwrap();
        let mut workload = make();
        // On mlx, only the control messages of stream and request-response are mapped for sending.
        workload.begin_run();
        testbed.run(env, &mut workload, packets).unwrap();
        let (stats, driver) = (*testbed.stats(), *testbed.driver_stats());
        assert!(stats.received + stats.sent >= packets && driver.failed == 0);
        testbed.close(env).unwrap();
    };
    Cell {
        name: format!("{} {name}", profile.name),
        // N >= L + the longest burst.
        rings: profile
            .api_rings()
            .map(|(ring, live)| (ring, live * 2))
            .collect(),
        run: Box::new(run),
        ways: [true; 2],
    }
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for profile in [NicProfile::MLX, NicProfile::BRCM] {
        cells.push(network(profile, "stream", 1_500, || {
            Box::new(NetperfStream::default())
        }));
        cells.push(network(profile, "request-response", 60, || {
            Box::new(RequestResponse::default())
        }));
        cells.push(network(profile, "Apache 1 MB", 1_000, || {
            Box::new(Apache::new(Apache::BIG, 2, 1))
        }));
        cells.push(network(profile, "Apache 1 KB", 200, || {
            Box::new(Apache::new(Apache::SMALL, 32, 1))
        }));
        cells.push(network(profile, "Memcached", 200, || {
            Box::new(Memcached::new(32, 1))
        }));
    }
    for operation in [Operation::Read, Operation::Write] {
        let ways = [operation == Operation::Write, operation == Operation::Read];
        cells.push(Cell {
            name: format!("NVMe {operation:?}"),
            rings: disks::rings_of(disks::QUEUE, 64),
            run: Box::new(move |env| disks::nvme_under_attack(env, operation)),
            ways,
        });
        cells.push(Cell {
            name: format!("pseudo SCSI {operation:?}"),
            rings: disks::rings_of(0, 2),
            run: Box::new(move |env| {
                let memory = rig::buffers(16 * 4096);
                let bytes = PseudoScsi::REQUEST;
                let mut scsi = PseudoScsi::new(memory, bytes, operation).unwrap();
                for _ in 0..300 {
                    scsi.request(&mut ringfence_devices::nic::Environment::api(env))
                        .unwrap();
                }
                assert_eq!(scsi.lost(), 0);
            }),
            ways,
        });
    }
    cells
}

/// Runs all attackers on all workloads in one mode. Returns the numbers of runs and attempts.
fn every_workload_under_every_attacker((mode, choice, coherency): (&str, SlotChoice, Coherency)) {
    let (mut runs, mut all) = (0, 0);
    for cell in cells() {
        for who in Who::all() {
            let name = format!("{mode}, {}, {}", cell.name, who.name());
            let counted = Counted { who, tried: [0; 2] };
            let setup = RingSetup { choice, coherency };
            let mut env = RingRig::rings(cell.rings.iter().copied(), setup, AttackHook(counted));
            (cell.run)(&mut env);
            let tried = env.hooks.0.0.tried;
            let judge = &env.machine.judge;
            println!(
                "{name}: {tried:?} attempts to read and write, {} stopped",
                judge.faults
            );
            let outcome = (judge.violations, judge.colocated, judge.false_faults);
            assert_eq!(
                outcome,
                (0, 0, 0),
                "{name}: violations, colocated, false faults"
            );
            assert_eq!((judge.live(), judge.overwritten), (0, 0), "{name}");
            for way in 0..2 {
                assert_eq!(tried[way] > 0, cell.ways[way], "{name}: {tried:?}");
            }
            runs += 1;
            all += tried[0] + tried[1];
        }
    }
    println!("{mode}: {runs} runs, {all} attempts, nothing reached, nothing denied");
    assert_eq!(runs, 14 * 4);
}

#[test]
fn riommu_on_every_workload_under_every_attacker() {
    every_workload_under_every_attacker(MODES[0]);
}

#[test]
fn non_coherent_riommu_on_all_workloads_under_all_attackers() {
    every_workload_under_every_attacker(MODES[1]);
}

#[test]
fn riommu_ooo_on_every_workload_under_every_attacker() {
    every_workload_under_every_attacker(MODES[2]);
}
