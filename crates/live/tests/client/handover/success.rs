//! Hand-overs that succeed.

use std::process::Stdio;

use ringfence_live::daemon::{Daemon, EndReason};
use ringfence_live::handover::HandOverTimeouts;

use super::guest::{AWAY, Dir, Guest, daemon, daemon_of, end};
use crate::rig::*;

#[test]
fn devices_go_on_elsewhere_without_the_client_seeing_it() {
    let dir = Dir::new("on");
    let mut first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    guest.read(3);
    for round in 0..3u64 {
        let before = guest.mapped_in("self");
        assert_eq!(before.len(), 2, "two clients share the memory");
        // A request without a doorbell, and a part of the doorbell's message.
        guest.offer(10 + round);
        let bell = [longs(&[0x3000]), words(&[0, 2]), vec![0, 0]].concat();
        let bell = encode(7, REGION_WRITE, 0, &bell);
        let (now, later) = bell.split_at(5 + 7 * round as usize);
        guest.disk.send(now, &[]);
        let (second, taken) = Daemon::take_over(here!(&dir.0), 0).unwrap();
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        assert_eq!(taken.copies, 1);
        let after = guest.mapped_in("self");
        assert_eq!(
            after.len(),
            2,
            "the first one's are gone: {before:?}, {after:?}"
        );
        assert!(
            before.iter().all(|range| !after.contains(range)),
            "{before:?} {after:?}"
        );
        guest.disk.send(later, &[]);
        assert_eq!(guest.disk.receive().0, 0);
        guest.has_read(10 + round);
        guest.read(20 + round);
        guest.is_stopped_at(Guest::stopped_at());
        guest.read(30 + round);
        first = second;
    }
    // Another client is served as well, and the daemon removes the sockets at its end.
    drop(guest);
    let mut guest = Guest::boot(&dir);
    guest.read(7);
    drop(guest);
    end(first);
    for name in ["blk", "iommu", "rng", "metrics", "control"] {
        assert!(!dir.0.join(format!("{name}.sock")).exists(), "{name}");
    }
}

/// A function that is not a bus master is none in the next process either. It does all pending work
/// once its driver sets the bit there.
#[test]
fn a_function_that_may_not_master_the_bus_may_not_elsewhere() {
    let dir = Dir::new("master");
    let mut first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    guest.read(3);
    for remote in [&mut guest.iommu, &mut guest.disk] {
        remote.master(false);
    }
    guest.offer(4);
    guest.disk.ring(0);
    for _ in 0..2 {
        let before = guest.peek(0, RAM_BYTES as usize);
        let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        first = second;
        guest.disk.ring(0);
        assert_eq!(guest.disk.register(0x14, 1), [15]);
        assert!(guest.peek(0, RAM_BYTES as usize) == before, "written to");
        let interrupt = rustix::io::read(&guest.interrupt, &mut [0; 8]);
        assert_eq!(interrupt, Err(rustix::io::Errno::AGAIN));
    }
    guest.disk.master(true);
    guest.has_read(4);
    guest.iommu.master(true);
    guest.is_stopped_at(Guest::stopped_at());
    guest.read(5);
    end(first);
}

#[test]
fn descriptors_of_a_message_that_is_under_way_go_with_it() {
    use std::os::fd::AsFd;
    let dir = Dir::new("part");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let more = sealed(4096);
    let map = [words(&[32, 3]), longs(&[0, 1 << 30, 4096])].concat();
    let map = encode(7, DMA_MAP, 0, &map);
    guest.disk.send(&map[..20], &[more.as_fd()]);
    let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    guest.disk.send(&map[20..], &[]);
    assert_eq!(guest.disk.receive().0, 0, "it had its descriptor");
    guest.read(5);
    end(second);
}

#[test]
fn pviommu_mappings_are_handed_over_as_records() {
    let dir = Dir::new("para");
    let mut first = daemon_of(&dir, HandOverTimeouts::default(), true);
    let mut guest = Guest::boot_with(&dir, true);
    guest.read(3);
    for round in 0..3 {
        let before = guest.mapped_in("self");
        let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        let after = guest.mapped_in("self");
        assert!(before.iter().all(|range| !after.contains(range)));
        guest.read(20 + round);
        // The second process knows the mappings: it refuses a second map, and it can unmap.
        assert_eq!(guest.map(AWAY, 4096, 0), 5, "mapped already");
        guest.is_stopped_at(Guest::stopped_at());
        guest.read(30 + round);
        first = second;
    }
    drop(guest);
    end(first);
}

/// The destination process of the test below.
#[test]
#[ignore = "started by another test"]
fn second_process() {
    let Ok(dir) = std::env::var("RF_HAND_OVER_DIR") else {
        return;
    };
    let (daemon, _) = Daemon::take_over(here!(dir.as_ref()), 0).unwrap();
    println!("taken");
    // Wait until the test closes this process's input.
    let _ = std::io::stdin().read_line(&mut String::new());
    end(daemon);
}

#[test]
fn source_unmaps_guest_memory_before_the_destination_starts() {
    use std::io::BufRead;
    let dir = Dir::new("two");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    guest.read(3);
    assert_eq!(guest.mapped_in("self").len(), 2);
    let mut second = crate::process_of("handover::success::second_process")
        .env("RF_HAND_OVER_DIR", &dir.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = std::io::BufReader::new(second.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().contains("taken")));
    // This process lives, but serves no device.
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    assert_eq!(guest.mapped_in("self"), [""; 0]);
    assert_eq!(guest.mapped_in(&second.id().to_string()).len(), 2);
    guest.read(4);
    guest.is_stopped_at(Guest::stopped_at());
    drop(second.stdin.take());
    assert!(second.wait().unwrap().success());
}

#[test]
fn it_is_copied_while_requests_are_completed() {
    let dir = Dir::new("busy");
    let first = daemon(&dir, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let path = dir.0.clone();
    let taking = std::thread::spawn(move || Daemon::take_over(here!(&path), 100).unwrap());
    let mut reads = 0;
    while !taking.is_finished() {
        guest.read(reads % 200);
        reads += 1;
    }
    let (second, taken) = taking.join().unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    assert!(taken.requests_completed >= 100, "{taken:?}");
    assert!(taken.copies > 1, "{taken:?}");
    guest.read(9);
    end(second);
}
