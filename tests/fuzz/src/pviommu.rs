//! A hostile guest's requests to the para-virtual IOMMU's backend, over tables that the modelled
//! unit walks. The host reclaims frames, runs out of frames, and its invalidations fail. After
//! every step, devices reach exactly the memory of a brute-force map.
//!
//! Input: two bytes of limits (mappings of a device, frames for tables), then steps:
//!
//! | first byte mod 8 | then | step |
//! |---|---|---|
//! | 0 | length, that many bytes | a request, unmodified |
//! | 1, 2 | device, direction, count, pairs of numbers | map |
//! | 3 | device, count, numbers | unmap |
//! | 4 | | reset |
//! | 5 | number | the host reclaims the frame of a page |
//! | 6 | bit 0 | invalidations fail from now on, or work |
//! | 7 | | all mappings migrate to another host |

mod frames;
pub(crate) mod judge;
pub(crate) mod recorded;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use ringfence_hw::{FaultLog, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit};
use ringfence_pgtable::{Coherency, ContextTables, Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, DeviceState, FixedLastTable, HardwareTables, OnDemand,
    ReclaimError,
};
use ringfence_pviommu::wire::{
    Config, Devid, Gpa, GuestPhysical, Status, encode_map, encode_unmap,
};
use ringfence_types::{
    Access, AddressRange, Direction, DomainId, FrameSource, Invalidation, InvalidationError,
    Invalidator, Iova, IovaRange, RequesterId, Ticket,
};

use crate::OutcomeHook;
use frames::{Source, Tables};
use judge::{Model, Rules};

const PAGE: u64 = 4096;
const WINDOW: u64 = 0x20_0000;
const WINDOW_BYTES: u64 = 8 << 20;
const MEMORY_BYTES: u64 = 4 << 20;
const PAGES_MAX: u32 = 8;
const DEVICES: [u64; 2] = [0x10, 0x11];
/// Frames for tables, from address 4096 on; they are all the memory there is.
const TABLES: u64 = 40;
/// Address of the guest's frames, outside memory: no test accesses their contents.
const FRAMES: u64 = 1 << 30;

/// Outcomes that the corpus reaches: every status, every end of a reclaim, and the steps without a
/// status.
pub const OUTCOMES: &[&str] = &[
    "status: Ok",
    "status: Malformed",
    "status: NoDevice",
    "status: BadGiova",
    "status: BadGpa",
    "status: Mapped",
    "status: NotMapped",
    "status: NoRoom",
    "status: Failed",
    "reclaim: Ok",
    "reclaim: NotMemory",
    "reclaim: Mapped",
    "reclaim: NotPresent",
    "reclaim: NotInvalidated",
    "reset",
    "migrated",
    "no host",
];

/// A unit whose invalidations can fail.
struct Unit {
    hardware: VtdUnit,
    fails: Rc<Cell<bool>>,
}

impl Invalidator for Unit {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if self.fails.get() {
            return Err(InvalidationError::Failed);
        }
        self.hardware.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.hardware.poll(ticket)
    }
}

type Guest =
    Backend<OnDemand<Rc<Tables>, Source, FixedLastTable>, HardwareTables<Rc<Tables>, Source, Unit>>;

struct Host {
    memory: Rc<Tables>,
    frames: Source,
    backend: Guest,
    processors: Unit,
    fails: Rc<Cell<bool>>,
}

fn unit(fails: &Rc<Cell<bool>>) -> Unit {
    let geometry = |sets| Geometry::new(sets, 2).expect("a geometry");
    let config = UnitConfig {
        iotlb: geometry(8),
        walk_caches: [geometry(2); 3],
        contexts: geometry(2),
        replacement: Replacement::Lru,
        fault_log: FaultLog::MAX_CAPACITY,
        granularity: InvalidationGranularity::Selective,
    };
    Unit {
        hardware: VtdUnit::vtd(&config),
        fails: Rc::clone(fails),
    }
}

