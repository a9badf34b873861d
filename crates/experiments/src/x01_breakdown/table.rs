//! Rows of X01: the components of each mode and their sums.

use super::Column;
use crate::finding::{FindingRow, Findings, Measured, NullModel, Published};
use crate::published::Sheet;
use ringfence_lab::LabError;
use ringfence_lab::meter::Cycles;

/// Quantity of the rows that count invalidations.
pub(super) const INVALIDATIONS: &str = "invalidations per unmap";

/// Adds the rows of `columns`, and the sum of each over that of the first. An invalidation takes
/// `price` cycles.
pub(super) fn tabulate(
    columns: &[Column],
    price: f64,
    found: &mut Findings,
) -> Result<(), LabError> {
    let sheet = Sheet::named("riommu_table1")?;
    let printed = |mode: &str, function, component| {
        let wanted = [
            ("function", function),
            ("component", component),
            ("mode", mode),
        ];
        sheet.printed(&wanted, "value")
    };
    for column in columns {
        let mode = column.mode.as_str();
        let rows = rows_of(&column.parts.cycles, column.invalidations * price);
        for (function, component, measured_part, modelled) in rows {
            let measured = Measured::cost(measured_part, modelled, 0.0);
            let row = FindingRow::new(
                format!("{mode}: {function}, {component}"),
                "cycles",
                measured.with_spread(column.spread()),
            );
            let row = row.with_published(printed(mode, function, component)?);
            found.push(match (function, component) {
                ("map", "iova alloc") => row.ordered_within("alloc"),
                // Each unmap pays the modelled number, which the papers print.
                (_, "iotlb inv") if column.invalidations >= 1.0 => row.fitted(),
                _ => row,
            });
        }
        let what = format!("{mode}: {INVALIDATIONS}");
        found.push(FindingRow::counted(what, "", column.invalidations));
    }
    let printed_sum = |mode: &str| {
        let (map, unmap) = (printed(mode, "map", "sum")?, printed(mode, "unmap", "sum")?);
        Ok::<_, LabError>(map.value + unmap.value)
    };
    let mut first = None;
    for column in columns {
        let (mode, spread) = (column.mode.as_str(), column.spread());
        let cost = Measured::cost(column.measured(), column.invalidations * price, 0.0);
        let wanted = printed_sum(mode)?;
        let row = FindingRow::new(
            format!("{mode}: map and unmap"),
            "cycles",
            cost.with_spread(spread),
        );
        let sum = Published::new(format!("{wanted}"), wanted, "riommu_table1.csv: both sums");
        found.push(
            row.with_published(sum.rounded_by(1.0))
                .ordered_within("totals"),
        );
        let share = spread / cost.median;
        let Some((name, median, base_share, base)) = first else {
            first = Some((mode, cost.median, share, wanted));
            continue;
        };
        let row = FindingRow::new(
            format!("{mode} over {name}: map and unmap"),
            "",
            Measured::timed(cost.median / median, share + base_share),
        );
        let ratio = Published::derived(wanted / base, "riommu_table1.csv: both sums, divided");
        found.push(row.overhead(ratio, NullModel::RATIO));
    }
    Ok(())
}

