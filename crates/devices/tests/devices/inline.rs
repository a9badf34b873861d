//! Frames that the driver copies into their descriptors: nothing is mapped, whatever the device
//! claims.

use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_devices::Transfer;
use ringfence_devices::nic::{
    DescriptorSegment, Environment, Nic, NicCompletion, NicDevice, NicError, NicProfile,
    NicTestbed, QueueDir, Rings, SendOutcome, TxReclaim,
};
use ringfence_devices::ring::{CompletionFault, RingSize};
use ringfence_devices::workload::{NetperfStream, RequestResponse, Workload};
use ringfence_dma::Mapping;

use super::rig::{self, OracleChecked};
use super::small_nic::{SIZE, open, profile};

/// Sends a frame, lets the device transmit it, and reclaims it. Returns the numbers of maps, of
/// unmaps, of ended bursts, and of the device's accesses to buffers.
fn cost_of_a_frame<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(
    mut env: W,
    profile: NicProfile,
    bytes: usize,
) -> [u64; 4] {
    let mut nic = open(&mut env, profile);
    let mut device = NicDevice::new(rig::NIC, &profile, 1);
    for (dir, index, at) in nic.rings() {
        device.program(dir, index, &at);
    }
    // The second lap overwrites descriptors of longer frames.
    let mut before = [0; 4];
    let mut cost = [0; 4];
    for round in 0..=SIZE as u8 {
        let last = round == SIZE as u8;
        let bytes = if last { bytes } else { 700 };
        let frame: Vec<u8> = (0..bytes).map(|at| at as u8 ^ round).collect();
        assert_eq!(nic.send(&mut env.api(), 0, &frame), Ok(SendOutcome::Queued));
        let tail = nic.sync_map(&mut env.api(), QueueDir::Tx, 0).unwrap();
        device.doorbell(QueueDir::Tx, 0, tail);
        let mut wire = Vec::new();
        let sent = device.transmit(&mut env.bus(), 0, |frame| wire.push(frame.to_vec()));
        assert_eq!((sent, wire), (Ok(1), vec![frame]));
        assert_eq!(nic.reclaim(&mut env.api(), 0, 10), Ok(1));
        let (stats, accesses) = (*nic.stats(), env.judge().accesses);
        let now = [stats.maps, stats.unmaps, stats.bursts, accesses];
        cost = core::array::from_fn(|index| now[index] - before[index]);
        before = now;
    }
    nic.close(&mut env.api()).unwrap();
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
    cost
}

#[test]
fn a_frame_within_the_threshold_needs_no_mapping() {
    for (per_packet, thold, bytes, buffers) in [
        (2, 104, 54, 0),
        (2, 104, 104, 0),
        (2, 104, 105, 2),
        (1, 104, 104, 0),
        (1, 60, 60, 0),
        (1, 60, 61, 1),
        (1, 0, 54, 1),
        (2, 0, 54, 1),
        (2, 1, 54, 1),
        // The threshold is at most 104, as in Linux.
        (2, u32::MAX, 104, 0),
        (2, u32::MAX, 105, 2),
    ] {
        let profile = profile(per_packet, thold);
        let bursts = u64::from(buffers > 0);
        let wanted = [buffers, buffers, bursts, buffers];
        let case = format!("{bytes} bytes, threshold {thold}");
        assert_eq!(
            cost_of_a_frame(rig::strict(), profile, bytes),
            wanted,
            "{case}"
        );
        assert_eq!(
            cost_of_a_frame(rig::burst(64), profile, bytes),
            wanted,
            "{case}"
        );
        let rings = rig::rings(&profile, 2, rig::TAIL);
        assert_eq!(cost_of_a_frame(rings, profile, bytes), wanted, "{case}");
    }
}

/// An action of the driver or of its hostile device.
#[derive(Debug, Clone)]
enum Act {
    /// The driver sends a frame of this length.
    Send(u32),
    /// The driver reclaims at most this many frames.
    Reclaim(u32),
    /// The device completes the next descriptor and reports this many bytes at most.
    Complete(u32),
    /// The device writes any completion: the distance from the next descriptor, bytes, bytes in
    /// the first buffer, and status.
    Lie(u32, u32, u32, u16),
    /// The device changes a descriptor to an inlined frame, or to a buffer.
    Rewrite(u32, bool),
}

fn act() -> impl Strategy<Value = Act> {
    let length = || prop_oneof![0_u32..=110, 0_u32..=1600, any::<u32>()];
    let distance = prop_oneof![9 => Just(0_u32), 1 => any::<u32>()];
    let status = prop_oneof![9 => 0_u16..3, 1 => 3_u16..9];
    prop_oneof![
        3 => prop_oneof![1_u32..=110, 1_u32..=1514].prop_map(Act::Send),
        2 => (1_u32..5).prop_map(Act::Reclaim),
        3 => prop_oneof![Just(u32::MAX), 0_u32..110, 0_u32..1514].prop_map(Act::Complete),
        1 => (distance, length(), length(), status)
            .prop_map(|(ahead, a, b, status)| Act::Lie(ahead, a.max(b), a.min(b), status)),
        1 => (0..SIZE, any::<bool>()).prop_map(|(at, inline)| Act::Rewrite(at, inline)),
    ]
}

