//! Effects of the as-published ring on devices and their peers: the buffers that a racer reaches
//! (erratum 8), the overwritten entry (erratum 7), the access past a buffer's end (erratum 6). The
//! fixed ring shows none of them.

use std::collections::BTreeSet;

use ringfence_devices::api::{AttackHook, DeviceRing, DmaApi};
use ringfence_devices::block::nvme::{NvmeController, NvmeQueue};
use ringfence_devices::block::{DiskRequest, Operation, PAGE_BYTES, RamDisk};
use ringfence_devices::nic::{
    DescriptorSegment, Environment, Fill, Nic, NicDevice, NicProfile, QueueDir, Replace, Rings,
    SendOutcome,
};
use ringfence_devices::ring::RingSize;
use ringfence_devices::{
    Attacker, Buffer, ByteMemory, DeviceMapping, DmaError, DmaPort, DmaRequest, DriverEvent, Pool,
    Racer, Replayer, Reuse, Seed, Transfer,
};
use ringfence_dma::Mapping;
use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{RingSetup, SlotChoice};
use ringfence_hw::Prefetch;
use ringfence_papers::BurstAsPublished;
use ringfence_pgtable::Coherency;
use ringfence_types::{Access, FaultReason};

use super::rig::{self, AsPublishedRig, OracleChecked, RingRig};

const SETUPS: [Coherency; 2] = [Coherency::Coherent, Coherency::NonCoherent];

fn setup(coherency: Coherency) -> RingSetup {
    RingSetup {
        choice: SlotChoice::Tail,
        coherency,
    }
}

fn as_published<W>(
    rings: impl IntoIterator<Item = (DeviceRing, u32)>,
    coherency: Coherency,
    hooks: W,
) -> AsPublishedRig<W> {
    let setup = setup(coherency);
    AsPublishedRig::of_rings(rings, setup, Prefetch::Immediate, BurstAsPublished, hooks)
}

fn fixed<W>(
    rings: impl IntoIterator<Item = (DeviceRing, u32)>,
    coherency: Coherency,
    hooks: W,
) -> RingRig<W> {
    let (setup, burst) = (setup(coherency), Burst::default());
    RingRig::of_rings(rings, setup, Prefetch::Immediate, burst, hooks)
}

/// One buffer per packet, and a transmit ring for a burst of 200.
fn profile() -> NicProfile {
    let rings = |size| Rings {
        count: 1,
        size: RingSize::new(size).unwrap(),
    };
    NicProfile {
        name: "burst",
        buffers_per_packet: 1,
        receive: rings(2),
        transmit: rings(256),
        replace: Replace::AfterUnmap,
        fill: Fill::RingByRing,
        ..NicProfile::BRCM
    }
}

fn api_rings() -> impl Iterator<Item = (DeviceRing, u32)> {
    profile().api_rings().map(|(ring, live)| (ring, live * 2))
}

const BURST: u64 = 200;

/// A late racer: it accesses each buffer just before its unmap, and again at the next event.
#[derive(Debug, Default)]
struct Late(Option<DeviceMapping>);

impl Attacker for Late {
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        let touch = |mapping: &DeviceMapping, port: &mut P| {
            let request = DmaRequest {
                device: mapping.device,
                iova: mapping.range.start(),
                bytes: 1,
                access: mapping.access(),
            };
            let _ = port.access(&request);
        };
        if let Some(dead) = self
            .0
            .take_if(|_| !matches!(event, DriverEvent::Unmapped(_)))
        {
            touch(&dead, port);
        }
        match event {
            DriverEvent::Unmapping(mapping) => touch(mapping, port),
            DriverEvent::Unmapped(mapping) => self.0 = Some(*mapping),
            _ => {}
        }
    }
}

