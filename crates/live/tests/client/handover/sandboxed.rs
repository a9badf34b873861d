//! Hand-over of a sandboxed disk: a new process continues with the same mappings after the old one
//! is dead.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, DiskMode, EndReason, LocalConfig, Log, RestoredDevices,
    VfioUserDevices,
};
use ringfence_live::handover::{
    DeviceState, DiskKind, FunctionState, HandOverTimeouts, SavedDevices, StateError,
};
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;
use ringfence_live::sandbox::SandboxProgram;

use super::guest::{AWAY, Dir, Guest, counted, end, iommu, log, serving};
use super::refused::{COPY, STOP, STREAM, Second};
use crate::rig::*;

pub(super) fn program(behaviour: &str) -> SandboxProgram {
    SandboxProgram {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: vec![behaviour.into()],
    }
}

fn devices(dir: &Dir, behaviour: &str, para: bool) -> DeviceOptions {
    let devices = VfioUserDevices {
        iommu: iommu(para),
        disk: Some(Disk {
            mode: DiskMode::Sandbox(program(behaviour)),
            ..Disk::new(dir.0.join("disk.img"))
        }),
        ..VfioUserDevices::default()
    };
    devices.into()
}

fn first(dir: &Dir, behaviour: &str, para: bool) -> Daemon {
    serving(
        dir,
        &devices(dir, behaviour, para),
        HandOverTimeouts::default(),
    )
}

fn boot(dir: &Dir, para: bool) -> Guest {
    let mut guest = Guest::boot_with(dir, para);
    guest.sandboxed = true;
    guest
}

fn copy(dir: &Dir) -> SavedDevices {
    let (bytes, fds): (_, Vec<OwnedFd>) = Second::connect(dir).copy();
    SavedDevices::decode(&bytes, fds).unwrap()
}

/// Calls `go` with a configuration whose sandbox program is `program`.
fn with<R>(
    dir: &Dir,
    program: Option<&SandboxProgram>,
    go: impl FnOnce(LocalConfig<'_>) -> R,
) -> R {
    let (caps, log): (_, Log) = (GuestLimits::default(), log());
    go(LocalConfig {
        sandbox: program,
        ..LocalConfig::new(&dir.0, &caps, &log)
    })
}

fn rehearse(dir: &Dir, handed: SavedDevices) -> Result<RestoredDevices, StateError> {
    with(dir, Some(&program("")), |here| {
        Daemon::rehearse(here, handed)
    })
}

fn take_over(dir: &Dir, first: Daemon) -> Daemon {
    take_over_with(dir, first, "")
}

fn take_over_with(dir: &Dir, first: Daemon, behaviour: &str) -> Daemon {
    let program = program(behaviour);
    let taken = with(dir, Some(&program), |here| Daemon::take_over(here, 0));
    let (second, _) = taken.unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    second
}

fn slot(handed: &SavedDevices) -> &ringfence_live::handover::QueueSlot {
    let disk = handed.devices.last().unwrap();
    assert!(matches!(
        disk.state,
        DeviceState::Blk {
            kind: DiskKind::Sandboxed,
            ..
        }
    ));
    let FunctionState::Virtio(registers) = &disk.function else {
        panic!("a disk");
    };
    &registers.common.queues[0]
}

/// Returns the processes that have the image open, without this one. A child of another test holds
/// the image between its fork and the end of its exec, so only a process in five listings counts.
fn processes(dir: &Dir) -> Vec<String> {
    let mut found = listed(dir);
    for _ in 0..4 {
        let again = listed(dir);
        found.retain(|process| again.contains(process));
    }
    found
}

/// Lists the processes once. A child before its exec has this process's command line.
fn listed(dir: &Dir) -> Vec<String> {
    let image = dir.0.join("disk.img");
    let command = |process: &str| fs::read(format!("/proc/{process}/cmdline")).ok();
    let own = command("self");
    let has_it = |process: &String| {
        let fds = fs::read_dir(format!("/proc/{process}/fd"));
        let mut fds = fds.into_iter().flatten().flatten();
        fds.any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == image))
    };
    let all = fs::read_dir("/proc").unwrap();
    let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let numbers = names.filter(|name| name.bytes().all(|c| c.is_ascii_digit()));
    let others = numbers.filter(|number| command(number) != own);
    others.filter(has_it).collect()
}

