//! Network adapters: each end receives exactly what the other sent, and all mapped buffers are
//! returned.

use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_devices::nic::{
    DescriptorSegment, Environment, FRAME_HEADER_BYTES, Fill, MAX_BODY_BYTES, Nic, NicDevice,
    NicProfile, NicTestbed, QueueDir, Reception, Replace, Rings, SEGMENT_BYTES, SendOutcome,
    TestbedError, TxReclaim,
};
use ringfence_devices::ring::{COMPLETION_BYTES, RingAddresses, RingBase, RingSize};
use ringfence_devices::workload::{
    Apache, BURST, ClientAction, Memcached, NetperfStream, Packet, RequestResponse, Workload,
};
use ringfence_devices::{DmaError, Transfer};
use ringfence_dma::Mapping;
use ringfence_dma::ring::RingSetup;
use ringfence_pgtable::Coherency;
use ringfence_types::{Access, Direction, Iova, RequesterId};

use super::rig::{self, OracleChecked};

fn open<W: Environment<Handle = Mapping<B>>, B>(
    env: &mut W,
    profile: NicProfile,
    burst: u32,
    seed: u64,
) -> NicTestbed<Mapping<B>> {
    let bytes = Nic::<Mapping<B>>::buffer_bytes(&profile, burst);
    NicTestbed::open(env, rig::NIC, profile, rig::buffers(bytes), burst, seed).unwrap()
}

/// Runs a workload and closes the port. Returns the number of verified frames.
fn run<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(
    mut env: W,
    profile: NicProfile,
    burst: u32,
    mut workload: impl Workload,
    packets: u64,
) -> u64 {
    let mut testbed = open(&mut env, profile, burst, 1);
    testbed.run(&mut env, &mut workload, packets).unwrap();
    let stats = *testbed.stats();
    let driver = *testbed.driver_stats();
    assert!(stats.received + stats.sent >= packets);
    assert_eq!(driver.failed, 0);
    testbed.close(&mut env).unwrap();
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
    assert!(judge.accesses >= packets);
    assert!(judge.maps >= packets);
    stats.received + stats.sent
}

/// Every workload in every kind of mode: the mode must not change the traffic.
fn every_workload(profile: NicProfile) {
    type Make = fn() -> Box<dyn Workload>;
    // Stream wraps its receive rings. The rings of the others are large enough not to wrap in a
    // short run.
    let workloads: [(u64, Make); 5] = [
        (2_100, || Box::new(NetperfStream::default())),
        (200, || Box::new(RequestResponse::default())),
        (900, || Box::new(Apache::new(Apache::BIG, 32, 1))),
        (300, || Box::new(Apache::new(Apache::SMALL, 32, 1))),
        (300, || Box::new(Memcached::new(32, 1))),
    ];
    for (packets, workload) in workloads {
        // The table also holds the longest burst, so no map waits.
        let rings = rig::rings(&profile, 2, rig::TAIL);
        let counts = [
            run(rings, profile, BURST, workload(), packets),
            run(rig::strict(), profile, BURST, workload(), packets),
            run(rig::burst(256), profile, BURST, workload(), packets),
            run(rig::deferred(), profile, BURST, workload(), packets),
            run(rig::unprotected(), profile, BURST, workload(), packets),
        ];
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
    }
}

#[test]
fn every_workload_on_mlx() {
    every_workload(NicProfile::MLX);
}

#[test]
fn every_workload_on_brcm() {
    every_workload(NicProfile::BRCM);
}

#[test]
fn full_rings_hold_the_published_number_of_addresses() {
    // About 12K and 3K addresses. Idle, only receive buffers are mapped.
    for (profile, at_rest) in [(NicProfile::MLX, 8192), (NicProfile::BRCM, 2048)] {
        let mut env = rig::strict();
        let testbed = open(&mut env, profile, BURST, 1);
        assert_eq!(env.judge().live(), at_rest);
        assert_eq!(testbed.nic().buffers_in_use(), at_rest);
        testbed.close(&mut env).unwrap();
        assert_eq!(env.judge().live(), 0);
    }
}

#[test]
fn closed_port_frees_everything() {
    let mut env = rig::strict();
    let mut in_use = Vec::new();
    for _ in 0..3 {
        let mut testbed = open(&mut env, NicProfile::BRCM, BURST, 1);
        testbed
            .run(&mut env, &mut NetperfStream::default(), 500)
            .unwrap();
        testbed.close(&mut env).unwrap();
        in_use.push(env.frames_in_use());
    }
    // Table pages stay allocated after the first run; descriptors do not.
    assert_eq!(in_use[1..], [in_use[0]; 2]);
}

