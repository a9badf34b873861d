//! A hostile device writes arbitrary data wherever its driver allows it. The driver returns a typed
//! error, never panics, and gets all its buffers back at the close.

use proptest::prelude::*;
use ringfence_devices::Transfer;
use ringfence_devices::nic::{
    Environment, Nic, NicCompletion, NicDevice, NicError, NicProfile, QueueDir, Reception, Replace,
    SendOutcome,
};
use ringfence_devices::ring::{CompletionFault, RingAddresses};
use ringfence_dma::Mapping;

use super::rig::{self, OracleChecked};
use super::small_nic::{self, open};

fn profile(buffers_per_packet: usize) -> NicProfile {
    inlining(buffers_per_packet, 0)
}

fn inlining(buffers_per_packet: usize, inline_thold: u32) -> NicProfile {
    NicProfile {
        replace: Replace::AfterUnmap,
        ..small_nic::profile(buffers_per_packet, inline_thold)
    }
}

fn addresses<H>(nic: &Nic<H>, dir: QueueDir) -> RingAddresses {
    nic.rings()
        .find(|(found, _, _)| *found == dir)
        .map(|(_, _, at)| at)
        .unwrap()
}

/// Writes a completion with the phase of the first lap.
fn claim<W: Environment>(env: &mut W, at: &RingAddresses, entry: u32, claim: NicCompletion) {
    let mut raw = claim.encode();
    raw[14] |= 1;
    let iova = at.completions.entry(entry);
    env.bus().write(rig::NIC, iova, &raw).unwrap();
}

#[test]
fn every_invalid_completion_has_its_error() {
    let good = NicCompletion {
        bytes: 60,
        first: 54,
        descriptor: 0,
        status: 0,
    };
    let cases = [
        (
            NicCompletion {
                descriptor: 1,
                ..good
            },
            CompletionFault::OutOfOrder {
                found: 1,
                oldest: 0,
            },
        ),
        (
            NicCompletion { status: 3, ..good },
            CompletionFault::Status(3),
        ),
        (
            NicCompletion { bytes: 53, ..good },
            CompletionFault::Length {
                found: 54,
                at_most: 53,
            },
        ),
        (
            NicCompletion { first: 55, ..good },
            CompletionFault::Length {
                found: 55,
                at_most: 54,
            },
        ),
        (
            NicCompletion {
                bytes: u32::MAX,
                ..good
            },
            CompletionFault::Length {
                found: u32::MAX - 54,
                at_most: 1460,
            },
        ),
    ];
    for (lie, expected) in cases {
        let mut env = rig::strict();
        let mut nic = open(&mut env, profile(2));
        let at = addresses(&nic, QueueDir::Rx);
        claim(&mut env, &at, 0, lie);
        for _ in 0..2 {
            // The ring has stopped: it returns the same error again.
            let frames = |_: &[u8]| panic!("a frame that never was");
            match nic.receive(&mut env.api(), 0, 10, None, frames) {
                Err(NicError::Device(found)) => assert_eq!(found.kind, expected),
                other => panic!("{lie:?}: {other:?}"),
            }
        }
        nic.close(&mut env.api()).unwrap();
        assert_eq!(env.judge().live(), 0);
    }
}

#[test]
fn a_completion_without_a_descriptor_is_invalid() {
    let mut env = rig::strict();
    let mut nic = open(&mut env, profile(1));
    let at = addresses(&nic, QueueDir::Tx);
    let nothing = NicCompletion {
        bytes: 0,
        first: 0,
        descriptor: 0,
        status: 0,
    };
    claim(&mut env, &at, 0, nothing);
    match nic.reclaim(&mut env.api(), 0, 10) {
        Err(NicError::Device(found)) => assert_eq!(found.kind, CompletionFault::Nothing),
        other => panic!("{other:?}"),
    }
    nic.close(&mut env.api()).unwrap();
}

#[test]
fn queues_that_do_not_exist_are_refused() {
    let mut env = rig::strict();
    let mut nic = open(&mut env, profile(1));
    let refused = |result: Result<(), NicError>| {
        assert!(matches!(
            result,
            Err(NicError::NoSuchQueue { index: 1, .. })
        ));
    };
    refused(nic.send(&mut env.api(), 1, &[0; 60]).map(drop));
    refused(nic.reclaim(&mut env.api(), 1, 1).map(drop));
    refused(nic.receive(&mut env.api(), 1, 1, None, |_| {}).map(drop));
    for bytes in [0, 1515] {
        assert_eq!(
            nic.send(&mut env.api(), 0, &vec![0; bytes]),
            Err(NicError::FrameLength { bytes })
        );
    }
    nic.close(&mut env.api()).unwrap();
}