#[test]
fn new_sandbox_replaces_the_old_one() {
    for para in [false, true] {
        let dir = Dir::new(if para {
            "sandboxed-para"
        } else {
            "apart-virtio"
        });
        let mut first = first(&dir, "", para);
        let mut guest = boot(&dir, para);
        guest.read(3);
        for round in 0..3u64 {
            let before = processes(&dir);
            let [old] = &before[..] else {
                panic!("{before:?}");
            };
            let mapped = guest.mapped_in(old).len();
            assert!(mapped > 0, "it is granted something");
            // During a rehearsal two processes exist, each with its own grants.
            let rebuilt = rehearse(&dir, copy(&dir)).unwrap();
            let both = processes(&dir);
            assert_eq!(both.len(), 2);
            let other = both.iter().find(|number| *number != old).unwrap();
            assert_eq!(guest.mapped_in(other).len(), mapped);
            drop(rebuilt);
            assert_eq!(processes(&dir), before);
            // A request without a doorbell; earlier requests have moved the ring indices.
            guest.offer(10 + round);
            let second = take_over(&dir, first);
            let after = processes(&dir);
            assert_eq!(after.len(), 1);
            assert_ne!(after, before);
            assert!(!fs::exists(format!("/proc/{old}")).unwrap(), "it is dead");
            assert_eq!(guest.mapped_in(&after[0]).len(), mapped);
            assert_eq!(guest.mapped_in("self").len(), 2);
            guest.disk.ring(0);
            guest.has_read(10 + round);
            guest.read(20 + round);
            guest.is_stopped_at(Guest::stopped_at());
            guest.read(30 + round);
            first = second;
        }
        drop(guest);
        let mut guest = boot(&dir, para);
        guest.read(7);
        drop(guest);
        end(first);
        assert_eq!(processes(&dir), [""; 0]);
    }
}

/// Frames belong to the host: the second process allocates its own, from its pool if it has one.
#[test]
fn mappings_use_frames_of_the_destination() {
    let dir = Dir::new("sandboxed-hopt");
    let mut first = first(&dir, "", true);
    let mut guest = boot(&dir, true);
    guest.read(3);
    let pages = RAM_BYTES >> 12;
    assert_eq!(counted(&first, "pviommu", "frames"), pages);
    assert_eq!(counted(&first, "pviommu", "frames_awaited"), pages);
    for round in 0..4u64 {
        let on = round % 2 == 0;
        let program = program("");
        let second = with(&dir, Some(&program), |here| {
            let optimisations = [HostPagePool::Off, HostPagePool::On][usize::from(on)];
            let here = LocalConfig {
                host_page_pool: optimisations,
                ..here
            };
            Daemon::take_over(here, 0).unwrap().0
        });
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        guest.read(10 + round);
        // The IOMMU updates its counters before it replies.
        assert_eq!(guest.map(AWAY, 4096, 0), 5, "mapped already");
        assert_eq!(counted(&second, "pviommu", "frames"), pages);
        assert_eq!(counted(&second, "pviommu", "frames_awaited") < pages, on);
        assert_eq!(counted(&second, "pviommu", "last_table_hits") > 0, on);
        first = second;
    }
    drop(guest);
    end(first);
}

/// Lets a waiting process continue, or not, through the last byte of its disk.
fn let_go_on(dir: &Dir, on: bool) {
    let_go_on_at(&dir.0, on);
}

