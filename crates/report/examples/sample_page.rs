//! Writes two pages for the browser test: `sample.html`, on the bundled sample, and `hostile.html`,
//! whose names attempt to run a script.
//!
//! The exposure is replayed. The cycles are those of the table in README.md, measured on a virtual
//! machine, so that the pages are equal on every machine.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use ringfence_attack::{CLASSES, Class, Options, run};
use ringfence_lab::compare::{CompareOptions, compare};
use ringfence_lab::layer::INSPECTED_BYTES;
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::meter::{Components, Cycles};
use ringfence_lab::modes::Mode;
use ringfence_lab::replay::AttackerKind;
use ringfence_lab::ring::RingSizes;
use ringfence_lab::row::Row;
use ringfence_lab::size::{SizeOptions, advise, measure_demand};
use ringfence_lab::{MachineProfile, Operation, ReplayLimits};
use ringfence_report::{MeasuredOn, PageContents, Report, Sizing, report_page};
use ringfence_trace::{Info, Operations, SAMPLE, TraceOptions, TraceSource};

/// Modes, and the cycles of README.md: map (alloc, table, sum), unmap (find, free, table, sum) and
/// the modelled cycles.
const COSTS: &[(&str, [f64; 8])] = &[
    ("none", [0.0, 0.0, 25.0, 0.0, 0.0, 0.0, 27.0, 0.0]),
    (
        "linux-lazy",
        [133.0, 415.0, 577.0, 0.0, 13.0, 421.0, 512.0, 25.0],
    ),
    (
        "fence",
        [107.0, 413.0, 545.0, 0.0, 0.0, 427.0, 2682.0, 2150.0],
    ),
    (
        "fence-burst",
        [99.0, 432.0, 557.0, 0.0, 0.0, 195.0, 1100.0, 774.0],
    ),
    ("copy", [0.0, 0.0, 676.0, 0.0, 0.0, 0.0, 111.0, 0.0]),
];
/// c of `r210-2015`.
const BASELINE: f64 = 908.0;

const HOSTILE: &str = "</script></style></title><script>hostile=1</script>\"'\
    ><img/src=x/onerror=hostile=1><svg/onload=hostile=1>\u{202e}";

fn main() -> Result<(), Box<dyn Error>> {
    let directory = env::args().nth(1).ok_or("usage: sample_page DIRECTORY")?;
    let directory = Path::new(&directory);
    fs::create_dir_all(directory)?;
    let modes: Vec<Mode> = COSTS
        .iter()
        .filter_map(|(name, _)| Mode::find(name))
        .collect();
    let classes: Vec<&Class> = CLASSES.iter().collect();
    let options = Options { scan_pages: 1024 };
    let matrix = run(&modes, &classes, &options, |_| Ok(()))?;

    let profile = MachineProfile::r210_2015();
    let mut report = Report::new(
        profile.clone(),
        measured_on("the CPU of README.md"),
        21,
        true,
        &modes,
        &[],
    );
    let options = CompareOptions {
        modes: modes.clone(),
        profile: profile.for_replay(),
        prices: Some(profile.prices(Operation::Packet, 1)),
        devices: None,
        rings: RingSizes::default(),
        repetitions: 0,
        attack: true,
        attackers: AttackerKind::All,
        early_touches: false,
        cache_cycles: CycleParams::default(),
        inspected_bytes: INSPECTED_BYTES,
        contiguous_frames: false,
        limits: ReplayLimits::default(),
    };
    let mut comparison = compare("sample", sample()?, &options, |_| {})?;
    for row in &mut comparison.rows {
        price(row);
    }
    report.push("sample", comparison);
    let mut infos = vec![Info::read(&mut sample()?)?];
    let mut sizing = Sizing::new(profile.clone());
    let usage = measure_demand(sample()?, None, ReplayLimits::default(), |_| {})?;
    let options = SizeOptions {
        profile: profile.for_replay(),
        devices: None,
        entries: Vec::new(),
        modes: ["linux-strict", "linux-lazy"]
            .iter()
            .filter_map(|name| Mode::find(name))
            .collect(),
        limits: ReplayLimits::default(),
    };
    sizing
        .traces
        .push(advise("sample", sample, &usage, &options, |_| {})?);
    let page = |report: &Report, infos: &[Info], sizing: &Sizing| {
        report_page(&PageContents {
            report,
            infos,
            sizing,
            matrix: Some(&matrix),
        })
    };
    fs::write(
        directory.join("sample.html"),
        page(&report, &infos, &sizing),
    )?;

    report.measured_on = measured_on(HOSTILE);
    for notes in &mut report.traces {
        notes.trace = HOSTILE.into();
        notes.devices = vec![HOSTILE.into()];
        notes.devices_skipping_unmaps = vec![HOSTILE.into()];
    }
    for row in &mut report.results {
        row.trace = HOSTILE.into();
    }
    for device in infos.iter_mut().flat_map(|info| &mut info.devices) {
        device.name = HOSTILE.into();
    }
    for trace in &mut sizing.traces {
        trace.trace = HOSTILE.into();
        for ring in &mut trace.rings {
            ring.device = HOSTILE.into();
        }
    }
    fs::write(
        directory.join("hostile.html"),
        page(&report, &infos, &sizing),
    )?;
    Ok(())
}

fn measured_on(cpu: &str) -> MeasuredOn {
    MeasuredOn {
        cpu: cpu.into(),
        arch: "x86_64",
        cycle_unit: "tsc",
        build: "release",
        processors: 2,
    }
}

fn sample() -> Result<Operations<TraceSource>, Box<dyn Error>> {
    let source = TraceSource::from_reader("sample", SAMPLE)?;
    Ok(Operations::from_source(
        "sample",
        source,
        TraceOptions::default(),
    ))
}

/// Fills the cycles of a row.
fn price(row: &mut Row) {
    let Some((_, costs)) = COSTS.iter().find(|(mode, _)| *mode == row.mode) else {
        return;
    };
    let [
        alloc,
        map_table,
        map,
        find,
        free,
        unmap_table,
        unmap,
        modelled,
    ] = *costs;
    let cycles = Cycles {
        map_iova_alloc: alloc,
        map_table,
        map_other: map - alloc - map_table,
        unmap_iova_find: find,
        unmap_iova_free: free,
        unmap_table,
        unmap_invalidation_modelled: modelled,
        unmap_other: unmap - find - free - unmap_table - modelled,
        ..Cycles::default()
    };
    row.components = Some(Components {
        cycles,
        measured: cycles.measured(),
        resolution: 10.0,
        ..Components::default()
    });
    (row.map_cycles, row.unmap_cycles) = (Some(map), Some(unmap));
    row.modelled_cycles = Some(modelled);
    row.modelled_share = Some(modelled / (map + unmap));
    row.baseline_cycles = Some(BASELINE);
    row.processor_throughput = Some(BASELINE / (BASELINE + map + unmap));
    row.relative_throughput = row.processor_throughput;
}
