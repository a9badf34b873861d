//! X02: cycles per packet in each mode, and throughput from the model (rIOMMU Figs. 7 and 8, Table
//! 2 for mlx stream).

use std::collections::HashMap;

use ringfence_memory::WriteBack;

use super::capture::Run;
use super::catalogue::{Experiment, Setting};
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, Published, median};
use super::model::{
    Derived, Point, busy_wait_line, derived, derived_variant, deviation, gbps, model_line,
    residuals,
};
use super::published::{
    BASELINE_CYCLES, BASELINES, Baseline, CLOCK_GHZ, IOVAS_PER_PACKET, MLX_STREAM, Sheet, TABLE_1,
    Variant,
};
use super::stream::{in_turns, last, packet, packets, relative_throughput, runs, throughput};
use super::substitution::{paged, ring};
use super::timed::{Cost, TimedReplays, TimedSubject, run_in_turns};
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::meter::cycles;

/// Non-coherent rIOMMU as published in Fig. 11.
const AS_PUBLISHED: &str = "riommu--paper";

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X02",
    title: "Cycles per packet and the throughput model",
    source: "rIOMMU section 3.3, Figs. 7 and 8, Table 2 (mlx stream)",
    measure,
};

/// The modes, each with the values that the paper's tables imply.
fn modes() -> Vec<(&'static str, Derived)> {
    let baseline = |mode: Baseline| (mode.name(), derived(mode, Variant::Coherent));
    vec![
        baseline(Baseline::Strict),
        baseline(Baseline::StrictPlus),
        baseline(Baseline::Defer),
        baseline(Baseline::DeferPlus),
        ("riommu-", derived_variant(Variant::NonCoherent)),
        ("riommu", derived_variant(Variant::Coherent)),
        baseline(Baseline::None),
    ]
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let runs = runs(setting)?;
    let mut found = Findings::with_method(format!(
        "{} runs of mlx stream, {} repetitions, with the modes interleaved. C is 1816 cycles plus \
        twice the cost of a map and an unmap in the last run. Page walks snoop in riommu only. The \
        busy-wait line is measured.",
        runs.len(),
        setting.repetitions,
    ));
    let profile = &setting.profile;
    let names: Vec<&str> = modes().iter().map(|(name, _)| *name).collect();
    let timed = names
        .iter()
        .filter(|name| **name != "none")
        .chain(&[AS_PUBLISHED]);
    let timed: Vec<&str> = timed.copied().collect();
    let subjects = timed.iter().map(|name| TimedSubject::from_name(name));
    let costs = in_turns(setting, &runs, subjects.collect::<Result<_, _>>()?)?;
    let mut all: HashMap<&str, Cost> = HashMap::new();
    for (name, costs) in timed.iter().zip(&costs) {
        all.insert(name, last(costs)?);
    }
    // The 1816 cycles include the cost of a map without an IOMMU.
    let nothing = Cost {
        repetitions: vec![0.0; setting.repetitions.max(1)],
        ..Cost::default()
    };
    all.insert("none", nothing);
    let of = |name: &str| all.get(name).ok_or(LabError::Internal("a cost"));

    let (mut crosses, mut printed_crosses) = (Vec::new(), Vec::new());
    let source = "riommu_table2.csv (mlx stream) and C_none = 1816 of Fig. 7";
    for (mode, derived) in modes() {
        let cycles = packet(of(mode)?, profile);
        let row = FindingRow::new(format!("{mode}: C"), "cycles", cycles);
        let printed = Published::new(
            format!("{:.0}", derived.cycles.value),
            derived.cycles.value,
            source,
        );
        let row = row.near(printed);
        found.push(row.ordered_in("cycles per packet"));
        crosses.push((cycles.median, gbps(CLOCK_GHZ, cycles.median)));
        printed_crosses.push((derived.cycles.value, derived.gbps.value));
    }
    for (mode, derived) in modes() {
        let speed = throughput(of(mode)?, profile);
        let row = FindingRow::new(format!("{mode}: throughput by the model"), "Gbit/s", speed);
        let printed = Published::derived(derived.gbps.value, source);
        found.push(row.beside(printed).ordered_in("throughput"));
    }
    found.push(whole_order(setting, &names, &all));
    let sheet = Sheet::named("riommu_table2")?;
    let cell = |variant: Variant, baseline: Baseline| {
        let wanted = [
            ("nic", "mlx"),
            ("benchmark", "stream"),
            ("metric", "throughput"),
            ("variant", variant.name()),
            ("divided_by", baseline.name()),
        ];
        sheet.printed(&wanted, "value")
    };
    for variant in Variant::ALL {
        for baseline in BASELINES {
            let (one, other) = (variant.name(), baseline.name());
            let ratio = relative_throughput(of(one)?, of(other)?, profile);
            let row = FindingRow::new(format!("throughput, {one} / {other}"), "", ratio);
            found.push(row.near(cell(variant, baseline)?));
        }
    }
    for variant in Variant::ALL {
        for column in &TABLE_1 {
            let (one, other) = (variant.name(), column.mode.name());
            let ring = ring(variant, of(one)?.invalidations_per_pair(), profile);
            let paged = paged(column, of(other)?.invalidations_per_pair(), profile);
            let row = FindingRow::counted(
                format!("the paper's components, our counts: {one} / {other}"),
                "",
                paged / ring,
            );
            let printed = cell(variant, column.mode)?;
            found.push(row.near(printed));
        }
    }
    as_published(&mut found, of(AS_PUBLISHED)?, of("riommu")?, profile)?;
    with_clflush(setting, &runs, &mut found)?;

    let lengths: Vec<u64> = (1..=10).map(|n| n * 1816).collect();
    let line = busy_wait(&lengths);
    if let Some(off) = deviation(CLOCK_GHZ, &line) {
        let row = FindingRow::new(
            "busy-wait line: largest deviation from the model",
            "%",
            Measured::timed(100.0 * off.worst, 0.0),
        );
        let printed = Published::new("coincide", 15.0, "rIOMMU Fig. 8: thick and thin line");
        found.push(row.at_most(printed));
    }
    let scale: Vec<f64> = (1..=40).map(|n| f64::from(n) * 500.0).collect();
    let points = |line: &[Point]| line.iter().map(|p| (p.cycles, p.gbps)).collect();
    found.figures.push(Figure::linear(
        "Fig. 8: throughput over cycles per packet",
        "cycles per packet (C)",
        "Gbit/s",
        vec![
            Series::line("model", points(&model_line(CLOCK_GHZ, &scale[2..]))),
            Series::crosses("busy wait", points(&line)),
            Series::crosses("modes, measured", crosses),
            Series::crosses("modes, paper", printed_crosses),
        ],
    ));
    for residual in residuals() {
        found.note(format!(
            "Erratum 2, {}: Table 1 gives C = {:.0}, Table 2 implies {:.0}; no component explains \
            the difference of {:.0} cycles.",
            residual.mode.name(),
            residual.by_table_1,
            residual.by_table_2.value,
            residual.residual.value
        ));
    }
    let share = |name: &str| -> Result<f64, LabError> {
        let cycles = packet(of(name)?, profile);
        Ok(
            (BASELINE_CYCLES + IOVAS_PER_PACKET * of(name)?.modelled_per_pair(profile))
                / cycles.median,
        )
    };
    found.explain(format!(
        "Only the measured part differs. The modelled part of C equals the paper's: {:.0}% in \
        strict, {:.0}% in strict+ and {:.0}% in riommu. X01 compares each component, and shows \
        riommu / strict with one component after another replaced by the paper's.",
        100.0 * share("strict")?,
        100.0 * share("strict+")?,
        100.0 * share("riommu")?,
    ));
    found.explain(
        "The structure is correct: the paper's component costs with the mappings and invalidations \
        counted here give its ratios (rows \"the paper's components, our counts\"). These rows use \
        the cost per IOVA of riommu that Table 2 implies; they do not predict it.",
    );
    found.explain(
        "riommu-: the paper's driver executes a barrier and a write-back at each of two maps and \
        two unmaps per packet. The fixed ring writes back lines of four entries each, before a \
        doorbell and before a release; riommu--paper follows Fig. 11.",
    );
    found.note(
        "Throughput is proportional to 1 / C, so the crosses lie on the line by construction. The \
        experiment tests the line itself.",
    );
    Ok(found)
}

