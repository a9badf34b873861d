//! X01: riommu over strict after each component is replaced by the paper's.

use super::Column;
use crate::capture::Run;
use crate::finding::{FindingRow, Findings, Measured};
use crate::published::Sheet;
use crate::setting::Setting;
use crate::stream::in_turns;
use crate::substitution::{Stage, stages};
use crate::timed::{Cost, TimedSubject};
use ringfence_lab::{LabError, Profile};

/// Quantity of the row of riommu's cycles, from which the stages begin.
pub(super) const RIOMMU: &str = "riommu: map and unmap";

/// Reports the cycles of riommu, and riommu / strict after each component is replaced by the
/// paper's. The first of `columns` is `strict`.
pub(super) fn by_stages(
    setting: &Setting,
    runs: &[Run],
    columns: &[Column],
    found: &mut Findings,
) -> Result<(), LabError> {
    let costs = in_turns(setting, runs, vec![TimedSubject::Rings])?;
    let costs = costs.first().ok_or(LabError::Internal("a cost"))?;
    let profile = &setting.profile;
    let riommu = mean_pair(costs, profile);
    let strict = columns.first().ok_or(LabError::Internal("a column"))?;
    let mut cycles = strict.parts.cycles;
    cycles.unmap_invalidation_modelled = strict.invalidations * profile.invalidation_cycles as f64;
    found.push(FindingRow::new(RIOMMU, "cycles", riommu));
    show_stages(&stages(&cycles, riommu.median), found)
}

/// Cycles of a map and an unmap, averaged over all pairs of all runs.
fn mean_pair(costs: &[Cost], profile: &Profile) -> Measured {
    let pairs: u64 = costs.iter().map(|cost| cost.pairs).sum();
    let mean = |of: fn(&Cost) -> f64| {
        let all = costs.iter().map(of);
        all.sum::<f64>() / pairs.max(1) as f64
    };
    let modelled = mean(|cost| cost.invalidations as f64) * profile.invalidation_cycles as f64;
    Measured::cost(mean(|cost| cost.measured), modelled, 0.0).with_spread(mean(|cost| cost.spread))
}

/// Adds riommu / strict of each stage, and the difference that each makes.
fn show_stages(stages: &[Stage], found: &mut Findings) -> Result<(), LabError> {
    let mut before = None;
    let mut moved = Vec::new();
    for stage in stages {
        let ratio = stage.strict / stage.riommu;
        if let Some(before) = before.replace(ratio) {
            moved.push(format!("{} {:+.2}", stage.what, ratio - before));
        }
        let what = format!(
            "throughput, riommu / strict, with the paper's: {}",
            stage.what
        );
        let printed = Sheet::named("riommu_table2")?.printed(
            &[
                ("nic", "mlx"),
                ("benchmark", "stream"),
                ("metric", "throughput"),
                ("variant", "riommu"),
                ("divided_by", "strict"),
            ],
            "value",
        )?;
        found.push(FindingRow::new(what, "", Measured::timed(ratio, 0.0)).with_published(printed));
    }
    found.explain(format!(
        "riommu / strict with one measured component after another replaced by the paper's: {}. \
        The rows \"with the paper's: ...\" show the ratio after each replacement; replacements \
        accumulate.",
        moved.join(", "),
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_divide_strict_by_riommu() {
        let stage = |what, strict, riommu| Stage {
            what,
            strict,
            riommu,
        };
        let mut found = Findings::default();
        let all = [stage("nothing", 6000.0, 2000.0), stage("a", 9000.0, 2000.0)];
        show_stages(&all, &mut found).unwrap();
        let ratios: Vec<f64> = found
            .rows
            .iter()
            .map(|row| row.measured.unwrap().median)
            .collect();
        assert_eq!(ratios, [3.0, 4.5]);
        let rows = found.rows.iter();
        let printed: Vec<f64> = rows
            .map(|row| row.published.as_ref().unwrap().value)
            .collect();
        assert_eq!(printed, [7.56, 7.56]);
        assert!(found.explanation[0].contains(": a +1.50. "), "{found:?}");
    }

    #[test]
    fn a_pair_is_averaged_over_all_pairs() {
        let mut profile = Profile::r210_2015();
        profile.invalidation_cycles = 1000;
        let cost = |measured, spread, invalidations, pairs| Cost {
            measured,
            spread,
            invalidations,
            pairs,
            ..Cost::default()
        };
        // 900 and 100 measured cycles, their spreads, and one invalidation, over ten pairs.
        let costs = [cost(900.0, 30.0, 0, 2), cost(100.0, 20.0, 1, 8)];
        let found = mean_pair(&costs, &profile);
        let wanted = Measured::cost(100.0, 100.0, 0.0).with_spread(5.0);
        assert_eq!(found, wanted);
        assert_eq!(mean_pair(&[], &profile), Measured::cost(0.0, 0.0, 0.0));
    }
}
