//! Random maps, unmaps and accesses with a fixed seed. QEMU and an oracle of granted bytes judge
//! every access.

mod accesses;
mod batch;
mod changes;
mod judge;

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, bail};
use ringfence_memory::Frames;
use ringfence_pgtable::{Entry, Format, Level, Table};
use ringfence_types::{
    DomainId, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};

use self::batch::Batch;
use crate::buffers::Buffers;
use crate::family::Family;
use crate::machine::Machine;
use crate::oracle::{GrantedPages, Mapping};
use crate::qtest::Qtest;
use crate::ram::GuestRam;
use crate::random::Random;
use crate::read_device::ReadDevice;
use crate::report::Report;
use crate::test_device::TestDevice;

const DOMAINS: u16 = 3;
/// Pages of each window of addresses that mappings use: a few 2 MiB leaves.
const WINDOW: u64 = 2048;
/// Mappings that a domain has at most.
const MAPPINGS: usize = 48;
/// Removed mappings that a domain remembers for accesses after unmap.
const REMEMBERED: usize = 16;

/// An error of the mapping layer above the unit. Tests assert that QEMU's verdict reveals it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// The layer is right.
    Nothing,
    /// Unmaps do not invalidate.
    Forgotten,
    /// Unmaps do not invalidate their first page.
    WithoutFirstPage,
    /// Unmaps do not invalidate their last page.
    WithoutLastPage,
    /// Unmaps invalidate the range in another domain.
    OtherDomain,
}

/// Options of a run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Number of accesses to judge.
    pub accesses: u64,
    /// Error of the mapping layer.
    pub broken: Broken,
}

impl Options {
    /// Judges `accesses` with seed 1, unless `RINGFENCE_JUDGED` and `RINGFENCE_SEED` set other
    /// numbers.
    ///
    /// # Errors
    /// A variable holds no number.
    pub fn from_environment(accesses: u64, broken: Broken) -> anyhow::Result<Self> {
        let variable = |name, default| match std::env::var(name) {
            Ok(text) => text
                .parse()
                .with_context(|| format!("{name} holds no number: {text}")),
            Err(_) => Ok(default),
        };
        Ok(Self {
            seed: variable("RINGFENCE_SEED", 1)?,
            accesses: variable("RINGFENCE_JUDGED", accesses)?,
            broken,
        })
    }
}

/// Runs the driver on `unit`, which confines the devices of `machine`. All devices are blocked at
/// first and afterwards.
///
/// # Errors
/// [`Disagreement`](crate::Disagreement) if QEMU's verdict, the address of an access or a fault
/// record differs from the oracle's. Otherwise QEMU or the unit failed.
pub fn drive<F: Family>(
    machine: &Machine,
    unit: &mut F,
    options: &Options,
) -> anyhow::Result<Report> {
    let begin = Instant::now();
    let before = machine.qtest().round_trips();
    let mut driver = Driver::new(machine, unit, options)?;
    while driver.report.accesses < options.accesses {
        driver.step()?;
    }
    let mut report = driver.finish()?;
    report.round_trips = machine.qtest().round_trips() - before;
    report.elapsed = begin.elapsed();
    Ok(report)
}

/// A device that accesses memory.
#[derive(Debug, Clone)]
enum Device {
    Writer(TestDevice),
    Reader(ReadDevice),
}

impl Device {
    const fn requester(&self) -> RequesterId {
        match self {
            Self::Writer(device) => device.requester(),
            Self::Reader(device) => device.requester(),
        }
    }
}

/// A domain: its table, and the pages that the oracle knows of.
struct Domain<T> {
    table: Table<T>,
    granted: GrantedPages,
    removed: VecDeque<Mapping>,
    /// A page where reading devices show their bytes.
    window: Mapping,
}

struct Driver<'m, F: Family> {
    options: &'m Options,
    qtest: Rc<Qtest>,
    ram: Rc<GuestRam>,
    buffer_region: PhysRange,
    frames: &'m Frames<Rc<GuestRam>>,
    unit: &'m mut F,
    random: Random,
    buffers: Buffers,
    domains: Vec<Domain<F::Format>>,
    /// Each device with the index of its domain.
    devices: Vec<(Device, Option<usize>)>,
    /// First pages of the windows.
    bases: Vec<Pfn>,
    /// Permissions that the format can express.
    permissions: Vec<Permissions>,
    batch: Batch,
    report: Report,
}

