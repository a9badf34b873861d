//! Rows of X03 on the CPU utilisation of request-response, and the explanation of those that fail.

use super::super::finding::{FindingRow, Measured, NullModel};
use super::super::published::{
    BASELINES, Baseline, CLOCK_GHZ, Nic, Sheet, TABLE_1, TABLE_3, Variant,
};
use super::super::transactions::{
    FITTED_MODE, TRANSACTION, Transaction, TransactionModel, fitted_cell, of_mode,
};
use ringfence_lab::LabError;

/// Quantity of the rows of the round trips.
fn round_trip(mode: &str) -> String {
    format!("{mode}, round trip")
}

/// Quantity of the rows of the utilisation.
fn utilisation(mode: &str) -> String {
    format!("{mode}, CPU utilisation")
}

/// Quantities of the ends of the range of all utilisations.
const ENDS: [&str; 2] = [
    "least CPU utilisation of all modes",
    "greatest CPU utilisation of all modes",
];

/// Percentages between which the paper's curves lie (section 5.2, claim R38).
fn printed_ends(nic: Nic) -> [f64; 2] {
    match nic {
        Nic::Mlx => [28.0, 30.0],
        Nic::Brcm => [12.0, 15.0],
    }
}

/// Rows of the CPU utilisation on `nic`, named `group`. `costs` has the cycles that each mode adds
/// to a frame, and `round_trips` the microseconds of none and of each mode.
///
/// # Errors
/// A mode has no round trip, or a cell is missing: a defect of Ringfence.
pub(super) fn rows(
    nic: Nic,
    group: &str,
    costs: &[(&'static str, Measured)],
    round_trips: &[(&'static str, Measured)],
) -> Result<Vec<FindingRow>, LabError> {
    let free = ("none", Measured::cost(0.0, 0.0, 0.0));
    let modes = std::iter::once(&free).chain(costs);
    let transactions = modes.map(|&(mode, cost)| {
        let round_trip = of_mode(round_trips, mode)?;
        Ok((mode, Transaction::new(cost, round_trip)))
    });
    let transactions = transactions.collect::<Result<Vec<_>, LabError>>()?;
    let cell = fitted_cell(nic)?;
    let model = TransactionModel::fitted(cell.value, &of_mode(&transactions, FITTED_MODE)?);
    let named = |what: &str, unit, value| FindingRow::new(format!("{group}: {what}"), unit, value);
    let c_none = Measured::cost(0.0, model.c_none(), 0.0);
    let mut out = vec![named(TRANSACTION, "cycles", c_none).fitted()];
    for (mode, microseconds) in round_trips {
        out.push(named(&round_trip(mode), "us", *microseconds));
    }
    let mut all = Vec::new();
    for (mode, transaction) in &transactions {
        let percent = model.percent(transaction);
        all.push(percent);
        let row = named(&utilisation(mode), "%", percent);
        out.push(if *mode == FITTED_MODE {
            row.with_published(cell.clone()).fitted()
        } else {
            row
        });
    }
    let none = model.percent(&of_mode(&transactions, "none")?);
    let null = NullModel::exactly(none.median);
    let by_median = |one: &&Measured, other: &&Measured| one.median.total_cmp(&other.median);
    let ends = [all.iter().min_by(by_median), all.iter().max_by(by_median)];
    let claim = Sheet::named("claims")?.printed(&[("id", "R38")], "value")?;
    for ((what, end), printed) in ENDS.into_iter().zip(ends).zip(printed_ends(nic)) {
        let end = *end.ok_or(LabError::Internal("no modes"))?;
        let row = named(what, "%", end).near(claim.clone().read_as(printed));
        out.push(row.with_null_model(null));
    }
    let sheet = Sheet::named("riommu_table2")?;
    for variant in Variant::ALL {
        for baseline in BASELINES {
            let wanted = [
                ("nic", nic.name()),
                ("benchmark", "rr"),
                ("metric", "cpu"),
                ("variant", variant.name()),
                ("divided_by", baseline.name()),
            ];
            let one = of_mode(&transactions, variant.name())?;
            let other = of_mode(&transactions, baseline.name())?;
            let at = |ends| model.percent_at(&one, ends) / model.percent_at(&other, -ends);
            let median = model.percent(&one).median / model.percent(&other).median;
            let ratio = Measured::counted(median).with_spread((at(1.0) - at(-1.0)).abs());
            let row = named(&ratio_of(variant, baseline), "", ratio);
            out.push(row.overhead(sheet.printed(&wanted, "value")?, NullModel::RATIO));
        }
    }
    Ok(out)
}

/// Quantity of the row of a ratio of utilisations.
fn ratio_of(variant: Variant, baseline: Baseline) -> String {
    format!("cpu, {} / {}", variant.name(), baseline.name())
}

/// Explains the failing rows of the CPU utilisation on `nic`, whose rows are named `group`. `None`
/// if all hold.
pub(super) fn explanation(nic: Nic, group: &str, rows: &[FindingRow]) -> Option<String> {
    let find = |what: &str| {
        let name = format!("{group}: {what}");
        rows.iter().find(|row| row.quantity == name)
    };
    let ratios = Variant::ALL.into_iter().flat_map(|variant| {
        BASELINES
            .into_iter()
            .map(move |baseline| ratio_of(variant, baseline))
    });
    let judged = ENDS.map(str::to_owned).into_iter().chain(ratios);
    let judged: Vec<bool> = judged
        .filter_map(|what| find(&what).and_then(|row| row.holds))
        .collect();
    let failing = judged.iter().filter(|holds| !**holds).count();
    if failing == 0 {
        return None;
    }
    let printed = |what: &str| Some(find(what)?.published.as_ref()?.value);
    let over = |baseline| printed(&ratio_of(Variant::Coherent, baseline));
    // Printed percentages times printed round trips.
    let table = TABLE_3.iter().find(|table| table.nic == nic)?;
    let microseconds = |baseline: Baseline| table.baselines[baseline as usize];
    let fitted = printed(&utilisation(FITTED_MODE))?;
    let none = fitted * over(Baseline::StrictPlus)? / over(Baseline::None)?;
    let cycles = |percent: f64, baseline| {
        let whole = microseconds(baseline) * CLOCK_GHZ * 1e3;
        percent / 100.0 * whole
    };
    let added = cycles(fitted, Baseline::StrictPlus) - cycles(none, Baseline::None);
    let here = find(&super::added(FITTED_MODE))?.measured?.scaled(2.0);
    let column = &TABLE_1[Baseline::StrictPlus as usize];
    Some(format!(
        "{failing} of {} judged rows of CPU utilisation on {group} fail. The printed numbers imply \
        that {FITTED_MODE} adds {added:.0} cycles to a transaction: {fitted} % of {} us, less \
        {none:.1} % of {} us without protection, by the ratios of riommu. Here it adds {:.0}, of \
        which {:.0} are modelled invalidations. In the paper's Table 1, one map and unmap costs \
        {:.0} cycles, of which the invalidation is {:.0}.",
        judged.len(),
        microseconds(Baseline::StrictPlus),
        microseconds(Baseline::None),
        here.median,
        here.modelled_part.unwrap_or(0.0),
        column.map() + column.unmap(),
        column.invalidation,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Requirement;
    use super::*;

    const GROUP: &str = "nic rr";

    /// Cycles that each mode adds to a frame, and its round trip in microseconds.
    const MODES: [(&str, f64, f64); 7] = [
        ("none", 0.0, 10.0),
        ("strict", 2000.0, 16.0),
        ("strict+", 1000.0, 14.0),
        ("defer", 900.0, 13.0),
        ("defer+", 800.0, 12.5),
        ("riommu-", 700.0, 12.0),
        ("riommu", 500.0, 11.0),
    ];

    fn by_hand(nic: Nic) -> Vec<FindingRow> {
        let cost = |value| Measured::cost(value, 0.0, 0.0);
        let costs = MODES[1..].iter().map(|of| (of.0, cost(of.1)));
        let trips = MODES.map(|(mode, _, microseconds)| (mode, cost(microseconds)));
        rows(nic, GROUP, &costs.collect::<Vec<_>>(), &trips).unwrap()
    }

    fn find<'a>(rows: &'a [FindingRow], what: &str) -> &'a FindingRow {
        let name = format!("{GROUP}: {what}");
        let row = rows.iter().find(|row| row.quantity == name);
        row.unwrap_or_else(|| panic!("{name}"))
    }

    fn assert_near(row: &FindingRow, wanted: f64) {
        let found = row.measured.unwrap().median;
        assert!((found - wanted).abs() < 1e-9, "{row:?}, not {wanted}");
    }

    /// strict+ takes 14 us, 43,400 cycles, of which the printed percentage is busy and 2000 are of
    /// two frames.
    #[test]
    fn each_mode_has_its_cycles_over_its_round_trip() {
        for (nic, percent) in [(Nic::Mlx, 29.0), (Nic::Brcm, 12.0)] {
            let rows = by_hand(nic);
            let c_none = 434.0 * percent - 2000.0;
            let row = find(&rows, "cycles per transaction without protection");
            assert_near(row, c_none);
            assert!(row.fitted);
            let load = |mode: &str| {
                let (_, added, trip) = MODES.iter().find(|of| of.0 == mode).unwrap();
                100.0 * (c_none + 2.0 * added) / (trip * 3100.0)
            };
            for (mode, _, trip) in MODES {
                assert_near(find(&rows, &format!("{mode}, round trip")), trip);
                let row = find(&rows, &format!("{mode}, CPU utilisation"));
                assert_near(row, load(mode));
                assert_eq!(row.fitted, mode == "strict+", "{mode}");
                assert_eq!(row.holds, None, "{mode}");
            }
            let row = find(&rows, "strict+, CPU utilisation");
            assert_eq!(row.published.as_ref().unwrap().value, percent);
            assert_near(row, percent);
            for variant in ["riommu-", "riommu"] {
                for baseline in ["strict", "strict+", "defer", "defer+", "none"] {
                    let row = find(&rows, &format!("cpu, {variant} / {baseline}"));
                    assert_near(row, load(variant) / load(baseline));
                }
            }
            let loads = MODES.map(|of| load(of.0));
            let least = loads.into_iter().fold(f64::INFINITY, f64::min);
            assert_near(find(&rows, "least CPU utilisation of all modes"), least);
            let most = loads.into_iter().fold(0.0, f64::max);
            assert_near(find(&rows, "greatest CPU utilisation of all modes"), most);
        }
    }

    /// rIOMMU Table 2, and "28-30% for mlx and at 12-15% for brcm" of section 5.2.
    #[test]
    fn rows_are_judged_beside_their_own_cells() {
        for (nic, ends, ratios) in [
            (
                Nic::Mlx,
                [28.0, 30.0],
                [
                    [0.94, 0.99, 0.98, 0.99, 1.01],
                    [0.93, 0.98, 0.96, 0.98, 1.00],
                ],
            ),
            (
                Nic::Brcm,
                [12.0, 15.0],
                [
                    [0.86, 0.96, 0.96, 1.00, 1.11],
                    [0.84, 0.93, 0.93, 0.98, 1.08],
                ],
            ),
        ] {
            let rows = by_hand(nic);
            let none = find(&rows, "none, CPU utilisation").measured.unwrap();
            for (what, printed) in ENDS.into_iter().zip(ends) {
                let row = find(&rows, what);
                assert_eq!(row.published.as_ref().unwrap().value, printed);
                assert_eq!(row.requirement, Requirement::Near, "{what}");
                assert_eq!(row.null_model, Some(NullModel::exactly(none.median)));
                assert!(row.holds.is_some(), "{what}");
            }
            for (variant, printed) in Variant::ALL.into_iter().zip(ratios) {
                for (baseline, printed) in BASELINES.into_iter().zip(printed) {
                    let row = find(&rows, &ratio_of(variant, baseline));
                    assert_eq!(row.published.as_ref().unwrap().value, printed);
                    assert_eq!(row.requirement, Requirement::Overhead);
                    assert_eq!(row.null_model, Some(NullModel::RATIO));
                    assert!(row.holds.is_some());
                }
            }
            let judged = rows.iter().filter(|row| row.holds.is_some()).count();
            assert_eq!((judged, rows.len()), (12, 1 + 7 + 7 + 2 + 10));
        }
    }

    /// The ends of a ratio are the greatest of one mode over the least of the other, and inverse.
    #[test]
    fn a_ratio_has_the_spread_of_both_utilisations() {
        let cost = |value, spread| Measured::cost(value, 0.0, 0.0).with_spread(spread);
        let costs = MODES[1..].iter().map(|of| (of.0, cost(of.1, 100.0)));
        let trips = MODES.map(|(mode, _, microseconds)| (mode, cost(microseconds, 1.0)));
        let rows = rows(Nic::Mlx, GROUP, &costs.collect::<Vec<_>>(), &trips).unwrap();
        let c_none = 434.0 * 29.0 - 2000.0;
        let riommu = |ends: f64| (c_none + 1000.0 + ends * 100.0) / (11.0 - ends * 0.5);
        let strict = |ends: f64| (c_none + 4000.0 + ends * 100.0) / (16.0 - ends * 0.5);
        let wanted = riommu(1.0) / strict(-1.0) - riommu(-1.0) / strict(1.0);
        let found = find(&rows, "cpu, riommu / strict").measured.unwrap().spread;
        assert!((found - wanted).abs() < 1e-9, "{found}, not {wanted}");
    }

    #[test]
    fn text_has_the_cycles_that_the_printed_numbers_imply() {
        for (nic, wanted) in [
            (
                Nic::Mlx,
                "strict+ adds 1769 cycles to a transaction: 29 % of 15.1 us, less 28.4 % of 13.4 \
                us without protection, by the ratios of riommu. Here it adds 2000, of which 600 \
                are modelled invalidations. In the paper's Table 1, one map and unmap costs 3794 \
                cycles, of which the invalidation is 2135.",
            ),
            (
                Nic::Brcm,
                "strict+ adds 2569 cycles to a transaction: 12 % of 36.7 us, less 10.3 % of 34.6 \
                us without protection, by the ratios of riommu. Here it adds 2000, of which 600 \
                are modelled invalidations. In the paper's Table 1, one map and unmap costs 3794 \
                cycles, of which the invalidation is 2135.",
            ),
        ] {
            let mut rows = by_hand(nic);
            let per_frame = Measured::cost(700.0, 300.0, 0.0);
            let what = format!("{GROUP}: {}", super::super::added("strict+"));
            rows.push(FindingRow::new(what, "cycles", per_frame));
            let failing = rows.iter().filter(|row| row.holds == Some(false)).count();
            let text = explanation(nic, GROUP, &rows).unwrap();
            let begin = format!("{failing} of 12 judged rows of CPU utilisation on nic rr fail. ");
            assert!(text.starts_with(&begin) && text.ends_with(wanted), "{text}");
            rows.retain(|row| row.holds != Some(false));
            assert_eq!(explanation(nic, GROUP, &rows), None);
        }
    }
}
