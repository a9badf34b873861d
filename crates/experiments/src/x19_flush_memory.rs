//! X19: flush frequency and memory of the batched and the bitmap policy (Fujita and Moriai section
//! 3.3).

use std::cell::RefCell;

use ringfence_iova::{AllocRequest, Bitmap, CachedTree, IovaAllocator, RangeStore};
use ringfence_papers::{BitmapAsPublished, DeferredUnmaps};
use ringfence_types::{Nanos, Pfn};

use super::allocators::{TOP, pages};
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Published};
use super::published::Sheet;
use super::setting::Setting;
use super::timed::{TimedReplays, TimedSubject};
use super::x18_fujita::Requests;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X19",
    title: "Flush frequency of a policy, and memory for addresses that wait",
    source: "Fujita and Moriai section 3.3",
    measure,
};

/// Requests after the last wrap, to trigger its flush.
const MORE: u64 = 16;

fn flushes(setting: &Setting, mode: &str) -> Result<f64, LabError> {
    let mut timed = TimedReplays::new(TimedSubject::from_name(mode)?, &setting.profile, 1)?;
    let requested = (setting.wraps << 20) + MORE;
    let mut driver = Requests::new()?;
    let (mut done, mut invalidations) = (0, 0);
    while done < requested {
        let count = (requested - done).min(1 << 16);
        invalidations += timed.run(&driver.take(count)?)?.invalidations;
        done += count;
    }
    Ok(requested as f64 / invalidations.max(1) as f64)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(format!(
        "{} times 2^20 requests of one page, one at a time. Invalidations are counted; their \
        period follows from the paper's 124,337 requests per second. Memory is that of \
        all addresses of 4 GB, in the layouts of the paper and in those of the allocators here.",
        setting.wraps,
    ));
    let facts = Sheet::named("fujita_facts")?;
    let fact = |name: &str| facts.printed(&[("fact", name)], "value");
    let iops = fact("IOPS of default (1024-B I/O, 1 outstanding)")?.value;
    let batch = flushes(setting, "defer")?;
    let wrap = flushes(setting, "bitmap")?;
    let counted = |what: &str, unit, value| FindingRow::counted(what, unit, value);
    let row = counted("default: unmaps per flush", "", batch.round());
    found.push(row.near(fact("flush array size (default)")?));
    let row = counted("default: time between flushes", "ms", 1e3 * batch / iops);
    // A count over the printed requests a second: it follows from the row above.
    found.push(row.near(fact("250-array fills every")?).fitted());
    let row = counted("bitmap: maps per wrap", "", wrap);
    found.push(row.near(fact("maps per wrap")?.read_as(1_048_576.0)));
    let row = counted("bitmap: time between flushes", "s", wrap / iops);
    found.push(row.near(fact("bitmap flush period")?).fitted());

    memory(&facts, &mut found)?;
    found.explain(
        "Judged are the counts of flushes. The memory of the layouts that the paper describes, \
        Linux's struct iova (Fig. 3) and one bit per page, follows from the paper, so these rows \
        are marked and not judged. They hold every page of 4 GB while it waits for a flush. The \
        allocators of this library are next to them.",
    );
    found.explain(
        "The fixed bitmap keeps two more bitmaps: the pages freed since the flush, and during it. \
        The paper's single bitmap returns addresses that were freed ahead of its pointer before \
        any flush (decision 0003).",
    );
    found.explain(
        "A node of the tree here is smaller than the paper's, because it has indices instead of \
        pointers.",
    );
    Ok(found)
}

