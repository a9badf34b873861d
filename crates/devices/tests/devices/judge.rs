//! Knows what is in the layer's keeping, by the addresses that the device was told, and nothing of
//! the mode.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ringfence_devices::{DeviceMapping, DmaRequest, Observer};
use ringfence_types::{Direction, Fault, Iova, IovaRange, PhysAddr, PhysRange};

use super::rig::TABLES;

/// A buffer in the layer's keeping.
#[derive(Debug, Clone, Copy)]
struct Grant {
    range: IovaRange,
    memory: PhysRange,
    direction: Direction,
    /// Mapped, and not withheld.
    live: bool,
    /// The device may have been told of it, so it must not be stopped there.
    told: bool,
}

impl Grant {
    fn allows(&self, request: &DmaRequest) -> bool {
        self.direction.permissions().allows(request.access)
    }

    /// Whether an access leads to where the grant lies.
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

/// An address of the device and the byte it leads to. A literal ring gives an address twice.
type Key = (Iova, PhysAddr);

/// The judge of one device.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    grants: BTreeMap<Key, Grant>,
    /// First byte of what was mapped at an address, oldest first.
    starts: BTreeMap<Iova, VecDeque<PhysAddr>>,
    withheld: BTreeMap<PhysAddr, Iova>,
    /// Grants that the device was not told of yet; used where walks do not snoop.
    untold: Vec<Key>,
    tells_later: bool,
    /// Keeps no grants: for a ring that overwrites entries, of which nobody can say whose an
    /// address is.
    pub(crate) blind: bool,
    /// Accesses that lead outside what is kept.
    pub(crate) violations: u64,
    /// Those of them on a page where addresses of a live buffer are.
    pub(crate) colocated: u64,
    /// Where accesses led that lay outside what is kept.
    pub(crate) reached: BTreeSet<PhysAddr>,
    /// Accesses inside memory for buffers.
    pub(crate) accesses: u64,
    /// Accesses that were stopped.
    pub(crate) faults: u64,
    /// Those of them to a byte of a live buffer that the device was told of.
    pub(crate) false_faults: u64,
    /// Addresses that were given for a second buffer while the first one was live.
    pub(crate) overwritten: u64,
    /// Grants so far.
    pub(crate) maps: u64,
}

impl Judge {
    /// One who knows that a device is told of what is mapped at once, or, if it `tells_later`, when
    /// that was published.
    pub(crate) fn new(tells_later: bool) -> Self {
        Self {
            tells_later,
            ..Self::default()
        }
    }

    /// Buffers in the layer's keeping.
    pub(crate) fn live(&self) -> usize {
        self.grants.len()
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
            told: !self.tells_later,
        };
        let kept = self.withheld.get(&memory.start());
        assert_eq!(kept, None, "{memory} is mapped, and not back");
        let before = self.grants.insert(key, grant).map(|grant| grant.memory);
        assert_eq!(before, None, "{memory} is mapped twice");
        if self.tells_later {
            self.untold.push(key);
        }
    }

    /// The device is told of all that is mapped.
    pub(crate) fn tell(&mut self) {
        for key in self.untold.drain(..) {
            if let Some(grant) = self.grants.get_mut(&key) {
                grant.told = true;
            }
        }
    }

    /// What is unmapped from `iova` is back, or withheld until it is released.
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

    /// A buffer that was withheld is back.
    pub(crate) fn release(&mut self, start: PhysAddr) {
        let iova = self.withheld.remove(&start).expect("withheld");
        self.grants.remove(&(iova, start));
    }

    /// Grants whose addresses begin where the last ones at or below `iova` do.
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
        // Tables and descriptors lie above.
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
                && kept.told
                && kept.range.contains_address(fault.iova)
                && kept.allows(request)
        };
        let denied = self.around(fault.iova).any(denied);
        self.false_faults += u64::from(denied);
    }
}