/// The driver's record by the rules: lengths of the parts, and whether they are mapped.
#[derive(Debug, Clone, Copy)]
struct Sent {
    parts: [u32; 2],
    mapped: bool,
}

impl Sent {
    fn of(bytes: u32, profile: &NicProfile) -> Self {
        let inline = bytes <= profile.inline_thold;
        let first = match profile.buffers_per_packet {
            2 if !inline => bytes.min(54),
            _ => bytes,
        };
        Self {
            parts: [first, bytes - first],
            mapped: !inline,
        }
    }

    fn buffers(&self) -> u64 {
        let parts = self.parts.iter().filter(|bytes| **bytes > 0).count() as u64;
        parts * u64::from(self.mapped)
    }
}

/// Runs a script against the driver and against a model of its records.
fn follows_its_records<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(
    mut env: W,
    profile: NicProfile,
    acts: &[Act],
) {
    let mut nic = open(&mut env, profile);
    let (_, _, at) = nic.rings().find(|(dir, ..)| *dir == QueueDir::Tx).unwrap();
    let (at_rest, opened) = (env.judge().live() as u64, *nic.stats());
    let mut outstanding: VecDeque<Sent> = VecDeque::new();
    let mut claims: VecDeque<NicCompletion> = VecDeque::new();
    let (mut head, mut written) = (0_u32, 0_u32);
    let [mut maps, mut unmaps, mut bursts, mut inlined] = [0_u64; 4];
    let mut stopped = false;
    for act in acts {
        match *act {
            Act::Send(bytes) => {
                let frame = vec![3; bytes as usize];
                let sent = nic.send(&mut env.api(), 0, &frame);
                if outstanding.len() == SIZE as usize {
                    assert_eq!(sent, Ok(SendOutcome::Full));
                    continue;
                }
                assert_eq!(sent, Ok(SendOutcome::Queued));
                let record = Sent::of(bytes, &profile);
                maps += record.buffers();
                inlined += u64::from(!record.mapped);
                outstanding.push_back(record);
            }
            Act::Complete(_) | Act::Lie(..) => {
                if claims.len() == SIZE as usize {
                    continue;
                }
                let (ahead, bytes, first, status) = match *act {
                    Act::Lie(ahead, bytes, first, status) => (ahead, bytes, first, status),
                    Act::Complete(most) => {
                        // The device completes no more than it was given.
                        let Some(record) = outstanding.get(claims.len()) else {
                            continue;
                        };
                        let first = record.parts[0].min(most);
                        let second = record.parts[1].min(most - first);
                        (0, first + second, first, 0)
                    }
                    _ => unreachable!(),
                };
                let claim = NicCompletion {
                    bytes,
                    first,
                    descriptor: written.wrapping_add(ahead),
                    status,
                };
                let mut raw = claim.encode();
                raw[14] |= u8::from((written / SIZE).is_multiple_of(2));
                let entry = at.completions.entry(written);
                env.bus().write(rig::NIC, entry, &raw).unwrap();
                written += 1;
                claims.push_back(claim);
            }
            Act::Rewrite(index, inline) => {
                let segment = match inline {
                    true => DescriptorSegment::inline(104),
                    false => DescriptorSegment {
                        bytes: 1460,
                        ..DescriptorSegment::NONE
                    },
                };
                let entry = at.descriptors.entry(index);
                env.bus().write(rig::NIC, entry, &segment.encode()).unwrap();
            }
            Act::Reclaim(budget) => {
                let (mut done, mut any) = (0, false);
                let mut fault = None;
                while done < budget && fault.is_none() {
                    let Some(claim) = claims.front() else { break };
                    fault = match outstanding.front() {
                        None => Some(CompletionFault::Nothing),
                        Some(record) => wrong(claim, head, record),
                    };
                    if fault.is_none() {
                        let record = outstanding.pop_front().unwrap();
                        claims.pop_front();
                        head += 1;
                        done += 1;
                        any |= record.mapped;
                        unmaps += record.buffers();
                    }
                }
                bursts += u64::from(any);
                match (nic.reclaim(&mut env.api(), 0, budget), fault) {
                    (Ok(found), None) => assert_eq!(found, done),
                    (Err(NicError::Device(found)), Some(kind)) => {
                        assert_eq!(found.kind, kind);
                        stopped = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let stats = nic.stats();
        assert_eq!(stats.maps - opened.maps, maps);
        assert_eq!(stats.unmaps - opened.unmaps, unmaps);
        assert_eq!(stats.bursts - opened.bursts, bursts);
        assert_eq!(stats.inlined, inlined);
        assert_eq!(nic.in_flight(0) as usize, outstanding.len());
        let live = at_rest + maps - unmaps;
        assert_eq!(
            (env.judge().live() as u64, nic.buffers_in_use() as u64),
            (live, live)
        );
        if stopped {
            break;
        }
    }
    nic.close(&mut env.api()).unwrap();
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
}

/// Returns the fault of a claim about the oldest frame, by the rules.
fn wrong(claim: &NicCompletion, head: u32, record: &Sent) -> Option<CompletionFault> {
    if claim.descriptor != head {
        return Some(CompletionFault::OutOfOrder {
            found: claim.descriptor,
            oldest: head,
        });
    }
    if claim.status > 2 {
        return Some(CompletionFault::Status(claim.status));
    }
    let parts = [claim.first, claim.bytes - claim.first];
    let long = parts.into_iter().zip(record.parts);
    long.into_iter()
        .find(|(found, at_most)| found > at_most)
        .map(|(found, at_most)| CompletionFault::Length { found, at_most })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn only_the_drivers_record_decides(
        per_packet in 1_usize..=2,
        thold in prop_oneof![Just(0), Just(104), 1_u32..104],
        acts in prop::collection::vec(act(), 1..80),
    ) {
        let profile = profile(per_packet, thold);
        follows_its_records(rig::strict(), profile, &acts);
        follows_its_records(rig::burst(4), profile, &acts);
        follows_its_records(rig::deferred(), profile, &acts);
        follows_its_records(rig::rings(&profile, 2, rig::TAIL), profile, &acts);
    }
}

/// Runs `packets` frames of one benchmark run, and returns the port's counters.
fn run_of(
    profile: NicProfile,
    workload: &mut impl Workload,
    runs: u64,
    packets: u64,
) -> ([u64; 4], u64) {
    let mut env = rig::strict();
    let memory = rig::buffers(Nic::<()>::buffer_bytes(&profile, profile.rx_frames));
    let burst = profile.rx_frames;
    let mut testbed = NicTestbed::open(&mut env, rig::NIC, profile, memory, burst, 1).unwrap();
    for _ in 0..runs {
        workload.begin_run();
        testbed.run(&mut env, workload, packets).unwrap();
    }
    let (driver, stats) = (*testbed.driver_stats(), *testbed.stats());
    let receive = 2 * stats.received;
    let sent_maps = driver.maps - profile.receive_at_most() - receive;
    let sent_unmaps = driver.unmaps - receive;
    testbed.close(&mut env).unwrap();
    assert_eq!(env.judge().violations, 0);
    let counts = [stats.sent, driver.inlined, sent_maps, sent_unmaps];
    (counts, stats.interferences)
}

#[test]
fn stream_maps_its_control_messages_only() {
    let mlx = NicProfile::MLX;
    // A response of two buffers in each run, and the results of the first run.
    let (counts, interferences) = run_of(mlx, &mut NetperfStream::default(), 2, 2_400);
    let [sent, inlined, maps, unmaps] = counts;
    assert_eq!((sent - inlined, maps, unmaps), (3, 6, 6));
    assert!(inlined > 1_500, "{inlined}");
    assert_eq!(interferences, 0);
    // The second response is still mapped before its timer expires.
    let (counts, _) = run_of(mlx, &mut NetperfStream::default(), 1, 300);
    assert_eq!(counts[2..], [2, 0]);
    let (counts, _) = run_of(mlx, &mut RequestResponse::default(), 1, 900);
    assert_eq!(counts[0] - counts[1], 1);
    assert_eq!(counts[2..], [2, 2]);
    // Without the thresholds each acknowledgement is mapped.
    let (counts, _) = run_of(
        NicProfile::MLX_MAPPED,
        &mut NetperfStream::default(),
        1,
        2_400,
    );
    let [sent, inlined, maps, _] = counts;
    assert_eq!((inlined, maps), (0, sent + 1));
}

/// At every 16th frame the driver polls, before the device has transmitted it.
#[test]
fn frames_above_the_threshold_are_reclaimed_by_polling() {
    let mut env = rig::strict();
    let profile = NicProfile {
        tx_reclaim: TxReclaim::Poll {
            moder: 16,
            timeout: u64::MAX,
        },
        transmit: Rings {
            count: 1,
            size: RingSize::new(64).unwrap(),
        },
        ..profile(1, 104)
    };
    let mut nic = open(&mut env, profile);
    let mut device = NicDevice::new(rig::NIC, &profile, 1);
    for (dir, index, at) in nic.rings() {
        device.program(dir, index, &at);
    }
    let mut most = 0;
    for number in 1..=100 {
        // Inlined frames count too.
        let bytes = if number % 3 == 0 { 60 } else { 600 };
        nic.send(&mut env.api(), 0, &vec![1; bytes]).unwrap();
        let tail = nic.sync_map(&mut env.api(), QueueDir::Tx, 0).unwrap();
        device.doorbell(QueueDir::Tx, 0, tail);
        let done = nic.xmit_poll(&mut env.api(), 0).unwrap();
        let due = number % 16 == 0;
        let completed = if number == 16 { 15 } else { 16 };
        assert_eq!(done, if due { completed } else { 0 }, "frame {number}");
        device.transmit(&mut env.bus(), 0, |_| {}).unwrap();
        most = most.max(nic.in_flight(0));
    }
    assert_eq!(most, 16);
    nic.close(&mut env.api()).unwrap();
    assert_eq!(env.judge().live(), 0);
}
