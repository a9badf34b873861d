//! Compares backends with a brute-force map, and the map with the accesses that the hardware
//! allows.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_pviommu::backend::{BackendLimits, DeviceState, FixedLastTable};
use ringfence_pviommu::wire::{Devid, Gpa, Status};
use ringfence_types::{Access, Direction, FaultReason};

use crate::rig::{DISK, NIC, PAGE, Rig, WINDOW, cases, config, memory};

/// Few addresses, so that they collide: in several regions and at the window's ends.
const GIOVAS: u64 = 24;
const GPAS: u64 = 16;
const MAPPINGS: u64 = 12;

fn giova(number: u64) -> u64 {
    match number % GIOVAS {
        page @ 0..8 => WINDOW + page * PAGE,
        page @ 8..16 => WINDOW + (3 << 20) + page * PAGE,
        page @ 16..20 => WINDOW + (64 << 20) - (page - 15) * PAGE,
        20 => WINDOW - PAGE,
        21 => WINDOW + (64 << 20),
        22 => WINDOW + 1,
        _ => u64::MAX - 4095,
    }
}

fn gpa(number: u64) -> u64 {
    match number % GPAS {
        page @ 0..6 => page * PAGE,
        page @ 6..9 => (1 << 20) + page * PAGE,
        page @ 9..12 => (1 << 30) + (page - 9) * 256 * PAGE,
        12 => (8 << 20) - PAGE,
        13 => 8 << 20,
        14 => (1 << 30) + (4 << 20),
        _ => 77,
    }
}

#[derive(Debug, Clone)]
enum Step {
    Map(u64, Direction, Vec<(u64, u64)>),
    Unmap(u64, Vec<u64>),
    /// The host reclaims a frame if it may.
    Reclaim(u64),
    /// The next invalidations fail (all, or only those of table pages), or succeed again.
    Fail(bool, bool),
    Reset,
    /// Migrates to another host and back.
    Migrate,
}

fn step() -> impl Strategy<Value = Step> {
    let direction = prop::sample::select(Direction::ALL.to_vec());
    let pages = prop::collection::vec((0..GIOVAS, 0..GPAS), 1..5);
    // Mostly valid addresses.
    let good = prop::collection::vec((0..20_u64, 0..13_u64), 1..4);
    let pages = prop_oneof![3 => good, 1 => pages];
    let giovas = prop_oneof![
        3 => prop::collection::vec(0..20_u64, 1..3),
        1 => prop::collection::vec(0..GIOVAS, 1..5)
    ];
    prop_oneof![
        12 => (15..19_u64, direction, pages).prop_map(|(d, dir, p)| Step::Map(d, dir, p)),
        10 => (15..19_u64, giovas).prop_map(|(device, giovas)| Step::Unmap(device, giovas)),
        4 => (0..13_u64).prop_map(Step::Reclaim),
        2 => (any::<bool>(), any::<bool>()).prop_map(|(all, tables)| Step::Fail(all, tables)),
        1 => Just(Step::Reset),
        1 => Just(Step::Migrate),
    ]
}

/// The guest's mappings, by device and page.
#[derive(Debug, Default, Clone)]
struct Model(BTreeMap<(u64, u64), (u64, Direction)>);

impl Model {
    fn repeated(giovas: &[u64]) -> bool {
        giovas
            .iter()
            .enumerate()
            .any(|(i, giova)| giovas[..i].contains(giova))
    }

    fn is_bad_giova(giova: u64) -> bool {
        let pages = WINDOW..=WINDOW + (64 << 20) - PAGE;
        !giova.is_multiple_of(PAGE) || !pages.contains(&giova)
    }

    fn is_bad_gpa(gpa: u64) -> bool {
        let inside = gpa < 8 << 20 || (1 << 30..(1 << 30) + (4 << 20)).contains(&gpa);
        !gpa.is_multiple_of(PAGE) || !inside
    }

