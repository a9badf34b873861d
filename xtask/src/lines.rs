//! Lines of code per crate, without tests, comments and blank lines, against the bounds of the
//! tree.

use std::collections::BTreeMap;
use std::path::Path;

use crate::output;
use crate::repo::Repo;
use crate::rules;
use crate::source::Source;

/// Most lines of code of all libraries and programs below `crates`.
const ALL: usize = 78_000;

/// Most lines of code of the core crates.
const CORE: usize = 22_000;

/// Prints the table. `Ok(false)` if a bound is exceeded.
pub(crate) fn print(repo: &Repo) -> anyhow::Result<bool> {
    let crates = count(repo.sources()?);
    let sum = |of: fn(&str) -> bool| {
        let counted = crates.iter().filter(|(name, _)| of(name));
        counted.map(|(_, lines)| lines).sum::<usize>()
    };
    for (name, lines) in &crates {
        let kind = if rules::is_core(name) { "core" } else { "" };
        output::line(format!("{lines:>7}  {name:<16}{kind}").trim_end());
    }
    let totals = [
        ("core", sum(rules::is_core), CORE),
        ("all", sum(|_| true), ALL),
    ];
    for (name, lines, bound) in totals {
        output::line(&format!("{lines:>7}  {name:<16}at most {bound}"));
    }
    Ok(totals.iter().all(|(_, lines, bound)| lines <= bound))
}

/// Returns the lines of code in `crates/*/src`, by crate.
fn count(sources: &[Source]) -> BTreeMap<&str, usize> {
    let mut crates = BTreeMap::new();
    for source in sources {
        if let Some(name) = crate_of(&source.path) {
            *crates.entry(name).or_insert(0) += source.lines_of_code();
        }
    }
    crates
}

/// Returns the crate whose `src` directory contains `path`.
pub(crate) fn crate_of(path: &Path) -> Option<&str> {
    let mut parts = path.components().map(|part| part.as_os_str());
    let (first, name, src) = (parts.next()?, parts.next()?, parts.next()?);
    (first == "crates" && src == "src").then(|| name.to_str())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    #[test]
    fn only_code_of_crates_counts() {
        let code = "//! Text.\n\nfn f() {}\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n";
        let sources = [
            source("crates/hw/src/lib.rs", code),
            source("crates/hw/src/ring/unit.rs", "fn f() {\n}\n"),
            source("crates/hw/tests/a.rs", code),
            source("crates/hw/benches/a.rs", code),
            source("crates/lab/src/lib.rs", code),
            source("xtask/src/main.rs", code),
        ];
        let expected = BTreeMap::from([("hw", 3), ("lab", 1)]);
        assert_eq!(count(&sources), expected);
    }
}
