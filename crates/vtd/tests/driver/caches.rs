//! The caches of a unit, as unhelpful as the specification allows: they cache every entry at once,
//! refill each other between two commands, and execute the commands between two fences in reverse
//! order. After each operation the unit must see exactly the attached devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, Pasid, PhysAddr, PhysMemory, RequesterId};
use ringfence_vtd::{Mode, Translation};

use crate::model::{self, CAP, CM, ECAP, ECAP_SCALABLE, Event, Model};

const DEVICES: [u16; 4] = [0x20, 0x28, 0x0190, 0x01e8];
const PASIDS: [u32; 3] = [0, 1, 0x41];
const ROOT: u64 = 0x10_0000;
const POINTER: u64 = !0xfff;

/// A tag of translations: the domain-id, and the PASID for the first stage.
type Tag = (u16, Option<u32>);

struct Caches<'m> {
    model: &'m Model,
    is_scalable: bool,
    /// The unit caches entries that are not present.
    caching_mode: bool,
    /// Words 0 and 1 of context entries; zero if not present.
    contexts: BTreeMap<u16, [u64; 2]>,
    /// Words 0 and 1 of PASID entries.
    pasids: BTreeMap<(u16, u32), [u64; 2]>,
    translations: BTreeSet<Tag>,
}

