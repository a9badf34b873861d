//! Source processes that violate the protocol: the destination takes over nothing and serves
//! nothing.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ringfence_live::daemon::{Daemon, LocalConfig};
use ringfence_live::handover::{
    DeviceState, HandOverTimeouts, SavedDevices, StateError, TakeOverError,
};
use ringfence_live::limits::GuestLimits;
use ringfence_pviommu::backend::EVENTS;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::guest::{Dir, Guest, daemon_of, end, log};
use super::refused::{Second, common};
use crate::rig::{longs, words};

const STREAM: u32 = 4;
const GONE: u32 = 5;
const KEPT: u32 = 6;
const ORPHANED: u32 = 8;

/// The scripted source process.
struct First(UnixStream);

impl First {
    fn say(&self, kind: u32, bytes: &[u8], fds: &[OwnedFd]) {
        let send = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
            let part = [IoSlice::new(bytes)];
            sendmsg(&self.0, &part, &mut control, SendFlags::empty()).unwrap();
        };
        send(
            &words(&[kind, bytes.len() as u32, fds.len() as u32, 0]),
            &[],
        );
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        fds.chunks(16).for_each(|few| send(&[0], few));
        if !bytes.is_empty() {
            send(bytes, &[]);
        }
    }

    fn stream(&self, handed: SavedDevices) {
        let (bytes, fds) = handed.encode();
        self.say(STREAM, &bytes, &fds);
    }

    /// Returns the kinds of the requests that the destination made until it disconnected.
    fn asked(mut self) -> Vec<u32> {
        let mut asked = Vec::new();
        let _ = self.0.read_to_end(&mut asked);
        let kinds = asked.chunks(16).map(|order| u32::from(order[0]));
        kinds.collect()
    }
}

/// Runs a destination process against the messages that `say` sends.
fn told(dir: &Dir, say: impl FnOnce(&First)) -> (Result<(), TakeOverError>, Vec<u32>) {
    let (first, second) = UnixStream::pair().unwrap();
    let first = First(first);
    say(&first);
    first.0.shutdown(std::net::Shutdown::Write).unwrap();
    let result = Daemon::rehearse_take_over(second, here!(&dir.0));
    (result.map(drop), first.asked())
}

fn copy(dir: &Dir) -> SavedDevices {
    let (bytes, fds) = Second::connect(dir).copy();
    SavedDevices::decode(&bytes, fds).unwrap()
}

/// Returns an invalid state, with an eventfd in place of a listener.
fn spoiled(dir: &Dir) -> SavedDevices {
    let mut handed = copy(dir);
    handed.control = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    handed
}

#[test]
fn destination_waits_for_the_release_of_the_source() {
    let dir = Dir::new("first");
    let first = daemon_of(&dir, HandOverTimeouts::default(), false);
    let mut guest = Guest::boot(&dir);
    let both = |first: &First| {
        first.stream(copy(&dir));
        first.stream(copy(&dir));
    };
    let (result, asked) = told(&dir, |first| {
        both(first);
        first.say(GONE, &[], &[]);
    });
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(asked, [1, 2, 3]);
    // The source keeps the devices after all, or dies before it has released them.
    let (result, asked) = told(&dir, |first| {
        both(first);
        first.say(KEPT, b"too late", &[]);
    });
    assert!(
        matches!(&result, Err(TakeOverError::Kept(why)) if why == "too late"),
        "{result:?}"
    );
    assert_eq!(asked, [1, 2, 3]);
    // The source has released the devices but cannot stop one, so no process serves them.
    let (result, asked) = told(&dir, |first| {
        both(first);
        first.say(ORPHANED, b"blk is stuck", &[]);
    });
    let error = result.unwrap_err();
    assert!(matches!(error, TakeOverError::Orphaned(_)), "{error:?}");
    assert_eq!(
        error.to_string(),
        "no process serves the devices: blk is stuck"
    );
    assert_eq!(asked, [1, 2, 3]);
    let (result, _) = told(&dir, both);
    assert!(matches!(result, Err(TakeOverError::Io(_))), "{result:?}");
    // A state that cannot be rebuilt leads neither to a stop nor to a confirmation.
    let (result, asked) = told(&dir, |first| {
        first.stream(spoiled(&dir));
        first.stream(copy(&dir));
        first.say(GONE, &[], &[]);
    });
    assert!(matches!(result, Err(TakeOverError::State(_))), "{result:?}");
    assert_eq!(asked, [1]);
    let (result, asked) = told(&dir, |first| {
        first.stream(copy(&dir));
        first.stream(spoiled(&dir));
        first.say(GONE, &[], &[]);
    });
    assert!(matches!(result, Err(TakeOverError::State(_))), "{result:?}");
    assert_eq!(asked, [1, 2]);
    guest.read(3);
    end(first);
}