fn let_go_on_at(dir: &Path, on: bool) {
    let image = dir.join("disk.img");
    let file = fs::File::options().write(true).open(image).unwrap();
    let last = [if on { 0xff } else { 0 }];
    file.write_all_at(&last, DISK_SECTORS * 512 - 1).unwrap();
}

/// Offers two requests with doorbells. The process starts neither.
fn ask_twice(dir: &Dir, guest: &mut Guest) {
    let_go_on(dir, false);
    for sector in [4, 5] {
        guest.offer(sector);
        guest.disk.ring(0);
    }
}

/// Checks that both requests are done, each once.
fn are_done(dir: &Dir, guest: &mut Guest) {
    guest.has_all();
    // The copy makes the daemon read all messages of the process.
    copy(dir);
    guest.forget_interrupts();
    guest.read(6);
}

/// The driver rings again while the process works. The process finishes its turn, and the next
/// owner serves the second request.
#[test]
fn round_completes_before_the_next_owner_starts() {
    let dir = Dir::new("sandboxed-turn");
    let first = first(&dir, "waits", false);
    let mut guest = boot(&dir, false);
    guest.read(3);
    let mut unfinished = 0;
    for attempt in 0..200 {
        ask_twice(&dir, &mut guest);
        let mut second = Second::connect(&dir);
        second.say(COPY);
        // The turn may end before the disk is paused, or after.
        for _ in 0..attempt {
            guest.iommu.register(0x14, 1);
        }
        let_go_on(&dir, true);
        let (kind, bytes, fds) = second.hear();
        assert_eq!(kind, STREAM);
        let handed = SavedDevices::decode(&bytes, fds).unwrap();
        let slot = slot(&handed);
        assert_eq!(slot.queue.next_avail, guest.requests);
        assert_eq!(slot.queue.next_used, guest.requests);
        unfinished += u32::from(slot.unfinished);
        drop(second);
        are_done(&dir, &mut guest);
        if unfinished > 2 {
            break;
        }
    }
    assert!(unfinished > 2, "never called while it was at work");
    // The same holds when another process takes over.
    let mut daemon = first;
    for _ in 0..3 {
        ask_twice(&dir, &mut guest);
        let path = dir.0.clone();
        let gate = std::thread::spawn(move || {
            (0..100).for_each(|_| std::thread::yield_now());
            let_go_on_at(&path, true);
        });
        daemon = take_over_with(&dir, daemon, "waits");
        gate.join().unwrap();
        are_done(&dir, &mut guest);
    }
    end(daemon);
}

#[test]
fn busy_sandbox_stays_at_the_source() {
    let dir = Dir::new("sandboxed-late");
    let limits = HandOverTimeouts {
        stop: Duration::from_secs(1),
        ..HandOverTimeouts::default()
    };
    let first = serving(&dir, &devices(&dir, "waits", false), limits);
    let mut guest = boot(&dir, false);
    guest.read(3);
    for asked in [COPY, STOP] {
        let_go_on(&dir, false);
        guest.offer(4);
        guest.disk.ring(0);
        let mut second = Second::connect(&dir);
        second.say(asked);
        let (kind, why, _) = second.hear();
        let why = String::from_utf8_lossy(&why).into_owned();
        assert_ne!(kind, STREAM);
        assert_eq!(why, "blk did not end its turn in time");
        let_go_on(&dir, true);
        guest.has_read(4);
    }
    end(first);
}

#[test]
fn sandbox_survives_a_lost_destination() {
    let dir = Dir::new("sandboxed-away");
    let first = first(&dir, "", false);
    let mut guest = boot(&dir, false);
    guest.read(3);
    let before = processes(&dir);
    for _ in 0..3 {
        let mut second = Second::connect(&dir);
        second.say(STOP);
        assert_eq!(second.hear().0, STREAM);
        drop(second);
        guest.read(4);
        assert_eq!(processes(&dir), before);
    }
    end(first);
}