/// Counts the repetitions in which all modes are in the paper's order.
fn whole_order(setting: &Setting, names: &[&str], all: &HashMap<&str, Cost>) -> FindingRow {
    let each: Vec<Vec<f64>> = names
        .iter()
        .map(|name| all.get(name).map(|cost| packets(cost, &setting.profile)))
        .map(Option::unwrap_or_default)
        .collect();
    let repetitions = setting.repetitions.max(1);
    let ordered = (0..repetitions).filter(|&repetition| {
        let cycles = each.iter().filter_map(|costs| costs.get(repetition));
        cycles
            .collect::<Vec<_>>()
            .is_sorted_by(|one, other| one > other)
    });
    let what = "repetitions in which all modes are in order: strict < strict+ < defer < defer+ < \
    riommu- < riommu < none";
    let row = FindingRow::counted(what, "", ordered.count() as f64);
    // Not required: one disturbed repetition says nothing about a mode. The groups judge the
    // medians.
    row.beside(Published::new(
        format!("{repetitions} of {repetitions}"),
        repetitions as f64,
        "the order of riommu_table2.csv, mlx stream",
    ))
}

/// Adds the cost per packet of Fig. 11's barriers and write-backs.
fn as_published(
    found: &mut Findings,
    as_published: &Cost,
    riommu: &Cost,
    profile: &Profile,
) -> Result<(), LabError> {
    let (with, without) = (packet(as_published, profile), packet(riommu, profile));
    found.push(FindingRow::new(
        format!("{AS_PUBLISHED}: C"),
        "cycles",
        with,
    ));
    let each = packets(as_published, profile)
        .into_iter()
        .zip(packets(riommu, profile));
    let each: Vec<f64> = each.map(|(with, without)| with - without).collect();
    let more = Measured::cost(with.median - without.median, 0.0, median(&each).1);
    let row = FindingRow::new(
        format!("{AS_PUBLISHED}: C beyond that of riommu"),
        "cycles",
        more,
    );
    let printed = Sheet::named("claims")?.printed(&[("id", "R28")], "value")?;
    found.push(row.near(printed));
    Ok(())
}