impl Host {
    /// Creates a host; `None` if there are too few frames for its root tables.
    fn new(mappings: u64, tables: u64) -> Option<Self> {
        let memory = Rc::new(Tables::new(tables));
        let tables = Source::new(&memory, PAGE, tables);
        let frames = Source::new(&memory, FRAMES, 320);
        let fails = Rc::new(Cell::new(false));
        let format = SecondStage::new(Levels::Four);
        let range: AddressRange<GuestPhysical> = AddressRange::new(Gpa::new(0), MEMORY_BYTES)?;
        let last = FixedLastTable::default();
        let backing = OnDemand::new(
            Rc::clone(&memory),
            tables.clone(),
            frames.clone(),
            format,
            DomainId::new(9),
            &[range],
            last,
            (),
        )
        .ok()?;
        let domains = [DomainId::new(1), DomainId::new(2)];
        let mut hardware = HardwareTables::new(
            Rc::clone(&memory),
            tables.clone(),
            unit(&fails),
            format,
            Coherency::Coherent,
            &domains,
        )
        .ok()?;
        // A low limit, so that unmaps free some tables and keep others.
        hardware.set_kept_tables(6);
        let mut contexts = ContextTables::new(Coherency::Coherent, &memory, &tables).ok()?;
        for (index, device) in (0..).zip(DEVICES) {
            let context = hardware.context(DeviceSlot::new(index))?;
            let id = RequesterId::new(device as u16);
            contexts.attach(&memory, &tables, id, &context).ok()?;
        }
        let window = IovaRange::new(Iova::new(WINDOW), WINDOW_BYTES)?;
        let config = Config::new(window, PAGES_MAX, DEVICES.map(|id| id as u32)).ok()?;
        let limits = BackendLimits {
            mappings,
            leaves: 3,
        };
        let mut backend = Backend::new(config, limits, backing, hardware);
        let hardware = &mut backend.tables().invalidator().hardware;
        hardware.set_root_table(contexts.root());
        hardware.enable();
        Some(Self {
            processors: unit(&fails),
            memory,
            frames,
            backend,
            fails,
        })
    }

    fn reach(&mut self, device: u64, giova: u64, access: Access) -> Option<u64> {
        let id = RequesterId::new(device as u16);
        let unit = &mut self.backend.tables().invalidator().hardware;
        let reached = unit.translate(&self.memory, id, Iova::new(giova), 1, access);
        Some(reached.ok()?.first().start().get())
    }
}

fn giova(number: u8) -> u64 {
    match number % 32 {
        page @ 0..16 => WINDOW + u64::from(page) * PAGE,
        page @ 16..24 => WINDOW + u64::from(page - 15) * (1 << 20) - PAGE,
        page @ 24..28 => WINDOW + WINDOW_BYTES - u64::from(page - 23) * PAGE,
        28 => WINDOW - PAGE,
        29 => WINDOW + WINDOW_BYTES,
        30 => WINDOW + 8,
        _ => u64::MAX - 4095,
    }
}

fn gpa(number: u8) -> u64 {
    match number % 16 {
        page @ 0..8 => u64::from(page) * PAGE,
        page @ 8..12 => u64::from(page - 7) * (1 << 20) - PAGE,
        12 => MEMORY_BYTES,
        13 => 1 << 40,
        14 => 17,
        _ => 0,
    }
}

const STATUSES: [&str; 9] = [
    "status: Ok",
    "status: Malformed",
    "status: NoDevice",
    "status: BadGiova",
    "status: BadGpa",
    "status: Mapped",
    "status: NotMapped",
    "status: NoRoom",
    "status: Failed",
];

/// Reads a request of kind `kind` from the rest of the input.
fn request<'a>(kind: u8, rest: &mut &'a [u8]) -> Option<Vec<u8>> {
    let mut bytes = |count: usize| -> Option<&'a [u8]> {
        let (now, later) = rest.split_at_checked(count)?;
        *rest = later;
        Some(now)
    };
    let device = |number: u8| Devid::new(0xf + u64::from(number % 4));
    let mut out = Vec::new();
    match kind {
        0 => {
            let count = bytes(1)?[0];
            out.extend(bytes(usize::from(count))?);
        }
        1 | 2 => {
            let header = bytes(3)?;
            let direction = Direction::ALL[usize::from(header[1] % 3)];
            let pairs = bytes(2 * (1 + usize::from(header[2]) % 9))?;
            let pairs = pairs.chunks_exact(2);
            let pairs = pairs.map(|pair| (Iova::new(giova(pair[0])), Gpa::new(gpa(pair[1]))));
            encode_map(&mut out, device(header[0]), direction, pairs).expect("pages");
        }
        _ => {
            let header = bytes(2)?;
            let giovas = bytes(1 + usize::from(header[1]) % 9)?;
            let giovas = giovas.iter().map(|number| Iova::new(giova(*number)));
            encode_unmap(&mut out, device(header[0]), giovas).expect("pages");
        }
    }
    Some(out)
}