/// A program that cannot run as a sandbox is detected while the first process works.
#[test]
fn rehearsal_rejects_a_foreign_program() {
    let dir = Dir::new("sandboxed-program");
    let first = first(&dir, "", false);
    let mut guest = boot(&dir, false);
    let before = processes(&dir);
    let refused = |program: Option<&SandboxProgram>| {
        let taken = with(&dir, program, |here| Daemon::take_over(here, 0));
        taken.unwrap_err().1.to_string()
    };
    let nothing = SandboxProgram {
        path: "/bin/true".into(),
        arguments: Vec::new(),
    };
    for (program, why) in [
        (None, "no program for the sandbox process"),
        (Some(nothing), "the process has exited"),
        (
            Some(program("keeps-a-thread")),
            "unexpected threads or descriptors",
        ),
        // It violates the protocol at its first map, so its disk would be broken.
        (Some(program("maps-more")), "unexpected system call"),
    ] {
        let said = refused(program.as_ref());
        assert!(said.contains(why), "{said}");
        assert_eq!(processes(&dir), before);
        guest.read(3);
    }
    end(first);
}

/// A disk whose process was killed needs a reset. It can recover in another process.
#[test]
fn a_broken_disk_is_whole_again_after_its_drivers_reset() {
    let dir = Dir::new("sandboxed-broken");
    let devices = devices(&dir, "opens", false);
    let quiet: Log = std::sync::Arc::new(|_, _| {});
    let mut first = Daemon::start(&dir.0, &devices, &quiet).unwrap();
    first
        .offer_hand_over(HandOverTimeouts::default(), &quiet)
        .unwrap();
    let mut guest = boot(&dir, false);
    guest.offer(3);
    guest.disk.ring(0);
    while guest.disk.register(0x14, 1)[0] & 64 == 0 {}
    assert_eq!(processes(&dir), [""; 0]);
    let second = take_over(&dir, first);
    assert_eq!(
        guest.disk.register(0x14, 1)[0] & 64,
        64,
        "until it is reset"
    );
    guest.begin_again();
    guest.read(3);
    guest.is_stopped_at(Guest::stopped_at());
    end(second);
}

/// As many mappings as fit into a process, and one more.
#[test]
fn more_than_a_process_can_have_is_refused() {
    const WINDOWS: u64 = 16 * 1024;
    let dir = Dir::new("sandboxed-many");
    let first = first(&dir, "", false);
    let mut guest = boot(&dir, false);
    let with = |mappings: u64| {
        let mut handed = copy(&dir);
        for device in &mut handed.devices {
            let DeviceState::Iommu { snapshot, .. } = &mut device.state else {
                continue;
            };
            let events = snapshot.split_off(snapshot.len() - 4);
            let count = snapshot.len() - 28 - 4;
            let all = (mappings as u32).to_le_bytes();
            snapshot[count..count + 4].copy_from_slice(&all);
            for at in 1..mappings {
                let start = 2 * AWAY + (at << 12);
                snapshot.extend(longs(&[start, start + 4095, 0]));
                snapshot.extend(words(&[3]));
            }
            snapshot.extend(events);
        }
        rehearse(&dir, handed).map(drop)
    };
    assert!(with(WINDOWS).is_ok());
    let refused = with(WINDOWS + 1);
    assert!(matches!(refused, Err(StateError::Iommu(_))), "{refused:?}");
    guest.read(3);
    end(first);
}

/// A hostile stream: a sandboxed disk without an IOMMU that could grant pages.
#[test]
fn a_process_without_an_iommu_is_refused() {
    let dir = Dir::new("sandboxed-alone");
    let first = first(&dir, "", false);
    let mut guest = boot(&dir, false);
    let mut handed = copy(&dir);
    handed.devices.remove(0);
    let refused = rehearse(&dir, handed).unwrap_err();
    let why = "invalid sandboxed disk without an IOMMU: no driver can set this value";
    assert_eq!(refused.to_string(), why);
    guest.read(3);
    end(first);
}