#[test]
fn a_transmit_interrupt_falls_into_receive_loops() {
    let mut env = rig::strict();
    let mut testbed = open(&mut env, NicProfile::MLX_MAPPED, BURST, 1);
    let mut stream = NetperfStream::default();
    testbed.run(&mut env, &mut stream, 6_000).unwrap();
    let stats = testbed.stats();
    // 4000 received frames are 20 loops. 2000 sent frames are 10 interrupts, each during a loop.
    assert!((8..=10).contains(&stats.interferences), "{stats:?}");
    testbed.close(&mut env).unwrap();
}

#[test]
fn one_invalidation_per_burst_and_direction() {
    let mut env = rig::burst(512);
    let mut testbed = open(&mut env, NicProfile::BRCM, 100, 1);
    let mut stream = NetperfStream::default();
    testbed.run(&mut env, &mut stream, 3_000).unwrap();
    let driver = testbed.driver_stats();
    // 2000 received frames and 1000 sent frames, in bursts of 100.
    assert!((28..=32).contains(&driver.bursts), "{driver:?}");
    assert!((2_800..=3_100).contains(&driver.unmaps), "{driver:?}");
    assert_eq!(env.troubles()[1].turns(), driver.bursts);
    testbed.close(&mut env).unwrap();
}

#[test]
fn a_ring_with_room_for_a_burst_never_waits() {
    for (times, coherency, waits) in [
        (2, Coherency::Coherent, false),
        (2, Coherency::NonCoherent, false),
        // N = L: the entries of a burst cannot be reused before its end.
        (1, Coherency::Coherent, true),
    ] {
        let setup = RingSetup {
            coherency,
            ..rig::TAIL
        };
        let mut env = rig::rings(&NicProfile::MLX, times, setup);
        let mut testbed = open(&mut env, NicProfile::MLX, BURST, 1);
        testbed
            .run(&mut env, &mut NetperfStream::default(), 4_000)
            .unwrap();
        let stalls = testbed.driver_stats().stalls;
        assert_eq!(stalls > 0, waits, "{stalls} stalls with N = {times} L");
        testbed.close(&mut env).unwrap();
        let judge = env.judge();
        assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
    }
}

#[test]
fn request_response_never_gathers() {
    let mut env = rig::strict();
    let mut testbed = open(&mut env, NicProfile::BRCM, BURST, 1);
    let mut workload = RequestResponse::default();
    testbed.run(&mut env, &mut workload, 200).unwrap();
    let (driver, device) = (*testbed.driver_stats(), *testbed.device_stats());
    assert_eq!(device.interrupts, driver.bursts);
    assert!(driver.unmaps.abs_diff(driver.bursts) <= 1, "{driver:?}");
    assert_eq!(testbed.stats().interferences, 0);
    testbed.close(&mut env).unwrap();
}

/// Packets in both directions from a list.
#[derive(Debug, Clone)]
struct Script {
    inbound: VecDeque<Packet>,
    outbound: VecDeque<Packet>,
    /// Number of received packets before each pause.
    pause: usize,
    since: usize,
    got: Vec<Packet>,
    answered: Vec<Packet>,
}

impl Workload for Script {
    fn clients(&self) -> u32 {
        CLIENTS
    }
    fn offer(&mut self) -> ClientAction {
        self.since += 1;
        if self.since.is_multiple_of(self.pause) {
            return ClientAction::Silence;
        }
        self.inbound
            .pop_front()
            .map_or(ClientAction::Waiting, ClientAction::Packet)
    }
    fn received(&mut self, packet: Packet) {
        self.got.push(packet);
    }
    fn send(&mut self) -> Option<Packet> {
        self.outbound.pop_front()
    }
    fn answered(&mut self, packet: Packet) {
        self.answered.push(packet);
    }
}

const CLIENTS: u32 = 5;

fn packets() -> impl Strategy<Value = Vec<Packet>> {
    // Acknowledgements, and frames around the threshold of inlining.
    let body = prop_oneof![0..=MAX_BODY_BYTES as u32, Just(0), 48_u32..54];
    let packet = (0..CLIENTS, body).prop_map(|(client, bytes)| Packet { client, bytes });
    prop::collection::vec(packet, 0..300)
}

fn by_client(packets: impl IntoIterator<Item = Packet>) -> Vec<Vec<u32>> {
    let mut flows = vec![Vec::new(); CLIENTS as usize];
    for packet in packets {
        flows[packet.client as usize].push(packet.bytes);
    }
    flows
}