impl Caches<'_> {
    fn load(&self, at: u64) -> u64 {
        let word = self.model.memory.word(PhysAddr::new(at)).unwrap();
        word.load(Ordering::SeqCst)
    }

    fn read_context(&self, device: u16) -> [u64; 2] {
        let (bus, devfn) = (u64::from(device >> 8), u64::from(device & 0xff));
        let (root, entry) = if self.is_scalable {
            (ROOT + bus * 16 + devfn / 128 * 8, devfn % 128 * 32)
        } else {
            (ROOT + bus * 16, devfn * 16)
        };
        let table = self.load(root);
        if table & 1 == 0 {
            return [0, 0];
        }
        let at = (table & POINTER) + entry;
        [self.load(at), self.load(at + 8)]
    }

    fn read_pasid(&self, context: [u64; 2], pasid: u32) -> [u64; 2] {
        let directory = (context[0] & POINTER) + u64::from(pasid / 64) * 8;
        let table = self.load(directory);
        if table & 1 == 0 {
            return [0, 0];
        }
        let at = (table & POINTER) + u64::from(pasid % 64) * 64;
        [self.load(at), self.load(at + 8)]
    }

    /// Looks a device's domain up through the caches, and fills them.
    fn lookup(&mut self, device: u16, pasid: u32) -> Option<u16> {
        let cached = self.contexts.get(&device).copied();
        let context = cached.unwrap_or_else(|| self.read_context(device));
        let present = context[0] & 1 != 0;
        if present || self.caching_mode {
            self.contexts.insert(device, context);
        }
        if !present {
            return None;
        }
        if !self.is_scalable {
            let domain = (context[1] >> 8) as u16;
            self.translations.insert((domain, None));
            return (pasid == 0).then_some(domain);
        }
        let cached = self.pasids.get(&(device, pasid)).copied();
        let entry = cached.unwrap_or_else(|| self.read_pasid(context, pasid));
        let present = entry[0] & 1 != 0;
        if present || self.caching_mode {
            self.pasids.insert((device, pasid), entry);
        }
        if !present {
            return None;
        }
        let domain = entry[1] as u16;
        // First stage and pass-through (6.5.3.3, "Guidance to Software for Invalidations": both owe
        // a PASID-based invalidation of the IOTLB).
        let has_pasid = matches!(entry[0] >> 6 & 7, 1 | 4);
        self.translations
            .insert((domain, has_pasid.then_some(pasid)));
        Some(domain)
    }

    fn fill(&mut self) {
        for device in DEVICES {
            for pasid in PASIDS {
                self.lookup(device, pasid);
            }
        }
    }

    /// Executes the descriptors since the last call.
    fn execute(&mut self) {
        let mut group = Vec::new();
        for event in self.model.take() {
            match event {
                // A wait: a fence or the end.
                Event::Descriptor([low, _]) if low & 0xf == 5 => {
                    for command in group.drain(..).rev() {
                        self.fill();
                        self.invalidate(command);
                        self.fill();
                    }
                }
                Event::Descriptor([low, _]) => group.push(low),
                Event::Write(..) => {}
            }
        }
        assert!(group.is_empty(), "commands without a wait");
    }

    fn invalidate(&mut self, low: u64) {
        let granularity = low >> 4 & 3;
        let (domain, high) = ((low >> 16) as u16, (low >> 32) as u32);
        // An entry that is not present has domain-id 0.
        let tag = |word: u64, entry: u16| if word & 1 == 0 { 0 } else { entry };
        let is_scalable = self.is_scalable;
        match (low & 0xf, granularity) {
            (1, 1) => self.contexts.clear(),
            (1, 3) => self.contexts.retain(|device, words| {
                let own = tag(words[0], (words[1] >> 8) as u16);
                *device != high as u16 || (!is_scalable && own != domain)
            }),
            (7, 3) => self.pasids.clear(),
            (7, 0) => {
                self.pasids
                    .retain(|_, words| tag(words[0], words[1] as u16) != domain);
            }
            (7, 1) => self.pasids.retain(|(_, pasid), words| {
                tag(words[0], words[1] as u16) != domain || *pasid != high
            }),
            (2, 1) => self.translations.clear(),
            (2, 2) => {
                self.translations.remove(&(domain, None));
            }
            (6, 2) => {
                self.translations.remove(&(domain, Some(high)));
            }
            other => panic!("command {other:?}"),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Attach(usize, usize, u16),
    Detach(usize),
    DetachPasid(usize, usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let (device, pasid) = (0..DEVICES.len(), 0..PASIDS.len());
    let one = prop_oneof![
        3 => (device.clone(), pasid.clone(), 1..5_u16)
            .prop_map(|(device, pasid, domain)| Operation::Attach(device, pasid, domain)),
        1 => device.clone().prop_map(Operation::Detach),
        2 => (device, pasid).prop_map(|(d, p)| Operation::DetachPasid(d, p)),
    ];
    prop::collection::vec(one, 1..30)
}

/// Domain 4 passes through. Odd domains have a first stage in scalable mode.
fn translation(domain: u16, mode: Mode) -> Translation {
    let root = PhysAddr::new(u64::from(domain) << 12);
    let levels = Levels::Four;
    match mode {
        _ if domain == 4 => Translation::PassThrough,
        Mode::Scalable if domain % 2 == 1 => Translation::FirstStage { root, levels },
        _ => Translation::SecondStage { root, levels },
    }
}

fn check(mode: Mode, cap: u64, ecap: u64, operations: &[Operation]) {
    let model = Model::new(cap, ecap);
    let frames = model::frames(&model);
    let mut unit = model::start(&model, &frames, mode).unwrap();
    model.take();
    let mut caches = Caches {
        model: &model,
        is_scalable: mode == Mode::Scalable,
        caching_mode: cap & CM != 0,
        contexts: BTreeMap::new(),
        pasids: BTreeMap::new(),
        translations: BTreeSet::new(),
    };
    let mut attached = BTreeMap::new();
    for operation in operations {
        caches.fill();
        match *operation {
            Operation::Attach(device, pasid, domain) => {
                let (device, pasid) = (DEVICES[device], PASIDS[pasid]);
                let id = RequesterId::new(device);
                let translation = translation(domain, mode);
                let result = unit.attach_pasid(
                    id,
                    Pasid::new(pasid).unwrap(),
                    DomainId::new(domain),
                    translation,
                );
                if result.is_ok() {
                    attached.insert((device, pasid), domain);
                }
            }
            Operation::Detach(device) => {
                let device = DEVICES[device];
                let _ = unit.detach(RequesterId::new(device));
                attached.retain(|(other, _), _| *other != device);
            }
            Operation::DetachPasid(device, pasid) => {
                let (device, pasid) = (DEVICES[device], PASIDS[pasid]);
                let _ = unit.detach_pasid(RequesterId::new(device), Pasid::new(pasid).unwrap());
                attached.remove(&(device, pasid));
            }
        }
        caches.execute();
        for device in DEVICES {
            for pasid in PASIDS {
                let expected = attached.get(&(device, pasid)).copied();
                let found = caches.lookup(device, pasid);
                assert_eq!(found, expected, "{device:x} {pasid}: {operation:?}");
            }
        }
        // A domain-id without devices may get another table: nothing of the old one is cached.
        for (domain, pasid) in &caches.translations {
            let mut owners = attached.iter();
            let is_used = owners.any(|((_, other), owner)| {
                owner == domain && pasid.is_none_or(|pasid| pasid == *other)
            });
            assert!(is_used, "domain {domain} after {operation:?}");
        }
    }
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

proptest! {
    #[test]
    fn no_cache_holds_an_entry_that_is_gone(operations in operations()) {
        for cap in [CAP, CAP | CM] {
            check(Mode::Legacy, cap, ECAP, &operations);
            check(Mode::Scalable, cap, ECAP_SCALABLE, &operations);
        }
    }
}
