//! Hand-overs that fail: the source continues to serve the devices.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, DiskBus, DiskMode, Iommu, VfioUserDevices,
};
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::handover::{CommonState, HandOverTimeouts, SavedDevices};
use ringfence_live::host::HostPagePool;
use ringfence_live::virtio::pviommu::{InjectedReply, ReplyFault};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::guest::{Dir, Guest, daemon, end, log};
use crate::rig::words;

pub(super) const COPY: u32 = 1;
pub(super) const STOP: u32 = 2;
const REBUILT: u32 = 3;
pub(super) const STREAM: u32 = 4;
pub(super) const KEPT: u32 = 6;
pub(super) const REFUSED: u32 = 7;

/// The scripted destination process.
pub(super) struct Second(pub(super) UnixStream);

impl Second {
    pub(super) fn connect(dir: &Dir) -> Self {
        Self(UnixStream::connect(dir.0.join("control.sock")).unwrap())
    }

    pub(super) fn say(&mut self, kind: u32) {
        self.0.write_all(&words(&[kind, 0, 0, 0])).unwrap();
    }

    pub(super) fn hear(&mut self) -> (u32, Vec<u8>, Vec<OwnedFd>) {
        let mut header = [0; 16];
        self.0.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut fds = Vec::new();
        while fds.len() < word(8) as usize {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let part = std::io::IoSliceMut::new(&mut byte);
            recvmsg(&self.0, &mut [part], &mut control, RecvFlags::empty()).unwrap();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(few) = message {
                    fds.extend(few);
                }
            }
        }
        let mut bytes = vec![0; word(4) as usize];
        self.0.read_exact(&mut bytes).unwrap();
        (word(0), bytes, fds)
    }

    /// Returns a copy of the state, taken while the devices run.
    pub(super) fn copy(&mut self) -> (Vec<u8>, Vec<OwnedFd>) {
        self.say(COPY);
        let (kind, bytes, fds) = self.hear();
        assert_eq!(kind, STREAM);
        (bytes, fds)
    }
}

/// Returns virtio's registers of the first device.
pub(super) fn common(handed: &mut SavedDevices) -> &mut CommonState {
    handed.devices[0].function.common_mut().unwrap()
}

/// Sends a doorbell for a request, which paused devices do not serve.
fn waits(guest: &mut Guest) {
    guest.offer(6);
    let bell = [crate::rig::longs(&[0x3000]), words(&[0, 2]), vec![0, 0]];
    let bell = crate::rig::encode(7, crate::rig::REGION_WRITE, 0, &bell.concat());
    guest.disk.send(&bell, &[]);
}

fn is_served(guest: &mut Guest) {
    assert_eq!(guest.disk.receive().0, 0);
    guest.has_read(6);
    guest.read(8);
    guest.is_stopped_at(Guest::stopped_at());
}

#[test]
fn destination_that_disconnects_has_no_effect() {
    let dir = Dir::new("away");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    // Disconnect at once; after a copy; after the stop; and each twice, to show that it has no
    // effect.
    for round in 0..8 {
        let mut second = Second::connect(&dir);
        if round % 4 > 0 {
            second.copy();
        }
        let stopped = round % 4 > 1;
        if stopped {
            second.say(STOP);
            assert_eq!(second.hear().0, STREAM);
            waits(&mut guest);
        }
        if round % 4 == 3 {
            // Disconnect inside a message.
            second.0.write_all(&[3, 0]).unwrap();
        }
        drop(second);
        if stopped {
            is_served(&mut guest);
        }
        guest.read(round);
    }
    end(first);
}