/// Measures the memory of the paper's layouts and of this library's with 2^20 addresses.
fn memory(facts: &Sheet, found: &mut Findings) -> Result<(), LabError> {
    let fact = |name: &str| facts.printed(&[("fact", name)], "value");
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let row = |what: &str, bytes| FindingRow::counted(what, "MiB", mib(bytes));
    // The sizes of Fig. 3's records and of one bit a page follow from the paper: nothing is judged.
    // One slot more than addresses: none of them triggers a flush.
    let no_memory = |_| LabError::Internal("out of memory");
    let mut waiting = DeferredUnmaps::new((1 << 20) + 1).map_err(no_memory)?;
    for number in 0..1 << 20 {
        waiting
            .add(pages(number, number)?, Nanos(0))
            .map_err(no_memory)?;
    }
    let as_published = waiting.memory();
    let structs = fact("memory needed by default to match bitmap: iova structs")?;
    found.push(
        row(
            "default as published: struct iova of 2^20 addresses",
            as_published.records,
        )
        .near(structs.clone())
        .fitted(),
    );
    found.push(
        row(
            "default as published: array of 2^20 pointers",
            as_published.array,
        )
        .near(fact("memory needed: array")?)
        .fitted(),
    );
    let mut tree = CachedTree::new(pages(1, TOP)?);
    let one = AllocRequest::new(1, Pfn::new(TOP));
    for _ in 1..=TOP {
        tree.alloc(&one)?;
    }
    let ours = row(
        "default here: ranges of a tree with 2^20 pages",
        tree.footprint(),
    );
    found.push(ours.with_published(structs));

    let printed = fact("bitmap size for 4 GB / 4 KB")?;
    let printed = Published {
        value: printed.value / 1024.0,
        rounding: printed.rounding / 1024.0,
        text: format!("{} KB", printed.text),
        ..printed
    };
    let literal = BitmapAsPublished::new(pages(1, TOP)?, RefCell::new)?;
    found.push(
        row("bitmap as published: its words", literal.footprint())
            .near(printed.clone())
            .fitted(),
    );
    let fixed = Bitmap::new(pages(1, TOP)?, RefCell::new)?;
    found.push(row("bitmap here: its words", fixed.footprint()).with_published(printed));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;

    #[test]
    fn a_batch_is_250_and_a_wrap_is_the_whole_space() {
        let found = EXPERIMENT.run(&Setting::smoke()).unwrap();
        let holds = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            assert_eq!(row.holds, Some(true), "{row:?}");
        };
        holds("default: unmaps per flush");
        holds("bitmap: maps per wrap");
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            row.measured.unwrap().median
        };
        assert_eq!(of("default: unmaps per flush"), 250.0);
        // 250 and 2^20 requests at 124,337 a second: 2 ms, and 8 s.
        let times = ["default", "bitmap"].map(|of_| of(&format!("{of_}: time between flushes")));
        assert!((2.0..2.02).contains(&times[0]), "{times:?}");
        assert!((8.4..8.5).contains(&times[1]), "{times:?}");
        for what in [
            "default: time between flushes",
            "bitmap: time between flushes",
            "default as published: array of 2^20 pointers",
            "default as published: struct iova of 2^20 addresses",
            "bitmap as published: its words",
        ] {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            assert!(row.fitted && row.holds.is_none(), "{row:?}");
        }
        // Each row is beside its own cell: 2^20 addresses have 40 MB of records and 8 MB of
        // pointers, and a bit each in 128 KB.
        let rows = found.rows.iter();
        let printed = rows.map(|row| {
            let printed = row.published.as_ref().unwrap();
            (row.quantity.as_str(), row.unit, printed.value)
        });
        let wanted = [
            ("default: unmaps per flush", "", 250.0),
            ("default: time between flushes", "ms", 2.0),
            ("bitmap: maps per wrap", "", 1_048_576.0),
            ("bitmap: time between flushes", "s", 8.0),
            (
                "default as published: struct iova of 2^20 addresses",
                "MiB",
                40.0,
            ),
            ("default as published: array of 2^20 pointers", "MiB", 8.0),
            (
                "default here: ranges of a tree with 2^20 pages",
                "MiB",
                40.0,
            ),
            ("bitmap as published: its words", "MiB", 0.125),
            ("bitmap here: its words", "MiB", 0.125),
        ];
        assert_eq!(printed.collect::<Vec<_>>(), wanted);
        // A node of the tree has 32 bytes.
        let tree = of("default here: ranges of a tree with 2^20 pages");
        assert_eq!(tree, 32.0);
        let mib = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            (row.measured.unwrap().median, row.holds)
        };
        let structs = mib("default as published: struct iova of 2^20 addresses");
        assert_eq!(structs, (40.0, None));
        let array = mib("default as published: array of 2^20 pointers").0;
        assert!((array - 8.0).abs() < 0.001, "{array}");
        assert_eq!(mib("bitmap as published: its words"), (0.125, None));
        // Three bitmaps are more than the paper's one, but far less than a tree.
        assert_eq!(mib("bitmap here: its words"), (0.375, None));
        assert_eq!(found.verdict, Verdict::Reproduced);
    }
}
