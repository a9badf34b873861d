//! The matrix of all named modes and classes.

use std::fmt::Write as _;
use std::sync::OnceLock;

use ringfence_attack::expect::{self, DEPARTURES, Kind, Letter, Outcome};
use ringfence_attack::untried::{UNTRIED, Untried};
use ringfence_attack::{CLASSES, Cell, Class, Matrix, Options, Status, run};
use ringfence_lab::modes::{Mode, Safety};

/// The attack matrix: none, strict, deferred, shared, persistent, ring, cached, copy, own-pool.
#[rustfmt::skip]
const EXPECTED: [(&str, &str); 38] = [
    ("A01", "V R R R B R R R R"),
    ("A02", "V R V B V B V R V"),
    ("A03", "V R R B V R V R V"),
    ("A04", "NA R R* R* NA B R R R"),
    ("A05", "V R V B V B V R V"),
    ("A06", "V R R B V R V* R R"),
    ("A07", "V V V V V R V R R"),
    ("A08", "V V V V V R V R R"),
    ("A09", "V V V V V R V R R"),
    ("A10", "V V V B V V B R R"),
    ("A11", "V R R R B R R R R"),
    ("A12", "V X X X X X X X X"),
    ("A13", "V X X X X X X X X"),
    ("A14", "V X X X X X X X X"),
    ("A15", "V X X X X X X X X"),
    ("A16", "V X X X X X X X X"),
    ("A17", "V R* V V V B V R R"),
    ("A18", "V X X X X X X X X"),
    ("A19", "V B B B V R* B R R"),
    ("A20", "NA R* B R* NA NA R* NA NA"),
    ("A21", "NA R* R* R* NA R* R* R* V"),
    ("A22", "NA R* R* R* NA R* R* R* R*"),
    ("A23", "V R* V B V B V R V"),
    ("A24", "NA V V V B B V V V"),
    ("A25", "NA R* R* R* NA V* R* R* R*"),
    ("A26", "NA NA NA NA NA V* NA NA NA"),
    ("A27", "NA NA NA NA NA B NA NA NA"),
    ("A28", "NA NA NA NA NA NA V* NA NA"),
    ("A29", "NA NA NA NA NA NA V* NA NA"),
    ("A30", "NA NA NA NA NA NA R* NA NA"),
    ("A31", "V R R R V NA R R R"),
    ("A32", "NA R* R* R* V R* R* R* R*"),
    ("A33", "NA NA NA NA NA NA V* NA NA"),
    ("A34", "NA V V V V R V R* R*"),
    ("A35", "V R* V V V B V R R"),
    ("A36", "V R* R* R* V R* R* R* R*"),
    ("A37", "V R V B V R* V R V"),
    ("A38", "NA X X X X X X X X"),
];

fn text(letter: Letter) -> &'static str {
    match letter {
        Letter::Resists => "R",
        Letter::ResistsIfOrdered => "R*",
        Letter::Bounded => "B",
        Letter::Vulnerable => "V",
        Letter::VulnerableAsPublished => "V*",
        Letter::Orthogonal => "X",
        Letter::NotApplicable => "NA",
    }
}

/// All named modes and all classes. The scan reads fewer pages than the command's.
fn matrix() -> &'static Matrix {
    static MATRIX: OnceLock<Matrix> = OnceLock::new();
    MATRIX.get_or_init(|| {
        let classes: Vec<&Class> = CLASSES.iter().collect();
        let options = Options { scan_pages: 4096 };
        run(&Mode::named(), &classes, &options, |_| Ok(())).unwrap()
    })
}

fn cell(class: &str, mode: &str) -> &'static Cell {
    let mut cells = matrix().row(class);
    cells.find(|cell| cell.mode == mode).unwrap()
}

#[test]
fn the_library_has_the_expectations_of_the_attack_matrix() {
    for (class, row) in EXPECTED {
        for (kind, expected) in Kind::ALL.into_iter().zip(row.split(' ')) {
            let found = expect::letter(class, kind).map(text);
            assert_eq!(found, Some(expected), "{class} {kind:?}");
        }
    }
    let ids: Vec<_> = CLASSES.iter().map(|class| class.id).collect();
    let expected: Vec<_> = EXPECTED.iter().map(|(class, _)| *class).collect();
    assert_eq!(ids, expected);
}