/// An adapter sends 200 frames and its driver reclaims them as one burst. Returns the number of
/// buffers that were accessed after their return.
fn reached_of_200<W: OracleChecked + Environment<Handle = Mapping<Buffer>>>(mut env: W) -> usize {
    let profile = profile();
    let memory = rig::buffers(Nic::<W::Handle>::buffer_bytes(&profile, 300));
    let mut nic = Nic::open(profile, memory, &mut env.api()).unwrap();
    let mut device = NicDevice::new(rig::NIC, &profile, BURST as u32);
    for (dir, index, at) in nic.rings() {
        device.program(dir, index, &at);
    }
    for _ in 0..BURST {
        let sent = nic.send(&mut env.api(), 0, &[7; 600]);
        assert_eq!(sent, Ok(SendOutcome::Queued));
    }
    let tail = nic.sync_map(&mut env.api(), QueueDir::Tx, 0).unwrap();
    device.doorbell(QueueDir::Tx, 0, tail);
    let sent = device.transmit(&mut env.bus(), 0, |frame| assert_eq!(frame, [7; 600]));
    assert_eq!(sent, Ok(BURST as u32));
    assert_eq!(nic.reclaim(&mut env.api(), 0, u32::MAX), Ok(BURST as u32));
    // The next event.
    assert_eq!(
        nic.send(&mut env.api(), 0, &[7; 600]),
        Ok(SendOutcome::Queued)
    );
    let slots: BTreeSet<_> = env
        .judge()
        .reached
        .iter()
        .map(|at| at.get() / 2048)
        .collect();
    nic.close(&mut env.api()).unwrap();
    slots.len()
}

/// Erratum 8: "a device that re-touches entry i just before unmap(i) reaches 199 of 200 buffers". A
/// driver that ends the burst with its last unmap leaves one buffer unreachable. Here the burst
/// ends with a later call: a late attacker also misses one buffer, an immediate one reaches all.
#[test]
fn racer_reaches_the_burst_as_published_only() {
    let at_once = || AttackHook((Replayer::new(Reuse::Page), Racer::new()));
    let late = || AttackHook(Late::default());
    for coherency in SETUPS {
        assert_eq!(
            reached_of_200(as_published(api_rings(), coherency, late())),
            199
        );
        assert_eq!(
            reached_of_200(as_published(api_rings(), coherency, at_once())),
            200
        );
        assert_eq!(reached_of_200(fixed(api_rings(), coherency, late())), 0);
        assert_eq!(reached_of_200(fixed(api_rings(), coherency, at_once())), 0);
    }
    // Without a racer, the prefetched entry is the only stale one in the ring's cache.
    let replayer = AttackHook(Replayer::new(Reuse::Page));
    let reached = reached_of_200(as_published(api_rings(), Coherency::Coherent, replayer));
    assert!(reached <= 2, "{reached}");
}

/// Results of reads from a disk that completes them in any order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reads {
    right: u64,
    /// The disk reported success, but the bytes are wrong.
    wrong: u64,
    /// The IOMMU blocked the disk.
    failed: u64,
}

fn reads<W: OracleChecked>(env: &mut W, seed: u64) -> Reads {
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(4096);
    for page in 0..512 {
        let bytes = disk.at(page * 8, PAGE_BYTES).unwrap();
        bytes.fill(1 + (page % 251) as u8);
    }
    let size = RingSize::new(16).unwrap();
    let mut queue = NvmeQueue::open(&mut env.api(), 0, size).unwrap();
    let mut controller = NvmeController::new(rig::NIC, queue.addresses(), seed);
    let mut dice = Seed::new(seed);
    let mut reads = Reads::default();
    let mut asked = [0; 16];
    let mut executed = 0;
    for page in (0..2_000).map(|number| number % 512) {
        let io = DiskRequest {
            operation: Operation::Read,
            block: page * 8,
            bytes: PAGE_BYTES as u32,
            buffers: vec![pool.alloc().unwrap()],
        };
        match queue.submit(&mut env.api(), io) {
            Ok(tag) => asked[usize::from(tag)] = page,
            Err(rejected) => rejected
                .buffers
                .into_iter()
                .for_each(|b| pool.free(b).unwrap()),
        }
        let tail = queue.sync_map(&mut env.api());
        controller.submission_doorbell(tail);
        // All completions so far are handled, so the controller has exactly the room that the
        // doorbell tells it. It executes a few of the fetched commands; the others stay mapped
        // while new ones arrive.
        let extra = dice.below(3) as u32;
        controller.completion_doorbell(size.index(executed + 1 + extra));
        executed += controller.run(&mut env.bus(), &mut disk).unwrap();
        let mut all = Vec::new();
        queue
            .complete(&mut env.api(), u32::MAX, |done| all.push(done))
            .unwrap();
        for done in all {
            let expected = 1 + (asked[usize::from(done.tag)] % 251) as u8;
            for buffer in done.buffers {
                let mut found = vec![0; PAGE_BYTES as usize];
                env.api().memory().read(buffer.start(), &mut found).unwrap();
                match (done.succeeded, found.iter().all(|byte| *byte == expected)) {
                    (true, true) => reads.right += 1,
                    (true, false) => reads.wrong += 1,
                    (false, _) => reads.failed += 1,
                }
                // Clear the page, so that the next read of it is checked.
                env.api()
                    .memory()
                    .write(buffer.start(), &[0; 4096])
                    .unwrap();
                pool.free(buffer).unwrap();
            }
        }
    }
    queue
        .close(&mut env.api(), |buffer| pool.free(buffer).unwrap())
        .unwrap();
    assert_eq!(pool.in_use(), 0);
    reads
}

