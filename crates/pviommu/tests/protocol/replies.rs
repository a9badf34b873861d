//! Sends the vectors to backends of every kind, and tests the backend's answers other than
//! statuses.

use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, EVENTS, FixedLastTable, HardwareTables, IoError, IoTables,
    OnDemand, Resident,
};
use ringfence_pviommu::wire::{Config, Devid, Event, EventReason, Status};
use ringfence_types::{Access, Direction, Iova, PhysAddr};

use crate::rig::{DISK, MEMORY, NIC, PAGE, Rig, WINDOW, config};
use crate::vectors::{Setting, Vector, all};

/// Tables whose operations always fail.
pub(crate) struct Stuck;

impl IoTables for Stuck {
    fn map(&mut self, _: DeviceSlot, _: Iova, _: PhysAddr, _: Direction) -> Result<(), IoError> {
        Err(IoError::Failed)
    }

    fn unmap(&mut self, _: DeviceSlot, _: Iova) -> Result<(), IoError> {
        Err(IoError::Failed)
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        Ok(())
    }
}

/// Tables without effect.
pub(crate) struct Nowhere;

impl IoTables for Nowhere {
    fn map(&mut self, _: DeviceSlot, _: Iova, _: PhysAddr, _: Direction) -> Result<(), IoError> {
        Ok(())
    }

    fn unmap(&mut self, _: DeviceSlot, _: Iova) -> Result<(), IoError> {
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        Ok(())
    }
}

fn limits(setting: &Setting) -> BackendLimits {
    BackendLimits {
        mappings: setting.mappings_max,
        ..BackendLimits::default()
    }
}

/// Creates a backend for the setting, over resident memory and these tables.
pub(crate) fn over<T: IoTables>(setting: &Setting, tables: T) -> Backend<Resident, T> {
    let memory = Resident::new(setting.memory.clone());
    Backend::new(setting.config.clone(), limits(setting), memory, tables)
}

fn run(setting: &Setting, vectors: &[Vector], mut handle: impl FnMut(&[u8]) -> Status) {
    for vector in vectors {
        let (of, name) = (&setting.name, &vector.name);
        assert_eq!(handle(&vector.bytes), vector.status, "{of}: {name}");
    }
}

#[test]
fn vectors_over_resident_memory() {
    for (setting, vectors) in all() {
        if setting.failing {
            let mut backend = over(&setting, Stuck);
            run(&setting, &vectors, |request| backend.handle(request));
        } else {
            let mut backend = over(&setting, Nowhere);
            run(&setting, &vectors, |request| backend.handle(request));
        }
    }
}

#[test]
fn vectors_over_hardware_tables() {
    for (setting, vectors) in all().into_iter().filter(|(setting, _)| !setting.failing) {
        let last = FixedLastTable::default();
        let mut rig = Rig::with(
            setting.config.clone(),
            limits(&setting),
            &setting.memory,
            last,
        );
        run(&setting, &vectors, |request| {
            rig.backend.maintain();
            rig.backend.handle(request)
        });
        let statuses: u64 = rig.backend.counts().statuses.iter().sum();
        assert_eq!(statuses, vectors.len() as u64);
    }
}

#[test]
fn a_device_between_those_of_the_list_is_no_device() {
    let memory = Resident::new(crate::rig::memory());
    let window = config().window();
    let listed = Config::new(window, 64, [0x0f, DISK.get() as u32, 0x12]).unwrap();
    let mut backend = Backend::new(listed, BackendLimits::default(), memory, Nowhere);
    let request = |device| crate::rig::map(device, Direction::ToDevice, &[(WINDOW, MEMORY)]);
    assert_eq!(backend.handle(&request(NIC)), Status::NoDevice);
    assert_eq!(backend.handle(&request(DISK)), Status::Ok);
}

/// Each limit applies to one guest, and a refused request changes nothing.
#[test]
fn limits_hold_and_leave_room_again() {
    let limits = BackendLimits {
        mappings: 1000,
        leaves: 2,
    };
    let memory = crate::rig::memory();
    let mut rig = Rig::with(config(), limits, &memory, FixedLastTable::default());
    let stretch = 2 << 20;
    // WINDOW lies in the first 2 MiB region.
    assert_eq!(
        rig.map(NIC, Direction::ToDevice, &[(WINDOW, 0)]),
        Status::Ok
    );
    let two = [(WINDOW + stretch, 0), (WINDOW + 2 * stretch, 0)];
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two), Status::NoRoom);
    assert_eq!(rig.backend.mapped_pages(NIC), 1);
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two[1..]), Status::Ok);
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two[..1]), Status::NoRoom);
    assert_eq!(rig.unmap(NIC, &[WINDOW]), Status::Ok);
    assert_eq!(rig.map(NIC, Direction::ToDevice, &two[..1]), Status::Ok);
}

#[test]
fn stopped_accesses_become_events_with_their_reason() {
    let mut rig = Rig::new();
    let page = WINDOW + 5 * PAGE;
    assert_eq!(rig.map(NIC, Direction::ToDevice, &[(page, 0)]), Status::Ok);
    for (device, access, giova) in [
        (NIC, Access::Write, page + 17),
        (NIC, Access::Read, page + PAGE),
        (DISK, Access::Read, page),
        (Devid::new(9), Access::Read, page),
    ] {
        rig.backend.report(device, access, Iova::new(giova));
    }
    let event = |device, access, reason, giova| Event {
        device,
        access,
        reason,
        giova: Iova::new(giova),
    };
    let events: Vec<Event> = std::iter::from_fn(|| rig.backend.next_event()).collect();
    assert_eq!(
        events,
        [
            event(NIC, Access::Write, EventReason::Direction, page + 17),
            event(NIC, Access::Read, EventReason::NotMapped, page + PAGE),
            event(DISK, Access::Read, EventReason::NotMapped, page),
        ]
    );
    for _ in 0..EVENTS + 7 {
        rig.backend.report(NIC, Access::Read, Iova::new(0));
    }
    assert_eq!(rig.backend.lost_events(), 7);
    rig.backend.reset().unwrap();
    assert_eq!(rig.backend.next_event(), None);
}

#[test]
fn a_reset_removes_every_mapping() {
    let mut rig = Rig::new();
    for (device, page) in [(NIC, 0), (NIC, 9), (DISK, 3)] {
        let giova = WINDOW + page * PAGE;
        let pages = [(giova, MEMORY + page * PAGE)];
        assert_eq!(
            rig.map(device, Direction::Bidirectional, &pages),
            Status::Ok
        );
        assert!(rig.reach(device, giova, Access::Write).is_ok());
    }
    rig.backend.reset().unwrap();
    for device in rig.devices() {
        for page in 0..16 {
            assert!(
                rig.reach(device, WINDOW + page * PAGE, Access::Read)
                    .is_err()
            );
        }
        assert_eq!(rig.backend.mapped_pages(device), 0);
    }
    for page in 0..16 {
        let gpa = ringfence_pviommu::wire::Gpa::new(MEMORY + page * PAGE);
        assert_eq!(rig.backend.backing().pinned(gpa), Some(0));
    }
}

// Name the public types here, so that renaming one breaks this test.
const _: fn() = || {
    fn ports<T>() {}
    ports::<OnDemand<(), crate::rig::Source, FixedLastTable>>();
    ports::<HardwareTables<(), (), ()>>();
};
