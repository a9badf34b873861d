//! The mappings that a guest's trace leaves: every `iommu:map` without its `iommu:unmap`.
//!
//! The events name no domain, and two domains can map the same address. [`events`] finds the device
//! of most events. Where it finds none, an unmap can mean any mapping of the address without a
//! device: the address then has several possible outcomes, and one of them must be in the tables.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use ringfence_types::{Permissions, RequesterId};

use super::events::{Change, Event, events};
use super::tables::{Domain, PAGE};

/// The translation of a page in one domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Mapping {
    phys: u64,
    /// The device, if the trace names it.
    device: Option<RequesterId>,
    /// The permissions, if the trace names them.
    permissions: Option<Permissions>,
}

/// Translations of one address in all domains. Sorted.
type Outcome = Vec<Mapping>;

/// Translation and permissions of one address in the table of a domain.
type Found<'a> = (u64, Permissions, &'a Domain);

/// The mappings that live at the end of a trace.
#[derive(Debug, Default)]
pub struct Live {
    /// By address of a page of 4 KiB: the possible outcomes.
    pages: BTreeMap<u64, BTreeSet<Outcome>>,
    /// Number of map events.
    pub maps: usize,
    /// Number of unmap events.
    pub unmaps: usize,
    /// Number of map events whose device is not known.
    pub unnamed: usize,
}

/// The result of a comparison.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Mapped pages whose translation is the only one that the trace allows.
    pub equal: usize,
    /// Pages of several possible outcomes, one of which is in the tables.
    pub possible: usize,
    /// Descriptions of all other pages.
    pub differences: Vec<String>,
}

impl Live {
    /// Reads a trace since boot, as tracefs prints it.
    ///
    /// # Errors
    /// The trace lost events, or an event is unreadable or unmaps what is not mapped.
    pub fn read(trace: &str) -> anyhow::Result<Self> {
        let mut live = Self::default();
        for event in events(trace)? {
            ensure!(
                event.iova % PAGE == 0 && event.size % PAGE == 0,
                "{event:x?} is no whole number of pages"
            );
            match event.change {
                Change::Map { phys } => live.map(&event, phys),
                Change::Unmap => live.unmap(&event)?,
            }
        }
        Ok(live)
    }

    fn map(&mut self, event: &Event, phys: u64) {
        for offset in (0..event.size).step_by(PAGE as usize) {
            let outcomes = self.pages.entry(event.iova + offset).or_default();
            if outcomes.is_empty() {
                outcomes.insert(Outcome::new());
            }
            let with = |outcome: &Outcome| {
                let mut outcome = outcome.clone();
                outcome.push(Mapping {
                    phys: phys + offset,
                    device: event.device,
                    permissions: event.permissions,
                });
                outcome.sort_unstable();
                outcome
            };
            *outcomes = outcomes.iter().map(with).collect();
        }
        self.maps += 1;
        self.unnamed += usize::from(event.device.is_none());
    }

    fn unmap(&mut self, event: &Event) -> anyhow::Result<()> {
        for offset in (0..event.size).step_by(PAGE as usize) {
            let outcomes = self.pages.entry(event.iova + offset).or_default();
            *outcomes = outcomes
                .iter()
                .flat_map(|outcome| without_one(outcome, event.device))
                .collect();
            ensure!(!outcomes.is_empty(), "{event:x?}: it is not mapped");
        }
        self.unmaps += 1;
        Ok(())
    }

    /// Compares with the tables of all domains.
    pub fn compare(&self, domains: &[Domain]) -> Comparison {
        let mut tables: BTreeMap<u64, Vec<Found<'_>>> = BTreeMap::new();
        for domain in domains {
            for (iova, (phys, permissions)) in &domain.pages {
                let found = (*phys, *permissions, domain);
                tables.entry(*iova).or_default().push(found);
            }
        }
        let mut result = Comparison::default();
        let pages: BTreeSet<&u64> = self.pages.keys().chain(tables.keys()).collect();
        let nowhere = BTreeSet::from([Outcome::new()]);
        for iova in pages {
            let found = tables.get(iova).map_or(&[][..], Vec::as_slice);
            let outcomes = self.pages.get(iova).unwrap_or(&nowhere);
            if !outcomes.iter().any(|outcome| agree(outcome, found)) {
                let found: Vec<_> = found.iter().map(|(phys, may, _)| (phys, may)).collect();
                result.differences.push(format!(
                    "{iova:#x}: the tables have {found:x?}, the trace has {outcomes:x?}"
                ));
            } else if outcomes.len() == 1 {
                result.equal += found.len();
            } else {
                result.possible += 1;
            }
        }
        result
    }
}

/// Returns what can remain of `outcome` when a mapping of `device` goes.
fn without_one(outcome: &Outcome, device: Option<RequesterId>) -> Vec<Outcome> {
    let fits = |index: &usize| outcome.get(*index).is_some_and(|of| of.device == device);
    let without = |index: usize| {
        let mut outcome = outcome.clone();
        outcome.remove(index);
        outcome
    };
    (0..outcome.len()).filter(fits).map(without).collect()
}

