//! The Linux 3.4 allocator against Table 1 of the EIOVAR paper, and against a transcription in
//! another language.

#[path = "support/common.rs"]
mod common;

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Random, flushed, pages};
use ringfence_iova::{
    AllocError, AllocRequest, CachedTree, InitialRangesError, IovaAllocator, Locked, RangeStore,
};
use ringfence_types::Pfn;

const TABLE_1: &str = include_str!("data/eiovar_table1_sequence.csv");

/// "Assume that all addresses are initially allocated": single pages around those in the table.
fn all_allocated(cache: u64) -> CachedTree {
    CachedTree::with_allocated(
        pages(0, 999),
        (0..1000).map(|page| pages(page, page)),
        Some(Pfn::new(cache)),
    )
    .unwrap()
}

fn cache_of(tree: &CachedTree) -> String {
    tree.cached_page()
        .map_or(String::new(), |page| page.get().to_string())
}

/// Replays one column of the table and returns the steps of each allocation. `first` is the index
/// of the column's "return value" cell.
fn replay_column(first: usize) -> Vec<u32> {
    let rows: Vec<Vec<&str>> = TABLE_1
        .lines()
        .skip(1)
        .map(|line| line.split(',').collect())
        .collect();
    let initial: u64 = rows[0][first + 2].parse().unwrap();
    let mut tree = all_allocated(initial);
    let mut steps = Vec::new();
    for row in &rows[1..] {
        let (operation, result, before, after) =
            (row[1], row[first], row[first + 1], row[first + 2]);
        if before.is_empty() {
            continue; // happens only in the other column
        }
        assert_eq!(cache_of(&tree), before, "C before {operation}");
        if operation.contains("alloc") {
            let found = tree.alloc(&AllocRequest::new(1, Pfn::new(999))).unwrap();
            assert_eq!(found.range.lo().get().to_string(), result, "{operation}");
            steps.push(found.steps);
        } else {
            let page: u64 = operation
                .chars()
                .filter(char::is_ascii_digit)
                .collect::<String>()
                .parse()
                .unwrap();
            assert!(tree.free(flushed(pages(page, page)).into()), "{operation}");
        }
        assert_eq!(cache_of(&tree), after, "C after {operation}");
    }
    steps
}

#[test]
fn equals_eiovar_table_1_without_tx() {
    assert_eq!(replay_column(2), [0, 0]);
}

#[test]
fn equals_eiovar_table_1_with_its_search_of_148_steps() {
    assert_eq!(replay_column(5), [0, 148]);
}

#[test]
fn a_seed_that_is_no_state_is_refused() {
    let space = pages(10, 20);
    let cases = [
        (
            vec![pages(9, 10)],
            None,
            InitialRangesError::Outside(pages(9, 10)),
        ),
        (
            vec![pages(10, 12), pages(12, 13)],
            None,
            InitialRangesError::Overlaps(pages(12, 13)),
        ),
        (
            vec![pages(12, 13), pages(10, 15)],
            None,
            InitialRangesError::Overlaps(pages(10, 15)),
        ),
        (
            vec![pages(12, 13)],
            Some(Pfn::new(13)),
            InitialRangesError::NoSuchRange(Pfn::new(13)),
        ),
    ];
    for (ranges, cache, error) in cases {
        assert_eq!(
            CachedTree::with_allocated(space, ranges, cache).unwrap_err(),
            error
        );
    }
}

/// Allocation and free never cache a node above the 32-bit space.
#[test]
fn a_cached_node_above_the_32bit_space_is_refused() {
    const LAST: u64 = (1 << 20) - 1;
    for (last, page, accepted) in [
        (1 << 21, LAST, true),
        (1 << 21, LAST + 1, false),
        (99, 99, true),
    ] {
        let page = Pfn::new(page);
        let range = pages(page.get(), page.get());
        let created = CachedTree::with_allocated(pages(1, last), [range], Some(page));
        let expected = Err(InitialRangesError::CachedNodeTooHigh(page));
        let expected = if accepted { Ok(Some(page)) } else { expected };
        assert_eq!(created.map(|tree| tree.cached_page()), expected, "{page}");
    }
}

/// `pfn_lo < dma_32bit_pfn` in Linux 3.4: the successor of a freed range becomes the cached node
/// unless it begins at the last page of the 32-bit space or above.
#[test]
fn only_a_successor_below_the_last_32bit_page_is_cached() {
    for (successor, cached) in [
        (0xf_fffe, Some(Pfn::new(0xf_fffe))),
        (0xf_ffff, None),
        (0x10_0000, None),
    ] {
        let (freed, next) = (pages(5, 5), pages(successor, successor));
        let space = pages(1, 0x1f_ffff);
        let mut tree = CachedTree::with_allocated(space, [freed, next], Some(freed.lo())).unwrap();
        assert!(tree.free(flushed(freed).into()));
        assert_eq!(tree.cached_page(), cached, "{successor:#x}");
    }
}

