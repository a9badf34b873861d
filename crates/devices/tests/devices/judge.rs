//! The judge tracks which buffers are mapped, by device address. It does not depend on the mode.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ringfence_devices::{DeviceMapping, DmaRequest, Observer};
use ringfence_types::{Access, Direction, Fault, Iova, IovaRange, PhysAddr, PhysRange};

use super::rig::TABLES;

/// A buffer that the layer owns.
#[derive(Debug, Clone, Copy)]
struct Grant {
    range: IovaRange,
    memory: PhysRange,
    direction: Direction,
    /// True if the buffer is mapped and not withheld.
    live: bool,
    /// True if the device may know of the buffer; then its accesses must not be blocked.
    reported: bool,
}

impl Grant {
    fn allows(&self, request: &DmaRequest) -> bool {
        self.direction.permissions().allows(request.access)
    }

    /// Returns true if the access goes to the grant's memory.
    fn covers(&self, request: &DmaRequest, ranges: &[PhysRange]) -> bool {
        let Some(asked) = IovaRange::new(request.iova, request.bytes) else {
            return false;
        };
        let offset = request.iova.get().wrapping_sub(self.range.start().get());
        let mut at = self.memory.start().wrapping_add(offset);
        self.range.contains(&asked)
            && self.allows(request)
            && ranges.iter().all(|range| {
                let here = range.start() == at;
                at = at.wrapping_add(range.bytes());
                here
            })
    }
}

/// A device address and the physical address behind it. An as-published ring may map an address
/// twice.
type Key = (Iova, PhysAddr);

/// The judge of one device.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    grants: BTreeMap<Key, Grant>,
    /// Physical start of each mapping at an address, oldest first.
    starts: BTreeMap<Iova, VecDeque<PhysAddr>>,
    withheld: BTreeMap<PhysAddr, Iova>,
    /// Grants that the device does not know of yet. Used if walks do not snoop.
    unreported: Vec<Key>,
    tells_later: bool,
    /// True if the judge tracks no grants: for a ring that overwrites entries, which makes the
    /// owner of an address ambiguous.
    pub(crate) blind: bool,
    /// Accesses outside all grants.
    pub(crate) violations: u64,
    /// Violations on a page that a live buffer shares.
    pub(crate) colocated: u64,
    /// Physical addresses of the violations.
    pub(crate) reached: BTreeSet<PhysAddr>,
    /// Accesses to buffer memory.
    pub(crate) accesses: u64,
    /// Accesses that the unit blocked.
    pub(crate) faults: u64,
    /// Blocked accesses to live buffers that the device knows of.
    pub(crate) false_faults: u64,
    /// Addresses mapped to a second buffer while the first one was live.
    pub(crate) overwritten: u64,
    /// Number of grants so far.
    pub(crate) maps: u64,
}

impl Judge {
    /// Creates a judge. If `tells_later`, the device learns of a mapping only after its sync;
    /// otherwise at once.
    pub(crate) fn new(tells_later: bool) -> Self {
        Self {
            tells_later,
            ..Self::default()
        }
    }

    /// Returns the number of buffers that the layer owns.
    pub(crate) fn live(&self) -> usize {
        self.grants.len()
    }

    /// Returns the first address of each mapped buffer, with an access that it allows.
    pub(crate) fn granted(&self) -> Vec<(Iova, Access)> {
        let live = self.grants.values().filter(|grant| grant.live);
        let first = live.map(|grant| {
            let reads = grant.direction.permissions().allows(Access::Read);
            let access = if reads { Access::Read } else { Access::Write };
            (grant.range.start(), access)
        });
        first.collect()
    }

    pub(crate) fn grant(&mut self, mapping: &DeviceMapping, memory: PhysRange) {
        self.maps += 1;
        let key = (mapping.range.start(), memory.start());
        let starts = self.starts.entry(key.0).or_default();
        self.overwritten += u64::from(!starts.is_empty());
        starts.push_back(key.1);
        if self.blind {
            return;
        }
        let grant = Grant {
            range: mapping.range,
            memory,
            direction: mapping.direction,
            live: true,
            reported: !self.tells_later,
        };
        let kept = self.withheld.get(&memory.start());
        assert_eq!(kept, None, "{memory} is mapped, and not back");
        let before = self.grants.insert(key, grant).map(|grant| grant.memory);
        assert_eq!(before, None, "{memory} is mapped twice");
        if self.tells_later {
            self.unreported.push(key);
        }
    }

    /// Records that the device knows of all mappings.
    pub(crate) fn tell(&mut self) {
        for key in self.unreported.drain(..) {
            if let Some(grant) = self.grants.get_mut(&key) {
                grant.reported = true;
            }
        }
    }

    /// Records an unmap at `iova`. The buffer is returned if `is_back`, and otherwise withheld.
    pub(crate) fn unmap(&mut self, iova: Iova, is_back: bool) {
        let starts = self.starts.get_mut(&iova).expect("mapped there");
        let start = starts.pop_front().expect("mapped there");
        if starts.is_empty() {
            self.starts.remove(&iova);
        }
        if is_back {
            self.grants.remove(&(iova, start));
        } else {
            self.withheld.insert(start, iova);
            if let Some(grant) = self.grants.get_mut(&(iova, start)) {
                grant.live = false;
            }
        }
    }

    /// Records the release of a withheld buffer.
    pub(crate) fn release(&mut self, start: PhysAddr) {
        let iova = self.withheld.remove(&start).expect("withheld");
        self.grants.remove(&(iova, start));
    }

    /// Returns the grants at the last start address at or below `iova`.
    fn around(&self, iova: Iova) -> impl Iterator<Item = &Grant> {
        let below = self.grants.range(..=(iova, PhysAddr::new(u64::MAX)));
        let start = below.clone().next_back().map(|((start, _), _)| *start);
        below
            .rev()
            .map(|(_, grant)| grant)
            .take_while(move |grant| Some(grant.range.start()) == start)
    }

    fn shares_a_page(&self, iova: Iova) -> bool {
        let page = iova.align_down(4096);
        let last = (page.wrapping_add(4095), PhysAddr::new(u64::MAX));
        let below = self.grants.range(..=last).next_back();
        below.is_some_and(|(_, grant)| grant.live && grant.range.last() >= page)
    }
}

impl Observer for Judge {
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        // Tables and descriptors are above the buffers.
        if self.blind || ranges.iter().all(|range| range.start().get() >= TABLES) {
            return;
        }
        self.accesses += 1;
        if self
            .around(request.iova)
            .any(|kept| kept.covers(request, ranges))
        {
            return;
        }
        self.violations += 1;
        self.colocated += u64::from(self.shares_a_page(request.iova));
        self.reached
            .extend(ranges.iter().map(|range| range.start()));
    }

    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        self.faults += 1;
        let denied = |kept: &Grant| {
            kept.live
                && kept.reported
                && kept.range.contains_address(fault.iova)
                && kept.allows(request)
        };
        let denied = self.around(fault.iova).any(denied);
        self.false_faults += u64::from(denied);
    }
}