/// Returns true if the tables have exactly these translations, in the devices' own tables, with the
/// permissions that the trace names.
fn agree(outcome: &Outcome, found: &[Found<'_>]) -> bool {
    let mut left = found.to_vec();
    // Mappings with a device first: the others fit any table.
    let mut outcome = outcome.clone();
    outcome.sort_by_key(|mapping| mapping.device.is_none());
    let all = outcome.iter().all(|mapping| {
        let index = left.iter().position(|(phys, permissions, domain)| {
            let of_device = |device| domain.devices.contains(&device);
            mapping.phys == *phys
                && mapping.device.is_none_or(of_device)
                && mapping.permissions.is_none_or(|may| may == *permissions)
        });
        index.map(|index| left.remove(index)).is_some()
    });
    all && left.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::PhysAddr;

    const HEADER: &str = "# entries-in-buffer/entries-written: 2/2   #P:1\n";

    fn tables(pages: &[(u64, u64)]) -> Domain {
        Domain {
            devices: Vec::new(),
            root: PhysAddr::new(0),
            pages: pages
                .iter()
                .map(|(iova, phys)| (*iova, (*phys, Permissions::READ)))
                .collect(),
            leaves: BTreeMap::new(),
        }
    }

    fn map(iova: u64, phys: u64, size: u64) -> String {
        let end = iova + size;
        format!(
            "a-1 [0] 1.0: map: IOMMU: iova={iova:#018x} - {end:#018x} paddr={phys:#018x} \
             size={size}\n"
        )
    }

    fn unmap(iova: u64, size: u64) -> String {
        let end = iova + size;
        format!(
            "a-1 [0] 1.0: unmap: IOMMU: iova={iova:#018x} - {end:#018x} size={size} \
             unmapped_size={size}\n"
        )
    }

    #[test]
    fn what_is_mapped_and_not_unmapped_lives() {
        let trace = [HEADER, &map(0x1000, 0x8000, 0x2000), &unmap(0x1000, 0x1000)].concat();
        let live = Live::read(&trace).unwrap();
        let equal = live.compare(&[tables(&[(0x2000, 0x9000)])]);
        assert_eq!(
            (equal.equal, equal.possible, equal.differences.len()),
            (1, 0, 0)
        );
        for wrong in [
            &[][..],
            &[(0x2000, 0x8000)],
            &[(0x2000, 0x9000), (0x1000, 0x8000)],
        ] {
            assert_eq!(live.compare(&[tables(wrong)]).differences.len(), 1);
        }
        assert!(Live::read(&[&trace[..], &unmap(0x1000, 0x1000)].concat()).is_err());
    }

    #[test]
    fn a_mapping_of_a_device_is_in_its_own_table() {
        let named = "a-1 [0] 1.0: dma_map_phys: 0000:00:05.0 dir=TO_DEVICE dma_addr=1010 size=16\n";
        let live = Live::read(&[HEADER, &map(0x1000, 0x8000, 0x1000), named].concat()).unwrap();
        let mut domain = tables(&[(0x1000, 0x8000)]);
        assert_eq!(
            live.compare(std::slice::from_ref(&domain))
                .differences
                .len(),
            1
        );
        domain.devices.push(RequesterId::new(0x28));
        assert_eq!(live.compare(&[domain]).differences.len(), 0);
    }

    #[test]
    fn a_mark_names_device_and_permissions() {
        let mark = |text| format!("a-1 [0] 1.0: tracing_mark_write: 0000:00:05.0 {text}\n");
        let mut domain = tables(&[(0x1000, 0x8000)]);
        domain.devices.push(RequesterId::new(0x28));
        for (marked, differences) in [("1", 0), ("2", 1), ("3", 1)] {
            let trace = [HEADER, &mark(marked), &map(0x1000, 0x8000, 0x1000)].concat();
            let live = Live::read(&trace).unwrap();
            let result = live.compare(std::slice::from_ref(&domain));
            assert_eq!(result.differences.len(), differences, "{marked}");
        }
        domain.devices = vec![RequesterId::new(0x30)];
        let trace = [HEADER, &mark("1"), &map(0x1000, 0x8000, 0x1000)].concat();
        let result = Live::read(&trace).unwrap().compare(&[domain]);
        assert_eq!(result.differences.len(), 1);
        assert!(Live::read(&[HEADER, &mark("0")].concat()).is_err());
    }

    #[test]
    fn an_unmap_of_either_domain_leaves_two_outcomes() {
        let maps = [map(0x1000, 0x8000, 0x1000), map(0x1000, 0x9000, 0x1000)].concat();
        let live = Live::read(&[HEADER, &maps, &unmap(0x1000, 0x1000)].concat()).unwrap();
        for phys in [0x8000, 0x9000] {
            let one = live.compare(&[tables(&[(0x1000, phys)])]);
            assert_eq!((one.possible, one.differences.len()), (1, 0));
        }
        let both = live.compare(&[tables(&[(0x1000, 0x8000)]), tables(&[(0x1000, 0x9000)])]);
        assert_eq!(both.differences.len(), 1);
    }

    #[test]
    fn a_trace_that_lost_events_is_rejected() {
        let header = HEADER.replace("2/2", "2/3");
        assert!(Live::read(&header).is_err());
        assert!(Live::read("").is_err());
        assert!(Live::read(&[HEADER, "CPU:0 [LOST 3 EVENTS]\n"].concat()).is_err());
    }
}
