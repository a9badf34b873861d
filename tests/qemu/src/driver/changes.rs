//! Maps, unmaps with their invalidations, and moves of devices between domains.

use std::rc::Rc;

use anyhow::{Context, anyhow};
use ringfence_memory::Frames;
use ringfence_pgtable::{Format, Level, MapError, MapRequest, Table};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, PageSize, Pending, Pfn,
    PfnRange, Ticket, Unmapped, WholeDomain,
};

use super::{Broken, Driver, MAPPINGS, REMEMBERED, WINDOW};
use crate::family::Family;
use crate::oracle::Mapping;
use crate::ram::GuestRam;
use crate::report::Kind;

const PAGE: u64 = PageSize::Size4K.bytes();
const LARGE: u64 = PageSize::Size2M.bytes();
/// Most unmaps that one burst of invalidations covers.
const BURST: u64 = 4;

impl<F: Family> Driver<'_, F> {
    /// Maps 1 to 64 pages, or 2 MiB, at a random free address of the domain.
    pub(super) fn map(&mut self, domain: usize) -> anyhow::Result<()> {
        self.judge_batch()?;
        let random = &mut self.random;
        let two = Level::new(2).context("no level 2")?;
        let can_be_large = self.unit.format().leaf_size(two) == Some(PageSize::Size2M);
        let is_large = can_be_large && random.once_in(8);
        let (pages, align) = match (is_large, random.below(4)) {
            (true, _) => (LARGE / PAGE, LARGE),
            (false, 0) => (1, PAGE),
            (false, _) => (1 + random.below(64), PAGE),
        };
        let base = *random.choose(&self.bases).context("no window")?;
        let offset = random.below(WINDOW * PAGE / align) * align / PAGE;
        let lo = Pfn::new(base.get() + offset);
        let lo = Pfn::new(lo.get() & !(align / PAGE - 1));
        let permissions = *random.choose(&self.permissions).context("no permissions")?;
        let Some(target) = self.domains.get_mut(domain) else {
            return Ok(());
        };
        let range = PfnRange::new(lo, pages).context("no range")?;
        let is_inside = base.get() <= lo.get() && range.hi().get() < base.get() + WINDOW;
        if !is_inside || !target.granted.is_free(&range) || target.granted.len() >= MAPPINGS {
            return Ok(());
        }
        let Some(pa) = self.buffers.take(random, pages, align) else {
            return Ok(());
        };
        let mapping = Mapping {
            range,
            pa,
            permissions,
        };
        map_in(self.unit, &target.table, &self.ram, self.frames, &mapping)?;
        target.granted.insert(mapping);
        let id = target.table.domain();
        self.report.maps += 1;
        self.report.large_maps += u64::from(is_large);
        if self.unit.invalidates_after_map() {
            let request = Invalidation::Pages {
                domain: id,
                range,
                levels: CachedLevels::All,
            };
            let ticket = self.unit.submit(request)?;
            wait(self.unit, ticket)?;
        }
        Ok(())
    }

    /// Unmaps one or several mappings of the domain. A device uses their ends before and tries to
    /// afterwards.
    pub(super) fn unmap(&mut self, domain: usize) -> anyhow::Result<()> {
        let count = match self.random.below(4) {
            0 => 1 + self.random.below(BURST),
            _ => 1,
        };
        let mut removed = Vec::new();
        for _ in 0..count {
            let Some(target) = self.domains.get(domain) else {
                break;
            };
            let index = self.random.below(target.granted.len() as u64) as usize;
            let Some(mapping) = target.granted.nth(index) else {
                break;
            };
            if mapping == target.window {
                continue;
            }
            self.probe(domain, &mapping, Kind::Inside)?;
            self.judge_batch()?;
            if let Some(target) = self.domains.get_mut(domain) {
                let unmapped = target
                    .table
                    .unmap(&self.ram, mapping.range)
                    .map_err(|error| anyhow!("unmap failed: {error:?}"))?;
                self.unit.unmapped(target.table.domain(), mapping.range)?;
                target.granted.remove(&mapping);
                removed.push((mapping, unmapped));
            }
        }
        let (mappings, unmapped): (Vec<_>, Vec<_>) = removed.into_iter().unzip();
        self.invalidate(unmapped)?;
        for mapping in mappings {
            self.report.unmaps += 1;
            self.probe(domain, &mapping, Kind::AfterUnmap)?;
            self.buffers.free(mapping.pa);
            if let Some(target) = self.domains.get_mut(domain) {
                target.removed.push_front(mapping);
                target.removed.truncate(REMEMBERED);
            }
        }
        self.judge_batch()
    }

    /// Makes the invalidations that the unmapped ranges owe, and waits for them.
    fn invalidate(&mut self, unmapped: Vec<(Unmapped, CachedLevels)>) -> anyhow::Result<()> {
        if self.options.broken != Broken::Nothing {
            return self.invalidate_badly(&unmapped);
        }
        match self.random.below(8) {
            0 => {
                for batch in unmapped {
                    flush(self.unit, Invalidation::Domain(batch.0.domain()), batch)?;
                }
                Ok(())
            }
            1 => {
                for batch in unmapped {
                    flush(self.unit, Invalidation::Global, batch)?;
                }
                Ok(())
            }
            2..5 => {
                for batch in unmapped {
                    flush(self.unit, pages(&batch), batch)?;
                }
                Ok(())
            }
            _ if unmapped.is_empty() => Ok(()),
            _ => {
                let requests: Vec<_> = unmapped.iter().map(pages).collect();
                let ticket = self.unit.submit_all(&requests)?;
                wait(self.unit, ticket)
            }
        }
    }

    /// Makes too small an invalidation, if any.
    fn invalidate_badly(&mut self, unmapped: &[(Unmapped, CachedLevels)]) -> anyhow::Result<()> {
        for batch in unmapped {
            let (domain, range) = (batch.0.domain(), batch.0.range());
            let (lo, rest) = (range.lo().get(), range.pages() - 1);
            let (domain, range) = match self.options.broken {
                Broken::Nothing => (domain, Some(range)),
                Broken::Forgotten => (domain, None),
                Broken::WithoutFirstPage => (domain, PfnRange::new(Pfn::new(lo + 1), rest)),
                Broken::WithoutLastPage => (domain, PfnRange::new(Pfn::new(lo), rest)),
                Broken::OtherDomain => (DomainId::new(domain.get() + 1), Some(range)),
            };
            if let Some(range) = range {
                let request = Invalidation::Pages {
                    domain,
                    range,
                    levels: batch.1,
                };
                let ticket = self.unit.submit(request)?;
                wait(self.unit, ticket)?;
            }
        }
        Ok(())
    }

    /// Moves a device to another domain, or blocks it.
    pub(super) fn move_device(&mut self) -> anyhow::Result<()> {
        self.judge_batch()?;
        let device = self.random.below(self.devices.len() as u64) as usize;
        let domain = self.random.below(self.domains.len() as u64) as usize;
        self.detach(device)?;
        if !self.random.once_in(8) {
            self.attach(device, domain)?;
        }
        self.report.moves += 1;
        Ok(())
    }

    pub(super) fn attach(&mut self, device: usize, domain: usize) -> anyhow::Result<()> {
        let device = self.devices.get_mut(device).context("no device")?;
        let target = self.domains.get(domain).context("no domain")?;
        self.unit.attach(device.0.requester(), &target.table)?;
        device.1 = Some(domain);
        Ok(())
    }

    pub(super) fn detach(&mut self, device: usize) -> anyhow::Result<()> {
        let device = self.devices.get_mut(device).context("no device")?;
        if device.1.take().is_some() {
            self.unit.detach(device.0.requester())?;
        }
        Ok(())
    }
}

