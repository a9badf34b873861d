//! The design axes of the slides as sweeps (CG17): size and ways of the IOTLB, granularity and time
//! of invalidations, location of the IOMMU, and the interfaces.
//!
//! Two devices map, access and unmap buffers of rings through Calgary units. The sweeps count; only
//! the cycles of a miss at each location are modelled.

use ringfence_hw::{CalgaryUnit, Geometry, HostBridge, InvalidationGranularity, UnitConfig};
use ringfence_lab::LabError;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{CalgaryTce, Coherency, MapRequest, Table};
use ringfence_types::{
    Access, DomainId, Invalidation, Invalidator, Iova, Permissions, Pfn, PfnRange, PhysAddr,
    PhysRange, RequesterId,
};

use crate::finding::{FindingRow, Findings};

/// Buffers in flight of each device.
const RING: u64 = 32;
/// Accesses to a buffer before its unmap: header, payload, status.
const ACCESSES: u64 = 3;
/// Buffers that each device uses in turn.
const ROUNDS: u64 = 2048;

/// The time of invalidations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Invalidate {
    /// At each unmap, as narrowly as the unit can.
    PerUnmap,
    /// After this many unmaps.
    Every(u64),
}

/// The location of the IOTLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Location {
    /// In the processor: one IOTLB for all devices, whose walks read the processor's caches.
    Core,
    /// In the chipset: one IOTLB for all devices, whose walks read memory.
    Chip,
    /// In each device: half of the entries for each of the two. A miss crosses the bus to the
    /// chipset and back.
    Device,
}

impl Location {
    /// Cycles that a device waits for a miss. The chipset's are rIOMMU's (section 5.3). The others
    /// are assumed: a walk that hits the caches, and two bus crossings more.
    const fn miss(self) -> f64 {
        match self {
            Self::Core => 100.0,
            Self::Chip => 1532.0,
            Self::Device => 2.0 * 1532.0,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Core => "core",
            Self::Chip => "chip",
            Self::Device => "device",
        }
    }
}

/// One point of a sweep.
#[derive(Debug, Clone, Copy)]
struct Design {
    sets: u32,
    ways: u32,
    granularity: InvalidationGranularity,
    invalidate: Invalidate,
    location: Location,
}

const BASE: Design = Design {
    sets: 16,
    ways: 4,
    granularity: InvalidationGranularity::GlobalOnly,
    invalidate: Invalidate::PerUnmap,
    location: Location::Chip,
};

/// Counts of a point.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counts {
    accesses: u64,
    misses: u64,
    invalidations: u64,
    /// Accesses to buffers after their unmap that the unit let through.
    stale: u64,
}

impl Counts {
    fn miss_rate(&self) -> f64 {
        self.misses as f64 / self.accesses.max(1) as f64
    }
}

fn failed() -> LabError {
    LabError::Internal("a design of an IOMMU")
}

/// The units of a design and the tables of its two devices, each on a bus of its own.
struct Machine {
    units: Vec<CalgaryUnit>,
    tables: Vec<Table<CalgaryTce>>,
}

impl Machine {
    fn new(design: &Design, arena: &Arena, frames: &Frames<&Arena>) -> Result<Self, LabError> {
        let units = if design.location == Location::Device {
            2
        } else {
            1
        };
        let sets = (design.sets / units).max(1);
        let config = UnitConfig {
            iotlb: Geometry::new(sets, design.ways)?,
            contexts: Geometry::new(16, 1)?,
            granularity: design.granularity,
            ..UnitConfig::UNCACHED
        };
        let mut units: Vec<CalgaryUnit> =
            (0..units).map(|_| CalgaryUnit::calgary(&config)).collect();
        let format = CalgaryTce::new(30).ok_or_else(failed)?;
        let mut tables = Vec::new();
        for bus in 0..2_u8 {
            let root = frames.alloc_contiguous(Table::root_bytes_of(&format) >> 12);
            let root = root.map_err(|_| failed())?;
            let domain = DomainId::new(u16::from(bus) + 1);
            let table = Table::at(format, domain, Coherency::Coherent, arena, root)?;
            for unit in &mut units {
                unit.enable();
                unit.set_bridge(HostBridge {
                    first_bus: bus,
                    last_bus: bus,
                    domain,
                    format,
                    table: root,
                });
            }
            tables.push(table);
        }
        Ok(Self { units, tables })
    }

    /// Returns the unit that translates for the device on `bus`.
    fn unit_of(&self, bus: usize) -> usize {
        bus.min(self.units.len() - 1)
    }

    /// Makes an access of the device on `bus`. Returns true if its unit lets it through.
    fn access(&mut self, arena: &Arena, bus: usize, at: Iova) -> bool {
        let device = RequesterId::new((bus as u16) << 8);
        let unit = self.unit_of(bus);
        self.units[unit]
            .translate(arena, device, at, 64, Access::Write)
            .is_ok()
    }

    /// Returns the lookups and the misses of all units.
    fn lookups(&self) -> (u64, u64) {
        let stats = self.units.iter().map(CalgaryUnit::stats);
        stats.fold((0, 0), |(lookups, misses), stats| {
            (lookups + stats.lookups(), misses + stats.iotlb_misses)
        })
    }

    /// Invalidates `request` in the unit of `bus`, or in all units if it is global.
    fn invalidate(&mut self, bus: usize, request: Invalidation) -> Result<(), LabError> {
        let own = self.unit_of(bus);
        for (number, unit) in self.units.iter_mut().enumerate() {
            if request == Invalidation::Global || number == own {
                unit.submit(request).map_err(|_| failed())?;
            }
        }
        Ok(())
    }
}