    /// Returns the status by the table in `docs/PVIOMMU.md`. A map needs no invalidation.
    fn map(&mut self, device: u64, direction: Direction, pages: &[(u64, u64)]) -> Status {
        let giovas: Vec<u64> = pages.iter().map(|(giova, _)| *giova).collect();
        let live = self.0.keys().filter(|(of, _)| *of == device).count();
        if device != NIC.get() && device != DISK.get() {
            Status::NoDevice
        } else if giovas.iter().any(|giova| Self::is_bad_giova(*giova)) {
            Status::BadGiova
        } else if pages.iter().any(|(_, gpa)| Self::is_bad_gpa(*gpa)) {
            Status::BadGpa
        } else if giovas
            .iter()
            .any(|giova| self.0.contains_key(&(device, *giova)))
            || Self::repeated(&giovas)
        {
            Status::Mapped
        } else if live + pages.len() > MAPPINGS as usize {
            Status::NoRoom
        } else {
            for (giova, gpa) in pages {
                self.0.insert((device, *giova), (*gpa, direction));
            }
            Status::Ok
        }
    }

    fn unmap(&mut self, device: u64, giovas: &[u64], fails: bool) -> Status {
        if device != NIC.get() && device != DISK.get() {
            Status::NoDevice
        } else if giovas.iter().any(|giova| Self::is_bad_giova(*giova)) {
            Status::BadGiova
        } else if giovas
            .iter()
            .any(|giova| !self.0.contains_key(&(device, *giova)))
            || Self::repeated(giovas)
        {
            Status::NotMapped
        } else if fails {
            Status::Failed
        } else {
            for giova in giovas {
                self.0.remove(&(device, *giova));
            }
            Status::Ok
        }
    }

    fn users(&self, gpa: u64) -> u32 {
        self.0.values().filter(|(to, _)| *to == gpa).count() as u32
    }
}

/// Checks every address for every device and access against the model.
fn judge(rig: &mut Rig, model: &Model) {
    for device in [NIC, DISK] {
        for number in 0..20 {
            let giova = giova(number);
            for access in [Access::Read, Access::Write] {
                let offset = number * 7;
                let reached = rig.reach(device, giova + offset, access);
                match model.0.get(&(device.get(), giova)) {
                    Some((gpa, direction)) if direction.permissions().allows(access) => {
                        let frame = rig.frame(*gpa);
                        assert_eq!(reached.map(|at| at.get()), Ok(frame.get() + offset));
                    }
                    Some(_) => assert!(
                        matches!(
                            reached,
                            Err(FaultReason::ReadDenied | FaultReason::WriteDenied)
                        ),
                        "{reached:?}"
                    ),
                    None => assert_eq!(reached, Err(FaultReason::NotPresent)),
                }
            }
        }
        let live = model.0.keys().filter(|(of, _)| *of == device.get());
        assert_eq!(rig.backend.mapped_pages(device), live.count() as u64);
    }
    for number in 0..13 {
        let page = Gpa::new(gpa(number));
        let pins = rig.backend.backing().pinned(page);
        assert_eq!(pins, Some(model.users(page.get())), "{page}");
    }
}

fn rig() -> Rig {
    let limits = BackendLimits {
        mappings: MAPPINGS,
        ..BackendLimits::default()
    };
    let mut rig = Rig::with(config(), limits, &memory(), FixedLastTable::default());
    // Free all empty tables.
    rig.backend.tables().set_kept_tables(0);
    rig
}

