//! X02: cycles per packet in each mode, and throughput from the model (rIOMMU Figs. 7 and 8, Table
//! 2 for mlx stream).

use std::collections::HashMap;

use ringfence_memory::WriteBack;

use super::capture::Run;
use super::experiment::Experiment;
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published, TOLERANCE, median};
use super::model::{
    Derived, Point, derived, derived_variant, deviation, gbps, model_line, residuals,
};
use super::packet_loop::{LoopAmount, packet_loop_line};
use super::published::{
    BASELINE_CYCLES, BASELINES, Baseline, CLOCK_GHZ, IOVAS_PER_PACKET, MLX_STREAM, Sheet, TABLE_1,
    Variant,
};
use super::setting::Setting;
use super::stream::{in_turns, last, packet, packets, relative_throughput, runs, throughput};
use super::substitution::{paged, ring};
use super::timed::{Cost, CountedSteps, TimedReplays, TimedSubject, run_in_turns};
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::meter::cycles;

/// Work of a point of the lengthened packet loop.
const LOOP: LoopAmount = LoopAmount {
    frames: 1024,
    repetitions: 15,
};

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
        driver's packet loop, lengthened by a busy-wait for each packet, is measured.",
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
        )
        .rounded_by(derived.cycles.rounding());
        // C of none is not measured: it is the paper's.
        found.push(if mode == "none" {
            row.with_published(printed).fitted()
        } else {
            let none = NullModel::exactly(BASELINE_CYCLES);
            row.overhead(printed, none)
                .ordered_within("cycles per packet")
        });
        crosses.push((cycles.median, gbps(CLOCK_GHZ, cycles.median)));
        printed_crosses.push((derived.cycles.value, derived.gbps.value));
    }
    for (mode, derived) in modes() {
        let speed = throughput(of(mode)?, profile);
        let row = FindingRow::new(format!("{mode}: throughput by the model"), "Gbit/s", speed);
        let printed = Published::derived(derived.gbps.value, source);
        let row = row.with_published(printed.rounded_by(derived.gbps.rounding()));
        found.push(if mode == "none" {
            row.fitted()
        } else {
            row.ordered_within("throughput")
        });
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
            found.push(row.overhead(cell(variant, baseline)?, NullModel::RATIO));
        }
    }
    for variant in Variant::ALL {
        for column in &TABLE_1 {
            let (one, other) = (variant.name(), column.mode.name());
            let ring = ring(variant, of(one)?.invalidations_per_pair(), profile);
            let paged = paged(column, of(other)?.invalidations_per_pair(), profile);
            let row =
                FindingRow::counted(format!("{BY_COMPONENTS}{one} / {other}"), "", paged / ring);
            let printed = cell(variant, column.mode)?;
            // Printed numbers go in, so their agreement predicts nothing.
            found.push(row.with_published(printed).fitted());
        }
    }
    as_published(&mut found, of(AS_PUBLISHED)?, of("riommu")?, profile)?;
    with_clflush(setting, &runs, &all, &mut found)?;

    let lengths: Vec<u64> = (1..=10).map(|n| n * 1816).collect();
    let line = packet_loop_line(CLOCK_GHZ, &lengths, LOOP, cycles)?;
    if let Some(off) = deviation(CLOCK_GHZ, &line) {
        let row = FindingRow::new(
            "lengthened packet loop: largest deviation from the model",
            "%",
            Measured::timed(100.0 * off.worst, 0.0),
        );
        // The paper prints no number.
        let printed = Published::new("coincide", 0.0, "rIOMMU Fig. 8: thick and thin line");
        found.push(row.with_published(printed));
    }
    let scale: Vec<f64> = (1..=40).map(|n| f64::from(n) * 500.0).collect();
    let points = |line: &[Point]| line.iter().map(|p| (p.cycles, p.gbps)).collect();
    found.figures.push(Figure::linear(
        "Fig. 8: throughput over cycles per packet",
        "cycles per packet (C)",
        "Gbit/s",
        vec![
            Series::line("model", points(&model_line(CLOCK_GHZ, &scale[2..]))),
            Series::crosses("packet loop, busy-waiting", points(&line)),
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
        "Of C, {:.0}% in strict, {:.0}% in strict+ and {:.0}% in riommu are modelled with the \
        paper's cycles of an invalidation and of a packet without protection. The rest is measured \
        here. X01 compares each component, and shows riommu / strict with one component after \
        another replaced by the paper's.",
        100.0 * share("strict")?,
        100.0 * share("strict+")?,
        100.0 * share("riommu")?,
    ));
    let text = by_components(&found.rows);
    found.explain(text);
    let beyond = |name: &str| -> Result<f64, LabError> {
        Ok(packet(of(name)?, profile).median - packet(of("riommu")?, profile).median)
    };
    found.explain(format!(
        "C beyond that of riommu: {:.0} cycles in {AS_PUBLISHED}, which executes Fig. 11's barrier \
        and write-back at each of two maps and two unmaps per packet, and {:.0} in riommu-, which \
        writes back lines of four entries before a doorbell and before a release. The paper prints \
        ~1.1K.",
        beyond(AS_PUBLISHED)?,
        beyond("riommu-")?,
    ));
    found.note(
        "Throughput is proportional to 1 / C, so the crosses lie on the line by construction. The \
        experiment tests the line itself.",
    );
    Ok(found)
}

