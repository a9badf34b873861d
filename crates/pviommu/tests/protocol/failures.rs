//! A host without free frames, or whose IOMMU does not answer: requests are refused as a whole, and
//! nothing leaks.

use std::collections::BTreeMap;

use ringfence_pviommu::backend::{
    Backend, BackendLimits, CommitFailed, DeviceSlot, GuestBacking, IoError, IoTables, PinError,
    TablesHandle,
};
use ringfence_pviommu::wire::{Gpa, Status};
use ringfence_types::{Access, Direction, Iova, PhysAddr};

use crate::rig::{MEMORY, NIC, PAGE, Rig, WINDOW, config, map, unmap};

fn pages(count: u64) -> Vec<(u64, u64)> {
    (0..count)
        .map(|page| (WINDOW + page * (2 << 20), MEMORY + page * PAGE))
        .collect()
}

fn pinned(rig: &mut Rig) -> u32 {
    (0..64)
        .map(|page| {
            let page = Gpa::new(MEMORY + page * PAGE);
            rig.backend.backing().pinned(page).unwrap()
        })
        .sum()
}

/// Each table allocation of a map of distant pages fails once.
#[test]
fn map_without_a_table_rolls_back() {
    let mut refused = 0;
    for after in 0.. {
        let mut rig = Rig::new();
        rig.tables.0.fail_after(after);
        let status = rig.map(NIC, Direction::Bidirectional, &pages(6));
        rig.tables.0.recover();
        if status == Status::Ok {
            break;
        }
        refused += 1;
        assert_eq!(status, Status::NoRoom);
        assert_eq!((pinned(&mut rig), rig.backend.mapped_pages(NIC)), (0, 0));
        // Each frame from the host is in the pool or behind a page.
        let backing = rig.backend.backing();
        let held = backing.pool().available() as u64 + backing.stats().allocated;
        assert_eq!(rig.frames.0.outstanding() as u64, held, "after {after}");
        for (giova, _) in pages(6) {
            assert!(rig.reach(NIC, giova, Access::Read).is_err());
        }
        assert_eq!(
            rig.map(NIC, Direction::Bidirectional, &pages(6)),
            Status::Ok
        );
        assert_eq!(rig.tables.0.wrong_frees(), 0);
    }
    assert!(refused > 6, "{refused} refused");
}

/// Guest frames run out in the middle of a request: the pool and the host have none.
#[test]
fn map_without_a_frame_rolls_back() {
    let mut rig = Rig::new();
    let available = rig.backend.backing().pool().available() as u64;
    rig.frames.0.fail_after(0);
    for page in 0..available - 2 {
        rig.frame(MEMORY + (64 + page) * PAGE);
    }
    assert_eq!(rig.map(NIC, Direction::ToDevice, &pages(3)), Status::NoRoom);
    assert_eq!((pinned(&mut rig), rig.backend.mapped_pages(NIC)), (0, 0));
    for (giova, _) in pages(3) {
        assert!(rig.reach(NIC, giova, Access::Read).is_err());
    }
    rig.frames.0.recover();
    assert_eq!(rig.map(NIC, Direction::ToDevice, &pages(3)), Status::Ok);
    assert_eq!(rig.frames.0.wrong_frees(), 0);
}

#[test]
fn an_unmap_that_cannot_be_invalidated_did_not_happen() {
    let mut rig = Rig::new();
    assert_eq!(rig.map(NIC, Direction::FromDevice, &pages(4)), Status::Ok);
    let giovas: Vec<u64> = pages(4).iter().map(|(giova, _)| *giova).collect();
    let reached = rig.reach(NIC, giovas[1], Access::Write);
    rig.fails.set(true);
    assert_eq!(rig.unmap(NIC, &giovas), Status::Failed);
    assert_eq!(rig.unmap(NIC, &giovas[1..2]), Status::Failed);
    assert_eq!((pinned(&mut rig), rig.backend.mapped_pages(NIC)), (4, 4));
    for giova in &giovas {
        assert!(rig.reach(NIC, *giova, Access::Write).is_ok());
    }
    assert_eq!(rig.reach(NIC, giovas[1], Access::Write), reached);
    assert!(rig.reach(NIC, giovas[1], Access::Read).is_err());
    rig.fails.set(false);
    assert_eq!(rig.unmap(NIC, &giovas), Status::Ok);
    assert!(rig.reach(NIC, giovas[1], Access::Write).is_err());
    assert_eq!(pinned(&mut rig), 0);
}

/// A map fails after the device has used an installed entry, and the invalidation fails as well.
/// The frames stay pinned until an invalidation succeeds.
#[test]
fn pages_cached_by_a_failed_map_stay_pinned() {
    let mut rig = Rig::new();
    assert_eq!(rig.map(NIC, Direction::ToDevice, &pages(1)), Status::Ok);
    rig.tables.0.fail_after(0);
    rig.fails.set(true);
    let more = [(WINDOW + PAGE, MEMORY + PAGE), (WINDOW + (8 << 20), MEMORY)];
    assert_eq!(rig.map(NIC, Direction::ToDevice, &more), Status::NoRoom);
    let page = Gpa::new(MEMORY + PAGE);
    assert_eq!(rig.backend.backing().pinned(page), Some(1));
    rig.tables.0.recover();
    assert_eq!(rig.map(NIC, Direction::ToDevice, &more), Status::Failed);
    assert_eq!(rig.backend.reset(), Err(CommitFailed(NIC)));
    assert_eq!(rig.backend.backing().pinned(page), Some(1));
    rig.fails.set(false);
    assert_eq!(rig.map(NIC, Direction::ToDevice, &more), Status::Ok);
    assert_eq!(rig.backend.mapped_pages(NIC), 2);
    assert_eq!(rig.backend.backing().pinned(page), Some(1));
    rig.backend.reset().unwrap();
    assert_eq!(pinned(&mut rig), 0);
}

