//! Compares workloads with decision 0011, without a machine: frames arrive at the moment when they
//! are sent.

use ringfence_devices::nic::{BufferChoice, Environment, Premapped};
use ringfence_devices::workload::{
    Apache, ClientAction, Memcached, NetperfStream, Packet, RequestResponse, Workload,
};
use ringfence_devices::{Pool, Seed};

use super::rig;

/// Returns the traffic: `(from the clients, packet)`.
fn exchange(workload: &mut impl Workload, packets: usize) -> Vec<(bool, Packet)> {
    let mut wire = Vec::new();
    while wire.len() < packets {
        match workload.offer() {
            ClientAction::Packet(packet) => {
                wire.push((true, packet));
                workload.received(packet);
            }
            ClientAction::Silence | ClientAction::Pause => {}
            ClientAction::Waiting => {
                let before = wire.len();
                answer(workload, &mut wire, usize::MAX);
                assert!(wire.len() > before, "nobody goes on");
            }
        }
    }
    wire
}

fn answer(workload: &mut impl Workload, wire: &mut Vec<(bool, Packet)>, at_most: usize) {
    for _ in 0..at_most {
        let Some(packet) = workload.send() else {
            return;
        };
        wire.push((false, packet));
        workload.answered(packet);
    }
}

fn bytes(wire: &[(bool, Packet)], inbound: bool) -> Vec<u32> {
    wire.iter()
        .filter(|(from, _)| *from == inbound)
        .map(|(_, packet)| packet.bytes)
        .collect()
}

#[test]
fn stream_fills_packets_and_every_second_is_acknowledged() {
    let mut wire = Vec::new();
    // A message of no byte would be an acknowledgement: it has one byte.
    let cases = [
        (NetperfStream::MESSAGE, 1460),
        (1460, 1460),
        (64, 64),
        (0, 1),
    ];
    for (message, packet) in cases {
        let mut stream = NetperfStream::new(message, 1);
        wire.clear();
        for _ in 0..100 {
            match stream.offer() {
                ClientAction::Packet(packet) => {
                    wire.push((true, packet));
                    stream.received(packet);
                }
                other => panic!("{other:?}"),
            }
            answer(&mut stream, &mut wire, usize::MAX);
        }
        assert_eq!(bytes(&wire, true), [packet; 100]);
        assert_eq!(bytes(&wire, false), [0; 50]);
    }
    assert_eq!(NetperfStream::new(1, 0).offer(), ClientAction::Waiting);
}

#[test]
fn request_response_is_one_byte_each_way_and_silence() {
    let mut workload = RequestResponse::default();
    for _ in 0..3 {
        assert!(matches!(
            workload.offer(),
            ClientAction::Packet(Packet { bytes: 1, .. })
        ));
        assert_eq!(workload.offer(), ClientAction::Waiting);
        assert_eq!(workload.send(), None);
        workload.received(Packet {
            client: 0,
            bytes: 1,
        });
        let answer = workload.send().unwrap();
        assert_eq!((answer.bytes, workload.send()), (1, None));
        workload.answered(answer);
        assert_eq!(workload.offer(), ClientAction::Silence);
    }
}

#[test]
fn apache_sends_whole_files_in_turns() {
    let mut big = Apache::new(Apache::BIG, 2, 1);
    // 719 packets of 1460 bytes hold 1 MiB. Two clients each acknowledge every second packet.
    let wire = exchange(&mut big, 2 + 2 * 719 + 700);
    assert_eq!(bytes(&wire[..2], true), [64, 64]);
    let first = wire.iter().position(|(from, _)| !from).unwrap();
    let clients: Vec<_> = wire[first..first + 88]
        .iter()
        .map(|(_, p)| p.client)
        .collect();
    assert!(clients[..44].iter().all(|client| *client == clients[0]));
    assert!(clients[44..].iter().all(|client| *client != clients[0]));
    let mut left = [Apache::BIG; 2];
    for (from, packet) in &wire[..first + 2 * 719] {
        if !from {
            left[packet.client as usize] -= u64::from(packet.bytes);
        }
    }
    assert_eq!(left, [0; 2]);
    let acknowledged = wire
        .iter()
        .filter(|(from, packet)| *from && packet.bytes == 0);
    assert!(acknowledged.count() >= 690);

    let small = exchange(&mut Apache::new(Apache::SMALL, 32, 1), 1_000);
    let answers = bytes(&small, false);
    assert!(answers.iter().all(|bytes| *bytes == 1024));
    let requests = bytes(&small, true);
    let count = requests.iter().filter(|bytes| **bytes == 64).count();
    assert!(count.abs_diff(answers.len()) <= 32);
}

