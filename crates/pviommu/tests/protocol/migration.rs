//! Migration: the guest's view survives, host addresses do not, and hostile streams are
//! rejected as a whole.

use std::collections::BTreeSet;

use proptest::prelude::*;
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceState, ExportError, FixedLastTable, IoTables, Resident,
    RestoreError,
};
use ringfence_pviommu::wire::{Devid, Gpa, Status, StreamWriter};
use ringfence_types::{Access, Direction, Iova};

use crate::replies;
use crate::rig::{DISK, MEMORY, NIC, PAGE, Rig, WINDOW, cases, config, memory};
use crate::vectors::{self, Setting, StreamResult, StreamVector};

fn busy() -> Rig {
    let mut rig = Rig::new();
    // Allocate the frames in another order than the destination.
    for page in (0..40).rev() {
        rig.frame(MEMORY + page * PAGE);
    }
    let run: Vec<_> = (0..30)
        .map(|page| (WINDOW + page * PAGE, MEMORY + (page * 7 % 40) * PAGE))
        .collect();
    assert_eq!(rig.map(NIC, Direction::ToDevice, &run), Status::Ok);
    assert_eq!(rig.map(DISK, Direction::FromDevice, &run[3..9]), Status::Ok);
    assert_eq!(rig.unmap(NIC, &[WINDOW + 11 * PAGE]), Status::Ok);
    rig
}

#[test]
fn mappings_arrive_at_other_frames() {
    let mut source = busy();
    let stream = source.backend.export(|_| DeviceState::Transferred).unwrap();
    let mut destination = Rig::new();
    destination.backend.restore(&stream).unwrap();
    let mut moved = 0;
    for device in [NIC, DISK] {
        for page in 0..32 {
            let giova = WINDOW + page * PAGE;
            for access in [Access::Read, Access::Write] {
                let (old, new) = (
                    source.reach(device, giova, access),
                    destination.reach(device, giova, access),
                );
                assert_eq!(old.is_ok(), new.is_ok(), "{device} {giova:#x}");
                if let Ok(new) = new {
                    let gpa = MEMORY + (page * 7 % 40) * PAGE;
                    assert_eq!(destination.frame(gpa), new);
                    moved += u32::from(old != Ok(new));
                }
            }
        }
    }
    assert!(moved > 20, "{moved} at other frames");
    assert_eq!(
        destination
            .backend
            .export(|_| DeviceState::Transferred)
            .unwrap(),
        stream
    );
    // The source frees its frames.
    source.backend.reset().unwrap();
    assert!(source.reach(NIC, WINDOW, Access::Read).is_err());
    for page in 0..40 {
        let page = Gpa::new(MEMORY + page * PAGE);
        let frame = source
            .backend
            .backing()
            .reclaim(page, &mut source.processors);
        assert!(frame.is_ok());
    }
}

/// The paper migrates no guest with a directly assigned device, mapped or not.
#[test]
fn devices_without_readable_state_do_not_migrate() {
    let assigned = |hardware| {
        move |device| match device == hardware {
            true => DeviceState::Inaccessible,
            false => DeviceState::Transferred,
        }
    };
    let mut source = busy();
    let stream = source.backend.export(|_| DeviceState::Transferred).unwrap();
    for device in [NIC, DISK] {
        let refused = source.backend.export(assigned(device));
        assert_eq!(refused, Err(ExportError::Inaccessible(device)));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&device.to_string()), "{text}");
    }
    // A device that the guest does not have changes nothing.
    let other = Devid::new(0x12);
    assert_eq!(source.backend.export(assigned(other)), Ok(stream));
    // The source continues, and a device without mappings has state all the same.
    assert!(source.reach(NIC, WINDOW, Access::Read).is_ok());
    source.backend.reset().unwrap();
    let refused = source.backend.export(assigned(DISK));
    assert_eq!(refused, Err(ExportError::Inaccessible(DISK)));
}

fn stream(pages: &[(u64, u64, u64)]) -> Vec<u8> {
    let mut writer = StreamWriter::new();
    for (device, giova, gpa) in pages {
        writer
            .page(
                Devid::new(*device),
                Iova::new(*giova),
                Gpa::new(*gpa),
                Direction::ToDevice,
            )
            .unwrap();
    }
    writer.finish()
}

fn nothing_is_mapped(rig: &mut Rig) {
    for device in [NIC, DISK] {
        assert_eq!(rig.backend.mapped_pages(device), 0);
        assert!(rig.reach(device, WINDOW, Access::Read).is_err());
    }
    for page in 0..8 {
        let page = Gpa::new(MEMORY + page * PAGE);
        assert_eq!(rig.backend.backing().pinned(page), Some(0));
    }
}