/// Erratum 7: after unmaps out of order, the published map overwrites live entries, and a disk's
/// data go to another request's page. The fixed ring makes the driver wait.
#[test]
fn tail_as_published_exposes_pages_of_other_buffers() {
    // As many slots as commands: the count never overflows.
    let rings = || super::disks::rings_of(0, 16);
    for coherency in SETUPS {
        for seed in 1..=3 {
            let mut env = as_published(rings(), coherency, ());
            env.judge().blind = true;
            let found = reads(&mut env, seed);
            let overwritten = env.judge().overwritten;
            assert!(overwritten > 20, "seed {seed}: {overwritten}, {found:?}");
            println!("seed {seed}: {overwritten} entries overwritten, {found:?}");
            assert!(
                found.wrong > 0 && found.failed > 0,
                "seed {seed}: {found:?}"
            );
            for choice in [SlotChoice::Tail, SlotChoice::NextFree] {
                let setup = RingSetup { choice, coherency };
                let mut env = RingRig::rings(rings(), setup, ());
                let found = reads(&mut env, seed);
                assert!(found.right > 50, "seed {seed}: {found:?}");
                assert_eq!((found.wrong, found.failed), (0, 0), "seed {seed}");
                let judge = env.judge();
                assert_eq!(
                    (judge.overwritten, judge.violations, judge.faults),
                    (0, 0, 0)
                );
            }
        }
    }
}

/// Erratum 6: the unit checks only the start of an access. A device with a buffer of 60 bytes
/// writes past its end.
#[test]
fn logic_as_published_lets_writes_run_past_the_buffer() {
    fn outcome<W: OracleChecked + Environment<Handle = Mapping<Buffer>>>(
        mut env: W,
    ) -> (Result<(), DmaError>, Vec<u8>, u64) {
        let profile = profile();
        let memory = rig::buffers(Nic::<W::Handle>::buffer_bytes(&profile, 4));
        let mut nic = Nic::open(profile, memory, &mut env.api()).unwrap();
        nic.sync_map(&mut env.api(), QueueDir::Rx, 0).unwrap();
        // The first descriptor, as the device reads it.
        let (_, _, at) = nic
            .rings()
            .find(|(dir, _, _)| *dir == QueueDir::Rx)
            .unwrap();
        let mut raw = [0; 16];
        env.bus()
            .read(rig::NIC, at.descriptors.entry(0), &mut raw)
            .unwrap();
        let reported = DescriptorSegment::decode(&raw);
        let last = reported.iova.wrapping_add(u64::from(reported.bytes) - 1);
        let written = env.bus().write(rig::NIC, last, &[0xee; 600]);
        // Its buffer is the first one, of half a page. The second descriptor's buffer follows.
        let mut next = vec![0; 8];
        let behind = memory.start().wrapping_add(2048);
        env.api().memory().read(behind, &mut next).unwrap();
        nic.close(&mut env.api()).unwrap();
        (written, next, env.judge().violations)
    }
    for coherency in SETUPS {
        let (written, next, violations) = outcome(as_published(api_rings(), coherency, ()));
        assert_eq!((written, next, violations), (Ok(()), vec![0xee; 8], 1));
        let (written, next, violations) = outcome(fixed(api_rings(), coherency, ()));
        let Err(DmaError::Fault(fault)) = written else {
            panic!("{written:?}");
        };
        assert_eq!(fault.reason, FaultReason::BeyondBuffer);
        assert_eq!((fault.access, fault.device), (Access::Write, rig::NIC));
        assert_eq!((next, violations), (vec![0; 8], 0));
    }
}