proptest! {
    #![proptest_config(cases(192, 20_251_122))]

    #[test]
    fn devices_access_the_guests_mappings(steps in prop::collection::vec(step(), 1..60)) {
        let mut rig = rig();
        let mut model = Model::default();
        // A failed unmap leaves an invalidation pending. The device's next request, even a map,
        // waits for it.
        let mut due: Vec<u64> = Vec::new();
        // The frame of each mapped page until it is reclaimed.
        let mut frames: BTreeMap<u64, u64> = BTreeMap::new();
        for step in steps {
            let fails = rig.fails.get();
            match step {
                Step::Map(device, direction, pages) => {
                    let pages: Vec<_> = pages.iter().map(|(g, p)| (giova(*g), gpa(*p))).collect();
                    let before = model.clone();
                    let mut wanted = model.map(device, direction, &pages);
                    if wanted == Status::Ok && fails && due.contains(&device) {
                        (wanted, model) = (Status::Failed, before.clone());
                    }
                    if wanted == Status::Ok && !fails {
                        due.retain(|of| *of != device);
                    }
                    let status = rig.map(Devid::new(device), direction, &pages);
                    if (wanted, status) == (Status::Ok, Status::Failed) && rig.keeps_tables.get() {
                        // A paging-structure cache still has the old table and would hide the
                        // mapping.
                        model = before;
                        continue;
                    }
                    prop_assert_eq!(status, wanted);
                    if status == Status::Ok {
                        let gpas = pages.iter().map(|(_, gpa)| *gpa);
                        let found = gpas.map(|gpa| (gpa, rig.frame(gpa).get()));
                        frames.extend(found.collect::<Vec<_>>());
                    }
                }
                Step::Unmap(device, giovas) => {
                    let giovas: Vec<_> = giovas.iter().map(|g| giova(*g)).collect();
                    let wanted = model.unmap(device, &giovas, fails);
                    match wanted {
                        Status::Failed => due.push(device),
                        Status::Ok => due.retain(|of| *of != device),
                        _ => {}
                    }
                    prop_assert_eq!(rig.unmap(Devid::new(device), &giovas), wanted);
                }
                Step::Reclaim(number) => {
                    let page = Gpa::new(gpa(number));
                    // A host that reclaims has no free frame for a table.
                    rig.tables.0.fail_after(0);
                    let taken = rig.backend.backing().reclaim(page, &mut rig.processors);
                    rig.tables.0.recover();
                    if model.users(page.get()) > 0 {
                        prop_assert!(taken.is_err());
                    }
                    if let Ok(frame) = taken {
                        ringfence_types::FrameSource::free(&rig.frames, frame);
                        frames.remove(&page.get());
                    } else if let Some(frame) = frames.get(&page.get()) {
                        prop_assert_eq!(rig.frame(page.get()).get(), *frame);
                    }
                }
                Step::Fail(fails, tables) => {
                    rig.fails.set(fails);
                    rig.keeps_tables.set(tables);
                }
                Step::Reset => {
                    rig.fails.set(false);
                    rig.keeps_tables.set(false);
                    rig.backend.reset().unwrap();
                    due.clear();
                    model.0.clear();
                }
                Step::Migrate => {
                    let stream = rig.backend.export(|_| DeviceState::Transferred).unwrap();
                    rig = self::rig();
                    due.clear();
                    frames.clear();
                    rig.backend.restore(&stream).unwrap();
                    let again = rig.backend.export(|_| DeviceState::Transferred);
                    prop_assert_eq!(again.unwrap(), stream);
                }
            }
            // While invalidations fail, a device may access entries that a refused map installed
            // briefly.
            if !rig.fails.get() && !rig.keeps_tables.get() {
                for device in [NIC, DISK] {
                    // Any request that passes validation completes a pending invalidation.
                    let free = (0..20)
                        .map(giova)
                        .find(|g| !model.0.contains_key(&(device.get(), *g)));
                    if let (Some(free), true) = (free, due.contains(&device.get())) {
                        let status = rig.map(device, Direction::ToDevice, &[(free, 0)]);
                        if status == Status::Ok {
                            prop_assert_eq!(rig.unmap(device, &[free]), Status::Ok);
                            due.retain(|of| *of != device.get());
                        }
                    }
                }
                if due.is_empty() {
                    judge(&mut rig, &model);
                }
            }
        }
    }
}