#[test]
fn memcached_gets_nine_of_ten() {
    let wire = exchange(&mut Memcached::new(32, 1), 40_000);
    let requests = bytes(&wire, true);
    let gets = requests.iter().filter(|bytes| **bytes == 64).count();
    let sets = requests.iter().filter(|bytes| **bytes == 1088).count();
    assert_eq!(gets + sets, requests.len());
    let share = gets as f64 / requests.len() as f64;
    assert!((0.88..0.92).contains(&share), "{share}");
    let answers = bytes(&wire, false);
    let values = answers.iter().filter(|bytes| **bytes == 1024).count();
    assert!(answers.iter().all(|bytes| *bytes == 1024 || *bytes == 8));
    assert!(values.abs_diff(gets) <= 32);
}

#[test]
fn a_client_asks_again_only_after_its_answer() {
    fn at_most_one(workload: &mut impl Workload, clients: u32) {
        let mut asked = vec![0_i32; clients as usize];
        for (from, packet) in exchange(workload, 3_000) {
            let asked = &mut asked[packet.client as usize];
            *asked += if from { 1 } else { -1 };
            assert!((0..=1).contains(asked));
        }
    }
    at_most_one(&mut Memcached::new(16, 7), 16);
    // A response of one packet is acknowledged only after the second one.
    let wire = exchange(&mut Apache::new(Apache::SMALL, 100, 7), 3_000);
    let order: Vec<_> = wire
        .iter()
        .filter(|(from, packet)| *from && packet.bytes > 0)
        .map(|(_, packet)| packet.client)
        .collect();
    assert_ne!(order[..100], order[100..200], "the order is drawn anew");
}

#[test]
fn the_same_seed_is_the_same_traffic() {
    let run = |seed| exchange(&mut Memcached::new(32, seed), 2_000);
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn random_buffers_miss_the_iotlb_and_one_buffer_does_not() {
    let mut misses = Vec::new();
    for choice in [BufferChoice::Random(Seed::new(1)), BufferChoice::Same] {
        let mut choice = choice;
        let mut env = rig::strict();
        let memory = rig::buffers(1024 * 4096);
        let mut pool = Premapped::open(&mut env.api(), memory, 4096, 64).unwrap();
        assert_eq!(pool.buffers(), 1024);
        let before = env.machine.unit().stats().iotlb_misses;
        for _ in 0..1_000 {
            pool.send(&mut env.bus(), rig::NIC, &mut choice).unwrap();
        }
        misses.push(env.machine.unit().stats().iotlb_misses - before);
        pool.close(&mut env.api()).unwrap();
        let judge = &env.machine.judge;
        assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
    }
    // The IOTLB has 64 entries for 1024 pages.
    assert!(misses[0] > 900, "{misses:?}");
    assert_eq!(misses[1], 1);
    assert!(Pool::new(rig::buffers(4096), 0).is_err());
}

/// Netperf 2.4.5: a request and a response before data, the results after them.
#[test]
fn control_messages_frame_a_run_of_netperf() {
    /// Returns `(from the clients, client, bytes)` of the control messages up to the first data
    /// packet, with `None` for a pause.
    fn begin(workload: &mut impl Workload, connections: u32) -> Vec<Option<(bool, u32, u32)>> {
        let mut seen = Vec::new();
        workload.begin_run();
        loop {
            match workload.offer() {
                ClientAction::Packet(packet) => {
                    if packet.client < connections {
                        return seen;
                    }
                    seen.push(Some((true, packet.client, packet.bytes)));
                    workload.received(packet);
                }
                ClientAction::Pause => seen.push(None),
                ClientAction::Waiting => {
                    let packet = workload.send().expect("nobody goes on");
                    seen.push(Some((false, packet.client, packet.bytes)));
                    workload.answered(packet);
                }
                ClientAction::Silence => panic!("nobody waits"),
            }
        }
    }
    for connections in [1, 3] {
        let mut stream = NetperfStream::new(NetperfStream::MESSAGE, connections);
        assert_eq!(stream.clients(), 2 * connections);
        // One control connection after the other.
        let first: Vec<_> = (connections..2 * connections)
            .flat_map(|client| [Some((true, client, 256)), Some((false, client, 256))])
            .collect();
        let results = (connections..2 * connections).map(|client| Some((false, client, 256)));
        let next: Vec<_> = results.chain([None]).chain(first.clone()).collect();
        assert_eq!(begin(&mut stream, connections), first);
        for _ in 0..3 {
            assert_eq!(begin(&mut stream, connections), next);
        }
    }
    let mut boxed: Box<dyn Workload> = Box::new(RequestResponse::default());
    let first = [Some((true, 1, 256)), Some((false, 1, 256))];
    assert_eq!(begin(&mut boxed, 1), first);
    // A run without connections has no messages.
    let mut none = NetperfStream::new(1, 0);
    none.begin_run();
    assert_eq!((none.offer(), none.send()), (ClientAction::Waiting, None));
}
