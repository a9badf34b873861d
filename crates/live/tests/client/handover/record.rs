//! Hand-over of a virtio-iommu that records requests: the record continues where the other process
//! stopped.

use std::fs::{self, File};
use std::os::fd::OwnedFd;

use ringfence_live::daemon::{Daemon, DeviceOptions, Disk, EndReason, Iommu, VfioUserDevices};
use ringfence_live::handover::{
    DeviceState, HandOverTimeouts, RecordState, SavedDevices, StateError,
};
use ringfence_live::limits::GuestLimits;

use super::guest::{AWAY, Dir, Guest, end, serving};
use super::refused::Second;

fn devices(dir: &Dir) -> DeviceOptions {
    let requests = Some(dir.0.join("requests"));
    let devices = VfioUserDevices {
        iommu: Iommu::Virtio {
            requests,
            dmas: None,
        },
        disk: Some(Disk::new(dir.0.join("disk.img"))),
        ..VfioUserDevices::default()
    };
    devices.into()
}

fn recorded(dir: &Dir) -> Daemon {
    serving(dir, &devices(dir), HandOverTimeouts::default())
}

/// Returns the record of a guest's boot.
fn booted() -> Vec<String> {
    let last = AWAY + crate::rig::RAM_BYTES - 1;
    vec![
        "attach domain=1 endpoint=32 ok".to_owned(),
        format!("map domain=1 start={AWAY:#x} last={last:#x} physical=0x0 flags=3 ok"),
    ]
}

/// Makes some requests; returns their record.
fn ask(guest: &mut Guest, pages: u64) -> Vec<String> {
    let mut expected = Vec::new();
    for page in 0..pages {
        let (start, last) = (page << 12, (page << 12) + 0xfff);
        assert_eq!(guest.map(start, 4096, 0), 0);
        assert_eq!(guest.unmap(start, 4096), 0);
        assert_ne!(guest.map(AWAY, 4096, 0), 0, "mapped already");
        expected.push(format!(
            "map domain=1 start={start:#x} last={last:#x} physical=0x0 flags=3 ok"
        ));
        expected.push(format!("unmap domain=1 start={start:#x} last={last:#x} ok"));
        let last = AWAY + 0xfff;
        expected.push(format!(
            "map domain=1 start={AWAY:#x} last={last:#x} physical=0x0 flags=3 refused"
        ));
    }
    expected
}

#[test]
fn every_request_is_written_down_once() {
    let dir = Dir::new("record");
    let mut first = recorded(&dir);
    let mut guest = Guest::boot(&dir);
    let mut expected = booted();
    // Lines that fill the buffer several times, few lines, and none.
    for pages in [3, 70, 0, 1, 90, 0] {
        expected.extend(ask(&mut guest, pages));
        // Copies without a take-over write nothing.
        Second::connect(&dir).copy();
        let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
        assert_eq!(first.join().unwrap(), EndReason::HandedOver);
        guest.read(3);
        first = second;
    }
    let so_far = fs::read_to_string(dir.0.join("requests")).unwrap();
    assert!(so_far.lines().all(|line| line != "end"), "it goes on");
    expected.extend(ask(&mut guest, 2));
    drop(guest);
    end(first);
    expected.push("end\n".to_owned());
    let written = fs::read_to_string(dir.0.join("requests")).unwrap();
    assert!(written == expected.join("\n"), "{written}");
}

/// A full record stays full, and its last line counts the requests that all processes left out.
#[test]
fn full_record_counts_requests_of_all_processes() {
    let dir = Dir::new("record-full");
    let mut expected = booted();
    let devices = DeviceOptions {
        limits: GuestLimits {
            record_bytes: expected.iter().map(|line| line.len() as u64 + 1).sum(),
            ..GuestLimits::default()
        },
        ..devices(&dir)
    };
    let first = serving(&dir, &devices, HandOverTimeouts::default());
    let mut guest = Guest::boot(&dir);
    let mut lost = ask(&mut guest, 3).len();
    let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    lost += ask(&mut guest, 0).len();
    let (third, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
    assert_eq!(second.join().unwrap(), EndReason::HandedOver);
    lost += ask(&mut guest, 2).len();
    drop(guest);
    end(third);
    expected.extend(["full".to_owned(), format!("lost {lost}\n")]);
    let written = fs::read_to_string(dir.0.join("requests")).unwrap();
    assert_eq!(written, expected.join("\n"));
}

#[test]
fn record_without_an_owner_is_rejected() {
    let dir = Dir::new("record-lies");
    let first = recorded(&dir);
    let mut guest = Guest::boot(&dir);
    let refused = |change: &dyn Fn(&mut RecordState)| {
        let (bytes, fds) = Second::connect(&dir).copy();
        let mut handed = SavedDevices::decode(&bytes, fds).unwrap();
        match &mut handed.devices[0].state {
            DeviceState::Iommu {
                record: Some(record),
                ..
            } => change(record),
            other => panic!("{other:?}"),
        }
        let rehearsed = Daemon::rehearse(here!(&dir.0), handed);
        rehearsed.err().map(|error| match error {
            StateError::Register { what } | StateError::NotA { what } => what,
            error => panic!("{error}"),
        })
    };
    let image = dir.0.join("disk.img");
    let readable = || OwnedFd::from(File::open(&image).unwrap());
    let directory = || OwnedFd::from(File::open(&dir.0).unwrap());
    let socket = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
    assert_eq!(refused(&|_| {}), None);
    assert_eq!(refused(&|r| r.file = readable()), Some("record"));
    assert_eq!(refused(&|r| r.file = directory()), Some("record"));
    assert_eq!(refused(&|r| r.file = socket()), Some("record"));
    let lines = Some("record line count");
    assert_eq!(refused(&|r| r.whole = false), lines);
    assert_eq!(refused(&|r| r.pending.truncate(r.pending.len() - 1)), lines);
    assert_eq!(refused(&|r| r.pending[0] = 0x80), lines);
    assert_eq!(refused(&|r| r.pending = vec![b'\n'; 8192]), lines);
    guest.read(3);
    drop(guest);
    end(first);
    let written = fs::read_to_string(dir.0.join("requests")).unwrap();
    let whole = [booted(), vec!["end\n".to_owned()]].concat();
    assert!(written == whole.join("\n"), "{written}");
}
