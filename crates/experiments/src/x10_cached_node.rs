//! X10: the search that one free in another ring causes in the allocator (EIOVAR Table 1).

use ringfence_iova::{AllocRequest, CachedTree, RangeStore};
use ringfence_types::Pfn;

use super::allocators::{flushed, pages};
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Published};
use super::published::Sheet;
use super::setting::Setting;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X10",
    title: "The cached node, step by step",
    source: "EIOVAR Table 1",
    measure,
};

/// Columns of the bundled table for one variant of the sequence.
struct Column {
    name: &'static str,
    result: &'static str,
    before: &'static str,
    after: &'static str,
}

const COLUMNS: [Column; 2] = [
    Column {
        name: "without Tx",
        result: "ret_without_tx",
        before: "C_before_without_tx",
        after: "C_after_without_tx",
    },
    Column {
        name: "with Tx",
        result: "ret_with_tx",
        before: "C_before_with_tx",
        after: "C_after_with_tx",
    },
];

/// Steps of the table: number, description, and the page to free; `None` for an allocation.
const STEPS: [(&str, &str, Option<u64>); 5] = [
    ("1", "free of 151 in Rx", Some(151)),
    ("2", "free of 300 in Tx", Some(300)),
    ("3", "first alloc in Rx", None),
    ("4", "free of 150 in Rx", Some(150)),
    ("5", "second alloc in Rx", None),
];

fn measure(_: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "All pages around those that the table names are allocated, and the cached node is page \
        152. Then the experiment makes the table's calls on the allocator of Linux 3.4.",
    );
    let sheet = Sheet::named("eiovar_table1_sequence")?;
    for column in &COLUMNS {
        let single = (0..1000)
            .map(|page| pages(page, page))
            .collect::<Result<Vec<_>, _>>()?;
        let mut tree = CachedTree::with_allocated(pages(0, 999)?, single, Some(Pfn::new(152)))
            .map_err(|_| LabError::Internal("a state of the tree"))?;
        let cache = |tree: &CachedTree| tree.cached_page().map_or(-1.0, |page| page.get() as f64);
        for (step, what, page) in STEPS {
            let cell = |name: &str| sheet.printed(&[("step", step)], name);
            if sheet.text(&[("step", step)], column.before)?.is_empty() {
                // This step occurs in the other column only.
                continue;
            }
            let mut exact = |what: String, printed: Published, value: f64| {
                let row = FindingRow::counted(what, "page", value);
                found.rows.push(row.exact(printed));
            };
            let name = column.name;
            exact(
                format!("{name}: C before {what}"),
                cell(column.before)?,
                cache(&tree),
            );
            let mut steps = None;
            match page {
                Some(page) => {
                    tree.free(flushed(pages(page, page)?)?.into());
                }
                None => {
                    let request = AllocRequest::new(1, Pfn::new(999));
                    let got = tree.alloc(&request).map_err(LabError::Alloc)?;
                    let lo = got.range.lo().get() as f64;
                    exact(
                        format!("{name}: result of {what}"),
                        cell(column.result)?,
                        lo,
                    );
                    steps = Some(got.steps);
                }
            }
            exact(
                format!("{name}: C after {what}"),
                cell(column.after)?,
                cache(&tree),
            );
            if let Some(steps) = steps {
                let row = FindingRow::counted(
                    format!("{name}: search steps, {what}"),
                    "rb_prev",
                    f64::from(steps),
                );
                // EIOVAR prints no search lengths. The last row's follows from the table.
                let wanted = if (step, column.name) == ("5", "with Tx") {
                    148.0
                } else {
                    0.0
                };
                let source = "follows from the table: from page 300 down to 152 (erratum 21)";
                let printed = Published::derived(wanted, source);
                found.rows.push(row.exact(printed));
            }
        }
    }
    found.note("Every number is counted; nothing is timed or modelled.");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;

    #[test]
    fn every_cell_of_the_table_is_exact() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        assert_eq!(found.verdict, Verdict::Reproduced, "{:#?}", found.rows);
        // C before and after four and five calls; a result and a search length for each of two
        // allocations.
        assert_eq!(found.rows.len(), 2 * (4 + 5) + 2 * 2 * 2);
    }
}
