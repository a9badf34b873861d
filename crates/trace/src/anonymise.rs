//! Anonymises a trace: keeps its structure and replaces its names and addresses.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};

use ringfence_types::{Iova, Nanos, PhysAddr};

use crate::devices::DeviceKind;
use crate::error::TraceError;
use crate::op::DeviceIndex;
use crate::options::TraceOptions;
use crate::render::render;
use crate::runs::Runs;
use crate::text::{RawChunk, RawEvent, RawKind, TraceReader};

const PAGE: u64 = 4096;
/// Runs keep their offset within blocks of this size, so that a replay can use the same large pages
/// as before.
const BLOCK: u64 = 2 << 20;
/// Lower bound of the new addresses.
const BASE: u64 = 1 << 32;

/// Separates the key for pages outside all runs from the seed that orders runs.
const STRAY: u64 = 0x7374_7261_7900_0001;

/// Options for anonymising.
#[derive(Debug, Clone, Copy, Default)]
pub struct Anonymise {
    /// Seed of the order in which runs of memory get new addresses; equal seeds give equal results.
    pub seed: u64,
    /// Shifts times so that the trace begins at 0.
    pub from_zero: bool,
}

/// An error of anonymising.
#[derive(Debug, thiserror::Error)]
pub enum AnonymiseError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The anonymised trace cannot be written.
    #[error("cannot write the anonymised trace")]
    Write(io::Error),
}

impl Anonymise {
    /// Reads a trace twice, from two readers of the same bytes, and writes its anonymised text.
    ///
    /// Each run of adjacent pages gets a new address with the same offset within 2 MiB. Shared and
    /// reused pages stay shared and reused, and separate runs stay separate. IOVAs of a translated
    /// device stay: they reveal nothing about memory, and pairing needs their adjacency. A device
    /// that maps nothing counts as untranslated, unless the trace has `iommu:*` lines. An access
    /// outside all mapped ranges of its device may name a physical address, and is renamed. Numbers
    /// replace the names of devices, tasks, processes and marks. Attributes, unknown events and
    /// comments are left out.
    ///
    /// # Errors
    /// [`AnonymiseError`].
    pub fn run<R: Read>(
        &self,
        name: &str,
        mut first: R,
        mut second: R,
        options: &TraceOptions,
        out: &mut impl Write,
    ) -> Result<(), AnonymiseError> {
        self.rewrite(name, &mut first, &mut second, options, out)
    }

    fn rewrite(
        &self,
        name: &str,
        first: &mut dyn Read,
        second: &mut dyn Read,
        options: &TraceOptions,
        out: &mut dyn Write,
    ) -> Result<(), AnonymiseError> {
        let survey = Survey::of(&mut TraceReader::new(name, first, options))?;
        let runs = PageRenaming::lay_out(&survey.runs, self.seed);
        let mut reader = TraceReader::new(name, second, options);
        let mut rewrite = Rewrite {
            start: if self.from_zero { survey.start } else { 0 },
            translated: survey.translated(),
            mapped: survey.mapped,
            runs,
            pids: HashMap::new(),
            marks: 0,
        };
        let mut chunk = RawChunk::default();
        let mut text = String::new();
        write(out, "# tracer: nop\n#\n")?;
        if survey.lost > 0 {
            write(out, &format!("CPU:0 [LOST {} EVENTS]\n", survey.lost))?;
        }
        loop {
            let more = reader.next_chunk(&mut chunk)?;
            text.clear();
            for index in 0..chunk.events.len() {
                let Some(mut event) = chunk.events.get(index).copied() else {
                    continue;
                };
                rewrite.event(&mut event, &mut chunk);
                let devices = reader.devices();
                let device = |index: DeviceIndex| {
                    let is_pci = devices
                        .get(index)
                        .is_some_and(|device| matches!(device.kind, DeviceKind::Pci { .. }));
                    let DeviceIndex(n) = index;
                    if is_pci {
                        format!("{:04x}:{:02x}:{:02x}.0", n >> 13, n >> 5 & 0xff, n & 31)
                    } else {
                        format!("device{n}")
                    }
                };
                // Writing into a string cannot fail.
                let _ = render(&event, &chunk, device, &mut text);
                text.push('\n');
            }
            write(out, &text)?;
            if !more {
                return Ok(());
            }
        }
    }
}