/// Drives a design.
fn run(design: Design) -> Result<Counts, LabError> {
    let arena = Arena::new(64 << 20)?;
    let region = PhysRange::new(PhysAddr::new(1 << 20), 63 << 20).ok_or_else(failed)?;
    let frames = Frames::new(&arena, region);
    let mut machine = Machine::new(&design, &arena, &frames)?;
    let mut counts = Counts::default();
    let mut unflushed = 0;
    let mut probed = (0, 0);
    for round in 0..ROUNDS {
        for bus in 0..machine.tables.len() {
            // Addresses come from a bitmap that moves on: no address recurs before a wrap.
            let request = MapRequest {
                iova: Pfn::new(16 + round).iova(),
                pa: PhysAddr::new((1 << 30) + (round << 12)),
                pages: 1,
                permissions: Permissions::READ_WRITE,
            };
            machine.tables[bus].map(&arena, &frames, request)?;
            // The device touches the buffers of its ring in turn, several times each.
            for touch in 0..ACCESSES {
                let Some(older) = round.checked_sub(touch * RING / ACCESSES) else {
                    continue;
                };
                if !machine.access(&arena, bus, Pfn::new(16 + older).iova()) {
                    return Err(LabError::Internal("a device could not access its buffers"));
                }
            }
            let Some(oldest) = round.checked_sub(RING) else {
                continue;
            };
            let range = PfnRange::new(Pfn::new(16 + oldest), 1).ok_or_else(failed)?;
            let table = &machine.tables[bus];
            let domain = table.domain();
            let (_unmapped, levels) = table.unmap(&arena, range).map_err(|_| failed())?;
            unflushed += 1;
            let request = match design.invalidate {
                Invalidate::PerUnmap => Some(Invalidation::Pages {
                    domain,
                    range,
                    levels,
                }),
                Invalidate::Every(number) => (unflushed >= number).then_some(Invalidation::Global),
            };
            if let Some(request) = request {
                machine.invalidate(bus, request)?;
                counts.invalidations += 1;
                unflushed = 0;
            }
            let before = machine.lookups();
            counts.stale += u64::from(machine.access(&arena, bus, range.lo().iova()));
            // The attacker's lookups are not the devices'.
            let after = machine.lookups();
            probed.0 += after.0 - before.0;
            probed.1 += after.1 - before.1;
        }
    }
    let (lookups, misses) = machine.lookups();
    counts.accesses = lookups - probed.0;
    counts.misses = misses - probed.1;
    Ok(counts)
}

/// Drives a design with the IOTLB in each location.
fn at_locations(design: Design) -> Result<[(Location, Counts); 3], LabError> {
    let at = |location| {
        let counts = run(Design { location, ..design })?;
        Ok::<_, LabError>((location, counts))
    };
    Ok([
        at(Location::Core)?,
        at(Location::Chip)?,
        at(Location::Device)?,
    ])
}

/// Adds the sweeps.
pub(super) fn add(found: &mut Findings) -> Result<(), LabError> {
    let mut row = |what: String, unit: &'static str, value: f64| {
        found.push(FindingRow::counted(what, unit, value));
    };
    let quiet = Design {
        invalidate: Invalidate::Every(256),
        ..BASE
    };
    for (sets, ways) in [(4, 4), (16, 4), (64, 4), (64, 1), (1, 64), (16, 16)] {
        let counts = run(Design {
            sets,
            ways,
            ..quiet
        })?;
        let what = format!("IOTLB of {sets} sets and {ways} ways: misses per access");
        row(what, "", counts.miss_rate());
    }
    let flushes = [
        (
            "all entries at each unmap",
            BASE.sets,
            InvalidationGranularity::GlobalOnly,
            Invalidate::PerUnmap,
        ),
        (
            "one page at each unmap",
            BASE.sets,
            InvalidationGranularity::Selective,
            Invalidate::PerUnmap,
        ),
        (
            "all entries at each 256th unmap",
            BASE.sets,
            InvalidationGranularity::GlobalOnly,
            Invalidate::Every(256),
        ),
        // The smaller IOTLB has evicted each entry before the access after its unmap.
        (
            "all of 256 entries at each 256th unmap",
            64,
            InvalidationGranularity::GlobalOnly,
            Invalidate::Every(256),
        ),
    ];
    for (name, sets, granularity, invalidate) in flushes {
        let counts = run(Design {
            sets,
            granularity,
            invalidate,
            ..BASE
        })?;
        row(
            format!("invalidation of {name}: misses per access"),
            "",
            counts.miss_rate(),
        );
        let stale = counts.stale as f64 / (2 * (ROUNDS - RING)) as f64;
        row(
            format!("invalidation of {name}: unmapped buffers reached"),
            "",
            stale,
        );
    }
    for (location, counts) in at_locations(quiet)? {
        let name = location.name();
        row(
            format!("IOMMU in the {name}: misses per access"),
            "",
            counts.miss_rate(),
        );
        let wait = counts.miss_rate() * location.miss();
        row(
            format!("IOMMU in the {name}: wait per access"),
            "cycles",
            wait,
        );
    }
    found.explain(
        "Of an IOTLB of 64 entries, 4 ways miss as rarely as 256 entries. One way adds conflict \
        misses, because pages of the two rings share sets. 64 ways add capacity misses: the third \
        access to a buffer follows 64 other pages since its second, and LRU has evicted it.",
    );
    Ok(())
}

#[cfg(test)]
mod tests;
