//! X22: page reuse of DMA buffers (PVIOMMU Table 5), on which the reverse translation cache
//! depends.

use super::experiment::Experiment;

use super::finding::{FindingRow, Findings, Published, Requirement, median};
use super::published::Sheet;
use super::reuse::ReuseRow;
use super::setting::Setting;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X22",
    title: "Page reuse of DMA buffers",
    source: "PVIOMMU Table 5",
    measure,
};

/// Tests of Table 5.
const TESTS: [&str; 4] = ["TCP_STREAM", "TCP_RR", "UDP_STREAM", "UDP_RR"];
/// The test that transfers continuously. `CREATES` is the minimum number of mappings of a recorded
/// device whose reuse is meaningful.
const STREAM: &str = "TCP_STREAM";
const CREATES: u64 = 1000;

/// Values of Table 5 for [`STREAM`].
struct Stream {
    reuse: Published,
    /// Share of maps that a cache without eviction answers.
    answered: f64,
}

fn row(what: String, unit: &'static str, value: f64) -> FindingRow {
    FindingRow::counted(what, unit, value)
}

/// Recomputes the table's reuse from its own counts. These rows are no result and not judged.
fn table_5(found: &mut Findings) -> Result<Stream, LabError> {
    let sheet = Sheet::named("pviommu_table5")?;
    let mut stream = None;
    for test in TESTS {
        let cell = |column| sheet.printed(&[("test", test)], column);
        let (creates, pages) = (cell("map_create_ops")?.value, cell("pages_4KB")?.value);
        let what = format!("Table 5, {test}: mappings per page, from its own counts");
        let reuse = row(what, "", (creates / pages).round());
        found.push(reuse.with_published(cell("reuse_per_page")?).fitted());
        if test == STREAM {
            stream = Some(Stream {
                reuse: cell("reuse_per_page")?,
                // The driver requests each page once; the cache answers all other maps.
                answered: 1.0 - pages / creates,
            });
        }
    }
    stream.ok_or(LabError::Internal("no such test"))
}