fn write(out: &mut dyn Write, text: &str) -> Result<(), AnonymiseError> {
    out.write_all(text.as_bytes())
        .map_err(AnonymiseError::Write)
}

/// Result of the first pass over the trace.
#[derive(Debug, Default)]
struct Survey {
    start: u64,
    lost: u64,
    /// By device: true if its DMA addresses are physical addresses. `None` if no map shows it.
    direct: Vec<Option<bool>>,
    /// By device: the pages of the DMA addresses that it maps.
    mapped: Vec<Runs>,
    /// True if the trace has `iommu:*` lines.
    has_iommu_lines: bool,
    /// The pages of all ranges.
    runs: Runs,
}

impl Survey {
    fn of(reader: &mut TraceReader<&mut dyn Read>) -> Result<Self, TraceError> {
        let mut survey = Self {
            start: u64::MAX,
            ..Self::default()
        };
        let mut chunk = RawChunk::default();
        // Ranges of coherent buffers. The pass may learn only later that their device is direct.
        let mut coherent: Vec<(DeviceIndex, u64, u64)> = Vec::new();
        while reader.next_chunk(&mut chunk)? {
            for event in &chunk.events {
                survey.start = survey.start.min(event.time.0);
                match event.kind {
                    RawKind::Map {
                        device,
                        iova,
                        phys,
                        size,
                        ..
                    } => {
                        survey.add(phys.get(), size);
                        survey.note_mapped(device, iova.get(), size);
                        survey.note_direct(device, iova.get() == phys.get());
                    }
                    RawKind::MapSg {
                        device,
                        dma_addrs,
                        sizes,
                        phys_addrs,
                        ..
                    } => {
                        let (dma, phys) = (chunk.list(dma_addrs), chunk.list(phys_addrs));
                        let direct = dma.first() == phys.first();
                        survey.note_direct(device, direct);
                        for (index, &start) in phys.iter().enumerate() {
                            let size = chunk.list(sizes).get(index);
                            let size = size.copied().filter(|_| phys.len() == dma.len());
                            survey.add(start, size.unwrap_or(1));
                        }
                        for (&start, &size) in dma.iter().zip(chunk.list(sizes)) {
                            survey.note_mapped(device, start, size);
                            if direct {
                                survey.add(start, size);
                            }
                        }
                    }
                    RawKind::Alloc {
                        device,
                        iova,
                        size,
                        phys_addrs,
                        ..
                    } => {
                        coherent.push((device, iova.get(), size));
                        survey.note_mapped(device, iova.get(), size);
                        for &start in chunk.list(phys_addrs) {
                            survey.add(start, 1);
                        }
                    }
                    RawKind::UnmapSg { phys_addrs, .. } => {
                        for &start in chunk.list(phys_addrs) {
                            survey.add(start, 1);
                        }
                    }
                    RawKind::IommuMap { phys, size, .. } => {
                        survey.has_iommu_lines = true;
                        survey.add(phys.get(), size);
                    }
                    RawKind::IommuUnmap { .. } => survey.has_iommu_lines = true,
                    _ => {}
                }
            }
        }
        for (device, start, size) in coherent {
            if !survey.is_translated(device.index()) {
                survey.add(start, size);
            }
        }
        survey.lost = reader.counts().lost;
        Ok(survey)
    }

    /// Records whether a map of `device` has equal DMA and physical addresses. One such map makes
    /// the device direct.
    fn note_direct(&mut self, device: DeviceIndex, direct: bool) {
        if self.direct.len() <= device.index() {
            self.direct.resize(device.index() + 1, None);
        }
        if let Some(known) = self.direct.get_mut(device.index()) {
            *known = Some(direct || *known == Some(true));
        }
    }

    /// Records that `device` maps `size` bytes from the DMA address `start`.
    fn note_mapped(&mut self, device: DeviceIndex, start: u64, size: u64) {
        if self.mapped.len() <= device.index() {
            self.mapped.resize_with(device.index() + 1, Runs::default);
        }
        if let Some(runs) = self.mapped.get_mut(device.index()) {
            add_range(runs, start, size);
        }
    }

