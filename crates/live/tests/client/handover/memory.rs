//! Locked memory and memory in a file: the destination applies its own settings before the source
//! releases the devices.

use std::fs::{self, File};

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, EndReason, Iommu, LocalConfig, VfioUserDevices,
};
use ringfence_live::handover::{HandOverTimeouts, SavedDevices, StateError};
use ringfence_live::limits::GuestLimits;
use ringfence_live::{Locked, MemoryError, MemoryRules};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::guest::{Dir, Guest, daemon_of, end, log, serving};
use super::refused::Second;
use crate::rig::*;

const KIB: u64 = RAM_BYTES >> 10;

fn rules(locked: Locked) -> MemoryRules {
    MemoryRules { file: None, locked }
}

fn devices(dir: &Dir, memory: &MemoryRules) -> DeviceOptions {
    let devices = VfioUserDevices {
        iommu: Iommu::PVIOMMU,
        disk: Some(Disk::new(dir.0.join("disk.img"))),
        memory: memory.clone(),
        ..VfioUserDevices::default()
    };
    devices.into()
}

fn copy(dir: &Dir) -> SavedDevices {
    let (bytes, fds) = Second::connect(dir).copy();
    SavedDevices::decode(&bytes, fds).unwrap()
}

#[test]
fn destination_locks_memory_before_the_release() {
    // Two clients share the memory; the pages that the IOMMU's client shares are pinned.
    for (locked, each) in [
        (Locked::Nothing, 0),
        (Locked::Mapped, KIB),
        (Locked::All, 2 * KIB),
    ] {
        let dir = Dir::new(&format!("lock-{locked:?}"));
        let memory = rules(locked);
        let mut first = serving(&dir, &devices(&dir, &memory), HandOverTimeouts::default());
        let mut guest = Guest::boot_with(&dir, true);
        assert_eq!(guest.locked(), each);
        let (caps, log) = (GuestLimits::default(), log());
        let here = LocalConfig {
            memory: &memory,
            ..LocalConfig::new(&dir.0, &caps, &log)
        };
        for round in 0..2 {
            // The state before the confirmation.
            let rebuilt = Daemon::rehearse(here, copy(&dir)).unwrap();
            assert_eq!(guest.locked(), 2 * each);
            drop(rebuilt);
            assert_eq!(guest.locked(), each);
            let (second, _) = Daemon::take_over(here, 0).unwrap();
            assert_eq!(first.join().unwrap(), EndReason::HandedOver);
            assert_eq!(guest.locked(), each);
            guest.read(10 + round);
            // An unmap unlocks the pages, and a new map locks them again.
            guest.is_stopped_at(Guest::stopped_at());
            assert_eq!(guest.locked(), each);
            first = second;
        }
        // The same holds for memory that another client shares.
        drop(guest);
        let guest = Guest::boot_with(&dir, true);
        assert_eq!(guest.locked(), each);
        drop(guest);
        end(first);
    }
}

#[test]
fn unmapped_memory_is_not_locked() {
    let dir = Dir::new("lock-none");
    let first = daemon_of(&dir, HandOverTimeouts::default(), false);
    let mut guest = Guest::boot(&dir);
    let (memory, caps, log) = (rules(Locked::Mapped), GuestLimits::default(), log());
    let here = LocalConfig {
        memory: &memory,
        ..LocalConfig::new(&dir.0, &caps, &log)
    };
    let refused = Daemon::rehearse(here, copy(&dir));
    assert!(matches!(refused, Err(StateError::Unfit(_))), "{refused:?}");
    guest.read(3);
    end(first);
}

/// A destination process that may lock as much memory as its environment says. It prints its
/// result.
#[test]
#[ignore = "started by another test"]
fn second_process() {
    let Ok(dir) = std::env::var("RF_HAND_OVER_DIR") else {
        return;
    };
    let word = |name: &str| std::env::var(name).unwrap();
    let limit = word("RF_LOCKED_KIB").parse::<u64>().unwrap() << 10;
    let locked = match word("RF_LOCK").as_str() {
        "all" => Locked::All,
        _ => Locked::Mapped,
    };
    let limits = Rlimit {
        current: Some(limit),
        ..getrlimit(Resource::Memlock)
    };
    setrlimit(Resource::Memlock, limits).unwrap();
    // The limit does not apply to a process with this capability.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let (memory, caps, log) = (rules(locked), GuestLimits::default(), log());
    let here = LocalConfig {
        memory: &memory,
        ..LocalConfig::new(dir.as_ref(), &caps, &log)
    };
    match Daemon::take_over(here, 0) {
        Ok((daemon, _)) => {
            println!("taken");
            end(daemon);
        }
        Err((_, error)) => println!("{error}"),
    }
}