impl<'m, F: Family> Driver<'m, F> {
    fn new(machine: &'m Machine, unit: &'m mut F, options: &'m Options) -> anyhow::Result<Self> {
        let writers = machine.devices().iter().cloned().map(Device::Writer);
        let readers = machine.readers().iter().cloned().map(Device::Reader);
        let bases = bases(&unit.format(), unit.tag_bits());
        let permissions = permissions(&unit.format());
        let mut driver = Self {
            options,
            qtest: machine.qtest(),
            ram: machine.ram(),
            buffer_region: machine.buffers(),
            frames: machine.frames(),
            unit,
            random: Random::new(options.seed),
            buffers: Buffers::new(machine.buffers()),
            domains: Vec::new(),
            devices: writers
                .chain(readers)
                .map(|device| (device, None))
                .collect(),
            bases,
            permissions,
            batch: Batch::default(),
            report: Report::default(),
        };
        for number in 1..=DOMAINS {
            let domain = driver.new_domain(DomainId::new(number))?;
            driver.domains.push(domain);
        }
        for device in 0..driver.devices.len() {
            driver.attach(device, device % usize::from(DOMAINS))?;
        }
        Ok(driver)
    }

    /// Makes a domain with nothing but its window, in the page below the first base.
    fn new_domain(&mut self, id: DomainId) -> anyhow::Result<Domain<F::Format>> {
        let (format, coherency) = (self.unit.format(), self.unit.coherency());
        let table = match self.unit.table(id)? {
            Some(table) => table,
            None => Table::new(format, id, coherency, &self.ram, self.frames)
                .map_err(|error| anyhow::anyhow!("no table: {error:?}"))?,
        };
        let page = PageSize::Size4K.bytes();
        let pa = self.buffers.take(&mut self.random, 1, page);
        let first = self.bases.first().context("no window of addresses")?;
        let lo = Pfn::new(first.get() - 1);
        let window = Mapping {
            range: PfnRange::new(lo, 1).context("no page")?,
            pa: pa.context("no memory")?,
            permissions: Permissions::READ_WRITE,
        };
        changes::map_in(self.unit, &table, &self.ram, self.frames, &window)?;
        let mut granted = GrantedPages::default();
        granted.insert(window);
        Ok(Domain {
            table,
            granted,
            removed: VecDeque::new(),
            window,
        })
    }

    /// Makes one random change or some random accesses.
    fn step(&mut self) -> anyhow::Result<()> {
        let domain = self.random.below(self.domains.len() as u64) as usize;
        match self.random.below(100) {
            0..4 => self.map(domain),
            4..7 => self.unmap(domain),
            7..8 => self.move_device(),
            _ => self.access(),
        }
    }

    /// Removes everything, and looks for bytes that landed where no access may.
    fn finish(mut self) -> anyhow::Result<Report> {
        self.judge_batch()?;
        for device in 0..self.devices.len() {
            self.detach(device)?;
        }
        if let Some(at) = self.ram.find_non_zero(self.buffer_region)? {
            bail!("bytes landed at {at}, in a page that was not mapped");
        }
        for domain in self.domains.drain(..) {
            changes::destroy(domain.table, self.unit, &self.ram, self.frames)?;
        }
        Ok(self.report)
    }
}

/// Returns the first pages of the windows: around 1 GiB, near the end of the lower half of the
/// addresses, and at their end.
fn bases<T: Format>(format: &T, tag_bits: u32) -> Vec<Pfn> {
    let gib = PageSize::Size1G.bytes();
    let half = 1 << (format.width() - 1);
    let ends = [half, half << 1, 0_u64];
    let mut bases = vec![Iova::new(gib - WINDOW / 2 * PageSize::Size4K.bytes())];
    for end in ends {
        // No access passes 2^64.
        let free = if end == 0 {
            PageSize::Size2M.bytes()
        } else {
            0
        };
        let bytes = WINDOW * PageSize::Size4K.bytes() + free;
        bases.push(Iova::new(end.wrapping_sub(bytes)));
    }
    bases.retain(|base| {
        let last = base.wrapping_add(WINDOW * PageSize::Size4K.bytes() - 1);
        format.translates(*base) && format.translates(last)
    });
    // Windows in the same 16 MiB of the tags would not be told apart.
    bases.dedup_by_key(|base| base.get() << (64 - tag_bits) >> (64 - tag_bits) >> 24);
    bases.into_iter().map(Pfn::containing).collect()
}

/// Returns the permissions that a leaf of the format keeps.
fn permissions<T: Format>(format: &T) -> Vec<Permissions> {
    let all = [
        Permissions::READ_WRITE,
        Permissions::READ,
        Permissions::WRITE,
    ];
    let kept = |wanted: &Permissions| {
        let raw = format.leaf(Level::LEAF, PhysAddr::ZERO, *wanted);
        matches!(
            format.decode(Level::LEAF, raw),
            Entry::Leaf { permissions, .. } if permissions == *wanted
        )
    };
    all.into_iter().filter(kept).collect()
}