/// Prefix of the rows that put the paper's component costs into the model.
const BY_COMPONENTS: &str = "the paper's components, our counts: ";

/// Compares the rows of the paper's components with Table 2.
fn by_components(rows: &[FindingRow]) -> String {
    let ratios = rows
        .iter()
        .filter(|row| row.quantity.starts_with(BY_COMPONENTS))
        .filter_map(|row| row.ratio);
    let worst = ratios.map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
    let meaning = if worst <= TOLERANCE {
        "so the counts do not explain a difference from Table 2"
    } else {
        "so counts or components are missing"
    };
    format!(
        "The paper's component costs with the mappings and invalidations counted here differ from \
        Table 2 by {:.0}% at most, {meaning}. Table 1 and Table 2 go into these rows, so they are \
        not judged and predict nothing.",
        100.0 * worst,
    )
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
    row.with_published(Published::new(
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
    let more = Measured::cost(with.median - without.median, 0.0, 0.0);
    let more = more.with_spread(median(&each).spread);
    let row = FindingRow::new(
        format!("{AS_PUBLISHED}: C beyond that of riommu"),
        "cycles",
        more,
    );
    let printed = Sheet::named("claims")?.printed(&[("id", "R28")], "value")?;
    found.push(row.near(printed));
    Ok(())
}

/// Makes a replica of each of the modes `names` that writes lines back with CLFLUSH.
fn clflush_replays(names: &[&str], profile: &Profile) -> Result<Vec<TimedReplays>, LabError> {
    let timed = names.iter().map(|name| {
        let subject = TimedSubject::from_name(name)?;
        TimedReplays::with_write_back(subject, profile, 1, WriteBack::Clflush)
    });
    timed.collect()
}

/// Repeats the comparison with CLFLUSH, the only write-back instruction of the paper's CPU, which
/// also evicts the line. Adds nothing if this CPU does not have CLFLUSH.
fn with_clflush(
    setting: &Setting,
    runs: &[Run],
    all: &HashMap<&str, Cost>,
    found: &mut Findings,
) -> Result<(), LabError> {
    if !WriteBack::Clflush.is_available() {
        return Ok(());
    }
    let profile = &setting.profile;
    let names = ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"];
    let mut timed = clflush_replays(&names, profile)?;
    let mut costs = Vec::new();
    for run in runs {
        costs = run_in_turns(&mut timed, run, CountedSteps::All)?;
    }
    let riommu = costs.last().ok_or(LabError::Internal("a cost"))?;
    let mut more = Vec::new();
    for (name, cost) in names.iter().zip(&costs) {
        let what = format!("{name}: C with write-backs by CLFLUSH");
        let cycles = packet(cost, profile);
        if let Some(usual) = all.get(name) {
            let change = cycles.median - packet(usual, profile).median;
            more.push(format!("{change:+.0} in {name}"));
        }
        found.push(FindingRow::new(what, "cycles", cycles));
    }
    let mut ratios = Vec::new();
    for (name, cost) in names.iter().zip(&costs).take(4) {
        let ratio = relative_throughput(riommu, cost, profile);
        ratios.push(format!("{:.2} over {name}", ratio.median));
        let what = format!("throughput with CLFLUSH, riommu / {name}");
        let cell = MLX_STREAM.throughput[Variant::Coherent as usize];
        let index = BASELINES
            .iter()
            .position(|baseline| baseline.name() == *name);
        let printed = index.and_then(|index| cell.get(index)).copied();
        let row = FindingRow::new(what, "", ratio);
        let printed =
            Published::derived(printed.unwrap_or(f64::NAN), "riommu_table2.csv, mlx stream");
        found.push(row.with_published(printed));
    }
    found.explain(format!(
        "With the paper's write-back instruction, CLFLUSH between fences, the throughput of riommu \
        is {}. C changes from that with {} by these cycles: {}.",
        ratios.join(", "),
        WriteBack::best(),
        more.join(", "),
    ));
    Ok(())
}

#[cfg(test)]
mod tests;
