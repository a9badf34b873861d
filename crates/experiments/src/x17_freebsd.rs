//! X17: FreeBSD's map and unmap, and the fix of its flush (EIOVAR section 7, Table 3).

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

use ringfence_dma::Platform;
use ringfence_iova::{AllocRequest, FreeBsdTree, RangeStore};
use ringfence_memory::{Arena, WriteBack};
use ringfence_papers::whole_table_pages;
use ringfence_pgtable::{
    Coherency, Levels, MapRequest, ReclaimingTable, SecondStage, WriteBackSpan,
};
use ringfence_types::{
    DomainId, Invalidation, Iova, MemoryError, PageSize, Pending, Permissions, Pfn, PhysAddr,
    PhysMemory, TABLE_WORDS,
};

use super::allocators::{TOP, pages};
use super::capture::Run;
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Measured, NullModel, Published};
use super::model::{cycles_per_packet, gbps};
use super::published::{BASELINE_CYCLES, CLOCK_GHZ, IOVAS_PER_PACKET, Sheet};
use super::setting::Setting;
use super::stream::{relative_throughput, runs};
use super::timed::{Cost, CountedSteps, TimedReplays, TimedSubject, run_in_turns};
use super::x01_breakdown::{Column, column};
use ringfence_lab::hardware::Vtd;
use ringfence_lab::meter::{Cycles, FreeInvalidator};
use ringfence_lab::plan::Step;
use ringfence_lab::replay_platform::ReplayPlatform;
use ringfence_lab::{LabError, Profile};

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X17",
    title: "Cost of FreeBSD, and the gain of flushing one entry instead of a page",
    source: "EIOVAR section 7, Table 3",
    measure,
};

/// Bytes of a cache line.
const LINE: u64 = 64;
/// Lines that the fix saves at an unmap: 64 without it and one with it.
const LINES_SAVED: f64 = 63.0;

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut runs = runs(setting)?;
    runs.truncate(2);
    let mut found = Findings::with_method(
        "Two runs of mlx stream on a platform whose walker does not snoop, so that write-backs are \
        measured: FreeBSD as published, FreeBSD with the flush fixed, Linux 3.4 with EIOVAR.",
    );
    let inv = setting.profile.invalidation_cycles as f64;
    let parts = systems(setting, &runs)?;
    table_3(&parts, inv, &mut found)?;
    counted(&runs, &mut found)?;
    saving(&parts, inv, &mut found)?;
    by_clflush(setting, &runs, &mut found)?;
    charged(&parts.as_published, inv, &mut found)?;
    found.explain(
        "Other costs of FreeBSD, such as locks and the busdma layer above the table, are not \
        implemented: only the allocator, the table that frees empty pages, and the flush of the \
        whole page. The paper's 9660 and 16003 cycles include everything.",
    );
    found.note(
        "Measured write-backs use CLWB or CLFLUSHOPT of this processor, except in the rows with \
        CLFLUSH.",
    );
    Ok(found)
}

/// A result of each system that the experiment compares.
#[derive(Debug)]
struct Systems<T> {
    /// FreeBSD, which writes back a whole page at unmap.
    as_published: T,
    /// FreeBSD, which writes back the one entry.
    fixed: T,
    /// Linux 3.4 with EIOVAR.
    linux: T,
}

/// Modes of [`Systems`], in the order of their rows.
const MODES: [&str; 3] = ["freebsd-paper", "freebsd", "strict+"];

