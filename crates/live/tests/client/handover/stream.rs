//! The hand-over stream: decoding inverts encoding, and invalid streams are refused before use.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;

use proptest::prelude::*;
use ringfence_live::daemon::Daemon;
use ringfence_live::handover::{
    CommonState, DeviceState, DiskKind, FunctionState, HandOverTimeouts, LinkState, NetState,
    PeerState, PendingFrameState, PlainState, PviommuState, QueueSlot, RangeState, RecordState,
    RiommuState, SavedDevice, SavedDevices, SessionState, VirtioState,
};
use ringfence_live::virtio::net::FLOWS;
use ringfence_pviommu::wire::crc32c;
use ringfence_riommu_device::State;
use ringfence_types::{Iova, IovaRange};
use virtio_queue::QueueState;

use super::guest::{Dir, Guest, daemon, end};
use super::refused::Second;

fn fd() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn maybe_fd() -> impl Strategy<Value = bool> {
    any::<bool>()
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

fn queue() -> impl Strategy<Value = QueueSlot> {
    (any::<[u16; 5]>(), any::<[u64; 3]>(), any::<[bool; 3]>()).prop_map(|(shorts, longs, flags)| {
        QueueSlot {
            queue: QueueState {
                max_size: shorts[0],
                next_avail: shorts[1],
                next_used: shorts[2],
                size: shorts[3],
                desc_table: longs[0],
                avail_ring: longs[1],
                used_ring: longs[2],
                ready: flags[0],
                event_idx_enabled: flags[1],
            },
            vector: shorts[4],
            unfinished: flags[2],
        }
    })
}

prop_compose! {
    fn function()(
        config in prop::collection::vec(any::<u8>(), 256),
        isr in any::<u8>(),
        vectors in prop::collection::vec(maybe_fd(), 0..9),
        longs in any::<[u64; 2]>(),
        words in any::<[u32; 2]>(),
        shorts in any::<[u16; 2]>(),
        status in any::<u8>(),
        queues in prop::collection::vec(queue(), 0..5),
    ) -> VirtioState {
        VirtioState {
            config: config.try_into().unwrap(),
            isr,
            vectors: vectors.into_iter().map(|some| some.then(fd)).collect(),
            common: CommonState {
                offered: longs[0],
                accepted: longs[1],
                offered_select: words[0],
                accepted_select: words[1],
                config_vector: shorts[0],
                status,
                selected: shorts[1],
                queues,
            },
        }
    }
}

prop_compose! {
    fn session()(
        agreed in any::<bool>(),
        bytes in bytes(100),
        fds in 0usize..16,
        too_many_fds in any::<bool>(),
        ranges in prop::collection::vec(
            (0u64..1 << 50, 1u64..1 << 50, any::<u64>(), maybe_fd()),
            0..6,
        ),
    ) -> SessionState {
        SessionState {
            stream: fd(),
            agreed,
            bytes,
            fds: (0..fds).map(|_| fd()).collect(),
            too_many_fds,
            ranges: ranges.into_iter().map(|(start, bytes, offset, file)| RangeState {
                range: IovaRange::new(Iova::new(start), bytes).unwrap(),
                offset: if file { offset } else { 0 },
                file: file.then(fd),
            }).collect(),
        }
    }
}

fn own(kind: usize, bytes: Vec<u8>, flag: bool) -> DeviceState {
    match kind {
        0 => DeviceState::Iommu {
            record: flag.then(|| RecordState {
                file: fd(),
                whole: bytes.len().is_multiple_of(2),
                pending: bytes.clone(),
                lost: (bytes.len() % 2) as u64,
            }),
            dmas: bytes.len().is_multiple_of(3).then(|| RecordState {
                file: fd(),
                whole: flag,
                pending: bytes.clone(),
                lost: u64::from(!flag),
            }),
            snapshot: bytes,
        },
        1 => DeviceState::PvIommu(PviommuState {
            running: flag,
            events: bytes.clone(),
            records: bytes,
        }),
        2 => DeviceState::Ring(RiommuState {
            registers: State {
                root: bytes.len() as u64,
                control: 7,
                status: u32::from(flag),
                fault_queue: 12,
                head: 3,
                tail: bytes.len() as u32,
                raised: flag,
            },
            is_due: !flag,
        }),
        3 => DeviceState::Rng,
        4 => DeviceState::Net(Box::new(NetState {
            mac: [bytes.len() as u8; 6],
            offered: bytes.len() as u16,
            active: 1,
            flows: [u8::from(flag); FLOWS],
            pending_frame: flag.then(|| PendingFrameState {
                frame: bytes.clone(),
                pair: 3,
            }),
            waiting: 5,
            link: link(bytes, flag),
        })),
        _ => DeviceState::Blk {
            file: fd(),
            read_only: flag,
            sectors: bytes.len() as u64,
            kind: [DiskKind::Plain, DiskKind::Assigned, DiskKind::Sandboxed][bytes.len() % 3],
        },
    }
}

fn link(bytes: Vec<u8>, flag: bool) -> LinkState {
    match bytes.len() % 3 {
        0 => LinkState::Tap { file: fd() },
        1 => LinkState::Datagram {
            socket: fd(),
            remote: OsString::from_vec(bytes).into(),
        },
        _ => LinkState::Stream {
            listener: flag.then(fd),
            peer: bytes.first().map(|first| PeerState {
                stream: fd(),
                begun: bytes[1..].to_vec(),
                missing: (*first).into(),
                unread: bytes.clone(),
                unsent: bytes.clone(),
            }),
        },
    }
}

prop_compose! {
    fn handed()(
        kinds in prop::sample::subsequence(vec![0usize, 1, 2, 3, 4, 5], 0..=6),
        parts in prop::collection::vec(
            (
                bytes(60),
                any::<bool>(),
                function(),
                prop::option::of(session()),
                any::<u64>(),
            ),
            6,
        ),
    ) -> SavedDevices {
        let devices = kinds.into_iter().zip(parts);
        let devices = devices.map(|(kind, (bytes, flag, function, session, requests))| SavedDevice {
            state: own(kind, bytes, flag),
            listener: fd(),
            // Kind 2 is no virtio device.
            function: match kind {
                2 => FunctionState::Plain(PlainState {
                    config: function.config,
                    vectors: function.vectors,
                }),
                _ => FunctionState::Virtio(function),
            },
            session,
            requests,
        });
        SavedDevices {
            metrics: fd(),
            control: fd(),
            devices: devices.collect(),
        }
    }
}

/// Formats all values without descriptor numbers, which change in transit.
fn text(handed: &SavedDevices) -> String {
    let text = format!("{handed:?}");
    let mut parts = text.split("fd: ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| {
        all + part.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

proptest! {
    #[test]
    fn saved_devices_round_trip(handed in handed()) {
        let before = text(&handed);
        let (bytes, fds) = handed.encode();
        let handed = SavedDevices::decode(&bytes, fds).unwrap();
        prop_assert_eq!(text(&handed), before);
        prop_assert_eq!(handed.encode().0, bytes);
    }

    /// Random bytes with a correct checksum: an error, or a value that encodes to the same bytes.
    #[test]
    fn no_bytes_make_it_panic(body in bytes(600), fds in 0u32..9) {
        let head = [b"RFHANDOV".to_vec(), 1u32.to_le_bytes().to_vec(), fds.to_le_bytes().to_vec()];
        let mut bytes = [head.concat(), body].concat();
        bytes.extend(crc32c(&bytes).to_le_bytes());
        if let Ok(handed) = SavedDevices::decode(&bytes, (0..fds).map(|_| fd()).collect()) {
            prop_assert_eq!(handed.encode().0, bytes);
        }
    }
}

/// A real stream with each byte changed and a correct checksum: rebuilt or refused, while the
/// source serves on.
#[test]
fn a_stream_that_lies_is_refused_or_harmless() {
    let dir = Dir::new("lies");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let (bytes, fds) = Second::connect(&dir).copy();
    let clones = || -> Vec<OwnedFd> { fds.iter().map(|fd| fd.try_clone().unwrap()).collect() };
    let body = bytes.len() - 4;
    let mut refused = 0;
    for at in 0..body {
        for value in [0, 1, 0x7f, 0xff] {
            let mut lie = bytes[..body].to_vec();
            lie[at] = value;
            lie.extend(crc32c(&lie).to_le_bytes());
            let rehearsed = SavedDevices::decode(&lie, clones())
                .and_then(|handed| Daemon::rehearse(here!(&dir.0), handed));
            refused += usize::from(rehearsed.is_err());
        }
        if at % 100 == 0 {
            guest.read(at as u64 / 100);
        }
    }
    assert!(refused > body, "{refused} of {}", 4 * body);
    // Descriptors in another order, for example an eventfd in place of a socket.
    let mut others = clones();
    others.rotate_left(1);
    let rotated = SavedDevices::decode(&bytes, others).unwrap();
    assert!(Daemon::rehearse(here!(&dir.0), rotated).is_err());
    let whole = SavedDevices::decode(&bytes, clones()).unwrap();
    Daemon::rehearse(here!(&dir.0), whole).unwrap();
    guest.read(1);
    end(first);
}