/// Writes the entries of `mapping`.
pub(super) fn map_in<F: Family>(
    unit: &mut F,
    table: &Table<F::Format>,
    ram: &Rc<GuestRam>,
    frames: &Frames<Rc<GuestRam>>,
    mapping: &Mapping,
) -> anyhow::Result<()> {
    let request = MapRequest {
        iova: mapping.range.lo().iova(),
        pa: mapping.pa,
        pages: mapping.range.pages(),
        permissions: mapping.permissions,
    };
    let mapped: Result<(), MapError> = table.map(ram, frames, request);
    mapped.map_err(|error| anyhow!("map failed: {error:?}"))?;
    unit.mapped(table.domain(), &request)
}

/// Invalidates the whole domain and frees its table.
pub(super) fn destroy<F: Family>(
    table: Table<F::Format>,
    unit: &mut F,
    ram: &Rc<GuestRam>,
    frames: &Frames<Rc<GuestRam>>,
) -> anyhow::Result<()> {
    let domain = table.domain();
    let pending = Pending::submit(unit, Invalidation::Domain(domain), WholeDomain(domain));
    let pending = pending.map_err(|(_, error)| error)?;
    let flushed = pending.wait(unit).map_err(|(_, error)| error)?;
    table
        .destroy(ram, frames, &flushed)
        .map_err(|_| anyhow!("the table of another domain"))
}

fn pages((unmapped, levels): &(Unmapped, CachedLevels)) -> Invalidation {
    Invalidation::Pages {
        domain: unmapped.domain(),
        range: unmapped.range(),
        levels: *levels,
    }
}

fn flush(
    unit: &mut impl Invalidator,
    request: Invalidation,
    batch: (Unmapped, CachedLevels),
) -> anyhow::Result<()> {
    let pending = Pending::submit(unit, request, batch).map_err(|(_, error)| error)?;
    let flushed = pending.wait(unit).map_err(|(_, error)| error)?;
    let _ = flushed.into_batch();
    Ok(())
}

/// Polls until the invalidation completes. The unit bounds the number of polls.
fn wait(unit: &mut impl Invalidator, ticket: Ticket) -> anyhow::Result<()> {
    loop {
        match unit.poll(ticket) {
            Ok(true) => return Ok(()),
            Ok(false) => std::hint::spin_loop(),
            Err(error) => return Err(InvalidationError::into(error)),
        }
    }
}