#[test]
fn an_iommu_and_its_driver_agree_or_are_refused() {
    const DRIVER_OK: u8 = 4;
    for para in [false, true] {
        let dir = Dir::new(if para { "agree-para" } else { "agree" });
        let first = daemon_of(&dir, HandOverTimeouts::default(), para);
        let mut guest = Guest::boot_with(&dir, para);
        let refused = |change: &dyn Fn(&mut SavedDevices)| {
            let mut handed = copy(&dir);
            change(&mut handed);
            match Daemon::rehearse(here!(&dir.0), handed) {
                Ok(_) => None,
                Err(error) => Some(error.to_string()),
            }
        };
        assert_eq!(refused(&|_| {}), None);
        let other_driver = if para {
            "invalid driver state of the para-virtual IOMMU"
        } else {
            "invalid accepted features of the virtio-iommu"
        };
        let without = refused(&|handed| common(handed).status &= !DRIVER_OK);
        assert!(without.unwrap().contains(other_driver));
        if para {
            let stopped = refused(&|handed| {
                if let DeviceState::PvIommu(state) = &mut handed.devices[0].state {
                    state.running = false;
                }
            });
            assert!(stopped.unwrap().contains(other_driver));
            // One event more than can ever be pending.
            let event = [longs(&[0x20]), words(&[1, 1]), longs(&[0x1000])].concat();
            let with = |events: usize| {
                refused(&|handed| {
                    if let DeviceState::PvIommu(state) = &mut handed.devices[0].state {
                        state.events = event.repeat(events);
                    }
                })
            };
            assert_eq!(with(EVENTS), None);
            assert!(with(EVENTS + 1).unwrap().contains("events"));
        } else {
            // Without the feature VIRTIO_IOMMU_F_INPUT_RANGE.
            let fewer = refused(&|handed| common(handed).accepted &= !1);
            assert!(fewer.unwrap().contains(other_driver));
        }
        guest.read(3);
        end(first);
    }
}

/// The limits of a guest are those of the process that serves it.
#[test]
fn a_guest_with_more_than_the_second_allows_is_not_taken_over() {
    let dir = Dir::new("caps");
    let first = daemon_of(&dir, HandOverTimeouts::default(), false);
    let mut guest = Guest::boot(&dir);
    let refused = |caps: &GuestLimits| {
        Daemon::rehearse(LocalConfig::new(&dir.0, caps, &log()), copy(&dir)).err()
    };
    let with = |change: &dyn Fn(&mut GuestLimits)| {
        let mut caps = GuestLimits::default();
        change(&mut caps);
        refused(&caps)
    };
    assert!(with(&|_| {}).is_none());
    let queue = with(&|caps| caps.queue_size = 128).unwrap();
    assert_eq!(
        queue.to_string(),
        "invalid maximum queue size: no driver can set this value"
    );
    for few in [
        with(&|caps| caps.mappings = 0),
        with(&|caps| caps.domains = 0),
    ] {
        assert!(matches!(few, Some(StateError::Iommu(_))), "{few:?}");
    }
    guest.read(3);
    end(first);
}