impl<T> Systems<T> {
    /// The results that `of` returns for the names of the modes.
    fn each(mut of: impl FnMut(&'static str) -> Result<T, LabError>) -> Result<Self, LabError> {
        Ok(Self {
            as_published: of("freebsd-paper")?,
            fixed: of("freebsd")?,
            linux: of("strict+")?,
        })
    }
}

/// Component costs of each system over `runs`.
fn systems(setting: &Setting, runs: &[Run]) -> Result<Systems<Column>, LabError> {
    Systems::each(|mode| column(setting, mode, runs))
}

/// Cycles of a map and an unmap, with an invalidation of `inv` cycles.
fn pair(c: &Cycles, inv: f64) -> f64 {
    c.map() + c.unmap() + inv
}

/// Adds the rows of Table 3: FreeBSD as published.
fn table_3(parts: &Systems<Column>, inv: f64, found: &mut Findings) -> Result<(), LabError> {
    let sheet = Sheet::named("eiovar_table3_freebsd")?;
    let spread = parts.as_published.spread();
    let c = parts.as_published.parts.cycles;
    let iova_unmap = c.unmap_iova_find + c.unmap_iova_free;
    for (component, operation, measured_part, modelled) in [
        ("iova", "map", c.map_iova_alloc, 0.0),
        ("all the rest", "map", c.map() - c.map_iova_alloc, 0.0),
        ("total", "map", c.map(), 0.0),
        ("iova", "unmap", iova_unmap, 0.0),
        ("all the rest", "unmap", c.unmap() - iova_unmap, inv),
        ("total", "unmap", c.unmap(), inv),
    ] {
        let wanted = [("component", component), ("operation", operation)];
        let measured = Measured::cost(measured_part, modelled, 0.0).with_spread(spread);
        let row = FindingRow::new(format!("{operation}: {component}"), "cycles", measured);
        // The busdma layer, locks and lookups of VM objects are not built.
        found.push(row.with_published(sheet.printed(&wanted, "value")?));
    }
    Ok(())
}

/// Adds the cycles that the fix saves, the gain in throughput, and the distance from Linux.
fn saving(parts: &Systems<Column>, inv: f64, found: &mut Findings) -> Result<(), LabError> {
    let Systems {
        as_published,
        fixed,
        linux,
    } = parts;
    let [spread, fixed_spread] = [as_published, fixed].map(Column::spread);
    let c = as_published.parts.cycles;
    let claims = Sheet::named("claims")?;
    let claim = |id| claims.printed(&[("id", id)], "value");
    let both = fixed.parts.cycles;
    let saved = c.unmap() - both.unmap();
    let row = FindingRow::new(
        "unmap: saved by the fix",
        "cycles",
        Measured::cost(saved, 0.0, 0.0).with_spread(spread + fixed_spread),
    );
    found.push(row.near(claim("E20")?));
    let measured = Measured::cost(both.map() + both.unmap(), inv, 0.0);
    let what = "map and unmap: total, fixed";
    let row = FindingRow::new(what, "cycles", measured.with_spread(fixed_spread));
    found.push(row);
    let gain = gain(&both, &c, inv);
    let row = FindingRow::new(
        "throughput: fixed over as published",
        "",
        Measured::timed(gain, spread / pair(&c, inv)),
    )
    .with_null_model(NullModel::RATIO);
    let printed = Published::derived(935.0 / 530.0, "claims.csv E21: 530 to 935 Mbit/s");
    found.push(row.near(printed));
    let linux_pair = pair(&linux.parts.cycles, inv);
    let slower = pair(&c, inv) / linux_pair;
    let row = FindingRow::new(
        "map and unmap: FreeBSD over Linux",
        "",
        Measured::timed(slower, spread / pair(&c, inv) + linux.spread() / linux_pair),
    );
    found.push(row.at_least(claim("E22")?));
    found.explain(
        "FreeBSD writes back the 64 lines of a table when one has changed; the fix writes back \
        that one.",
    );
    found.explain(saved_by(
        &WriteBack::best().to_string(),
        saved,
        gain,
        pair(&both, inv),
    ));
    Ok(())
}

/// Returns the model's throughput with `fixed` over that with `as_published`, if an invalidation
/// takes `inv` cycles.
fn gain(fixed: &Cycles, as_published: &Cycles, inv: f64) -> f64 {
    let speed = |c: &Cycles| {
        let (map, unmap) = (c.map(), c.unmap() + inv);
        let packet = cycles_per_packet(BASELINE_CYCLES, IOVAS_PER_PACKET, map, unmap);
        gbps(CLOCK_GHZ, packet)
    };
    speed(fixed) / speed(as_published)
}

/// Counts of the allocator and of the table over runs of a workload.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counts {
    /// Nodes visited per allocation, without the first run, which fills the rings.
    nodes: f64,
    /// Cache lines written back per unmap.
    lines: f64,
}

/// Memory that counts the cache lines that the table writes back.
struct CountingMemory<'a> {
    inner: &'a Arena,
    lines: Cell<u64>,
}

impl PhysMemory for CountingMemory<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.inner.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.inner.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.inner.words(at, count)
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        let lines = (at.get() + bytes).div_ceil(LINE) - at.get() / LINE;
        self.lines.set(self.lines.get() + lines);
        self.inner.write_back(at, bytes);
    }

    fn drain(&self) {
        self.inner.drain();
    }
}

