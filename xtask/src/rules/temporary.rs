//! The rule on temporary files: no code composes their paths.
//!
//! If another user can predict a path below the system's directory for temporary files, that user
//! can create the path first. `tempfile` makes files and directories that are new and private.

use crate::source::Source;
use crate::violation::Violation;

/// Files that may use the directory, tests included.
const ALLOWED: &[&str] = &[
    // Passes it to `tempfile`.
    "crates/cli/src/directory.rs",
    // Opens a file that must be new, and removes its name at once.
    "crates/cli/src/spool.rs",
];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        let path = source.path.to_str().unwrap_or_default();
        if ALLOWED.contains(&path) {
            continue;
        }
        let named = source
            .tokens
            .iter()
            .filter(|token| token.is_ident("temp_dir"));
        found.extend(named.map(|token| {
            let message = "`temp_dir` leads to paths that others can take; use `tempfile`";
            Violation::error(&source.path, token.line, message)
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    #[test]
    fn composed_paths_are_found_in_tests_too() {
        let call = "fn f() { std::env::temp_dir().join(\"x\"); }";
        for (path, expected) in [
            ("crates/cli/src/directory.rs", 0),
            ("crates/cli/src/commands/guest.rs", 1),
            ("crates/live/tests/client/links.rs", 1),
        ] {
            assert_eq!(check(&[source(path, call)]).len(), expected, "{path}");
        }
        assert!(check(&[source("a.rs", "fn f() { tempfile::tempdir(); }")]).is_empty());
    }
}