#[test]
fn silent_or_malformed_destination_times_out() {
    let dir = Dir::new("silent");
    let limits = HandOverTimeouts {
        rebuild: Duration::from_secs(1),
        ..HandOverTimeouts::default()
    };
    let first = daemon(&dir, limits);
    let mut guest = Guest::boot(&dir);
    // No message; a copy in place of the confirmation; malformed messages; a message with
    // unexpected content.
    for nonsense in [
        vec![],
        words(&[COPY, 0, 0, 0]),
        words(&[99, 0, 0, 0]),
        words(&[REBUILT, 1, 0, 0]),
        words(&[REBUILT, 0, 1, 0]),
        words(&[REBUILT, 0, 0, 1]),
    ] {
        let mut second = Second::connect(&dir);
        second.say(STOP);
        assert_eq!(second.hear().0, STREAM);
        waits(&mut guest);
        second.0.write_all(&nonsense).unwrap();
        let (kind, why, _) = second.hear();
        assert_eq!(kind, KEPT, "{}", String::from_utf8_lossy(&why));
        is_served(&mut guest);
        // Too late.
        let _ = second.0.write_all(&words(&[REBUILT, 0, 0, 0]));
        guest.read(2);
    }
    // A confirmation without a stop.
    let mut second = Second::connect(&dir);
    second.say(REBUILT);
    assert_eq!(second.hear().0, REFUSED);
    guest.read(3);
    end(first);
}

#[test]
fn one_busy_device_keeps_all_devices() {
    let dir = Dir::new("stuck");
    let limits = HandOverTimeouts {
        stop: Duration::from_secs(1),
        ..HandOverTimeouts::default()
    };
    let first = daemon(&dir, limits);
    let mut guest = Guest::boot(&dir);
    // The entropy device's client sends requests but does not read: the device's thread blocks on
    // its reply.
    let rng = super::guest::Remote::connect(&dir.0.join("rng.sock"), &guest.ram);
    let body = [crate::rig::longs(&[0]), words(&[7, 256])].concat();
    let question = crate::rig::encode(7, crate::rig::REGION_READ, 0, &body);
    rng.stream.set_nonblocking(true).unwrap();
    let mut full = 0;
    while full < 50 {
        match rustix::net::send(&rng.stream, &question, rustix::net::SendFlags::empty()) {
            Ok(_) => full = 0,
            // The socket stays full once the device takes no more.
            Err(_) => {
                full += 1;
                std::thread::yield_now();
                guest.read(1);
            }
        }
    }
    for asked in [COPY, STOP] {
        let mut second = Second::connect(&dir);
        second.say(asked);
        let (kind, why, _) = second.hear();
        let why = String::from_utf8_lossy(&why).into_owned();
        assert!(matches!(kind, KEPT | REFUSED), "{why}");
        assert!(why.starts_with("rng did not end its turn"), "{why}");
        guest.read(4);
    }
    drop(rng);
    guest.read(5);
    end(first);
}

/// Devices whose state cannot be handed over: the destination receives the device and the reason,
/// and the devices continue.
#[test]
fn unsupported_device_names_the_reason() {
    let dir = Dir::new("keeps");
    let disk = || Disk::new(dir.0.join("disk.img"));
    let never = InjectedReply {
        after: 0,
        how: ReplyFault::Never,
    };
    let cases = [
        (
            "blk: cannot hand over a disk with injected DMA",
            VfioUserDevices {
                disk: Some(Disk {
                    inject_dma: vec![InjectedDma::AfterUnmap],
                    ..disk()
                }),
                ..VfioUserDevices::default()
            },
        ),
        (
            "blk: cannot hand over a disk with injected DMA",
            VfioUserDevices {
                disk: Some(Disk {
                    inject_dma: vec![InjectedDma::AfterRevoke],
                    mode: DiskMode::Sandbox(super::sandboxed::program("")),
                    ..disk()
                }),
                ..VfioUserDevices::default()
            },
        ),
        (
            "blk: cannot hand over an NVMe disk",
            VfioUserDevices {
                disk: Some(Disk {
                    bus: DiskBus::Nvme,
                    ..disk()
                }),
                ..VfioUserDevices::default()
            },
        ),
        (
            "pviommu: cannot hand over an IOMMU with an injected reply",
            VfioUserDevices {
                iommu: Iommu::Pviommu {
                    host_page_pool: HostPagePool::Off,
                    inject_reply: Some(never),
                },
                disk: Some(disk()),
                ..VfioUserDevices::default()
            },
        ),
    ];
    for (expected, devices) in cases {
        let devices = DeviceOptions::from(devices);
        let mut first = Daemon::start(&dir.0, &devices, &log()).unwrap();
        first
            .offer_hand_over(HandOverTimeouts::default(), &log())
            .unwrap();
        for (asked, answer) in [(COPY, REFUSED), (STOP, KEPT), (COPY, REFUSED)] {
            let mut second = Second::connect(&dir);
            second.say(asked);
            let (kind, why, _) = second.hear();
            assert_eq!(kind, answer);
            assert_eq!(String::from_utf8_lossy(&why), expected);
        }
        end(first);
    }
}