/// A departure that no mode needs, or that repeats the matrix, is out of date.
#[test]
fn every_departure_changes_the_outcome_of_a_mode() {
    for departure in DEPARTURES {
        let modes: Vec<_> = Mode::named()
            .into_iter()
            .filter(departure.applies)
            .collect();
        for mode in &modes {
            let letter = expect::letter(departure.class, Kind::of(mode)).unwrap();
            let same = match departure.outcome {
                Outcome::Stopped => matches!(letter, Letter::Resists | Letter::ResistsIfOrdered),
                Outcome::Succeeded => letter == Letter::Vulnerable,
                Outcome::NotApplicable => letter == Letter::NotApplicable,
            };
            assert!(!same, "{} {}", departure.class, mode.name);
        }
        let is_shared = Mode::named()
            .iter()
            .any(|mode| Kind::of(mode) == Kind::Shared);
        let for_shared = departure.reason.contains("only user");
        let for_composed = departure.reason.contains("only composed modes");
        assert!(
            !modes.is_empty() || for_composed || (for_shared && !is_shared),
            "{}",
            departure.class
        );
    }
}

#[test]
fn every_cell_has_the_expected_outcome() {
    let unexpected: Vec<_> = matrix().unexpected().collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    assert_eq!(matrix().broken_promises().count(), 0);
}

/// A variant without an attempt is no evidence. The list of those that may make none is exact.
#[test]
fn every_variant_that_decides_is_tried() {
    let is_untried = |class: &str, trial: &str| {
        let mut trials = matrix().row(class).flat_map(|cell| &cell.executed.trials);
        trials.any(|found| found.name == trial && found.decides && found.evidence.attempts == 0)
    };
    for cell in &matrix().cells {
        for trial in &cell.executed.trials {
            let listed =
                |untried: &Untried| (untried.class, untried.trial) == (cell.class, trial.name);
            let tried = !trial.decides || trial.evidence.attempts > 0;
            assert!(tried || UNTRIED.iter().any(listed), "{cell:#?}");
        }
    }
    for untried in UNTRIED {
        assert!(is_untried(untried.class, untried.trial), "{untried:?}");
    }
}

/// A class that no mode lets through is no evidence.
#[test]
fn every_executed_class_succeeds_somewhere() {
    for class in CLASSES {
        let succeeded = matrix()
            .row(class.id)
            .any(|cell| cell.status == Status::Succeeded);
        // No allocator, table or host of a named mode lets these classes through. Mutations do.
        let only_by_mutation = ["A20", "A22", "A30", "A32", "A33"].contains(&class.id);
        assert_eq!(succeeded, !only_by_mutation, "{}", class.id);
    }
}

/// The first columns are strict modes, whose only successes are classes that the definition of
/// their safety excludes.
#[test]
fn strict_modes_are_open_only_where_strict_promises_nothing() {
    // Sub-page (A07 to A09, A19, A34), a mapped page (A10, A18), shared caches, logs and queues
    // (A24, A38), and attacks beside the table (A12 to A16).
    const OUTSIDE: [&str; 14] = [
        "A07", "A08", "A09", "A10", "A12", "A13", "A14", "A15", "A16", "A18", "A19", "A24", "A34",
        "A38",
    ];
    for mode in Mode::named() {
        if mode.safety() < Safety::Strict {
            continue;
        }
        for cell in matrix().cells.iter().filter(|cell| cell.mode == mode.name) {
            // The page of a live buffer is within the promise, and so is another device behind the
            // same host bridge.
            let excluded = match cell.class {
                "A02" | "A03" | "A05" | "A17" | "A23" | "A35" => "another user holds the page",
                "A11" => "same host bridge",
                // The table is in another machine, or another core checks the address later.
                "A25" => "second unmap, mapping claimed twice",
                "A36" => "not attached",
                _ => "",
            };
            let mut trials = cell.executed.trials.iter();
            let open = cell.status == Status::Succeeded
                && trials.any(|trial| {
                    trial.decides && trial.evidence.successes > 0 && !excluded.contains(trial.name)
                });
            assert!(!open || OUTSIDE.contains(&cell.class), "{cell:?}");
        }
    }
}

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