/// Repeats the comparison with CLFLUSH, the only write-back instruction of the paper's CPU, which
/// also evicts the line. Adds nothing if this CPU does not have CLFLUSH.
fn with_clflush(setting: &Setting, runs: &[Run], found: &mut Findings) -> Result<(), LabError> {
    if !WriteBack::Clflush.is_available() {
        return Ok(());
    }
    let profile = &setting.profile;
    let names = ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"];
    let timed = names.map(|name| {
        let subject = TimedSubject::from_name(name)?;
        TimedReplays::with_write_back(subject, profile, 1, WriteBack::Clflush)
    });
    let mut timed = timed.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut costs = Vec::new();
    for run in runs {
        costs = run_in_turns(&mut timed, run)?;
    }
    let riommu = costs.last().ok_or(LabError::Internal("a cost"))?;
    for (name, cost) in names.iter().zip(&costs) {
        let what = format!("{name}: C with write-backs by CLFLUSH");
        found.push(FindingRow::new(what, "cycles", packet(cost, profile)));
    }
    let mut ratios = Vec::new();
    for (name, cost) in names.iter().zip(&costs).take(4) {
        let ratio = relative_throughput(riommu, cost, profile);
        ratios.push(format!("{:.2} over {name}", ratio.median));
        let what = format!("throughput with CLFLUSH, riommu / {name}");
        let cell = MLX_STREAM.throughput[Variant::Coherent as usize];
        let place = BASELINES
            .iter()
            .position(|baseline| baseline.name() == *name);
        let printed = place.and_then(|place| cell.get(place)).copied();
        let row = FindingRow::new(what, "", ratio);
        let printed =
            Published::derived(printed.unwrap_or(f64::NAN), "riommu_table2.csv, mlx stream");
        found.push(row.beside(printed));
    }
    found.explain(format!(
        "With the paper's write-back instruction, CLFLUSH between fences, the throughput of riommu \
        is {}. The paper's processor evicted and fetched a line in about 275 cycles; this \
        processor takes several times as long. The paged modes write back at each map and each \
        unmap, so they lose more than they did in the paper; the rings do not.",
        ratios.join(", "),
    ));
    Ok(())
}

/// The busy-wait line. Each point is the median of short runs, which suppresses interruptions.
fn busy_wait(lengths: &[u64]) -> Vec<Point> {
    const RUNS: usize = 31;
    const PACKETS: u64 = 20;
    let runs: Vec<Vec<Point>> = (0..RUNS)
        .map(|_| busy_wait_line(CLOCK_GHZ, lengths, PACKETS, cycles))
        .collect();
    let points = (0..lengths.len()).filter_map(|place| {
        let at: Vec<Point> = runs
            .iter()
            .filter_map(|run| run.get(place).copied())
            .collect();
        let speeds: Vec<f64> = at.iter().map(|point| point.gbps).collect();
        at.first().map(|point| Point {
            gbps: median(&speeds).0,
            ..*point
        })
    });
    points.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_has_its_cross() {
        let mut setting = Setting::smoke();
        // The first run mostly maps, to fill the rings, and unmaps little.
        setting.runs = 2;
        let found = EXPERIMENT.run(&setting).unwrap();
        let clflush = if WriteBack::Clflush.is_available() {
            6 + 4
        } else {
            0
        };
        assert_eq!(found.rows.len(), 7 + 7 + 1 + 10 + 8 + 2 + clflush + 1);
        // The structure does not depend on execution speed.
        let structure = found
            .rows
            .iter()
            .filter(|row| row.quantity.starts_with("the paper's components"));
        assert!(structure.clone().all(|row| row.holds == Some(true)));
        assert_eq!(structure.count(), 8);
        assert_eq!(found.figures[0].series[2].points.len(), 7);
        let none = found
            .rows
            .iter()
            .find(|row| row.quantity == "none: C")
            .unwrap();
        assert_eq!(none.ratio, Some(1.0));
    }
}