/// Executes `runs` on FreeBSD's allocator and on its table, which writes back `span` at unmap.
fn counts(runs: &[Run], span: Option<WriteBackSpan>) -> Result<Counts, LabError> {
    let failed = || LabError::Internal("a map or an unmap of FreeBSD");
    let machine = ReplayPlatform::<Vtd>::new(&Profile::r210_2015(), false)?;
    let memory = CountingMemory {
        inner: machine.arena(),
        lines: Cell::new(0),
    };
    let mut table = ReclaimingTable::new(
        SecondStage::new(Levels::Four),
        DomainId::new(1),
        Coherency::NonCoherent,
        &memory,
        machine.frames(),
    )?;
    if let Some(span) = span {
        table = table.with_write_back(span);
    }
    let mut tree = FreeBsdTree::new(pages(1, TOP)?);
    let mut live = HashMap::new();
    let (mut steps, mut allocs, mut lines, mut unmaps) = (0_u64, 0_u64, 0_u64, 0_u64);
    for (number, run) in runs.iter().enumerate() {
        for timed in &run.plan.steps {
            match timed.step {
                Step::Map {
                    id, first, count, ..
                } => {
                    let [piece] = run.plan.segments(first, count) else {
                        return Err(failed());
                    };
                    let of = piece.to_pages(PageSize::Size4K);
                    let count = of.pages(PageSize::Size4K);
                    let found = tree.alloc(&AllocRequest::new(count, Pfn::new(TOP)))?;
                    if number > 0 {
                        steps += u64::from(found.steps);
                        allocs += 1;
                    }
                    let request = MapRequest {
                        iova: Iova::new(found.range.lo().get() << 12),
                        pa: of.start(),
                        pages: count,
                        permissions: Permissions::READ_WRITE,
                    };
                    table
                        .map(&memory, machine.frames(), request)
                        .map_err(|_| failed())?;
                    live.insert(id.0, found.range);
                }
                Step::Unmap { id, .. } => {
                    let range = live.remove(&id.0).ok_or_else(failed)?;
                    let before = memory.lines.get();
                    let unmapped = table.unmap(&memory, range).map_err(|_| failed())?.0;
                    lines += memory.lines.get() - before;
                    unmaps += 1;
                    let submitted =
                        Pending::submit(&mut FreeInvalidator, Invalidation::Global, unmapped);
                    let done = submitted.map_err(|_| failed())?.wait(&mut FreeInvalidator);
                    if !tree.free(done.map_err(|_| failed())?.into()) {
                        return Err(failed());
                    }
                }
                Step::EndBurst { .. }
                | Step::Doorbell { .. }
                | Step::EndDescriptor { .. }
                | Step::Tick => {}
            }
        }
    }
    Ok(Counts {
        nodes: steps as f64 / allocs.max(1) as f64,
        lines: lines as f64 / unmaps.max(1) as f64,
    })
}

/// Adds the counts that the paper names: they do not depend on a processor.
fn counted(runs: &[Run], found: &mut Findings) -> Result<(), LabError> {
    let as_published = counts(runs, Some(whole_table_pages))?;
    let fixed = counts(runs, None)?;
    let claims = Sheet::named("claims")?;
    let page = "EIOVAR section 7, in words: the whole page, and then the one entry";
    let rows = [
        (
            "unmap as published: lines written back",
            as_published.lines,
            Published::new("a page of 64 lines", (1 << 12) as f64 / LINE as f64, page),
        ),
        (
            "unmap fixed: lines written back",
            fixed.lines,
            Published::new("1 entry", 1.0, page),
        ),
        (
            "map: nodes visited per allocation",
            as_published.nodes,
            claims.printed(&[("id", "E19")], "value")?,
        ),
    ];
    for (what, value, printed) in rows {
        found.push(FindingRow::counted(what, "", value).near(printed));
    }
    Ok(())
}

/// Adds the cycles of an unmap as published. The price of a line follows from the paper's saving
/// and the lines that the fix saves.
fn charged(as_published: &Column, inv: f64, found: &mut Findings) -> Result<(), LabError> {
    let claims = Sheet::named("claims")?;
    let saving = claims.printed(&[("id", "E20")], "value")?;
    let line = saving.value / LINES_SAVED;
    let c = as_published.parts.cycles;
    let row = FindingRow::new(
        format!("unmap: total, with 63 lines at a declared {line:.0} cycles each"),
        "cycles",
        Measured::cost(c.unmap(), inv + LINES_SAVED * line, 0.0),
    );
    let sheet = Sheet::named("eiovar_table3_freebsd")?;
    let wanted = [("component", "total"), ("operation", "unmap")];
    found.push(
        row.with_published(sheet.printed(&wanted, "value")?)
            .fitted(),
    );
    Ok(())
}

