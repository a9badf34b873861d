//! X19: flush frequency and memory of the batched and the bitmap policy (Fujita and Moriai section
//! 3.3).

use std::cell::RefCell;

use ringfence_iova::{AllocRequest, Bitmap, CachedTree, IovaAllocator, RangeStore};
use ringfence_types::Pfn;

use super::allocators::{TOP, pages};
use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Published};
use super::published::Sheet;
use super::timed::{TimedReplays, TimedSubject};
use super::x18_fujita::requests;
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
    let (mut done, mut invalidations) = (0, 0);
    while done < requested {
        let count = (requested - done).min(1 << 16);
        invalidations += timed.run(&requests(count, done)?)?.invalidations;
        done += count;
    }
    Ok(requested as f64 / invalidations.max(1) as f64)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(format!(
        "{} times 2^20 requests of one page, one at a time. Invalidations are counted; their \
        period follows from the paper's 124,337 requests per second. Memory is that of the \
        allocators with every page of 4 GB allocated.",
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

    let bitmap = Bitmap::new(pages(1, TOP)?, RefCell::new)?;
    let mut tree = CachedTree::new(pages(1, TOP)?);
    let one = AllocRequest::new(1, Pfn::new(TOP));
    for _ in 1..=TOP {
        tree.alloc(&one)?;
    }
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let row = counted(
        "default: ranges of a tree with 2^20 pages",
        "MiB",
        mib(tree.footprint()),
    );
    let printed = fact("memory needed by default to match bitmap: iova structs")?;
    found.push(row.near(printed).ordered_within("memory"));
    let row = counted(
        "default: array of 2^20 addresses",
        "MiB",
        mib((1 << 20) * size_of::<u64>()),
    );
    // The size of the words times their number: nothing is measured.
    found.push(row.near(fact("memory needed: array")?).fitted());
    let row = counted("bitmap: its words", "MiB", mib(bitmap.footprint()));
    let printed = fact("bitmap size for 4 GB / 4 KB")?;
    let printed = Published {
        value: printed.value / 1024.0,
        rounding: printed.rounding / 1024.0,
        text: format!("{} KB", printed.text),
        ..printed
    };
    found.push(row.near(printed).ordered_within("memory"));
    found.explain(
        "The fixed bitmap keeps two more bitmaps: the pages freed since the flush, and during it. \
        The paper's single bitmap returns addresses that were freed ahead of its pointer before \
        any flush (decision 0003).",
    );
    found.explain(
        "A range in Linux 2.6.26 took 40 bytes on a list and in a tree; a node here has indices \
        instead of pointers.",
    );
    Ok(found)
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
        for what in [
            "default: time between flushes",
            "bitmap: time between flushes",
            "default: array of 2^20 addresses",
        ] {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            assert!(row.fitted && row.holds.is_none(), "{row:?}");
        }
        // Three bitmaps are more than the paper's one, but far less than a tree.
        assert_eq!(found.verdict, Verdict::OrderingOnly);
    }
}