fn small(buffers_per_packet: usize, rings: u16, size: u32) -> NicProfile {
    let rings = Rings {
        count: rings,
        size: RingSize::new(size).unwrap(),
    };
    NicProfile {
        name: "small",
        buffers_per_packet,
        receive: rings,
        transmit: rings,
        replace: Replace::AfterUnmap,
        fill: Fill::RingByRing,
        ..NicProfile::BRCM
    }
}

fn conserves<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(
    mut env: W,
    profile: NicProfile,
    burst: u32,
    mut script: Script,
) {
    let (inbound, outbound) = (script.inbound.clone(), script.outbound.clone());
    let mut testbed = open(&mut env, profile, burst, 3);
    let all = (inbound.len() + outbound.len()) as u64;
    match testbed.run(&mut env, &mut script, all) {
        Ok(()) => {}
        Err(error) => panic!("{error}"),
    }
    assert_eq!(by_client(script.got), by_client(inbound));
    assert_eq!(by_client(script.answered), by_client(outbound));
    testbed.close(&mut env).unwrap();
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_sent_is_received(
        inbound in packets(),
        outbound in packets(),
        per_packet in 1_usize..=2,
        rings in 1_u16..4,
        size in 1_u32..6,
        burst in 1_u32..40,
        pause in 2_usize..50,
        longest in 1_usize..64,
        replace in prop_oneof![Just(Replace::BeforeUnmap), Just(Replace::AfterUnmap)],
        fill in prop_oneof![Just(Fill::RingByRing), Just(Fill::InTurns)],
        inline_thold in prop_oneof![Just(0), 54_u32..=104, Just(u32::MAX)],
        tx_reclaim in prop_oneof![
            Just(TxReclaim::Interrupt),
            (0_u32..20, 0_u64..100)
                .prop_map(|(moder, timeout)| TxReclaim::Poll { moder, timeout }),
        ],
    ) {
        let profile = NicProfile {
            replace,
            fill,
            inline_thold,
            tx_reclaim,
            ..small(per_packet, rings, 1 << size)
        };
        let script = Script {
            inbound: inbound.into(),
            outbound: outbound.into(),
            pause,
            since: 0,
            got: Vec::new(),
            answered: Vec::new(),
        };
        conserves(rig::strict(), profile, burst, script.clone());
        conserves(rig::burst(longest), profile, burst, script.clone());
        conserves(rig::deferred(), profile, burst, script.clone());
        conserves(rig::unprotected(), profile, burst, script.clone());
        // N = L: maps wait for the end of a burst, with no other effect.
        conserves(rig::rings(&profile, 1, rig::TAIL), profile, burst, script);
    }
}

#[test]
fn stalled_workload_is_an_error() {
    struct Silent;
    impl Workload for Silent {
        fn clients(&self) -> u32 {
            1
        }
        fn offer(&mut self) -> ClientAction {
            ClientAction::Waiting
        }
        fn received(&mut self, _: Packet) {}
        fn send(&mut self) -> Option<Packet> {
            None
        }
        fn answered(&mut self, _: Packet) {}
    }
    let mut env = rig::strict();
    let mut testbed = open(&mut env, NicProfile::BRCM, 1, 1);
    assert_eq!(
        testbed.run(&mut env, &mut Silent, 1),
        Err(TestbedError::Stuck)
    );
    testbed.close(&mut env).unwrap();
}

/// Many clients in a closed loop: while the server sends one response, others request the next, so
/// it always has more to send.
#[test]
fn a_run_ends_though_the_server_always_has_more_to_send() {
    for file in [Apache::BIG, Apache::SMALL] {
        let mut env = rig::unprotected();
        let mut testbed = open(&mut env, NicProfile::MLX, BURST, 1);
        let mut apache = Apache::new(file, Apache::CLIENTS_EIOVAR, 1);
        let mut before = 0;
        for _ in 0..3 {
            testbed.run(&mut env, &mut apache, 3_000).unwrap();
            let stats = testbed.stats();
            let packets = stats.received + stats.sent;
            assert!((3_000..3_400).contains(&(packets - before)), "{packets}");
            before = packets;
        }
        testbed.close(&mut env).unwrap();
        assert_eq!(env.judge().live(), 0);
    }
}

/// Clients that never send.
#[test]
fn silence_for_good_is_an_error() {
    struct Removed;
    impl Workload for Removed {
        fn clients(&self) -> u32 {
            1
        }
        fn offer(&mut self) -> ClientAction {
            ClientAction::Silence
        }
        fn received(&mut self, _: Packet) {}
        fn send(&mut self) -> Option<Packet> {
            None
        }
        fn answered(&mut self, _: Packet) {}
    }
    let mut env = rig::unprotected();
    let mut testbed = open(&mut env, NicProfile::BRCM, BURST, 1);
    assert_eq!(
        testbed.run(&mut env, &mut Removed, 1),
        Err(TestbedError::Stuck)
    );
    testbed.close(&mut env).unwrap();
}