/// The last success of the racer at the scheduled times, and of the busy driver in unmaps.
#[test]
fn windows_have_their_lengths() {
    let cases = [
        ("none", Some(50 * S), Some(1023)),
        ("linux-strict", None, None),
        ("fence-burst", None, None),
        ("riommu", None, None),
        // 10 ms, or the 250th entry, the buffer's own included.
        ("defer", Some(9 * MS), Some(248)),
        // 10 ms or 256 entries.
        ("linux-lazy", Some(9 * MS), Some(255)),
        // The next map sends the unmap to the host.
        ("virtio-lazy", Some(9 * MS), Some(0)),
        // The release is half a second after the start of a cycle of 10 s; C = 3.
        ("pviommu+rtc", Some(39 * S), Some(5135)),
    ];
    for (mode, window, unmaps) in cases {
        let cell = cell("A02", mode);
        let racer = cell.executed.named("racer").unwrap();
        assert_eq!(racer.last_success_ns, window, "{mode}");
        let busy = cell.executed.named("busy driver").unwrap();
        assert_eq!(busy.last_success_unmaps, unmaps, "{mode}");
        let passive = cell.executed.named("passive").unwrap();
        assert!(passive.attempts > 0 && passive.successes == 0, "{mode}");
    }
    // The bitmap flushes when its 2^20 addresses have been handed out once.
    let bitmap = cell("A02", "bitmap").executed.named("busy driver").unwrap();
    let unmaps = bitmap.last_success_unmaps.unwrap();
    let pages = 1024 + (unmaps - 1024) * 256;
    assert!(((1 << 20) - 512..=1 << 20).contains(&pages), "{pages}");
}

/// The successes and attempts of one variant. `cells.rs` has those of the other classes.
#[test]
fn variants_have_their_counts() {
    let cases = [
        // The passive attacker alone hides the burst as published.
        ("A27", "riommu-paper", "passive", 0, 200),
        ("A27", "riommu-paper", "racer", 199, 200),
        ("A27", "riommu", "racer", 0, 200),
        // A driver that checks a mapped buffer is open in every mode.
        ("A17", "fence", "racer", 0, 100),
        ("A17", "fence", "checked before the unmap", 100, 100),
        ("A17", "linux-lazy", "racer", 100, 100),
        ("A18", "fence", "driver reads the ring back", 100, 100),
        ("A18", "fence", "network driver, forged descriptor", 0, 8),
        ("A18", "fence", "network driver, forged completion", 0, 6),
        ("A18", "riommu", "network driver, forged descriptor", 0, 8),
        ("A34", "fence", "bounce pool", 0, 248),
        ("A34", "linux-lazy", "bounce pool", 0, 248),
        // A strict mode ends the reach with both mappings; a deferred one does so later.
        ("A10", "fence", "freed after one unmap", 22, 44),
        ("A10", "fence", "freed after both unmaps", 0, 44),
        ("A10", "linux-lazy", "freed after both unmaps", 16, 44),
        ("A19", "fence", "across the page", 0, 10),
        ("A19", "riommu-paper", "across the page", 8, 10),
        // A driver of a pool of buffers is safe for what it has copied.
        ("A17", "pool", "racer", 0, 100),
        (
            "A17",
            "pool",
            "checked in the pool, without a copy",
            100,
            100,
        ),
        ("A17", "copy", "racer", 0, 100),
    ];
    for (class, mode, variant, successes, attempts) in cases {
        let cell = cell(class, mode);
        let found = cell.executed.named(variant);
        let found = found.unwrap_or_else(|| panic!("{class} {mode} {variant}"));
        assert_eq!(
            (found.successes, found.attempts),
            (successes, attempts),
            "{class} {mode} {variant}"
        );
    }
}

/// The oracle counts the references of mappings to a page at the moment it is freed.
#[test]
fn a_freed_page_with_a_mapping_is_noticed_in_every_mode() {
    for cell in matrix().row("A10") {
        // A mode with a pool maps no other page of a driver.
        let copies = Mode::find(&cell.mode).unwrap().has_pool();
        let at_the_free = format!("mapping references at the free: {}", u64::from(!copies));
        assert_eq!(
            cell.executed.notes,
            [at_the_free.as_str(), "after both unmaps: 0"],
            "{}",
            cell.mode
        );
    }
}

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/matrix.txt");

/// The matrix of the default modes and of `copy` equals `matrix.txt`. After an intended change,
/// rewrite it and review the difference:
/// `RINGFENCE_BLESS=1 cargo test -p ringfence-attack --test matrix golden`
#[test]
fn golden_matrix_of_the_default_modes() {
    let mut out = String::from("class successes/attempts bytes\n");
    for mode in Mode::default_selection()
        .into_iter()
        .chain(Mode::find("copy"))
    {
        for cell in matrix().cells.iter().filter(|cell| cell.mode == mode.name) {
            let status = format!("{:?}", cell.status);
            let total = &cell.total;
            let _ = writeln!(
                out,
                "{} {} {status} {}/{} {}",
                mode.name, cell.class, total.successes, total.attempts, total.bytes
            );
        }
    }
    if std::env::var_os("RINGFENCE_BLESS").is_some() {
        std::fs::write(GOLDEN, &out).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap_or_default();
    for (found, expected) in out.lines().zip(golden.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(out.lines().count(), golden.lines().count());
}