#[test]
fn rehearsal_rejects_a_lower_lock_limit() {
    for (name, locked, enough, words) in [
        ("mapped", Locked::Mapped, KIB, "a limit of the host"),
        (
            "all",
            Locked::All,
            2 * KIB,
            "raise the limit of locked memory",
        ),
    ] {
        let dir = Dir::new(&format!("lock-limit-{name}"));
        let first = serving(
            &dir,
            &devices(&dir, &rules(locked)),
            HandOverTimeouts::default(),
        );
        let mut guest = Guest::boot_with(&dir, true);
        assert_eq!(guest.locked(), enough);
        let second = |kib: u64| {
            let second = crate::process_of("handover::memory::second_process")
                .env("RF_HAND_OVER_DIR", &dir.0)
                .env("RF_LOCKED_KIB", kib.to_string())
                .env("RF_LOCK", name)
                .output()
                .unwrap();
            assert!(second.status.success(), "{second:?}");
            String::from_utf8(second.stdout).unwrap()
        };
        for kib in [0, 4, enough - 4] {
            let said = second(kib);
            assert!(said.contains(words), "{kib}: {said}");
            guest.read(3);
            assert_eq!(guest.locked(), enough);
        }
        assert!(second(enough).contains("taken"));
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        assert_eq!(guest.locked(), 0);
    }
}

/// A destination accepts a file that could be truncated only if its own settings name the file. It
/// removes the file at its end.
#[test]
fn memory_file_needs_the_option_at_the_destination() {
    let dir = Dir::new("memory-file");
    let path = dir.0.join("memory");
    let memory = MemoryRules {
        file: Some(path.clone()),
        locked: Locked::Mapped,
    };
    let mut first = serving(&dir, &devices(&dir, &memory), HandOverTimeouts::default());
    let ram = File::options().read(true).write(true).open(&path).unwrap();
    ram.set_len(RAM_BYTES).unwrap();
    let mut guest = Guest::boot_on(&dir, true, ram);
    let (caps, log) = (GuestLimits::default(), log());
    let told = |memory: &MemoryRules| {
        let here = LocalConfig {
            memory,
            ..LocalConfig::new(&dir.0, &caps, &log)
        };
        Daemon::rehearse(here, copy(&dir)).err()
    };
    let other = dir.0.join("disk.img");
    for (file, expected) in [(None, false), (Some(other.clone()), true)] {
        let error = told(&MemoryRules {
            file,
            ..memory.clone()
        });
        match error {
            Some(StateError::Unfit(_)) => assert!(expected),
            Some(StateError::Memory(MemoryError::Unsealed { .. })) => assert!(!expected),
            error => panic!("{error:?}"),
        }
        guest.read(3);
    }
    for round in 0..2 {
        let here = LocalConfig {
            memory: &memory,
            ..LocalConfig::new(&dir.0, &caps, &log)
        };
        let (second, _) = Daemon::take_over(here, 0).unwrap();
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        assert!(path.exists(), "it is the second one's");
        assert_eq!(guest.locked(), KIB);
        guest.read(10 + round);
        first = second;
    }
    drop(guest);
    end(first);
    assert!(!path.exists(), "it goes with the devices");
    assert!(other.exists());
}

/// Sealed memory has no file name: a named file belongs to someone else, and remains.
#[test]
fn a_file_that_is_not_the_guests_memory_is_refused() {
    let dir = Dir::new("memory-other");
    let first = daemon_of(&dir, HandOverTimeouts::default(), true);
    let mut guest = Guest::boot_with(&dir, true);
    let other = dir.0.join("other");
    fs::write(&other, [0; 4096]).unwrap();
    let memory = MemoryRules {
        file: Some(other.clone()),
        locked: Locked::Nothing,
    };
    let (caps, log) = (GuestLimits::default(), log());
    let here = LocalConfig {
        memory: &memory,
        ..LocalConfig::new(&dir.0, &caps, &log)
    };
    let (_, error) = Daemon::take_over(here, 0).unwrap_err();
    let nothing = "the guest's memory is not in the file of --memory-file";
    assert!(error.to_string().contains(nothing), "{error}");
    guest.read(3);
    end(first);
    assert!(other.exists());
}
