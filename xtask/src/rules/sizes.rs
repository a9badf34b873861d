//! The size rule: one concept per file, so files are short. Tests are exempt, because tables of
//! cases are long.

use crate::source::Source;
use crate::violation::Violation;

/// A file with more lines of code than this gets a note.
const NOTED: usize = 400;
/// A file with more lines of code than this is an error.
const REFUSED: usize = 500;

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        let lines = source.lines_of_code();
        if lines > REFUSED {
            found.push(Violation::error(
                &source.path,
                0,
                format!("{lines} lines of code, at most {REFUSED} allowed: split it"),
            ));
        } else if lines > NOTED {
            found.push(Violation::note(
                &source.path,
                0,
                format!("{lines} lines of code: more than one concept?"),
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    fn found(lines: usize, before: &str) -> Vec<bool> {
        let text = format!("{before}{}", "fn a() {} // a\n\n".repeat(lines));
        let found = check(&[source("crates/hw/src/a.rs", &text)]);
        found.iter().map(Violation::is_error).collect()
    }

    #[test]
    fn long_files_are_noted_and_longer_ones_refused() {
        assert_eq!(found(NOTED, ""), [false; 0]);
        assert_eq!(found(NOTED + 1, ""), [false]);
        assert_eq!(found(REFUSED, ""), [false]);
        assert_eq!(found(REFUSED + 1, ""), [true]);
        assert_eq!(found(REFUSED + 1, "#![cfg(test)]\n"), [false; 0]);
    }
}