/// Repeats the comparison with CLFLUSH, the write-back instruction of the paper's CPU.
fn by_clflush(setting: &Setting, runs: &[Run], found: &mut Findings) -> Result<(), LabError> {
    if !WriteBack::Clflush.is_available() {
        return Ok(());
    }
    let costs = clflush_costs(clflush_replays(setting)?, runs)?;
    clflush_rows(&costs, &setting.profile, found)
}

/// Replays of [`MODES`] that write lines back with CLFLUSH.
fn clflush_replays(setting: &Setting) -> Result<Vec<TimedReplays>, LabError> {
    let timed = MODES.map(|name| {
        let (profile, repetitions) = (&setting.profile, setting.repetitions);
        TimedReplays::with_write_back(
            TimedSubject::from_name(name)?,
            profile,
            repetitions,
            WriteBack::Clflush,
        )
    });
    timed.into_iter().collect()
}

/// Costs of the last of `runs` in each of [`MODES`], which `timed` replays.
fn clflush_costs(
    mut timed: Vec<TimedReplays>,
    runs: &[Run],
) -> Result<Vec<(&'static str, Cost)>, LabError> {
    let mut costs = Vec::new();
    for run in runs {
        costs = run_in_turns(&mut timed, run, CountedSteps::All)?;
    }
    Ok(MODES.into_iter().zip(costs).collect())
}

/// Adds the rows with CLFLUSH. `costs` has the cost of the last run in each mode.
fn clflush_rows(
    costs: &[(&'static str, Cost)],
    profile: &Profile,
    found: &mut Findings,
) -> Result<(), LabError> {
    for (name, cost) in costs {
        let what = format!("{name}: map and unmap with CLFLUSH");
        let measured = Measured::cost(
            cost.measured_per_pair(),
            cost.modelled_per_pair(profile),
            0.0,
        )
        .with_spread(cost.spread_per_pair());
        found.push(FindingRow::new(what, "cycles", measured));
    }
    let Systems {
        as_published,
        fixed,
        linux,
    } = Systems::each(|mode| {
        let cost = costs.iter().find(|(name, _)| *name == mode);
        cost.map(|(_, cost)| cost)
            .ok_or(LabError::Internal("three costs"))
    })?;
    let claims = Sheet::named("claims")?;
    let claim = |id| claims.printed(&[("id", id)], "value");
    let saved = as_published.measured_per_pair() - fixed.measured_per_pair();
    let error = Cost::spread_per_pair;
    let row = FindingRow::new(
        "map and unmap with CLFLUSH: saved by the fix",
        "cycles",
        Measured::cost(saved, 0.0, 0.0).with_spread(error(as_published) + error(fixed)),
    );
    found.push(row.near(claim("E20")?));
    let gain = relative_throughput(fixed, as_published, profile);
    let row = FindingRow::new("throughput with CLFLUSH: fixed over as published", "", gain)
        .with_null_model(NullModel::RATIO);
    let printed = Published::derived(935.0 / 530.0, "claims.csv E21: 530 to 935 Mbit/s");
    found.push(row.near(printed));
    let slower = as_published.per_pair(profile) / linux.per_pair(profile);
    let row = FindingRow::new(
        "map and unmap with CLFLUSH: FreeBSD over Linux",
        "",
        Measured::timed(
            slower,
            error(as_published) / as_published.per_pair(profile)
                + error(linux) / linux.per_pair(profile),
        ),
    );
    found.push(row.at_least(claim("E22")?));
    found.explain(saved_by(
        "CLFLUSH",
        saved,
        gain.median,
        fixed.per_pair(profile),
    ));
    Ok(())
}

/// Compares the cycles that the fix saves, the gain in throughput, and the cycles of a map and an
/// unmap that remain, with the paper's. `instruction` writes lines back.
fn saved_by(instruction: &str, saved: f64, gain: f64, remaining: f64) -> String {
    // Table 3's totals less the saving.
    const SAVED: f64 = 10_000.0;
    const GAIN: f64 = 935.0 / 530.0;
    const REMAINING: f64 = 9660.0 + 16_003.0 - SAVED;
    let compared = |here: f64, printed: f64| if here > printed { "more" } else { "no more" };
    format!(
        "With {instruction}, the fix saves {saved:.0} cycles at each unmap, {:.1} for each of 63 \
        lines, {} than the paper's {:.0} a line. {remaining:.0} cycles of a map and an unmap \
        remain ({:.0} in the paper), and throughput changes by a factor of {gain:.2}, {} than \
        the paper's {GAIN:.2}.",
        saved / LINES_SAVED,
        compared(saved / LINES_SAVED, SAVED / LINES_SAVED),
        SAVED / LINES_SAVED,
        REMAINING,
        compared(gain, GAIN),
    )
}

#[cfg(test)]
mod tests;
