//! Hand-over of a disk that the hardware model translates for: the second process maps its pages
//! again, with cold hardware.

use std::os::fd::OwnedFd;

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, DiskMode, EndReason, Iommu, LocalConfig, VfioUserDevices,
};
use ringfence_live::handover::{DeviceState, DiskKind, HandOverTimeouts, SavedDevices, StateError};
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;

use super::guest::{AWAY, Dir, Guest, counted, end, iommu, log, serving};
use super::refused::Second;
use crate::rig::*;

const PAGES: u64 = RAM_BYTES >> 12;

fn devices(dir: &Dir, iommu: Iommu, mode: DiskMode) -> DeviceOptions {
    let devices = VfioUserDevices {
        iommu,
        disk: Some(Disk {
            mode,
            ..Disk::new(dir.0.join("disk.img"))
        }),
        ..VfioUserDevices::default()
    };
    devices.into()
}

fn take_over(dir: &Dir, first: Daemon, optimisations: HostPagePool) -> Daemon {
    let (caps, log) = (GuestLimits::default(), log());
    let here = LocalConfig {
        host_page_pool: optimisations,
        ..LocalConfig::new(&dir.0, &caps, &log)
    };
    let (second, _) = Daemon::take_over(here, 0).unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    second
}

fn copy(dir: &Dir) -> SavedDevices {
    let (bytes, fds): (_, Vec<OwnedFd>) = Second::connect(dir).copy();
    SavedDevices::decode(&bytes, fds).unwrap()
}

#[test]
fn assigned_device_resumes_with_its_mappings() {
    for para in [false, true] {
        let dir = Dir::new(if para {
            "assigned-para"
        } else {
            "assigned-virtio"
        });
        let devices = devices(&dir, iommu(para), DiskMode::ASSIGNED);
        let mut first = serving(&dir, &devices, HandOverTimeouts::default());
        let mut guest = Guest::boot_with(&dir, para);
        guest.read(3);
        let iommu = if para { "pviommu" } else { "iommu" };
        for round in 0..4u64 {
            // Each process chooses its own host optimisations.
            let on = para && round % 2 == 1;
            let optimisations = [HostPagePool::Off, HostPagePool::On][usize::from(on)];
            let before = guest.mapped_in("self");
            let second = take_over(&dir, first, optimisations);
            let after = guest.mapped_in("self");
            assert_eq!(after.len(), 2, "the first one's are gone");
            assert!(before.iter().all(|range| !after.contains(range)));
            // Each page has a frame, found by a walk or by the pointer; the device has not accessed
            // any yet.
            assert_eq!(counted(&second, "blk", "unit_walks"), 0);
            guest.read(10 + round);
            let walks = counted(&second, "blk", "unit_walks");
            assert!(walks > 0, "its IOTLB is cold");
            // The disk can access mapped pages and no others.
            guest.is_stopped_at(Guest::stopped_at());
            guest.read(20 + round);
            if para {
                assert_eq!(guest.map(AWAY, 4096, 0), 5, "mapped already");
                assert_eq!(counted(&second, iommu, "frames"), PAGES);
                assert_eq!(counted(&second, iommu, "last_table_hits") > 0, on);
            }
            assert_eq!(counted(&second, iommu, "faults"), 1);
            first = second;
        }
        // A guest that boots now gets the same device.
        drop(guest);
        let mut guest = Guest::boot_with(&dir, para);
        guest.read(7);
        assert!(counted(&first, "blk", "unit_walks") > 0);
        drop(guest);
        end(first);
    }
}

/// kvm-baseline: the second process identity-maps all guest memory, too.
#[test]
fn without_an_iommu_all_of_the_guest_is_mapped_again() {
    let dir = Dir::new("assigned-whole");
    let devices = devices(&dir, Iommu::None, DiskMode::ASSIGNED);
    let mut first = serving(&dir, &devices, HandOverTimeouts::default());
    let mut guest = Guest::boot_untranslated(&dir);
    guest.read(3);
    for round in 0..3 {
        let second = take_over(&dir, first, HostPagePool::Off);
        assert_eq!(guest.mapped_in("self").len(), 1);
        assert_eq!(counted(&second, "blk", "frames"), PAGES);
        guest.read(10 + round);
        assert!(counted(&second, "blk", "unit_walks") > 0);
        first = second;
    }
    drop(guest);
    end(first);
}

#[test]
fn host_page_pool_requires_the_pviommu() {
    let dir = Dir::new("assigned-hopt");
    let log = log();
    let caps = GuestLimits::default();
    let here = LocalConfig {
        host_page_pool: HostPagePool::On,
        ..LocalConfig::new(&dir.0, &caps, &log)
    };
    let kinds = [(true, true), (false, true), (true, false), (false, false)];
    for (assigned, paravirtual) in kinds {
        let taken = paravirtual;
        let mode = if assigned {
            DiskMode::ASSIGNED
        } else {
            DiskMode::default()
        };
        let devices = devices(&dir, iommu(paravirtual), mode);
        let first = serving(&dir, &devices, HandOverTimeouts::default());
        let mut guest = Guest::boot_with(&dir, paravirtual);
        let rehearsed = Daemon::rehearse(here, copy(&dir));
        assert_eq!(rehearsed.is_ok(), taken);
        if !taken {
            assert!(matches!(rehearsed, Err(StateError::Unfit(_))));
            let (_, error) = Daemon::take_over(here, 0).unwrap_err();
            assert!(error.to_string().contains("--host-page-pool"), "{error}");
        }
        drop(rehearsed);
        guest.read(3);
        drop(guest);
        end(first);
    }
}

/// A domain that fits the software IOMMU but not the hardware's tables is refused: the device would
/// lose mappings.
#[test]
fn more_than_the_hardwares_tables_hold_is_refused() {
    // Tables of 4 KiB each, in 352 MiB.
    const TABLES: u64 = 92_000;
    let dir = Dir::new("assigned-many");
    let devices = devices(&dir, Iommu::default(), DiskMode::default());
    let first = serving(&dir, &devices, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let (log, mut caps) = (log(), GuestLimits::default());
    (caps.tables, caps.mappings) = (1 << 18, 1 << 18);
    // One page in each 2 MiB, from the middle of the address space. The only domain is at the
    // snapshot's end, before the events.
    let with = |mappings: u64, wanted: DiskKind| {
        let mut handed = copy(&dir);
        for device in &mut handed.devices {
            match &mut device.state {
                DeviceState::Iommu { snapshot, .. } => {
                    let events = snapshot.split_off(snapshot.len() - 4);
                    let count = snapshot.len() - 28 - 4;
                    let all = (mappings as u32 + 1).to_le_bytes();
                    snapshot[count..count + 4].copy_from_slice(&all);
                    for at in 0..mappings {
                        let start = 2 * AWAY + (at << 21);
                        snapshot.extend(longs(&[start, start + 4095, 0]));
                        snapshot.extend(words(&[3]));
                    }
                    snapshot.extend(events);
                }
                DeviceState::Blk { kind, .. } => *kind = wanted,
                _ => {}
            }
        }
        Daemon::rehearse(LocalConfig::new(&dir.0, &caps, &log), handed)
    };
    assert!(with(TABLES, DiskKind::Plain).is_ok());
    assert!(with(1000, DiskKind::Assigned).is_ok());
    let refused = with(TABLES, DiskKind::Assigned);
    assert!(matches!(refused, Err(StateError::Iommu(_))), "{refused:?}");
    guest.read(3);
    drop(guest);
    end(first);
}
