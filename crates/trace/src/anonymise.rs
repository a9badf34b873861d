//! A trace that can be shown around: the structure of the original, none of its names and
//! addresses.

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
/// Runs keep their place within blocks of this size, so that large leaves stay possible where they
/// were.
const BLOCK: u64 = 2 << 20;
/// Where the first run is put.
const BASE: u64 = 1 << 32;

/// Tells the key of stray pages from the seed that orders runs.
const STRAY: u64 = 0x7374_7261_7900_0001;

/// How to anonymise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Anonymise {
    /// Order in which runs of memory are laid out anew; equal seeds give equal results.
    pub seed: u64,
    /// Times begin at 0.
    pub from_zero: bool,
}

/// Why anonymising failed.
#[derive(Debug)]
pub enum AnonymiseError {
    /// The trace cannot be read.
    Trace(TraceError),
    /// The result cannot be written.
    Write(io::Error),
}

impl std::fmt::Display for AnonymiseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Trace(error) => error.fmt(f),
            Self::Write(_) => f.write_str("cannot write the anonymised trace"),
        }
    }
}

impl std::error::Error for AnonymiseError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Trace(error) => Some(error),
            Self::Write(error) => Some(error),
        }
    }
}

impl From<TraceError> for AnonymiseError {
    fn from(error: TraceError) -> Self {
        Self::Trace(error)
    }
}

impl Anonymise {
    /// Reads a trace twice, from two readers of the same bytes, and writes its anonymised text.
    ///
    /// Memory is renamed by runs of touching pages: what was contiguous, shared or used again still
    /// is, what was apart stays apart, and offsets within 2 MiB stay. IOVAs of a translated device
    /// say nothing about memory and pairing needs their neighbourhood: they stay. Devices, tasks,
    /// processes and marks are numbered. Attributes, unknown events and comments are left out.
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
            direct: survey.direct,
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
                    let pci = devices
                        .get(index)
                        .is_some_and(|device| matches!(device.kind, DeviceKind::Pci { .. }));
                    let DeviceIndex(n) = index;
                    match pci {
                        true => format!("{:04x}:{:02x}:{:02x}.0", n >> 13, n >> 5 & 0xff, n & 31),
                        false => format!("device{n}"),
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

/// What the first reading finds.
#[derive(Debug, Default)]
struct Survey {
    start: u64,
    lost: u64,
    /// Devices whose DMA addresses are physical ones.
    direct: Vec<bool>,
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
        // Ranges of coherent buffers, whose device may turn out to be direct only later.
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
                        if direct {
                            for (&start, &size) in dma.iter().zip(chunk.list(sizes)) {
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
                        for &start in chunk.list(phys_addrs) {
                            survey.add(start, 1);
                        }
                    }
                    RawKind::UnmapSg { phys_addrs, .. } => {
                        for &start in chunk.list(phys_addrs) {
                            survey.add(start, 1);
                        }
                    }
                    RawKind::IommuMap { phys, size, .. } => survey.add(phys.get(), size),
                    _ => {}
                }
            }
        }
        for (device, start, size) in coherent {
            if survey.direct.get(device.index()) == Some(&true) {
                survey.add(start, size);
            }
        }
        survey.lost = reader.counts().lost;
        Ok(survey)
    }

    fn note_direct(&mut self, device: DeviceIndex, direct: bool) {
        if self.direct.len() <= device.index() {
            self.direct.resize(device.index() + 1, false);
        }
        if let Some(known) = self.direct.get_mut(device.index()) {
            *known |= direct;
        }
    }

    /// Adds the pages of a range, joined with the runs it touches.
    fn add(&mut self, start: u64, size: u64) {
        let last = start.saturating_add(size.saturating_sub(1)) / PAGE;
        self.runs.add(start / PAGE, last + 1);
    }
}

/// Where each run goes.
#[derive(Debug, Default)]
struct PageRenaming {
    /// First page: one behind the last, new first page.
    runs: BTreeMap<u64, (u64, u64)>,
    /// Hides where pages were that no run holds.
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
            // The same place within a block, at least a page behind the run before.
            let block = BLOCK / PAGE;
            let ahead = (first % block + block - (next + 1) % block) % block;
            let place = next + 1 + ahead;
            runs.insert(first, (end, place));
            next = place + (end - first);
        }
        let key = mix(seed ^ STRAY);
        Self { runs, key }
    }

    fn rename(&self, address: u64) -> u64 {
        let page = address / PAGE;
        match self.runs.range(..=page).next_back() {
            Some((&first, &(end, place))) if page < end => {
                (place + (page - first)).wrapping_mul(PAGE) | (address % PAGE)
            }
            // Only an address that no map named, such as that of a stray unmap: its page offset is
            // kept. Two rounds, the second with a key of its own: without the seed nobody can
            // tabulate them.
            _ => {
                let hidden = mix(mix(page ^ self.key).wrapping_add(mix(self.key)));
                (hidden % (1 << 20) * PAGE) | (address % PAGE)
            }
        }
    }
}

/// SplitMix64's finaliser.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

struct Rewrite {
    start: u64,
    direct: Vec<bool>,
    runs: PageRenaming,
    pids: HashMap<u32, u32>,
    marks: u32,
}

impl Rewrite {
    fn event(&mut self, event: &mut RawEvent, chunk: &mut RawChunk) {
        event.time = Nanos(event.time.0.saturating_sub(self.start));
        // The idle task is no one's, and its number means something.
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
                // An identity map stays one.
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
            RawKind::IommuUnmap { .. } | RawKind::Sync { .. } | RawKind::Void { .. } => {}
        }
    }

    fn is_direct(&self, device: DeviceIndex) -> bool {
        self.direct.get(device.index()).copied().unwrap_or(false)
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
        // 64 draws of 2^20 pages: two alike is a chance of 1 in 500, and the seeds are fixed.
        assert_eq!(all.len(), 64);
        assert!(all.iter().all(|address| address % PAGE == 0xc80));
        assert_eq!(new(7), new(7));
    }

    #[test]
    fn runs_join_what_touches_and_keep_apart_what_does_not() {
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
            // A page apart at least, or a new run would arise.
            assert!(new(8) > new(4) + 1 || new(8) + 1 < new(1));
            assert_eq!(runs.rename(0x1234) % BLOCK, 0x1234);
        }
        // Runs that would fit exactly behind each other in their blocks still keep a page between
        // them.
        let mut full = Runs::default();
        for (first, end) in [(0, 5), (1029, 1030), (2058, 2059)] {
            full.add(first, end);
        }
        for seed in 0..100 {
            let runs = PageRenaming::lay_out(&full, seed);
            let mut places: Vec<_> = runs
                .runs
                .iter()
                .map(|(first, (end, place))| (*place, place + end - first))
                .collect();
            places.sort_unstable();
            assert!(
                places.windows(2).all(|pair| pair[0].1 < pair[1].0),
                "{places:?}"
            );
        }
    }
}