/// Rows of one mode: function, component, measured and modelled cycles. The modelled cycles are
/// those of the invalidation.
fn rows_of(cycles: &Cycles, modelled: f64) -> [(&'static str, &'static str, f64, f64); 10] {
    [
        ("map", "iova alloc", cycles.map_iova_alloc, 0.0),
        ("map", "page table", cycles.map_table, 0.0),
        ("map", "other", cycles.map_other, 0.0),
        ("map", "sum", cycles.map(), 0.0),
        ("unmap", "iova find", cycles.unmap_iova_find, 0.0),
        ("unmap", "iova free", cycles.unmap_iova_free, 0.0),
        ("unmap", "page table", cycles.unmap_table, 0.0),
        ("unmap", "iotlb inv", cycles.unmap_invalidation, modelled),
        ("unmap", "other", cycles.unmap_other, 0.0),
        ("unmap", "sum", cycles.unmap(), modelled),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::finding::Requirement;
    use ringfence_lab::meter::Components;

    #[test]
    fn each_component_has_its_own_cycles() {
        let cycles = Cycles {
            map_iova_alloc: 1.0,
            map_table: 2.0,
            map_other: 4.0,
            unmap_iova_find: 8.0,
            unmap_iova_free: 16.0,
            unmap_table: 32.0,
            unmap_invalidation: 64.0,
            unmap_other: 128.0,
            ..Cycles::default()
        };
        let wanted = [
            ("map", "iova alloc", 1.0, 0.0),
            ("map", "page table", 2.0, 0.0),
            ("map", "other", 4.0, 0.0),
            ("map", "sum", 7.0, 0.0),
            ("unmap", "iova find", 8.0, 0.0),
            ("unmap", "iova free", 16.0, 0.0),
            ("unmap", "page table", 32.0, 0.0),
            ("unmap", "iotlb inv", 64.0, 2150.0),
            ("unmap", "other", 128.0, 0.0),
            ("unmap", "sum", 248.0, 2150.0),
        ];
        assert_eq!(rows_of(&cycles, 2150.0), wanted);
    }

    /// Cycles of a map and an unmap, invalidations per unmap, both errors as shares, and the cycles
    /// that they are shares of.
    type Costs = (f64, f64, f64, f64, f64, f64);

    fn column(mode: &str, costs: Costs) -> Column {
        let (alloc, unmap_table, invalidations, order_spread, repetition_spread, measured) = costs;
        let cycles = Cycles {
            map_iova_alloc: alloc,
            unmap_table,
            ..Cycles::default()
        };
        Column {
            mode: mode.into(),
            parts: Components {
                cycles,
                order_spread,
                repetition_spread,
                measured,
                ..Components::default()
            },
            invalidations,
            layer: "",
            coherencies: Vec::new(),
        }
    }

    /// Spreads of 100, 32, 110 and 35 cycles: of each mode, the larger error.
    pub(crate) fn hand_made() -> Findings {
        let columns = [
            column("strict", (300.0, 700.0, 1.0, 0.1, 0.05, 1000.0)),
            column("strict+", (100.0, 700.0, 1.0, 0.02, 0.04, 800.0)),
            column("defer", (500.0, 600.0, 0.004, 0.1, 0.01, 1100.0)),
            column("defer+", (110.0, 590.0, 0.004, 0.05, 0.05, 700.0)),
        ];
        let mut found = Findings::default();
        tabulate(&columns, 2150.0, &mut found).unwrap();
        found
    }

    pub(crate) fn row<'a>(rows: &'a [FindingRow], what: &str) -> &'a FindingRow {
        let mut rows = rows.iter();
        rows.find(|row| row.quantity == what).expect(what)
    }

    #[test]
    fn ratios_and_spreads_follow_from_the_columns() {
        let found = hand_made();
        for (mode, spread, total, printed) in [
            ("strict", 100.0, 3150.0, ("7617", 7617.0)),
            ("strict+", 32.0, 2950.0, ("3794", 3794.0)),
            ("defer", 110.0, 1108.6, ("3388", 3388.0)),
            ("defer+", 35.0, 708.6, ("1967", 1967.0)),
        ] {
            for what in [
                "map, iova alloc",
                "unmap, sum",
                "unmap, other",
                "map and unmap",
            ] {
                let row = row(&found.rows, &format!("{mode}: {what}"));
                let off = row.measured.unwrap().spread - spread;
                assert!(off.abs() < 1e-9, "{row:?}");
            }
            let sum = row(&found.rows, &format!("{mode}: map and unmap"));
            assert!((sum.measured.unwrap().median - total).abs() < 1e-9);
            let cell = sum.published.as_ref().unwrap();
            assert_eq!((cell.text.as_str(), cell.value), printed);
        }
        // Table 1: 3794, 3388 and 1967 of 7617 cycles.
        for (mode, printed, ratio, share) in [
            ("strict+", "0.50", 2950.0 / 3150.0, 32.0 / 2950.0),
            ("defer", "0.44", 1108.6 / 3150.0, 110.0 / 1108.6),
            ("defer+", "0.26", 708.6 / 3150.0, 35.0 / 708.6),
        ] {
            let row = row(&found.rows, &format!("{mode} over strict: map and unmap"));
            let cell = row.published.as_ref().unwrap();
            assert_eq!(cell.text, printed);
            assert!((cell.value - printed.parse::<f64>().unwrap()).abs() < 0.005);
            let measured = row.measured.unwrap();
            assert!((measured.median - ratio).abs() < 1e-9, "{row:?}");
            let spread = (share + 100.0 / 3150.0) * ratio;
            assert!((measured.spread - spread).abs() < 1e-9, "{row:?}");
            let demand = (row.requirement, row.null_model);
            assert_eq!(demand, (Requirement::Overhead, Some(NullModel::RATIO)));
        }
    }

    /// Table 1 of the rIOMMU paper, and whether the modelled invalidations are part of the row.
    #[rustfmt::skip]
    const TABLE_1: [(&str, [f64; 4], bool); 10] = [
        ("map, iova alloc", [3986.0, 92.0, 1674.0, 108.0], false),
        ("map, page table", [588.0, 590.0, 533.0, 577.0], false),
        ("map, other", [44.0, 45.0, 44.0, 42.0], false),
        ("map, sum", [4618.0, 727.0, 2251.0, 727.0], false),
        ("unmap, iova find", [249.0, 418.0, 263.0, 454.0], false),
        ("unmap, iova free", [159.0, 62.0, 189.0, 57.0], false),
        ("unmap, page table", [438.0, 427.0, 471.0, 504.0], false),
        ("unmap, iotlb inv", [2127.0, 2135.0, 9.0, 9.0], true),
        ("unmap, other", [26.0, 25.0, 205.0, 216.0], false),
        ("unmap, sum", [2999.0, 3067.0, 1137.0, 1240.0], true),
    ];

    /// Each component of each mode is beside its own cell of Table 1, with its own cycles.
    #[test]
    fn each_component_is_beside_its_own_cell_of_table_1() {
        let modes = ["strict", "strict+", "defer", "defer+"];
        let columns: Vec<_> = (1..)
            .zip(modes)
            .map(|(number, mode)| {
                let number = f64::from(number);
                let mut of = column(mode, (0.0, 0.0, number / 4.0, 0.0, 0.0, 0.0));
                of.parts.cycles = Cycles {
                    map_iova_alloc: 1000.0 * number,
                    map_table: 2000.0 * number,
                    map_other: 4000.0 * number,
                    unmap_iova_find: 8000.0 * number,
                    unmap_iova_free: 16_000.0 * number,
                    unmap_table: 32_000.0 * number,
                    unmap_invalidation: 64_000.0 * number,
                    unmap_other: 128_000.0 * number,
                    ..Cycles::default()
                };
                of
            })
            .collect();
        let mut found = Findings::default();
        tabulate(&columns, 2000.0, &mut found).unwrap();
        let thousands = [1.0, 2.0, 4.0, 7.0, 8.0, 16.0, 32.0, 64.0, 128.0, 248.0];
        for (index, mode) in modes.into_iter().enumerate() {
            let times = (index + 1) as f64;
            for ((what, cells, invalidates), cycles) in TABLE_1.into_iter().zip(thousands) {
                let row = row(&found.rows, &format!("{mode}: {what}"));
                assert_eq!(
                    row.published.as_ref().unwrap().value,
                    cells[index],
                    "{row:?}"
                );
                let measured = row.measured.unwrap();
                let modelled = if invalidates { 500.0 * times } else { 0.0 };
                let total = 1000.0 * cycles * times + modelled;
                assert_eq!(measured.median, total, "{row:?}");
                assert_eq!(measured.modelled_part.unwrap_or(0.0), modelled, "{row:?}");
                let group = (what == "map, iova alloc").then_some("alloc");
                assert_eq!((row.group, row.requirement), (group, Requirement::Shown));
            }
            let counted = row(&found.rows, &format!("{mode}: {INVALIDATIONS}"));
            assert_eq!(counted.measured.unwrap().median, times / 4.0, "{mode}");
        }
    }
}