/// Action of a hostile device, or of the wire, between two steps of the driver.
#[derive(Debug, Clone)]
enum Act {
    /// Writes bytes at an offset of a ring's descriptors or completions.
    Scribble(bool, bool, u16, Vec<u8>),
    /// Writes a completion for a descriptor.
    Claim(bool, u32, u32, u32, u16),
    /// Receives a frame correctly.
    Receive(u16),
    /// Transmits the offered frames correctly.
    Transmit,
    /// The driver sends a frame.
    Send(u16),
    /// The driver handles completions.
    Service(bool),
    /// The driver writes any number to a doorbell.
    Doorbell(bool, u32),
}

fn act() -> impl Strategy<Value = Act> {
    let bytes = prop::collection::vec(any::<u8>(), 1..40);
    let small_or_any = || prop_oneof![0_u32..12, any::<u32>()];
    prop_oneof![
        (any::<bool>(), any::<bool>(), 0_u16..1024, bytes)
            .prop_map(|(a, b, c, d)| Act::Scribble(a, b, c, d)),
        (
            any::<bool>(),
            small_or_any(),
            small_or_any(),
            small_or_any(),
            0_u16..5
        )
            .prop_map(|(a, b, c, d, e)| Act::Claim(a, b, c, d, e)),
        (1_u16..2000).prop_map(Act::Receive),
        Just(Act::Transmit),
        (1_u16..1515).prop_map(Act::Send),
        (1_u16..110).prop_map(Act::Send),
        any::<bool>().prop_map(Act::Service),
        (any::<bool>(), small_or_any()).prop_map(|(a, b)| Act::Doorbell(a, b)),
    ]
}

fn survives<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(
    mut env: W,
    profile: NicProfile,
    acts: &[Act],
) {
    let mut nic = open(&mut env, profile);
    let mut device = NicDevice::new(rig::NIC, &profile, 3);
    for (dir, index, at) in nic.rings() {
        device.program(dir, index, &at);
    }
    let dir = |receive| {
        if receive { QueueDir::Rx } else { QueueDir::Tx }
    };
    for act in acts {
        match act {
            Act::Scribble(receive, completions, offset, bytes) => {
                let at = addresses(&nic, dir(*receive));
                let base = if *completions {
                    at.completions
                } else {
                    at.descriptors
                };
                let iova = base.at.wrapping_add(u64::from(*offset));
                env.bus().write(rig::NIC, iova, bytes).unwrap();
            }
            Act::Claim(receive, entry, descriptor, bytes, status) => {
                let at = addresses(&nic, dir(*receive));
                let lie = NicCompletion {
                    bytes: *bytes,
                    first: bytes / 2,
                    descriptor: *descriptor,
                    status: *status,
                };
                claim(&mut env, &at, *entry, lie);
            }
            Act::Receive(bytes) => {
                let frame = vec![7; usize::from(*bytes)];
                let _: Result<Reception, _> = device.receive(&mut env.bus(), 0, &frame);
            }
            Act::Transmit => {
                let _ = device.transmit(&mut env.bus(), 0, |_| {});
            }
            Act::Send(bytes) => {
                let sent = nic.send(&mut env.api(), 0, &vec![1; usize::from(*bytes)]);
                assert!(
                    matches!(sent, Ok(SendOutcome::Queued | SendOutcome::Full)),
                    "{sent:?}"
                );
            }
            Act::Service(receive) => {
                let result = if *receive {
                    nic.receive(&mut env.api(), 0, u32::MAX, None, |frame| {
                        assert!(frame.len() <= 1514);
                    })
                    .map(drop)
                } else {
                    nic.reclaim(&mut env.api(), 0, u32::MAX).map(drop)
                };
                assert!(matches!(result, Ok(()) | Err(NicError::Device(_))));
            }
            Act::Doorbell(receive, tail) => device.doorbell(dir(*receive), 0, *tail),
        }
        for dir in [QueueDir::Rx, QueueDir::Tx] {
            if let Some(tail) = nic.sync_map(&mut env.api(), dir, 0) {
                device.doorbell(dir, 0, tail);
            }
        }
    }
    device.reset();
    nic.close(&mut env.api()).unwrap();
    assert_eq!(env.judge().live(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_device_confuses_a_driver(
        per_packet in 1_usize..=2,
        thold in prop_oneof![Just(0), 1_u32..=104],
        acts in prop::collection::vec(act(), 1..60),
    ) {
        let profile = inlining(per_packet, thold);
        survives(rig::strict(), profile, &acts);
        survives(rig::burst(4), profile, &acts);
        survives(rig::rings(&profile, 2, rig::TAIL), profile, &acts);
    }
}