/// Between the stop and the confirmation no device does any work, since the destination would
/// repeat it.
#[test]
fn devices_stand_still_until_they_are_confirmed() {
    let dir = Dir::new("still");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let mut second = Second::connect(&dir);
    second.say(STOP);
    assert_eq!(second.hear().0, STREAM);
    waits(&mut guest);
    let mut answer = [rustix::event::PollFd::new(
        &guest.disk.stream,
        rustix::event::PollFlags::IN,
    )];
    let moment = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    // No reply comes, however long the wait is.
    let answers = rustix::event::poll(&mut answer, Some(&moment)).unwrap();
    assert_eq!(answers, 0, "it is served");
    drop(second);
    is_served(&mut guest);
    end(first);
}

#[test]
fn only_the_owner_may_ask() {
    let dir = Dir::new("owner");
    let first = daemon(&dir, HandOverTimeouts::default());
    let about = std::fs::metadata(dir.0.join("control.sock")).unwrap();
    assert_eq!(about.permissions().mode() & 0o777, 0o600);
    end(first);
}

/// Each prefix of a stream, and each stream with one changed bit, is refused completely, and the
/// source serves on.
#[test]
fn a_stream_that_was_cut_or_changed_is_refused_whole() {
    let dir = Dir::new("changed");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let (bytes, fds) = Second::connect(&dir).copy();
    for length in 0..bytes.len() {
        let cut = SavedDevices::decode(&bytes[..length], Vec::new());
        assert!(cut.is_err(), "{length} bytes");
    }
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let refused = SavedDevices::decode(&changed, Vec::new()).unwrap_err();
        let refused = format!("{refused:?}");
        assert!(
            ["NoStream", "Checksum"].contains(&refused.as_str()),
            "bit {bit}: {refused}"
        );
        if bit % 1000 == 0 {
            guest.read(bit as u64 / 1000 % 200);
        }
    }
    let mut few = fds;
    few.pop();
    assert!(
        SavedDevices::decode(&bytes, few).is_err(),
        "a descriptor too few"
    );
    let (bytes, mut fds) = Second::connect(&dir).copy();
    fds.push(std::fs::File::open("/dev/null").unwrap().into());
    assert!(SavedDevices::decode(&bytes, fds).is_err(), "one too many");
    let (bytes, fds) = Second::connect(&dir).copy();
    assert!(
        SavedDevices::decode(&bytes, fds).is_ok(),
        "and as it is it is taken"
    );
    end(first);
}

/// Its next request arrives before the last reply, so only the total time ends the copies.
#[test]
fn a_second_that_copies_on_and_on_is_hung_up_on() {
    let dir = Dir::new("endless");
    let limits = HandOverTimeouts {
        copying: Duration::from_millis(200),
        ..HandOverTimeouts::default()
    };
    let first = daemon(&dir, limits);
    let mut guest = Guest::boot(&dir);
    let mut second = Second::connect(&dir);
    let asked = second.0.try_clone().unwrap();
    let asks = std::thread::spawn(move || {
        let mut asked = asked;
        while asked.write_all(&words(&[COPY, 0, 0, 0])).is_ok() {}
    });
    // The test reads the replies, so only the time limit can end the loop. No host makes this many
    // copies in that time.
    let mut bytes = [0; 65536];
    let mut reads = 0;
    while std::io::Read::read(&mut second.0, &mut bytes).is_ok_and(|read| read > 0) {
        reads += 1;
        assert!(reads < 50_000, "copied on and on");
    }
    asks.join().unwrap();
    guest.read(8);
    end(first);
}
