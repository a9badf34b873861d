//! Processes that violate the protocol: the daemon kills each one, its device needs a reset, and
//! the guest driver's requests succeed.

use crate::guest::*;
use crate::pviommu_driver::Para;
use crate::rig::*;
use crate::{Boundary, sandboxed_guest};

/// The guest maps, starts the disk, makes a request and unmaps pages. At the end the process is
/// dead and the rest works.
fn breaks(behaviour: &str, why: &str) {
    breaks_behind::<Virtio>(behaviour, why);
    breaks_behind::<Para>(behaviour, why);
}

fn breaks_behind<I: Boundary>(behaviour: &str, why: &str) {
    let mut sandboxed = sandboxed_guest::<I>(behaviour, &[], &disk_file()).mapped();
    let guest = &mut sandboxed.guest;
    let _ = read(guest, 1, 0xb000 + AWAY);
    assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
    assert_eq!(
        I::unmap(guest, 0xb000 + AWAY, 0x1000),
        0,
        "{behaviour}: answered"
    );
    assert_eq!(
        I::unmap(guest, 0xe000 + AWAY, 0x1000),
        0,
        "{behaviour}: answered"
    );
    assert_eq!(
        I::unmap(guest, 0xe000 + AWAY, 0x1000),
        I::NOT_MAPPED,
        "{behaviour}: answered"
    );
    guest.disk.ring(0);
    assert!(sandboxed.broken(), "{behaviour}");
    let mut said = sandboxed.log.lock().unwrap().join("; ");
    if let Some(breach) = sandboxed.breach() {
        said = format!("{said}; {breach}");
    }
    assert!(said.contains(why), "{behaviour}: {said}");
    // The disk stays broken, and nothing else is affected.
    let guest = &mut sandboxed.guest;
    guest.disk.set(0x14, &[0]);
    guest.begin();
    guest.disk.ring(0);
    assert_eq!(guest.disk.register(0x14, 1) & 64, 64, "{behaviour}");
    assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
    I::withdraw(guest);
}

#[test]
fn calls_that_were_not_granted() {
    breaks("maps-more", "unexpected system call");
    breaks("maps-for-writing", "unexpected system call");
    breaks("maps-elsewhere", "unexpected system call");
    breaks("answers-twice", "unexpected system call");
}

#[test]
fn pages_that_the_process_does_not_release() {
    breaks("keeps", "unexpected system call");
    breaks("ignores", "in time");
}

/// Each answer arrives within its own limit, but the limit on their sum ends the process. Without
/// that limit the IOMMU would wait 700 ms for each unmap of the guest.
#[test]
fn answers_that_are_late_each_time() {
    let mut sandboxed = sandboxed_guest::<Virtio>("delays_replies", &[], &disk_file()).mapped();
    let mut rounds = 0;
    let breach = loop {
        if let Some(breach) = sandboxed.breach() {
            break breach.to_string();
        }
        rounds += 1;
        assert!(rounds < 60, "still trusted after {rounds} late answers");
        let guest = &mut sandboxed.guest;
        let at = 0xe000 + AWAY;
        assert_eq!(
            <Virtio as Boundary>::map(guest, at, 0x1000, 0xe000, READ),
            0
        );
        assert_eq!(<Virtio as Boundary>::unmap(guest, at, 0x1000), 0);
    };
    // On a busy host a single answer may exceed its limit.
    assert!(breach.contains("in time"), "{breach}");
    sandboxed.guest.disk.ring(0);
    assert!(sandboxed.broken());
}

#[test]
fn calls_that_are_forbidden() {
    for behaviour in [
        "protects",
        "opens",
        "connects",
        "starts-a-thread",
        "maps-itself",
        "reads-memory",
    ] {
        breaks(behaviour, "has exited");
    }
}

#[test]
fn forbidden_messages() {
    breaks("talks", "malformed or unexpected message");
    breaks("babbles", "malformed or unexpected message");
    breaks("complains", "malformed or unexpected message");
}