/// One ring that frees and allocates in pairs never searches. After a single interleaving
/// with another ring, every lap searches.
#[test]
fn long_lasting_ring_interference() {
    let limit = Pfn::new(0xf_ffff);
    let one = AllocRequest::new(1, limit);
    let allocator = Locked::new(CachedTree::new(pages(1, 0xf_ffff)), RefCell::new);
    let take = || allocator.alloc(&mut (), &one).unwrap();
    let tx: Vec<_> = (0..64).map(|_| take().range).collect();
    let mut rx: Vec<_> = (0..512).map(|_| take().range).collect();
    let lap = |rx: &mut Vec<_>, interfere: bool| {
        let mut longest = 0;
        for (slot, buffer) in rx.iter_mut().enumerate() {
            assert!(allocator.free(&mut (), flushed(*buffer)));
            if interfere && slot == 300 {
                assert!(allocator.free(&mut (), flushed(tx[7])));
            }
            let found = allocator.alloc(&mut (), &one).unwrap();
            longest = longest.max(found.steps);
            *buffer = found.range;
        }
        longest
    };
    for _ in 0..3 {
        assert_eq!(lap(&mut rx, false), 0);
    }
    lap(&mut rx, true);
    for _ in 0..3 {
        assert!(lap(&mut rx, false) > 200);
    }
}

const SEQUENCES: u64 = 10_000;

/// Appends one random sequence in the transcription's format, and the allocator's results.
fn run_sequence(seed: u64, script: &mut String, answers: &mut String) {
    let mut random = Random::new(seed);
    // Small spaces fill up; wide ones exceed the 32-bit boundary.
    let space = match random.below(4) {
        0 => pages(1, 40),
        1 => pages(0, 200),
        2 => pages(1, 0xf_ffff),
        _ => pages(0xf_ff00, 0x10_0100),
    };
    let (lo, hi) = (space.lo().get(), space.hi().get());
    writeln!(script, "space {lo} {hi}").unwrap();
    let mut live = Vec::new();
    let mut tree = CachedTree::new(space);
    if random.below(4) == 0 {
        // Start full of single pages, as in Table 1.
        let count = (hi - lo + 1).min(60);
        let first = hi - count + 1;
        live = (first..=hi).map(|page| pages(page, page)).collect();
        let cache = first + random.below(count);
        let cache = (cache <= 0xf_ffff).then_some(cache);
        let name = cache.map_or("-".into(), |page| page.to_string());
        write!(script, "seed {name}").unwrap();
        for range in &live {
            write!(script, " {} {}", range.lo().get(), range.hi().get()).unwrap();
        }
        script.push('\n');
        tree =
            CachedTree::with_allocated(space, live.iter().copied(), cache.map(Pfn::new)).unwrap();
    }
    let mixed = random.below(2) == 0;
    let free_bias = 3 + random.below(4);
    for _ in 0..40 + random.below(60) {
        if !live.is_empty() && random.below(10) < free_bias {
            let range = if random.below(20) == 0 {
                // Not as allocated: rejected.
                let page = lo + random.below(hi - lo);
                pages(page, page + 1)
            } else {
                live[random.below(live.len() as u64) as usize]
            };
            writeln!(script, "f {} {}", range.lo().get(), range.hi().get()).unwrap();
            let accepted = tree.free(flushed(range).into());
            assert_eq!(accepted, live.contains(&range));
            live.retain(|other| *other != range);
            answers.push(if accepted { 'f' } else { 'r' });
        } else {
            let (count, order) = if mixed {
                (1 + random.below(9), random.below(4))
            } else {
                (1, 0)
            };
            let limit = match random.below(6) {
                0 => lo + random.below(hi - lo + 1),
                1 => 0xff_ffff,
                _ => 0xf_ffff,
            };
            writeln!(script, "a {count} {order} {limit}").unwrap();
            let request = AllocRequest {
                align_order: order as u8,
                ..AllocRequest::new(count, Pfn::new(limit))
            };
            match tree.alloc(&request) {
                Ok(found) => {
                    assert_eq!(found.range.pages(), count);
                    live.push(found.range);
                    write!(answers, "{} {}", found.range.lo().get(), found.steps).unwrap();
                }
                Err(error) => {
                    assert!(matches!(error, AllocError::Exhausted { .. }));
                    answers.push('x');
                }
            }
        }
        match tree.cached_page() {
            Some(page) => writeln!(answers, " {}", page.get()).unwrap(),
            None => answers.push_str(" -\n"),
        }
    }
}

#[test]
fn agrees_with_the_naive_transcription() {
    let (mut script, mut answers) = (String::new(), String::new());
    for seed in 0..SEQUENCES {
        run_sequence(seed, &mut script, &mut answers);
    }
    let transcription =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/naive/cached_rbtree.py");
    let mut python = Command::new("python3")
        .arg(&transcription)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("this test needs python3 on the PATH: {error}"));
    let mut stdin = python.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(script.as_bytes()));
    let output = python.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(
        output.status.success(),
        "the transcription failed: {}",
        output.status
    );
    let wanted = String::from_utf8(output.stdout).unwrap();
    let (mut found, mut longest) = (0_usize, 0_u32);
    for (number, (actual, expected)) in answers.lines().zip(wanted.lines()).enumerate() {
        assert_eq!(actual, expected, "operation {number} (actual, expected)");
        let words: Vec<_> = actual.split(' ').collect();
        if words.len() == 3 {
            found += 1;
            longest = longest.max(words[1].parse().unwrap());
        }
    }
    assert_eq!(answers.lines().count(), wanted.lines().count());
    // The comparison is meaningless if the sequences never allocate or never search.
    assert!(
        found > 300_000 && longest > 30,
        "{found} allocations, longest search {longest}"
    );
}
