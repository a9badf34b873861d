//! The panic rule: core crates use no panicking method or macro outside tests. (Review and fuzzing
//! cover indexing and arithmetic.)

use proc_macro2::Delimiter;

use super::core_crate;
use crate::source::{Kind, Source, Token, matching_close};
use crate::violation::Violation;

const METHODS: &[&str] = &["unwrap", "expect", "unwrap_err", "expect_err"];

const MACROS: &[&str] = &[
    "panic",
    "unreachable",
    "todo",
    "unimplemented",
    "assert",
    "assert_eq",
    "assert_ne",
];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    sources
        .iter()
        .filter(|source| core_crate(source).is_some())
        .flat_map(check_source)
        .collect()
}

fn check_source(source: &Source) -> Vec<Violation> {
    let tokens = &source.tokens;
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(end) = constant(tokens, at) {
            // Code that the compiler evaluates cannot panic at run time.
            at = end + 1;
            continue;
        }
        if let (false, Some(name)) = (tokens[at].in_test, panicking(tokens, at)) {
            found.push(Violation::error(
                &source.path,
                tokens[at].line,
                format!("`{name}` in a core crate: return an error instead"),
            ));
        }
        at += 1;
    }
    found
}

/// Returns the end of the `const _: () = ...;` or `const { ... }` that begins at `at`.
fn constant(tokens: &[Token], at: usize) -> Option<usize> {
    if !tokens[at].is_ident("const") {
        return None;
    }
    let next = tokens.get(at + 1)?;
    if next.opens(Delimiter::Brace) {
        return Some(matching_close(tokens, at + 1));
    }
    if !next.is_ident("_") {
        return None;
    }
    let mut end = at + 1;
    while end < tokens.len() && !tokens[end].is_punct(';') {
        if matches!(tokens[end].kind, Kind::Open(_)) {
            end = matching_close(tokens, end);
        }
        end += 1;
    }
    Some(end)
}

fn panicking(tokens: &[Token], at: usize) -> Option<&str> {
    let Kind::Ident(name) = &tokens[at].kind else {
        return None;
    };
    let next = tokens.get(at + 1)?;
    let method = at > 0
        && (tokens[at - 1].is_punct('.') || tokens[at - 1].is_punct(':'))
        && METHODS.contains(&name.as_str());
    let invocation = next.is_punct('!') && MACROS.contains(&name.as_str());
    (method || invocation).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    fn count(path: &str, text: &str) -> usize {
        check(&[source(path, text)]).len()
    }

    #[test]
    fn panics_are_found_in_core_crates() {
        for text in [
            "fn f() { a.unwrap(); }",
            "fn f() { a.b()\n.expect(\"c\"); }",
            "fn f() { a.map(Option::unwrap); }",
            "fn f() { panic!(); }",
            "fn f() { core::unreachable!() }",
            "fn f() { m!({ todo!() }) }",
            "fn f() { assert_eq!(a, b); }",
            "const fn f() { assert!(a); }",
        ] {
            assert_eq!(count("crates/hw/src/unit.rs", text), 1, "{text}");
            assert_eq!(count("crates/lab/src/unit.rs", text), 0, "{text}");
            assert_eq!(count("crates/hw/benches/unit.rs", text), 0, "{text}");
        }
    }

    #[test]
    fn code_that_cannot_panic_passes() {
        for text in [
            "/// a.unwrap()\nfn f() { a.unwrap_or(0); debug_assert!(b); }",
            "#[cfg(test)] mod tests { fn f() { a.unwrap(); } }",
            "const _: () = assert!(size_of::<A>() == 8);",
            "fn f() { const { assert!(N > 0) } }",
            "fn unwrap() {} fn expect(a: A) {}",
        ] {
            assert_eq!(count("crates/hw/src/unit.rs", text), 0, "{text}");
        }
        let mixed = "const _: () = assert!(A); fn f() { a.unwrap(); }";
        assert_eq!(count("crates/hw/src/unit.rs", mixed), 1);
    }
}