    /// Returns true if the DMA addresses of the device are I/O virtual addresses.
    fn is_translated(&self, device: usize) -> bool {
        match self.direct.get(device).copied().flatten() {
            Some(direct) => !direct,
            None => self.has_iommu_lines,
        }
    }

    /// Returns [`is_translated`](Self::is_translated) of every possible device.
    fn translated(&self) -> Vec<bool> {
        let devices = 0..=usize::from(u16::MAX);
        devices.map(|device| self.is_translated(device)).collect()
    }

    /// Adds the pages of a range and merges them with adjacent runs.
    fn add(&mut self, start: u64, size: u64) {
        add_range(&mut self.runs, start, size);
    }
}

/// Adds the pages of `size` bytes from `start`.
fn add_range(runs: &mut Runs, start: u64, size: u64) {
    let last = start.saturating_add(size.saturating_sub(1)) / PAGE;
    runs.add(start / PAGE, last + 1);
}

/// New location of each run.
#[derive(Debug, Default)]
struct PageRenaming {
    /// First page of each run, mapped to the page after its last and the new first page.
    runs: BTreeMap<u64, (u64, u64)>,
    /// Key that hides the addresses of pages outside all runs.
    key: u64,
}

impl PageRenaming {
    fn lay_out(runs: &Runs, seed: u64) -> Self {
        let mut order: Vec<(u64, u64, u64)> = runs
            .iter()
            .map(|(first, end)| (mix(seed ^ mix(first)), first, end))
            .collect();
        order.sort_unstable();
        let mut next = BASE / PAGE;
        let mut runs = BTreeMap::new();
        for (_, first, end) in order {
            // Keeps the offset within a block, and a gap of at least one page to the previous run.
            let block = BLOCK / PAGE;
            let padding = (first % block + block - (next + 1) % block) % block;
            let target = next + 1 + padding;
            runs.insert(first, (end, target));
            next = target + (end - first);
        }
        let key = mix(seed ^ STRAY);
        Self { runs, key }
    }

    fn rename(&self, address: u64) -> u64 {
        let page = address / PAGE;
        match self.runs.range(..=page).next_back() {
            Some((&first, &(end, target))) if page < end => {
                (target + (page - first)).wrapping_mul(PAGE) | (address % PAGE)
            }
            // An address that no map has, for example of an unmap without a map. Two rounds, the
            // second with a separate key, prevent anyone without the seed from tabulating the
            // addresses.
            _ => {
                let hidden = mix(mix(page ^ self.key).wrapping_add(mix(self.key)));
                (hidden % (1 << 20) * PAGE) | (address % PAGE)
            }
        }
    }
}

/// The finaliser of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

struct Rewrite {
    start: u64,
    /// By device: true if its DMA addresses are I/O virtual addresses.
    translated: Vec<bool>,
    /// By device: the pages of the DMA addresses that it maps.
    mapped: Vec<Runs>,
    runs: PageRenaming,
    pids: HashMap<u32, u32>,
    marks: u32,
}

