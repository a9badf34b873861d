//! The example rule: the comment at the top of a library's `lib.rs` has an example that `cargo
//! test` runs.
//!
//! A library that exports nothing but `main` is part of a program. One that exports nothing is
//! loaded by another program, such as Python. Neither has a use to show.

use proc_macro2::Delimiter;

use crate::lines;
use crate::source::{Kind, Source};
use crate::violation::Violation;

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    sources
        .iter()
        .filter(|source| source.path.ends_with("src/lib.rs"))
        .filter(|source| lines::crate_of(&source.path).is_some())
        .filter(|source| exports(source) && !has_example(&source.text))
        .map(|source| {
            let message = "the comment at the top has no example that a doc test runs";
            Violation::error(&source.path, 1, message)
        })
        .collect()
}

/// Returns true if the file has a public item other than the function `main`.
fn exports(source: &Source) -> bool {
    let mut depth = 0_usize;
    source.tokens.iter().enumerate().any(|(index, token)| {
        match token.kind {
            Kind::Open(_) => depth += 1,
            Kind::Close(_) => depth = depth.saturating_sub(1),
            _ => {}
        }
        let [first, second] = [1, 2].map(|offset| source.tokens.get(index + offset));
        let is_main = first.is_some_and(|token| token.is_ident("fn"))
            && second.is_some_and(|token| token.is_ident("main"));
        let is_restricted = first.is_some_and(|token| token.opens(Delimiter::Parenthesis));
        depth == 0 && !token.in_test && token.is_ident("pub") && !is_restricted && !is_main
    })
}

/// Returns true if the `//!` comment of `text` has a block of code that a doc test compiles and
/// runs.
fn has_example(text: &str) -> bool {
    // In a block: true if it runs.
    let mut block = None;
    for line in text.lines().filter_map(|line| line.strip_prefix("//!")) {
        let line = line.trim();
        match (block, line.strip_prefix("```")) {
            (None, Some(words)) => block = Some(runs(words)),
            (Some(_), Some(_)) => block = None,
            // A line that `#` hides is no example.
            (Some(true), None) if !line.is_empty() && line != "#" && !line.starts_with("# ") => {
                return true;
            }
            _ => {}
        }
    }
    false
}

/// Returns true if rustdoc runs a block with these words after its fence.
fn runs(words: &str) -> bool {
    words
        .split([',', ' '])
        .all(|word| matches!(word, "" | "rust" | "should_panic") || word.starts_with("edition"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    const LIB: &str = "crates/hw/src/lib.rs";
    const PUBLIC: &str = "mod unit;\npub use unit::Unit;\n";

    fn found(path: &str, text: &str) -> usize {
        check(&[source(path, text)]).len()
    }

    #[test]
    fn a_library_has_an_example_that_runs() {
        for (comment, missing) in [
            ("//! ```\n//! use hw::Unit;\n//! ```\n", 0),
            (
                "//! Text.\n//!\n//! ```rust\n//! Unit::new();\n//! ```\n",
                0,
            ),
            ("//! ```should_panic\n//! Unit::new();\n//! ```\n", 0),
            (
                "//! ```text\n//! a -> b\n//! ```\n//! ```\n//! Unit::new();\n//! ```\n",
                0,
            ),
            ("", 1),
            ("//! Use `Unit`.\n", 1),
            ("//! ```text\n//! a -> b\n//! ```\n", 1),
            ("//! ```no_run\n//! Unit::new();\n//! ```\n", 1),
            ("//! ```ignore\n//! Unit::new();\n//! ```\n", 1),
            ("//! ```rust,compile_fail\n//! Unit::new();\n//! ```\n", 1),
            ("//! ```text\n//! a\n//! ```\n//! Unit::new();\n", 1),
            ("//! ```\n//! # fn main() {}\n//!\n//! ```\n", 1),
            // The example of an item further down.
            ("/// ```\n/// Unit::new();\n/// ```\n", 1),
        ] {
            assert_eq!(
                found(LIB, &format!("{comment}{PUBLIC}")),
                missing,
                "{comment}"
            );
        }
    }

    #[test]
    fn only_libraries_with_an_interface_need_one() {
        for (text, missing) in [
            ("pub mod unit;", 1),
            ("#[unsafe(no_mangle)] pub extern \"C\" fn version() {}", 1),
            ("pub fn main() {} pub const A: u32 = 1;", 1),
            ("pub fn main() {}", 0),
            ("mod unit; pub(crate) use unit::Unit;", 0),
            ("#[pymodule] mod _native { pub use super::Unit; }", 0),
            ("struct Unit { pub width: u8 }", 0),
            ("#[cfg(test)] pub mod testing {}", 0),
        ] {
            assert_eq!(found(LIB, text), missing, "{text}");
        }
    }

    #[test]
    fn only_libraries_of_the_product_need_one() {
        for path in [
            "crates/hw/src/unit.rs",
            "tests/src/lib.rs",
            "crates/hw/tests/common/src/lib.rs",
        ] {
            assert_eq!(found(path, PUBLIC), 0, "{path}");
        }
    }
}
