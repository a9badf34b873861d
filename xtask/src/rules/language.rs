//! The rules on text: doc comments have content and begin with their subject, lines are short, and
//! replaced names do not return.

use std::path::Path;

use crate::source::{Kind, Source};
use crate::violation::Violation;

/// Most characters of a line, code and comments.
const COLUMNS: usize = 100;

/// Columns between two positions of a tab.
const TAB: usize = 8;

/// Generated files, which tests compare with their source.
const GENERATED: &[&str] = &["crates/c/include/ringfence.h"];

/// First words of a sentence without a subject.
const OPENERS: &[&str] = &["What", "Whether", "Who", "Where", "Of", "How"];

/// Words of a doc comment that repeats a name.
const FEWEST_WORDS: usize = 3;

/// Identifiers of the private language that the field's words have replaced.
const BANNED: &[(&str, &str)] = &[
    ("Aged", "HistoryCost"),
    ("Booth", "GuestRunner"),
    ("Census", "NodeCounts"),
    ("Custody", "HeldBuffer"),
    ("Gone", "ClearedRange"),
    ("Inapplicable", "InconclusiveReason"),
    ("Judged", "CheckedReplay"),
    ("Lane", "BurstKey or QueueDir"),
    ("Leaving", "UnmapResult"),
    ("Occupants", "FrameRmap"),
    ("Owed", "NotInvalidated"),
    ("Reachability", "RangeMapping"),
    ("Said", "StreamRecord"),
    ("Seat", "DomainSlot"),
    ("Station", "NicTestbed"),
    ("Tally", "VerdictCounts"),
    ("Tenant", "DomainHandle"),
    ("bury_oldest", "discard_oldest"),
    ("call_off", "cancel_requests"),
    ("census", "node_counts or usage"),
    ("defeated", "stopped_device_rows"),
    ("has_seen_off", "is_stale"),
    ("lane", "ring or ring_index"),
    ("lanes", "rings or step_rings"),
    ("leaving", "unmapping"),
    ("owed", "not_invalidated or token"),
    ("purge", "invalidate"),
    ("purge_all", "invalidate_all"),
    ("purged", "invalidated"),
    ("senseless", "incompatible"),
    ("set_apart", "set_sandboxed"),
    ("take_down", "unmap_common"),
    ("vacancy", "free_slot"),
];

/// Names of files of the private language. Each had another name for its subject.
const BANNED_FILES: &[&str] = &[
    "apart",
    "behind",
    "booth",
    "breaches",
    "eye",
    "gates",
    "gone",
    "judged",
    "lagging",
    "leaving",
    "left_behind",
    "lies",
    "room",
    "said",
    "taken",
    "tenancy",
    "together",
    "world",
];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        check_lines(source, &mut found);
        check_names(source, &mut found);
        check_file(source, &mut found);
    }
    found
}

fn check_lines(source: &Source, found: &mut Vec<Violation>) {
    found.extend(long_lines(&source.path, &source.text));
    let mut error =
        |line: usize, message: String| found.push(Violation::error(&source.path, line, message));
    let lines: Vec<&str> = source.text.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let Some(text) = doc_text(line) else {
            continue;
        };
        if index > 0 && doc_text(lines[index - 1]).is_some() {
            continue;
        }
        let first = text.split_whitespace().next().unwrap_or("");
        if OPENERS.contains(&first) {
            error(
                index + 1,
                format!("a doc comment begins with `{first}`: begin with the subject"),
            );
        }
        let alone = lines
            .get(index + 1)
            .is_none_or(|next| doc_text(next).is_none());
        if alone && text.split_whitespace().count() < FEWEST_WORDS {
            error(index + 1, format!("`{text}` only repeats the name"));
        }
    }
}

/// Returns true for scripts and C sources, whose lines are short as well. A generator decides on
/// those of a generated file.
pub(super) fn is_script_or_c(path: &Path) -> bool {
    if GENERATED.iter().any(|file| path == Path::new(file)) {
        return false;
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("c" | "h" | "py" | "sh"))
}

/// Returns an error for each line that is too long.
pub(super) fn long_lines(path: &Path, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let columns = line.chars().fold(0, |column, char| match char {
            '\t' => column / TAB * TAB + TAB,
            _ => column + 1,
        });
        if columns > COLUMNS {
            let message = format!("{columns} columns, at most {COLUMNS} allowed");
            found.push(Violation::error(path, index + 1, message));
        }
    }
    found
}