/// Resident memory with a pin count for each page.
#[derive(Default)]
struct Pinned(BTreeMap<Gpa, u32>);

impl GuestBacking for Pinned {
    fn contains(&self, _: Gpa) -> bool {
        true
    }

    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        *self.0.entry(page).or_default() += 1;
        Ok(PhysAddr::new(page.get()))
    }

    fn unpin(&mut self, page: Gpa) {
        let pins = self.0.get_mut(&page).expect("a pin");
        *pins = pins.checked_sub(1).expect("a pin");
    }
}

/// Tables that find no room for an entry after the grant, and cannot commit, until `well` is set.
#[derive(Default)]
struct Unwell {
    well: bool,
}

impl TablesHandle for Unwell {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for Unwell {
    fn map(&mut self, _: DeviceSlot, _: Iova, _: PhysAddr, _: Direction) -> Result<(), IoError> {
        self.well.then_some(()).ok_or(IoError::NoRoom)
    }

    fn unmap(&mut self, _: DeviceSlot, _: Iova) -> Result<(), IoError> {
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        self.well.then_some(()).ok_or(IoError::Failed)
    }
}

/// A page whose entry found no room may have been granted briefly. It stays pinned until the grant
/// is known to be revoked.
#[test]
fn page_of_a_failed_grant_stays_pinned_until_revoked() {
    let (memory, tables) = (Pinned::default(), Unwell::default());
    let mut backend = Backend::new(config(), BackendLimits::default(), memory, tables);
    let page = Gpa::new(MEMORY);
    let request = map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]);
    for status in [Status::NoRoom, Status::Failed, Status::Failed] {
        assert_eq!(backend.handle(&request), status);
        assert_eq!(backend.backing().0[&page], 1);
        assert_eq!(backend.mapped_pages(NIC), 0);
    }
    backend.tables().well = true;
    assert_eq!(backend.handle(&request), Status::Ok);
    assert_eq!(backend.backing().0[&page], 1);
    backend.reset().unwrap();
    assert_eq!(backend.backing().0[&page], 0);
}

/// Tables that fail after a number of operations.
struct Tired {
    maps: u32,
    unmaps: u32,
}

fn once(left: &mut u32) -> Result<(), IoError> {
    *left = left.checked_sub(1).ok_or(IoError::Failed)?;
    Ok(())
}

impl TablesHandle for Tired {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for Tired {
    fn map(&mut self, _: DeviceSlot, _: Iova, _: PhysAddr, _: Direction) -> Result<(), IoError> {
        once(&mut self.maps)
    }

    fn unmap(&mut self, _: DeviceSlot, _: Iova) -> Result<(), IoError> {
        once(&mut self.unmaps)
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        Ok(())
    }
}

/// An unmap fails half way and cannot be undone, so the device's access differs from the view. The
/// backend refuses its requests until a reset.
#[test]
fn a_device_that_cannot_be_put_back_waits_for_a_reset() {
    let (memory, tables) = (Pinned::default(), Tired { maps: 2, unmaps: 1 });
    let mut backend = Backend::new(config(), BackendLimits::default(), memory, tables);
    let pages = [(WINDOW, MEMORY), (WINDOW + PAGE, MEMORY + PAGE)];
    let to = Direction::ToDevice;
    assert_eq!(backend.handle(&map(NIC, to, &pages)), Status::Ok);
    let both = unmap(NIC, &[WINDOW, WINDOW + PAGE]);
    assert_eq!(backend.handle(&both), Status::Failed);
    *backend.tables() = Tired {
        maps: 100,
        unmaps: 100,
    };
    let another = map(NIC, to, &[(WINDOW + 2 * PAGE, MEMORY)]);
    for request in [&both, &another, &both] {
        assert_eq!(backend.handle(request), Status::Failed);
    }
    assert_eq!(backend.mapped_pages(NIC), 2);
    assert!(backend.backing().0.values().all(|pins| *pins == 1));
    backend.reset().unwrap();
    assert!(backend.backing().0.values().all(|pins| *pins == 0));
    assert_eq!(backend.handle(&another), Status::Ok);
}

/// One run of pages takes one page invalidation; many runs take one domain invalidation.
#[test]
fn invalidations_are_merged() {
    let mut rig = Rig::new();
    let near: Vec<_> = (0..64).map(|page| (WINDOW + page * PAGE, MEMORY)).collect();
    let far: Vec<_> = (0..30)
        .map(|page| (WINDOW + page * 2 * PAGE, MEMORY))
        .collect();
    for (pages, wanted) in [(near, 1), (far[..8].to_vec(), 8), (far, 1)] {
        assert_eq!(rig.map(NIC, Direction::ToDevice, &pages), Status::Ok);
        let before = rig.backend.tables().invalidator().submitted;
        let giovas: Vec<u64> = pages.iter().map(|(giova, _)| *giova).collect();
        for giova in &giovas {
            assert!(rig.reach(NIC, *giova, Access::Read).is_ok());
        }
        assert_eq!(rig.unmap(NIC, &giovas), Status::Ok);
        assert_eq!(
            rig.backend.tables().invalidator().submitted - before,
            wanted
        );
        for giova in &giovas {
            assert!(rig.reach(NIC, *giova, Access::Read).is_err());
        }
    }
}

#[test]
fn errors_have_messages() {
    assert_eq!(
        CommitFailed(NIC).to_string(),
        "commit failed: device 0x10 may still reach unmapped pages"
    );
}