impl Rewrite {
    fn event(&mut self, event: &mut RawEvent, chunk: &mut RawChunk) {
        event.time = Nanos(event.time.0.saturating_sub(self.start));
        // PID 0 is the idle task on every system: it identifies no user's process and has a
        // meaning.
        if event.context.pid != 0 {
            let next = self.pids.len() as u32 + 1;
            event.context.pid = *self.pids.entry(event.context.pid).or_insert(next);
        }
        match &mut event.kind {
            RawKind::Map {
                device, iova, phys, ..
            } => {
                *iova = self.iova(*device, *iova);
                *phys = PhysAddr::new(self.runs.rename(phys.get()));
            }
            RawKind::Unmap { device, iova, .. } | RawKind::Free { device, iova, .. } => {
                *iova = self.iova(*device, *iova)
            }
            RawKind::Access { device, iova, .. } => {
                let mapped = self.mapped.get(device.index());
                *iova = match mapped.is_some_and(|runs| runs.contains(iova.get() / PAGE)) {
                    true => self.iova(*device, *iova),
                    false => Iova::new(self.runs.rename(iova.get())),
                };
            }
            RawKind::Alloc {
                device,
                iova,
                phys_addrs,
                ..
            } => {
                *iova = self.iova(*device, *iova);
                self.list(chunk, *phys_addrs);
            }
            RawKind::MapSg {
                device,
                dma_addrs,
                phys_addrs,
                ..
            } => {
                if self.is_direct(*device) {
                    self.list(chunk, *dma_addrs);
                }
                self.list(chunk, *phys_addrs);
            }
            RawKind::UnmapSg { phys_addrs, .. } => self.list(chunk, *phys_addrs),
            RawKind::IommuMap { iova, phys, .. } => {
                let new = self.runs.rename(phys.get());
                // Keep an identity map an identity map.
                if iova.get() == phys.get() {
                    *iova = Iova::new(new);
                }
                *phys = PhysAddr::new(new);
            }
            RawKind::Mark(index) => {
                self.marks += 1;
                if let Some(text) = chunk.marks.get_mut(*index as usize) {
                    *text = format!("mark {}", self.marks);
                }
            }
            // The reader of this module skips the events of the page allocator.
            RawKind::IommuUnmap { .. }
            | RawKind::Sync { .. }
            | RawKind::Void { .. }
            | RawKind::Page(_) => {}
        }
    }

    fn is_direct(&self, device: DeviceIndex) -> bool {
        let translated = self.translated.get(device.index());
        !translated.copied().unwrap_or(false)
    }

    fn iova(&self, device: DeviceIndex, iova: Iova) -> Iova {
        match self.is_direct(device) {
            true => Iova::new(self.runs.rename(iova.get())),
            false => iova,
        }
    }

    fn list(&self, chunk: &mut RawChunk, span: crate::text::ListSpan) {
        let first = span.first as usize;
        let list = chunk.words.get_mut(first..first + span.count as usize);
        for word in list.unwrap_or(&mut []) {
            *word = self.runs.rename(*word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stray_address_is_hidden_by_the_seed() {
        let new = |seed| PageRenaming::lay_out(&Runs::default(), seed).rename(0x23_b765_4c80);
        let all: std::collections::BTreeSet<u64> = (0..64).map(new).collect();
        // 64 draws of 2^20 pages: a collision has a probability of 1 in 500, and the seeds are
        // fixed.
        assert_eq!(all.len(), 64);
        assert!(all.iter().all(|address| address % PAGE == 0xc80));
        assert_eq!(new(7), new(7));
    }

    #[test]
    fn adjacent_runs_are_joined() {
        let mut survey = Survey::default();
        for (start, size) in [
            (0x1000, 0x1000),
            (0x3000, 0x1800),
            (0x8000, 1),
            (0x2000, 1),
            (0x3800, 0x10),
        ] {
            survey.add(start, size);
        }
        let runs: Vec<_> = survey.runs.iter().collect();
        assert_eq!(runs, [(1, 5), (8, 9)]);
        for seed in 0..100 {
            let runs = PageRenaming::lay_out(&survey.runs, seed);
            let new = |page: u64| runs.rename(page * PAGE) / PAGE;
            assert!((1..4).all(|page| new(page + 1) == new(page) + 1));
            // At least one page lies between them; otherwise they would merge into one run.
            assert!(new(8) > new(4) + 1 || new(8) + 1 < new(1));
            assert_eq!(runs.rename(0x1234) % BLOCK, 0x1234);
        }
        // Runs that would fit exactly one after another in their blocks still keep a page between
        // them.
        let mut full = Runs::default();
        for (first, end) in [(0, 5), (1029, 1030), (2058, 2059)] {
            full.add(first, end);
        }
        for seed in 0..100 {
            let runs = PageRenaming::lay_out(&full, seed);
            let mut ranges: Vec<_> = runs
                .runs
                .iter()
                .map(|(first, (end, target))| (*target, target + end - first))
                .collect();
            ranges.sort_unstable();
            assert!(
                ranges.windows(2).all(|pair| pair[0].1 < pair[1].0),
                "{ranges:?}"
            );
        }
    }
}