/// The text of a line of a doc comment.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line
        .strip_prefix("///")
        .or_else(|| line.strip_prefix("//!"))?;
    // Four slashes are no doc comment.
    (!text.starts_with('/')).then(|| text.trim())
}

fn check_names(source: &Source, found: &mut Vec<Violation>) {
    for token in &source.tokens {
        let Kind::Ident(name) = &token.kind else {
            continue;
        };
        let Some((_, better)) = BANNED.iter().find(|(banned, _)| banned == name) else {
            continue;
        };
        let message = format!("`{name}` is not a word of the field: use `{better}`");
        found.push(Violation::error(&source.path, token.line, message));
    }
}

fn check_file(source: &Source, found: &mut Vec<Violation>) {
    let stem = source.path.file_stem().and_then(|stem| stem.to_str());
    if let Some(stem) = stem.filter(|stem| BANNED_FILES.contains(stem)) {
        let message = format!("`{stem}.rs` does not name its subject");
        found.push(Violation::error(&source.path, 0, message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::{shown, source};

    fn errors(text: &str) -> Vec<String> {
        shown(&check(&[source("crates/hw/src/a.rs", text)]))
    }

    #[test]
    fn doc_comments_begin_with_their_subject() {
        for opener in OPENERS {
            let text = format!("/// {opener} is mapped there.\nfn f() {{}}\n");
            assert_eq!(errors(&text).len(), 1, "{opener}");
            let text = format!("//! {opener} is mapped there.\n");
            assert_eq!(errors(&text).len(), 1, "{opener}");
        }
        // In later lines, and in plain comments, they are words.
        let text = "/// The page and\n/// What follows it.\n// What follows.\nfn f() {}\n";
        assert_eq!(errors(text), [""; 0]);
        assert_eq!(errors("/// Whatever is mapped.\nfn f() {}\n"), [""; 0]);
    }

    #[test]
    fn doc_comments_say_something() {
        assert_eq!(errors("/// The ring.\nfn ring() {}\n").len(), 1);
        assert_eq!(errors("/// The rIOMMU ring.\nfn ring() {}\n"), [""; 0]);
        let text = "/// Errors.\n///\n/// # Errors\n/// None.\nfn f() {}\n";
        assert_eq!(errors(text), [""; 0]);
        assert_eq!(errors("//// No doc\nfn f() {}\n"), [""; 0]);
    }

    #[test]
    fn lines_are_short() {
        let line = |columns: usize| format!("// {}\n", "ü".repeat(columns - 3));
        assert_eq!(errors(&line(COLUMNS)), [""; 0]);
        assert_eq!(errors(&line(COLUMNS + 1)).len(), 1);
    }

    #[test]
    fn lines_of_scripts_and_c_are_short() {
        for path in ["a.c", "a.h", "a.py", "a.sh"] {
            assert!(is_script_or_c(Path::new(path)), "{path}");
        }
        for path in ["a.csv", GENERATED[0]] {
            assert!(!is_script_or_c(Path::new(path)), "{path}");
        }
        let long = |text: &str| long_lines(Path::new("a.c"), text).len();
        assert_eq!(long(&format!("a\n\t{}\n", "ü".repeat(92))), 0);
        assert_eq!(long(&format!("a\n\t{}\n", "ü".repeat(93))), 1);
        assert_eq!(long(&format!("1234567\t{}\n", "a".repeat(93))), 1);
    }

    #[test]
    fn banned_names_are_found_in_code_alone() {
        let found = errors("struct Seat;\n");
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("DomainSlot"), "{found:?}");
        assert_eq!(errors("// a Seat\nconst A: &str = \"Seat\";\n"), [""; 0]);
    }
    #[test]
    fn each_banned_name_is_listed_once() {
        assert!(BANNED.is_sorted_by(|(a, _), (b, _)| a < b));
        assert!(BANNED_FILES.is_sorted_by(|a, b| a < b));
        for (name, better) in BANNED {
            let found = errors(&format!("struct {name};\n"));
            assert_eq!(found.len(), 1, "{name}");
            assert!(found[0].contains(better), "{found:?}");
        }
    }

    #[test]
    fn banned_file_names_are_found() {
        for stem in BANNED_FILES {
            let path = format!("crates/hw/src/{stem}.rs");
            let found = shown(&check(&[source(&path, "fn f() {}\n")]));
            assert_eq!(found.len(), 1, "{stem}");
        }
        let longer = source("crates/hw/src/eye_pattern.rs", "fn f() {}\n");
        assert_eq!(shown(&check(&[longer])), [""; 0]);
    }
}