/// Well-formed streams whose last mapping the guest could not have made, after valid mappings.
#[test]
fn streams_that_no_guest_made_are_refused_whole() {
    let good = (0x10, WINDOW, MEMORY);
    for (name, bad, status) in [
        ("another device", (0x12, WINDOW, MEMORY), Status::NoDevice),
        ("no device", (1 << 63, WINDOW, MEMORY), Status::NoDevice),
        (
            "below the window",
            (0x11, WINDOW - PAGE, MEMORY),
            Status::BadGiova,
        ),
        (
            "above the window",
            (0x11, WINDOW + (64 << 20), MEMORY),
            Status::BadGiova,
        ),
        ("a hole", (0x11, WINDOW, 8 << 20), Status::BadGpa),
        ("above all memory", (0x11, WINDOW, 1 << 50), Status::BadGpa),
        ("inside a page", (0x11, WINDOW, MEMORY + 8), Status::BadGpa),
    ] {
        let mut rig = Rig::new();
        let refused = rig.backend.restore(&stream(&[good, bad]));
        assert_eq!(
            refused,
            Err(RestoreError::Refused {
                record: 1,
                device: Devid::new(bad.0),
                first: Iova::new(bad.1),
                status,
            }),
            "{name}"
        );
        nothing_is_mapped(&mut rig);
        rig.backend.restore(&stream(&[good])).unwrap();
        assert!(rig.reach(NIC, WINDOW, Access::Read).is_ok());
        assert_eq!(
            rig.backend.restore(&stream(&[good])),
            Err(RestoreError::NotEmpty(NIC))
        );
    }
}

/// Restores every stream of the vectors. An accepted stream is mapped and exported again; a
/// rejected one leaves nothing mapped.
#[test]
fn every_stream_of_the_vectors_is_taken_whole_or_refused_whole() {
    let (mut taken, mut refused) = (0, BTreeSet::new());
    for (setting, vectors) in vectors::streams() {
        for vector in vectors {
            if setting.failing {
                let mut host = replies::over(&setting, replies::Stuck);
                arrive(&mut host, &setting, &vector);
            } else {
                let mut host = replies::over(&setting, replies::Nowhere);
                arrive(&mut host, &setting, &vector);
            }
            match vector.end {
                StreamResult::Refused { status, .. } => _ = refused.insert(status),
                StreamResult::Accepted { .. } => taken += 1,
                StreamResult::Malformed(_) => {}
            }
        }
    }
    assert!(taken > 10, "{taken} taken");
    let all = [
        Status::NoDevice,
        Status::BadGiova,
        Status::BadGpa,
        Status::NoRoom,
        Status::Failed,
    ];
    assert_eq!(refused, BTreeSet::from(all));
}

fn arrive<T: IoTables>(
    host: &mut Backend<Resident, T>,
    setting: &Setting,
    StreamVector { name, bytes, end }: &StreamVector,
) {
    let mut mapped = 0;
    match (host.restore(bytes), end) {
        (Ok(()), StreamResult::Accepted { records, canonical }) => {
            mapped = records.iter().map(|(.., gpas)| gpas.len() as u64).sum();
            assert_eq!(
                host.export(|_| DeviceState::Transferred).unwrap() == *bytes,
                *canonical,
                "{name}"
            );
        }
        (Err(error), end) if end.is(&error) => {
            let nothing = StreamWriter::new().finish();
            assert_eq!(
                host.export(|_| DeviceState::Transferred).unwrap(),
                nothing,
                "{name}"
            );
        }
        (Ok(()), _) => panic!("{name}: taken"),
        (Err(error), _) => panic!("{name}: {error}"),
    }
    let devices = setting.config.devices();
    let found: u64 = devices.map(|device| host.mapped_pages(device)).sum();
    assert_eq!(found, mapped, "{name}");
}

#[test]
fn a_stream_that_does_not_fit_is_refused_whole() {
    let pages: Vec<_> = (0..6)
        .map(|page| (0x10, WINDOW + page * 2 * PAGE, MEMORY))
        .collect();
    let limits = BackendLimits {
        mappings: 5,
        ..BackendLimits::default()
    };
    let mut rig = Rig::with(config(), limits, &memory(), FixedLastTable::default());
    let refused = rig.backend.restore(&stream(&pages));
    assert!(
        matches!(
            refused,
            Err(RestoreError::Refused {
                record: 5,
                status: Status::NoRoom,
                ..
            })
        ),
        "{refused:?}"
    );
    nothing_is_mapped(&mut rig);
    rig.backend.restore(&stream(&pages[..5])).unwrap();
    // No table is left for the last of several mappings.
    let far: Vec<_> = (0..6)
        .map(|page| (0x10, WINDOW + page * (4 << 20), MEMORY))
        .collect();
    let mut rig = Rig::new();
    rig.tables.0.fail_after(8);
    let refused = rig.backend.restore(&stream(&far));
    assert!(
        matches!(
            refused,
            Err(RestoreError::Refused {
                status: Status::NoRoom,
                ..
            })
        ),
        "{refused:?}"
    );
    rig.tables.0.recover();
    nothing_is_mapped(&mut rig);
    rig.backend.restore(&stream(&far)).unwrap();
}

proptest! {
    #![proptest_config(cases(64, 20_251_123))]

    /// A valid stream with one bit flipped or cut short.
    #[test]
    fn spoiled_streams_are_refused_whole(at in any::<prop::sample::Index>(), bit in 0..9_u32) {
        let good = busy().backend.export(|_| DeviceState::Transferred).unwrap();
        let mut bytes = good.clone();
        let at = at.index(bytes.len());
        if bit == 8 {
            bytes.truncate(at);
        } else {
            bytes[at] ^= 1 << bit;
        }
        let mut rig = Rig::new();
        prop_assert!(matches!(rig.backend.restore(&bytes), Err(RestoreError::Stream(_))));
        nothing_is_mapped(&mut rig);
        prop_assert!(rig.backend.restore(&good).is_ok());
    }
}