fn recorded(rows: &[ReuseRow], stream: &Stream, found: &mut Findings) {
    let used: Vec<&ReuseRow> = rows.iter().filter(|row| row.creates >= CREATES).collect();
    let values = |of: &dyn Fn(&ReuseRow) -> f64| used.iter().map(|row| of(row)).collect::<Vec<_>>();
    let middle = median(&values(&ReuseRow::answered)).middle;
    let summary = row(
        "recorded devices: share of maps that the cache answers, median".into(),
        "",
        middle,
    );
    let printed = Published::new(
        format!("{:.4}", stream.answered),
        stream.answered,
        "pviommu_table5.csv, TCP_STREAM: 1 - pages / maps",
    );
    found.push(summary.near(printed));
    let reuse = values(&ReuseRow::reuse);
    let least = reuse.iter().copied().fold(f64::INFINITY, f64::min);
    let most = reuse.iter().copied().fold(0.0, f64::max);
    let middle = median(&reuse).middle;
    let reused = |what: &str, value| {
        row(
            format!("recorded devices: mappings per page, {what}"),
            "",
            value,
        )
    };
    found.push(reused("fewest", least));
    let middle = reused("median", middle).with_published(stream.reuse.clone());
    found.push(middle.require(Requirement::Near));
    found.push(reused("most", most));
    for one in &used {
        let each = |what: &str| format!("{}: {what}", one.source);
        found.push(row(each("seconds"), "s", one.seconds));
        found.push(row(each("maps"), "", one.creates as f64));
        found.push(row(each("pages"), "", one.pages as f64));
        found.push(row(each("mappings per page"), "", one.reuse()));
        found.push(row(
            each("share of maps that the cache answers"),
            "",
            one.answered(),
        ));
    }
    found.note(format!(
        "Recorded: {} devices of the named traces, of {} with any streaming mapping; the others \
        make fewer than {CREATES} mappings.",
        used.len(),
        rows.len()
    ));
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "The reuse of Table 5 from its own counts; and for each device of the traces named by \
        --trace, the mappings, the distinct 4 KiB pages under them, and the hits of a reverse \
        translation cache with T = 10 s and C = 3 on the clock of the trace.",
    );
    let stream = table_5(&mut found)?;
    if setting.reuse.is_empty() {
        found.note(
            "No trace was named (--trace FILE...), so nothing was measured. The table's counts \
            divided by each other are no result.",
        );
    } else {
        recorded(&setting.reuse, &stream, &mut found);
        found.explain(
            "Pages recur, but not as often as the paper's 872 times. The reuse of a device is its \
            number of mappings divided by the number of pages that are in flight or free for \
            reuse. A stream with a large window or large frames takes thousands of pages; one \
            request at a time, or a disk's buffers, take a few tens. The paper's card took 95 \
            pages for its stream; the paper does not explain this, and no recorded stream has so \
            few. The requirement of the cache holds all the same: only the first mapping of a page \
            needs a request, so a page mapped 30 times is almost as good as a page mapped 900 \
            times (3 % of the maps). Reuse grows with the observed time, while the number of pages \
            does not; the paper's tests last 10 s, and each recorded row states its seconds.",
        );
    }
    found.note(
        "The paper counts the driver's map calls. Here each consecutive segment of a scatterlist \
        counts, because it takes its own key.",
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::page_reuse_workload::stream;
    use super::super::reuse::ReuseCounter;
    use super::*;

    fn device(name: &str, creates: u64, hits: u64) -> ReuseRow {
        ReuseRow {
            source: name.into(),
            seconds: 1.0,
            creates,
            pages: 100,
            hits,
        }
    }

    /// Counts a stream with the maps and pages that the paper prints, and compares with the reuse
    /// that it prints. Only the first map of each page needs a request.
    #[test]
    fn streams_of_table_5_are_counted_as_printed() {
        let sheet = Sheet::named("pviommu_table5").unwrap();
        for test in TESTS {
            let cell = |column| sheet.printed(&[("test", test)], column).unwrap().value;
            let (creates, pages) = (cell("map_create_ops") as u64, cell("pages_4KB") as u64);
            let mut counter = ReuseCounter::default();
            counter.add(&stream(creates, pages, 5).unwrap());
            let rows = counter.rows("t", &[]);
            let [row] = rows.as_slice() else {
                panic!("{rows:?}");
            };
            assert_eq!((row.creates, row.pages), (creates, pages), "{test}");
            assert_eq!(row.reuse().round(), cell("reuse_per_page"), "{test}");
            assert_eq!(row.hits, creates - pages, "{test}");
            // The last unmap comes half a period before the end.
            assert!((row.seconds - cell("duration_s")).abs() < 1.0, "{row:?}");
        }
    }

    #[test]
    fn quotients_of_the_tables_own_counts_are_not_judged() {
        let mut found = Findings::default();
        table_5(&mut found).unwrap();
        assert_eq!(found.rows.len(), 4);
        for row in &found.rows {
            assert!(row.fitted && row.holds.is_none(), "{row:?}");
        }
        let cells = found.rows.iter();
        let cells = cells.map(|row| (row.measured.unwrap().median, row.published.as_ref()));
        let cells = cells.map(|(here, printed)| (here, printed.unwrap().value));
        let wanted = [872.0, 744.0, 1.0, 5761.0].map(|reuse| (reuse, reuse));
        assert_eq!(cells.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn without_a_trace_it_has_not_run() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        assert_eq!((found.rows.len(), found.verdict), (4, Verdict::NotRun));
    }

    #[test]
    fn recorded_devices_are_judged_by_their_median() {
        let mut setting = Setting::smoke();
        setting.reuse = vec![device("a", 90_000, 89_900), device("b", 999, 0)];
        let found = EXPERIMENT.run(&setting).unwrap();
        assert_eq!(found.rows.len(), 4 + 4 + 5);
        assert_eq!(found.verdict, Verdict::Reproduced, "{:#?}", found.rows);
        // Three devices that differ in both measures: reuse of 100, 900 and 5000.
        setting.reuse = vec![
            device("d", 10_000, 5_000),
            device("e", 500_000, 500_000),
            device("f", 90_000, 89_910),
        ];
        let found = EXPERIMENT.run(&setting).unwrap();
        let of = |what: String| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.unwrap_or_else(|| panic!("{what}"))
                .measured
                .unwrap()
                .median
        };
        let reuse = ["fewest", "median", "most"]
            .map(|which| of(format!("recorded devices: mappings per page, {which}")));
        assert_eq!(reuse, [100.0, 900.0, 5000.0]);
        let answered = of("recorded devices: share of maps that the cache answers, median".into());
        assert_eq!(answered, 0.999);
        for (name, maps, answered) in [
            ("d", 10_000.0, 0.5),
            ("e", 500_000.0, 1.0),
            ("f", 90_000.0, 0.999),
        ] {
            let each = [
                "seconds",
                "maps",
                "pages",
                "mappings per page",
                "share of maps that the cache answers",
            ]
            .map(|what| of(format!("{name}: {what}")));
            assert_eq!(each, [1.0, maps, 100.0, maps / 100.0, answered]);
        }
        // Pages that the driver maps less often, and pages that it maps too late for the cache.
        for (creates, hits) in [(10_000, 9_900), (90_000, 0)] {
            setting.reuse = vec![device("c", creates, hits)];
            let found = EXPERIMENT.run(&setting).unwrap();
            assert_eq!(found.verdict, Verdict::NumbersOff, "{:#?}", found.rows);
        }
    }
}