#[test]
fn a_descriptor_that_is_half_armed_is_given_back_too() {
    let profile = small(2, 1, 8);
    // One slot fewer than the ring has buffers: the last descriptor has mapped headers and waits
    // for its data buffer.
    let slots = profile.api_rings().map(|(ring, live)| (ring, live - 1));
    let mut env = rig::RingRig::rings(slots, rig::TAIL, ());
    let testbed = open(&mut env, profile, 4, 1);
    assert_eq!(env.judge().live(), 15);
    assert_eq!(testbed.driver_stats().stalls, 1);
    testbed.close(&mut env).unwrap();
    assert_eq!(env.judge().live(), 0);
}

#[test]
fn a_frame_that_finds_half_its_room_is_taken_back() {
    let profile = small(2, 1, 8);
    let slots = profile
        .api_rings()
        .map(|(ring, live)| match ring.direction {
            Direction::ToDevice => (ring, 1),
            _ => (ring, live),
        });
    let mut env = rig::RingRig::rings(slots, rig::TAIL, ());
    let memory = rig::buffers(Nic::<()>::buffer_bytes(&profile, 4));
    let mut nic = Nic::open(profile, memory, &mut env.api()).unwrap();
    let (live, out) = (env.judge().live(), nic.buffers_in_use());
    for _ in 0..3 {
        // The headers take the only slot; the data find none.
        assert_eq!(
            nic.send(&mut env.api(), 0, &[1; 600]),
            Ok(SendOutcome::Full)
        );
        assert_eq!((env.judge().live(), nic.buffers_in_use()), (live, out));
    }
    nic.close(&mut env.api()).unwrap();
    assert_eq!(env.judge().live(), 0);
}

/// A bus that returns one descriptor to every read, and records the accesses.
struct Recorder {
    descriptor: Vec<u8>,
    accesses: Vec<(Access, u64, usize)>,
}

impl Transfer for Recorder {
    fn read(&mut self, _: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        into.copy_from_slice(&self.descriptor);
        self.accesses.push((Access::Read, iova.get(), into.len()));
        Ok(())
    }

    fn write(&mut self, _: RequesterId, iova: Iova, from: &[u8]) -> Result<(), DmaError> {
        self.accesses.push((Access::Write, iova.get(), from.len()));
        Ok(())
    }
}

/// The order of rIOMMU, Fig. 5: the device reads the descriptor at the head, writes the frame to
/// the buffers that it names, and reports the frame last.
#[test]
fn a_frame_is_reported_after_its_bytes() {
    let base = |at, entry_bytes| RingBase {
        at: Iova::new(at),
        size: RingSize::new(4).unwrap(),
        entry_bytes,
    };
    let segment = |iova, bytes| DescriptorSegment {
        iova: Iova::new(iova),
        bytes,
    };
    let (headers, body) = (segment(0x5000, 128), segment(0x9000, 1500));
    let mut bus = Recorder {
        descriptor: [headers.encode(), body.encode()].concat(),
        accesses: Vec::new(),
    };
    let mut device = NicDevice::new(rig::NIC, &NicProfile::MLX, 1);
    device.program(
        QueueDir::Rx,
        0,
        &RingAddresses {
            descriptors: base(0x1000, 2 * SEGMENT_BYTES as u32),
            completions: base(0x2000, COMPLETION_BYTES),
        },
    );
    device.doorbell(QueueDir::Rx, 0, 2);
    let frame = [0; FRAME_HEADER_BYTES + 1000];
    for (descriptor, completion) in [(0x1000, 0x2000), (0x1020, 0x2010)] {
        let taken = device.receive(&mut bus, 0, &frame).unwrap();
        assert_eq!(taken, Reception::Taken);
        let expected = [
            (Access::Read, descriptor, 2 * SEGMENT_BYTES),
            (Access::Write, 0x5000, FRAME_HEADER_BYTES),
            (Access::Write, 0x9000, 1000),
            (Access::Write, completion, COMPLETION_BYTES as usize),
        ];
        assert_eq!(std::mem::take(&mut bus.accesses), expected);
    }
    let taken = device.receive(&mut bus, 0, &frame).unwrap();
    assert_eq!((taken, bus.accesses.len()), (Reception::NoDescriptor, 0));
}
