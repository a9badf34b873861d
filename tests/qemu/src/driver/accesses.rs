//! Choice of random accesses, most of them near ends.

use anyhow::Context;
use ringfence_pgtable::Format;
use ringfence_types::{Access, Iova, PageSize, RequesterId};

use super::{Device, Driver};
use crate::family::Family;
use crate::oracle::Mapping;
use crate::report::Kind;

const PAGE: u64 = PageSize::Size4K.bytes();

/// An access to judge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt {
    /// Number of accesses before this one.
    pub(super) step: u64,
    pub(super) device: RequesterId,
    /// The domain of the device.
    pub(super) domain: Option<usize>,
    pub(super) kind: Kind,
    pub(super) access: Access,
    pub(super) iova: Iova,
    pub(super) bytes: u64,
}

impl<F: Family> Driver<'_, F> {
    /// Makes one access of a random device.
    pub(super) fn access(&mut self) -> anyhow::Result<()> {
        let count = self.devices.len() as u64;
        // A read costs several accesses of QEMU, and is rarer.
        let index = match self.random.below(count) as usize {
            index if self.is_reader(index) && !self.random.once_in(8) => 0,
            index => index,
        };
        let domain = self.devices.get(index).and_then(|device| device.1);
        let other = self.random.below(self.domains.len() as u64) as usize;
        let kind = match self.random.below(20) {
            0..12 => Kind::Inside,
            12..15 => Kind::OverEnds,
            15..18 => Kind::AfterUnmap,
            18 => Kind::OtherDevice,
            _ => Kind::Anywhere,
        };
        let mapping = match kind {
            Kind::AfterUnmap => self.removed_mapping(domain.unwrap_or(other)),
            Kind::OtherDevice if domain != Some(other) => self.mapping(other),
            _ => self.mapping(domain.unwrap_or(other)),
        };
        let Some(mapping) = mapping else {
            return Ok(());
        };
        let (iova, bytes) = match kind {
            Kind::OverEnds => self.over_ends(&mapping),
            Kind::Anywhere => self.anywhere(),
            _ => self.inside(&mapping),
        };
        self.attempt(index, kind, iova, bytes)
    }

    /// Accesses the first and the last page of `mapping` of `domain` by one of its devices, if it
    /// has any.
    pub(super) fn probe(
        &mut self,
        domain: usize,
        mapping: &Mapping,
        kind: Kind,
    ) -> anyhow::Result<()> {
        let mut devices = self.devices.iter();
        let Some(index) = devices.position(|device| device.1 == Some(domain)) else {
            return Ok(());
        };
        let last = mapping.first_byte() + mapping.bytes() - PAGE;
        for first in [mapping.first_byte(), last] {
            let iova = Iova::new(first + self.random.below(PAGE - 8));
            self.attempt(index, kind, iova, 4)?;
        }
        Ok(())
    }

    fn attempt(&mut self, index: usize, kind: Kind, iova: Iova, bytes: u64) -> anyhow::Result<()> {
        let (device, domain) = self.devices.get(index).context("no device")?.clone();
        let (access, bytes) = match &device {
            Device::Writer(_) => (Access::Write, bytes),
            Device::Reader(_) => (Access::Read, bytes.min(8)),
        };
        if self.unit.translates_byte_below() && self.looks_below(domain, iova, bytes) {
            self.report.skipped += 1;
            return Ok(());
        }
        let kind = match (kind, self.granted(domain, iova)) {
            (Kind::Inside, Some(mapping)) if !mapping.permissions.allows(access) => {
                Kind::WrongDirection
            }
            _ => kind,
        };
        let attempt = Attempt {
            step: self.report.accesses,
            device: device.requester(),
            domain,
            kind,
            access,
            iova,
            bytes,
        };
        match device {
            Device::Writer(device) => self.add_write(device, attempt)?,
            Device::Reader(device) => self.judge_read(&device, &attempt)?,
        }
        self.report.accesses += 1;
        self.report.count(attempt.kind);
        Ok(())
    }

    /// Returns true if a word of the access begins directly below a mapping.
    fn looks_below(&self, domain: Option<usize>, iova: Iova, bytes: u64) -> bool {
        (0..bytes).step_by(4).any(|offset| {
            let next = iova.wrapping_add(offset + 1);
            let mapping = self.granted(domain, next);
            mapping.is_some_and(|mapping| mapping.first_byte() == next.get())
        })
    }

    fn is_reader(&self, index: usize) -> bool {
        matches!(self.devices.get(index), Some((Device::Reader(_), _)))
    }

    fn granted(&self, domain: Option<usize>, iova: Iova) -> Option<Mapping> {
        self.domains.get(domain?)?.granted.find(iova)
    }

    fn mapping(&mut self, domain: usize) -> Option<Mapping> {
        let granted = &self.domains.get(domain)?.granted;
        let index = self.random.below(granted.len() as u64);
        granted.nth(index as usize)
    }

    fn removed_mapping(&mut self, domain: usize) -> Option<Mapping> {
        let removed = &self.domains.get(domain)?.removed;
        if removed.is_empty() {
            return None;
        }
        let index = self.random.below(removed.len() as u64);
        removed.get(index as usize).copied()
    }

    /// Returns some bytes of the mapping, often near the end of a page.
    fn inside(&mut self, mapping: &Mapping) -> (Iova, u64) {
        let random = &mut self.random;
        let bytes = match random.below(8) {
            0 => 1 + random.below(mapping.bytes().min(2 * PAGE)),
            _ => 1 + random.below(16),
        };
        let room = mapping.bytes() - bytes;
        let page = random.below(mapping.range.pages()) * PAGE;
        let offset = match random.below(4) {
            0 => page,
            1 => page + PAGE - bytes.min(PAGE),
            2 => page + PAGE - 1 - random.below(16),
            _ => page + random.below(PAGE),
        };
        let first = mapping.first_byte() + offset.min(room);
        (Iova::new(first), bytes)
    }

    /// Returns bytes over the first or the last byte of the mapping.
    fn over_ends(&mut self, mapping: &Mapping) -> (Iova, u64) {
        let random = &mut self.random;
        let bytes = match random.below(8) {
            0 => 2 + random.below(2 * PAGE),
            _ => 2 + random.below(15),
        };
        let before = 1 + random.below(bytes - 1);
        let edge = match random.below(2) {
            0 => mapping.first_byte(),
            _ => mapping.first_byte().wrapping_add(mapping.bytes()),
        };
        (Iova::new(edge.wrapping_sub(before)), bytes)
    }

    /// Returns bytes in or near a window, or beyond the width of the table.
    fn anywhere(&mut self) -> (Iova, u64) {
        let width = self.unit.format().width();
        let bits = self.unit.tag_bits();
        let random = &mut self.random;
        let base = random
            .choose(&self.bases)
            .map_or(0, |base| base.iova().get());
        let offset = random.below(super::WINDOW * PAGE * 2);
        let iova = base.wrapping_add(offset);
        let iova = match random.below(4) {
            0 if width < bits => {
                iova ^ 1 << (u64::from(width) + random.below(u64::from(bits - width)))
            }
            _ => iova,
        };
        let bytes = 1 + random.below(16);
        (Iova::new(iova.min(u64::MAX - bytes)), bytes)
    }
}
