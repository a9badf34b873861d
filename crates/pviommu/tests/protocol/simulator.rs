//! Simulated devices (section 4.2): GIOVA to addresses of a simulator that can access only its
//! grants.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use ringfence_memory::Arena;
use ringfence_pgtable::{Levels, SecondStage};
use ringfence_pviommu::backend::{
    AnyTables, Backend, BackendLimits, DeviceSlot, GrantError, Grants, Hva, IoError, IoTables,
    Resident, SimulatedTables,
};
use ringfence_pviommu::wire::{EventReason, GuestPhysical, Status};
use ringfence_types::{Access, AddressRange, Direction, Iova, PhysAddr};

use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, WINDOW, config, map, memory, unmap};

/// A simulator's process: its mapped pages, at addresses that are never reused.
#[derive(Debug, Default)]
pub(crate) struct Process {
    reached: BTreeMap<u64, (PhysAddr, Direction)>,
    revoked: Vec<u64>,
    next: u64,
    room: usize,
    fails: Rc<Cell<bool>>,
}

/// First address at which a process maps a page.
const FIRST_HVA: u64 = 0x7f00_0000_0000;

impl Process {
    /// Creates a process without mappings that accepts every grant.
    pub(crate) fn with_room() -> Self {
        Self {
            room: usize::MAX,
            ..Self::default()
        }
    }

    /// Creates a process with all of the guest's memory, like a simulator that is a thread of the
    /// VMM.
    pub(crate) fn whole() -> Self {
        let mut process = Self::with_room();
        for page in pages_of_memory() {
            let frame = PhysAddr::new(page);
            process
                .grant(FIRST, frame, Direction::Bidirectional)
                .unwrap();
        }
        process
    }

    /// Returns the frame that code in this process accesses at an address, whatever its device may
    /// access.
    fn access(&self, at: u64, access: Access) -> Option<PhysAddr> {
        let (frame, direction) = self.reached.get(&(at & !(PAGE - 1)))?;
        let allowed = direction.permissions().allows(access);
        allowed.then(|| frame.wrapping_add(at % PAGE))
    }
}

/// Returns all pages of the guest.
pub(crate) fn pages_of_memory() -> impl Iterator<Item = u64> {
    let pages = |range: AddressRange<GuestPhysical>| {
        let start = range.start().get();
        (0..range.bytes() / PAGE).map(move |page| start + page * PAGE)
    };
    memory().into_iter().flat_map(pages)
}

impl Grants for Process {
    fn grant(
        &mut self,
        _: DeviceSlot,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<Hva, GrantError> {
        if self.reached.len() == self.room {
            return Err(GrantError::NoRoom);
        }
        self.next += 1;
        let at = FIRST_HVA + self.next * PAGE;
        self.reached.insert(at, (frame, direction));
        Ok(Hva::new(at))
    }

    fn revoke(&mut self, _: DeviceSlot, at: Hva) -> Result<(), GrantError> {
        assert!(self.reached.contains_key(&at.get()), "{at} was not granted");
        assert!(!self.revoked.contains(&at.get()), "{at} is revoked twice");
        if self.fails.get() {
            return Err(GrantError::Failed);
        }
        self.revoked.push(at.get());
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), GrantError> {
        if self.fails.get() {
            return Err(GrantError::Failed);
        }
        for at in self.revoked.drain(..) {
            self.reached.remove(&at);
        }
        Ok(())
    }
}

pub(crate) type Tables = SimulatedTables<Arc<Arena>, Source, Process>;

pub(crate) struct Host {
    pub(crate) backend: Backend<Resident, Tables>,
    tables: Source,
    fails: Rc<Cell<bool>>,
}

pub(crate) fn host(room: usize) -> Host {
    host_of(Process {
        room,
        ..Process::default()
    })
}

/// Creates a host whose simulator runs in `process`.
pub(crate) fn host_of(process: Process) -> Host {
    let rig = Rig::new();
    let fails = Rc::clone(&process.fails);
    let format = SecondStage::new(Levels::Four);
    let tables = SimulatedTables::new(
        Arc::clone(&rig.arena),
        rig.tables.clone(),
        process,
        format,
        2,
    )
    .unwrap();
    let memory = Resident::new(memory());
    Host {
        backend: Backend::new(config(), BackendLimits::default(), memory, tables),
        tables: rig.tables,
        fails,
    }
}

const FIRST: DeviceSlot = DeviceSlot::new(0);

impl Host {
    /// Returns the frame that the first device's simulator accesses for `giova`.
    fn reach(&mut self, giova: u64, access: Access) -> Result<u64, EventReason> {
        let tables = self.backend.tables();
        let at = tables.translate(FIRST, Iova::new(giova), access)?;
        let page = at.align_down(PAGE).get();
        let (frame, direction) = tables.grants().reached[&page];
        assert!(direction.permissions().allows(access));
        Ok(frame.get() + at.offset_in(PAGE))
    }

