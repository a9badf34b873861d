//! A sandboxed process whose function is not a bus master has no access to guest memory, whatever
//! it does. A correct process continues its work when the bit is set.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ringfence_live::sandbox::DiskProxy;
use ringfence_live::server::PolledFunction;
use rustix::event::{EventfdFlags, eventfd};

use crate::guest::*;
use crate::pviommu_driver::Para;
use crate::rig::*;
use crate::{Boundary, SandboxedGuest, sandboxed_guest};

/// Number of polls for an event that must come.
const LOOKS: usize = 20_000_000;

/// Pages that a started disk has mapped: rings, header and status, and one data page.
pub(crate) const MAPPED: u64 = 10;

fn ram<I: Boundary>(guest: &mut Guest<DiskProxy, I>) -> Vec<u8> {
    let mut bytes = vec![0; RAM_BYTES as usize];
    I::ram(guest).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The IOMMU's driver maps before the disk's driver starts: the grants come with the bit.
#[test]
fn nothing_is_granted_before_it_is_set() {
    nothing_is_granted_behind::<Virtio>();
    nothing_is_granted_behind::<Para>();
}

fn nothing_is_granted_behind<I: Boundary>() {
    let mut sandboxed: SandboxedGuest<I> = sandboxed_guest("", &[], &disk_file());
    let guest = &mut sandboxed.guest;
    I::again(guest);
    for at in [0x1000, 0x5000] {
        assert_eq!(I::map(guest, at + AWAY, 0x1000, at, READ_WRITE), 0);
    }
    let calls = Arc::clone(&guest.disk.counters);
    assert_eq!(calls.calls.get(), 0);
    guest.disk.master(true);
    assert_eq!(calls.calls.get(), 2);
    guest.disk.master(true);
    assert_eq!(calls.calls.get(), 2, "it was set");
    guest.disk.master(false);
    assert_eq!(calls.calls.get(), 4);
    assert_eq!(I::unmap(guest, 0x1000 + AWAY, 0x1000), 0);
    assert_eq!(guest.disk.send(RESET, &[]).errno, 0);
    assert_eq!(calls.calls.get(), 4);
    guest.disk.master(true);
    assert_eq!(calls.calls.get(), 5);
    assert_eq!(guest.disk.send(RESET, &[]).errno, 0);
    assert_eq!(calls.calls.get(), 6, "a reset clears it");
}

/// Requests made while the bit is clear are served when it is set, with the mappings made in
/// between.
#[test]
fn device_waits_and_resumes() {
    waits_and_resumes::<Virtio>();
    waits_and_resumes::<Para>();
}

fn waits_and_resumes<I: Boundary>() {
    let mut sandboxed: SandboxedGuest<I> = sandboxed_guest("", &[], &disk_file()).mapped();
    let guest = &mut sandboxed.guest;
    let sector: Vec<u8> = (0..512u64).map(|at| (at / 7) as u8).collect();
    I::wait_for_a_fault(guest);
    for count in (1..).step_by(3).take(3) {
        assert_eq!(read(guest, count, 0xb000 + AWAY), Some(0));
        guest.disk.master(false);
        // Map one page and unmap another.
        assert_eq!(I::map(guest, 0xd000 + AWAY, 0x1000, 0xd000, READ_WRITE), 0);
        assert_eq!(I::unmap(guest, 0xb000 + AWAY, 0x1000), 0);
        guest.disk.poke(0xd000, &[0; 512]);
        assert_eq!(read(guest, count + 1, 0xd000 + AWAY), None);
        let before = ram(guest);
        guest.disk.ring(0);
        assert!(guest.disk.session.function().device().is_idle());
        assert!(!guest.wait(), "there is nothing to wait for");
        assert!(ram(guest) == before, "written to");
        guest.disk.master(true);
        guest.disk.session.function().continue_work();
        guest.settle();
        assert_eq!(guest.disk.used().0, count + 1);
        assert_eq!(guest.disk.peek(0x9000, 1), [0]);
        assert_eq!(guest.disk.peek(0xd000, 512), sector);
        assert_eq!(I::fault(guest), None, "nothing was stopped");
        // The unmapped page is inaccessible, and is mapped again.
        assert_eq!(I::map(guest, 0xb000 + AWAY, 0x1000, 0xb000, READ_WRITE), 0);
        assert_eq!(I::unmap(guest, 0xd000 + AWAY, 0x1000), 0);
        assert_eq!(read(guest, count + 2, 0xb000 + AWAY), Some(0));
    }
    let counters = &sandboxed.guest.disk.counters;
    assert_eq!((counters.requests.get(), counters.failed.get()), (9, 0));
}

/// Setting the bit does not restore pages that were unmapped while it was clear.
#[test]
fn pages_unmapped_while_paused_stay_unmapped() {
    pages_unmapped_during_the_wait_stay_unmapped::<Virtio>();
    pages_unmapped_during_the_wait_stay_unmapped::<Para>();
}

fn pages_unmapped_during_the_wait_stay_unmapped<I: Boundary>() {
    let image = tally();
    let mut sandboxed: SandboxedGuest<I> = goes_on(&image);
    let guest = &mut sandboxed.guest;
    guest.disk.master(false);
    assert_eq!(I::unmap(guest, 0xb000 + AWAY, 0x1000), 0);
    guest.disk.poke(0xb000, &[0; 4096]);
    guest.disk.master(true);
    assert_eq!(writes(&image), MAPPED - 1);
    assert_eq!(guest.disk.peek(0xb000, 4096), [0; 4096]);
}

/// Returns a process that writes to all pages that it can access, in rounds, and has written to all
/// mapped pages.
pub(crate) fn goes_on<I: Boundary>(image: &File) -> SandboxedGuest<I> {
    let mut sandboxed: SandboxedGuest<I> = sandboxed_guest("goes-on", &[], image).mapped();
    sandboxed.guest.disk.ring(0);
    sandboxed.guest.settle();
    assert_eq!(writes(image), MAPPED);
    sandboxed
}

/// Returns an image for such a process, with its round counter at zero.
pub(crate) fn tally() -> File {
    let image = disk_file();
    image.write_all_at(&[0; 16], 0).unwrap();
    image
}

/// Returns the number of pages written in a round that began after the call.
pub(crate) fn writes(image: &File) -> u64 {
    let progress = || {
        let mut bytes = [0; 16];
        image.read_exact_at(&mut bytes, 0).unwrap();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        (word(0), word(8))
    };
    // One round may be in progress, and the two words may belong to different rounds.
    let begun = progress().0 + 3;
    for _ in 0..LOOKS {
        let (round, pages) = progress();
        if round >= begun {
            return pages;
        }
        std::thread::yield_now();
    }
    panic!("it goes round no more");
}

/// The process writes to all accessible pages, and ignores all messages.
#[test]
fn one_that_does_not_listen_has_nothing() {
    does_not_listen_behind::<Virtio>();
    does_not_listen_behind::<Para>();
}

fn does_not_listen_behind<I: Boundary>() {
    let image = tally();
    let mut sandboxed: SandboxedGuest<I> = goes_on(&image);
    let guest = &mut sandboxed.guest;
    has_nothing(guest, &image);
    assert_eq!(writes(&image), MAPPED);
}

/// Checks that the process has no access while the bit is clear.
fn has_nothing<I: Boundary>(guest: &mut Guest<DiskProxy, I>, image: &File) {
    guest.disk.master(false);
    let before = ram(guest);
    assert_eq!(writes(image), 0);
    assert!(ram(guest) == before, "written to");
    guest.disk.master(true);
}

/// The daemon waits for a process that never ends its turn, but not forever. The process ignores
/// the reset, so the daemon kills it.
#[test]
fn one_that_never_ends_its_work_has_nothing() {
    let image = tally();
    let mut sandboxed: SandboxedGuest<Virtio> = sandboxed_guest("never-ends", &[], &image).mapped();
    let guest = &mut sandboxed.guest;
    guest.disk.ring(0);
    assert_eq!(writes(&image), MAPPED);
    has_nothing(guest, &image);
    assert_eq!(writes(&image), MAPPED);
    assert_eq!(guest.disk.send(RESET, &[]).errno, 0);
    assert_eq!(guest.disk.config(4, 1), [0]);
    assert_eq!(
        *sandboxed.log.lock().unwrap(),
        ["the process did not answer in time"]
    );
}

/// The bit is cleared inside a turn. Completed requests stay completed, the rest is done later, and
/// none is done twice.
#[test]
fn a_turn_is_cut_short_and_made_up_for() {
    cut_short_behind::<Virtio>();
    cut_short_behind::<Para>();
}

fn cut_short_behind<I: Boundary>() {
    const EACH: u64 = 0x4000;
    let mut sandboxed: SandboxedGuest<I> = sandboxed_guest("", &[], &disk_file()).mapped();
    let guest = &mut sandboxed.guest;
    // Chains of three descriptors each.
    let chains = 5;
    let bytes = EACH * u64::from(chains);
    assert_eq!(
        I::map(guest, 0x8_0000 + AWAY, bytes, 0x8_0000, READ_WRITE),
        0
    );
    I::wait_for_a_fault(guest);
    let data: Vec<u8> = (0..EACH).map(|at| (at / 7) as u8).collect();
    let (mut cut, mut offered) = (0, 0u16);
    for round in 0..2400 {
        // The process may take this thread's CPU at each doorbell for a while.
        if round >= 24 && cut > 0 {
            break;
        }
        guest.disk.poke(0x8000, &request(0, 0));
        guest.disk.poke(0x8_0000, &vec![0; bytes as usize]);
        for chain in 0..chains {
            let head = 3 * chain;
            let to = 0x8_0000 + EACH * u64::from(chain) + AWAY;
            let disk = &guest.disk;
            disk.descriptor(head, 0x8000 + AWAY, 16, NEXT, head + 1);
            disk.descriptor(head + 1, to, EACH as u32, NEXT | WRITE, head + 2);
            disk.descriptor(head + 2, 0x9000 + u64::from(chain) + AWAY, 1, WRITE, 0);
            let slot = u64::from(offered % 16);
            disk.poke(QUEUE + 0x1004 + 2 * slot, &head.to_le_bytes());
            offered += 1;
        }
        guest.disk.poke(0x9000, &[0xee; 5]);
        guest.disk.poke(QUEUE + 0x1002, &offered.to_le_bytes());
        guest.disk.ring(0);
        // Vary the moment at which the bit is cleared.
        (0..round % 24 * 300).for_each(|_| std::hint::spin_loop());
        guest.disk.master(false);
        let before = ram(guest);
        let done = guest.disk.used().0;
        cut += u32::from(done != offered);
        for chain in offered - chains..done.max(offered - chains) {
            let chain = u64::from(chain % chains);
            let at = 0x8_0000 + EACH * chain;
            assert_eq!(guest.disk.peek(at, EACH as usize), data, "it is done");
            assert_eq!(guest.disk.peek(0x9000 + chain, 1), [0], "it is done");
        }
        assert!(ram(guest) == before, "written to");
        guest.disk.master(true);
        guest.disk.session.function().continue_work();
        guest.settle();
        assert_eq!(guest.disk.used().0, offered, "round {round}");
        assert_eq!(guest.disk.peek(0x9000, 5), [0; 5]);
        let all = guest.disk.peek(0x8_0000, bytes as usize);
        assert!(all.chunks(EACH as usize).all(|one| one == data));
    }
    println!("{cut} turns were cut short");
    assert!(cut > 0);
    let counters = &guest.disk.counters;
    assert_eq!(counters.requests.get(), u64::from(offered), "none twice");
    assert_eq!((counters.failed.get(), counters.malformed.get()), (0, 0));
    assert_eq!(I::fault(guest), None, "nothing was a fault");
}

/// A turn ends before the bit is cleared, and the daemon has not read its message yet. Its
/// interrupt precedes the reply.
#[test]
fn earlier_events_are_reported_first() {
    let mut sandboxed: SandboxedGuest<Virtio> = sandboxed_guest("", &[], &disk_file()).mapped();
    let disk = &mut sandboxed.guest.disk;
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let fds = vec![event.as_fd().try_clone_to_owned().unwrap()];
    let all = words(&[20, 4 | 32, 2, 0, 1]);
    assert_eq!(disk.send_with(SET_IRQS, &all, fds).errno, 0);
    disk.set(0x16, &[0, 0]);
    disk.set(0x1a, &[0, 0]);
    disk.poke(0x8000, &request(0, 0));
    disk.descriptor(0, 0x8000 + AWAY, 16, NEXT, 1);
    disk.descriptor(1, 0xb000 + AWAY, 512, NEXT | WRITE, 2);
    disk.descriptor(2, 0x9000 + AWAY, 1, WRITE, 0);
    disk.offer(0, 1);
    while disk.used().0 != 1 {
        std::thread::yield_now();
    }
    disk.master(false);
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
}
