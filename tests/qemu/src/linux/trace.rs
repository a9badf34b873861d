//! The mappings that a guest's trace leaves: every `iommu:map` without its `iommu:unmap`.
//!
//! The events name no domain. If two domains have mapped the same address and one unmaps it, either
//! can be meant: the address then has several possible outcomes, and one of them must be in the
//! tables.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail, ensure};

use super::tables::{Domain, PAGE};

/// Translations of one address in all domains, sorted.
type Outcome = Vec<u64>;

/// The mappings that live at the end of a trace.
#[derive(Debug, Default)]
pub struct Live {
    /// By address of a page of 4 KiB: the possible outcomes.
    pages: BTreeMap<u64, BTreeSet<Outcome>>,
    /// Number of map events.
    pub maps: usize,
    /// Number of unmap events.
    pub unmaps: usize,
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
        let counts = trace
            .lines()
            .find_map(|line| line.strip_prefix("# entries-in-buffer/entries-written: "));
        let counts = counts.and_then(|counts| counts.split_whitespace().next()?.split_once('/'));
        let (kept, written) = counts.context("a trace without its header")?;
        ensure!(kept == written, "the trace lost events: {kept} of {written}");
        for line in trace.lines() {
            ensure!(!line.contains("LOST"), "the trace lost events: {line}");
            if let Some((_, event)) = line.split_once(": map: IOMMU: ") {
                let map = live.map(event);
                map.with_context(|| line.to_owned())?;
            } else if let Some((_, event)) = line.split_once(": unmap: IOMMU: ") {
                let unmap = live.unmap(event);
                unmap.with_context(|| line.to_owned())?;
            }
        }
        Ok(live)
    }

    fn map(&mut self, event: &str) -> anyhow::Result<()> {
        let (iova, size) = (field(event, "iova=")?, field(event, "size=")?);
        let phys = field(event, "paddr=")?;
        for offset in offsets(iova | phys, size)? {
            let outcomes = self.pages.entry(iova + offset).or_default();
            if outcomes.is_empty() {
                outcomes.insert(Outcome::new());
            }
            let with = |outcome: &Outcome| {
                let mut outcome = outcome.clone();
                outcome.push(phys + offset);
                outcome.sort_unstable();
                outcome
            };
            *outcomes = outcomes.iter().map(with).collect();
        }
        self.maps += 1;
        Ok(())
    }

    fn unmap(&mut self, event: &str) -> anyhow::Result<()> {
        let (iova, size) = (field(event, "iova=")?, field(event, "unmapped_size=")?);
        for offset in offsets(iova, size)? {
            let Some(outcomes) = self.pages.get_mut(&(iova + offset)) else {
                bail!("{:#x} was never mapped", iova + offset);
            };
            let without = |outcome: &Outcome| {
                let outcome = outcome.clone();
                (0..outcome.len()).map(move |index| {
                    let mut outcome = outcome.clone();
                    outcome.remove(index);
                    outcome
                })
            };
            *outcomes = outcomes.iter().flat_map(without).collect();
            ensure!(!outcomes.is_empty(), "{:#x} is not mapped", iova + offset);
        }
        self.unmaps += 1;
        Ok(())
    }

    /// Compares with the tables of all domains.
    pub fn compare(&self, domains: &[Domain]) -> Comparison {
        let mut tables: BTreeMap<u64, Outcome> = BTreeMap::new();
        for (iova, phys) in domains.iter().flat_map(|domain| &domain.pages) {
            tables.entry(*iova).or_default().push(*phys);
        }
        let mut result = Comparison::default();
        let pages: BTreeSet<&u64> = self.pages.keys().chain(tables.keys()).collect();
        for iova in pages {
            let mut found = tables.get(iova).cloned().unwrap_or_default();
            found.sort_unstable();
            match self.pages.get(iova) {
                Some(outcomes) if outcomes.contains(&found) => match outcomes.len() {
                    1 => result.equal += found.len(),
                    _ => result.possible += 1,
                },
                expected => result.differences.push(format!(
                    "{iova:#x}: the tables have {found:x?}, the trace has {expected:x?}"
                )),
            }
        }
        result
    }
}

/// Returns the number behind `name`, which is hexadecimal after `0x`.
fn field(event: &str, name: &str) -> anyhow::Result<u64> {
    let mut words = event.split_whitespace();
    let word = words.find_map(|word| word.strip_prefix(name));
    let word = word.with_context(|| format!("no field {name}"))?;
    Ok(match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16)?,
        None => word.parse()?,
    })
}

/// Returns the offsets of the pages of a range.
fn offsets(start: u64, size: u64) -> anyhow::Result<impl Iterator<Item = u64>> {
    ensure!(
        start % PAGE == 0 && size % PAGE == 0,
        "no whole number of pages"
    );
    Ok((0..size).step_by(PAGE as usize))
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
            pages: pages.iter().copied().collect(),
            leaves: BTreeMap::new(),
        }
    }

    fn map(iova: u64, phys: u64, size: u64) -> String {
        let end = iova + size;
        format!("a-1 [0] 1.0: map: IOMMU: iova={iova:#018x} - {end:#018x} paddr={phys:#018x} size={size}\n")
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
        assert_eq!((equal.equal, equal.possible, equal.differences.len()), (1, 0, 0));
        for wrong in [&[][..], &[(0x2000, 0x8000)], &[(0x2000, 0x9000), (0x1000, 0x8000)]] {
            assert_eq!(live.compare(&[tables(wrong)]).differences.len(), 1);
        }
        assert!(Live::read(&[&trace[..], &unmap(0x1000, 0x1000)].concat()).is_err());
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