    pub(crate) fn granted(&mut self) -> usize {
        self.backend.tables().grants().reached.len()
    }

    /// The simulator tries every address at which a guest page may be mapped, without its table.
    /// Returns the guest pages that it can read.
    pub(crate) fn read_all(&mut self) -> BTreeSet<u64> {
        let process = self.backend.tables().grants();
        let all = pages_of_memory().count() as u64;
        (0..=2 * all)
            .filter_map(|page| process.access(FIRST_HVA + page * PAGE, Access::Read))
            .map(|frame| frame.get())
            .collect()
    }
}

#[test]
fn simulator_respects_mappings_and_directions() {
    let mut host = host(100);
    let request = map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY + PAGE)]);
    assert_eq!(host.backend.handle(&request), Status::Ok);
    assert_eq!(host.reach(WINDOW + 5, Access::Read), Ok(MEMORY + PAGE + 5));
    assert_eq!(
        host.reach(WINDOW, Access::Write),
        Err(EventReason::Direction)
    );
    assert_eq!(
        host.reach(WINDOW + PAGE, Access::Read),
        Err(EventReason::NotMapped)
    );
    let other =
        host.backend
            .tables()
            .translate(DeviceSlot::new(1), Iova::new(WINDOW), Access::Read);
    assert_eq!(other, Err(EventReason::NotMapped));
    assert_eq!(host.granted(), 1);
    assert_eq!(host.backend.handle(&unmap(NIC, &[WINDOW])), Status::Ok);
    assert_eq!(
        host.reach(WINDOW, Access::Read),
        Err(EventReason::NotMapped)
    );
    assert_eq!(host.granted(), 0);
}

#[test]
fn refused_maps_grant_nothing() {
    let pages: Vec<_> = (0..5)
        .map(|page| (WINDOW + page * (2 << 20), MEMORY))
        .collect();
    let request = map(NIC, Direction::FromDevice, &pages);
    let mut host = host(4);
    assert_eq!(host.backend.handle(&request), Status::NoRoom);
    assert_eq!(host.granted(), 0);
    // The grant succeeds, but no frame is left for a table.
    for after in 0..6 {
        let mut host = self::host(100);
        host.tables.0.fail_after(after);
        assert_eq!(host.backend.handle(&request), Status::NoRoom);
        assert_eq!(host.granted(), 0);
        host.tables.0.recover();
        assert_eq!(host.backend.handle(&request), Status::Ok);
        assert_eq!(host.granted(), 5);
    }
}

#[test]
fn unmap_with_a_failed_revocation_has_no_effect() {
    let mut host = host(100);
    let pages = [(WINDOW, MEMORY), (WINDOW + PAGE, MEMORY + PAGE)];
    let request = map(NIC, Direction::Bidirectional, &pages);
    assert_eq!(host.backend.handle(&request), Status::Ok);
    host.fails.set(true);
    let request = unmap(NIC, &[WINDOW, WINDOW + PAGE]);
    assert_eq!(host.backend.handle(&request), Status::Failed);
    assert_eq!(host.reach(WINDOW + PAGE, Access::Write), Ok(MEMORY + PAGE));
    assert_eq!(host.backend.mapped_pages(NIC), 2);
    host.fails.set(false);
    assert_eq!(host.backend.handle(&request), Status::Ok);
    assert_eq!(host.granted(), 0);
}

/// Records the slots of its calls.
#[derive(Default)]
struct Noted(Vec<DeviceSlot>);

impl IoTables for Noted {
    fn map(
        &mut self,
        device: DeviceSlot,
        _: Iova,
        _: PhysAddr,
        _: Direction,
    ) -> Result<(), IoError> {
        self.0.push(device);
        Ok(())
    }

    fn unmap(&mut self, _: DeviceSlot, _: Iova) -> Result<(), IoError> {
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), IoError> {
        Ok(())
    }
}

#[test]
fn each_device_of_a_mixed_guest_has_its_side() {
    let mut mixed = AnyTables::new(Noted::default(), Noted::default(), [false, true, false]);
    for device in [0, 1, 2] {
        let (giova, frame) = (Iova::new(WINDOW), PhysAddr::new(0));
        let mapped = mixed.map(DeviceSlot::new(device), giova, frame, Direction::ToDevice);
        assert_eq!(mapped, Ok(()));
    }
    assert_eq!(mixed.commit(DeviceSlot::new(3)), Err(IoError::Failed));
    assert_eq!(mixed.assigned().0, [DeviceSlot::new(0)]);
    assert_eq!(
        mixed.simulated().0,
        [DeviceSlot::new(0), DeviceSlot::new(1)]
    );
}