/// Checks that devices reach each tested address exactly if the model maps it, and in the right
/// frame.
fn compare(host: &mut Host, model: &Model) {
    let mut pins = BTreeMap::new();
    for (page, _) in model.values() {
        *pins.entry(*page).or_insert(0) += 1;
    }
    for device in DEVICES {
        for number in 0..28 {
            let at = giova(number);
            for access in [Access::Read, Access::Write] {
                let mapped = model.get(&(device, at));
                let wanted = mapped.filter(|(_, to)| to.permissions().allows(access));
                let wanted = wanted.map(|(page, _)| {
                    let frame = host.backend.backing().resolve(Gpa::new(*page));
                    frame.expect("pinned").get()
                });
                assert_eq!(
                    host.reach(device, at, access),
                    wanted,
                    "{device:#x} {at:#x}"
                );
            }
        }
        let live = model.keys().filter(|(of, _)| *of == device).count();
        assert_eq!(host.backend.mapped_pages(Devid::new(device)), live as u64);
    }
    // After a failure, more pages may stay pinned, never fewer.
    for (page, count) in pins {
        let pinned = host.backend.backing().pinned(Gpa::new(page));
        assert!(pinned >= Some(count), "{page:#x}");
    }
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((&[mappings, tables], mut rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let mappings = 1 + u64::from(mappings % 32);
    let tables = u64::from(tables) % (TABLES + 1);
    let Some(mut host) = Host::new(mappings, tables) else {
        reached("no host");
        return;
    };
    let rules = Rules {
        pages_max: PAGES_MAX,
        devices: DEVICES,
        first: WINDOW,
        last: WINDOW + WINDOW_BYTES - PAGE,
        memory_bytes: MEMORY_BYTES,
        mappings,
        // The host limits the frames of tables instead.
        stretches: u64::MAX,
    };
    let mut model = Model::new();
    while let Some((&step, later)) = rest.split_first() {
        rest = later;
        match step % 8 {
            kind @ 0..4 => {
                let Some(request) = request(kind, &mut rest) else {
                    break;
                };
                let (wanted, after) = rules.judge(&model, &request);
                let status = host.backend.handle(&request);
                host.backend.maintain();
                reached(STATUSES[usize::from(status.raw())]);
                match (wanted, status) {
                    (Status::Ok, Status::Ok) => model = after,
                    // The host may lack frames or tables, or fail to invalidate; the mappings are
                    // then unchanged.
                    (Status::Ok, Status::NoRoom) => assert!(kind != 3 || host.fails.get()),
                    (Status::Ok, Status::Failed) => assert!(host.fails.get()),
                    (wanted, status) => assert_eq!(status, wanted),
                }
            }
            4 => {
                host.fails.set(false);
                host.backend.reset().expect("invalidations work");
                model.clear();
                reached("reset");
            }
            5 => {
                let Some((&number, later)) = rest.split_first() else {
                    break;
                };
                rest = later;
                let page = Gpa::new(gpa(number));
                let users = model.values().filter(|(to, _)| *to == page.get()).count();
                let Host {
                    backend,
                    processors,
                    ..
                } = &mut host;
                let taken = backend.backing().reclaim(page, processors);
                if taken == Err(ReclaimError::NotInvalidated) {
                    let allocated = |backend: &mut Guest| backend.backing().stats().allocated;
                    let before = allocated(backend);
                    backend.backing().resolve(page).expect("it has its frame");
                    assert_eq!(allocated(backend), before, "it kept its frame");
                }
                assert!(users == 0 || matches!(taken, Err(ReclaimError::Mapped { .. })));
                reached(match taken {
                    Ok(frame) => {
                        host.frames.free(frame);
                        "reclaim: Ok"
                    }
                    Err(ReclaimError::NotMemory) => "reclaim: NotMemory",
                    Err(ReclaimError::Mapped { .. }) => "reclaim: Mapped",
                    Err(ReclaimError::NotPresent) => "reclaim: NotPresent",
                    Err(ReclaimError::NotInvalidated) => "reclaim: NotInvalidated",
                    Err(ReclaimError::Corrupt) => panic!("a sound second stage is corrupt"),
                });
            }
            6 => {
                let Some((&fails, later)) = rest.split_first() else {
                    break;
                };
                rest = later;
                host.fails.set(fails & 1 == 1);
            }
            _ => {
                let stream = host
                    .backend
                    .export(|_| DeviceState::Transferred)
                    .expect("in order");
                // The other host has all tables, so the mappings fit there.
                let Some(mut other) = Host::new(mappings, TABLES) else {
                    break;
                };
                if other.backend.restore(&stream).is_ok() {
                    assert_eq!(
                        other
                            .backend
                            .export(|_| DeviceState::Transferred)
                            .expect("in order"),
                        stream
                    );
                    host = other;
                    reached("migrated");
                } else {
                    assert_eq!(other.backend.mapped_pages(Devid::new(DEVICES[0])), 0);
                }
            }
        }
        compare(&mut host, &model);
    }
    host.fails.set(false);
    host.backend.reset().expect("invalidations work");
    for number in 0..=u8::MAX {
        let pinned = host.backend.backing().pinned(Gpa::new(gpa(number)));
        assert!(
            pinned.unwrap_or_default() == 0,
            "still pinned after a reset"
        );
    }
}
