//! References in documents: checks that the target of each relative link and each file of the tree
//! named in backticks exists.

use std::path::{Path, PathBuf};

use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;

/// First components of the paths that must exist.
const ROOTS: &[&str] = &[
    "crates", "docs", "examples", "fuzz", "kmod", "tests", "xtask",
];

/// Marks a document that quotes earlier names of files.
const HISTORICAL: &str = "<!-- historical file names -->";

/// Checks every Markdown file of the repository.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let mut found = Vec::new();
    for path in repo.files()? {
        if path.extension().is_some_and(|extension| extension == "md") {
            let directory = repo.root.join(path.parent().unwrap_or(Path::new("")));
            let text = repo.read(&path)?;
            let mut missing = |line, target: &str| {
                let message = format!("{target} does not exist");
                found.push(Violation::error(&path, line, message));
            };
            for (line, target) in links(&text) {
                if !directory.join(&target).exists() {
                    missing(line, &target);
                }
            }
            for (line, name) in file_names(&text) {
                let candidates = candidates(&repo.root, &directory, &name);
                if !candidates.is_empty() && !candidates.iter().any(|path| path.exists()) {
                    missing(line, &name);
                }
            }
        }
    }
    rules::verdict(&found)
}

/// Returns the lines of `text` outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        !in_code
    })
}

/// Returns the words in backticks that look like paths, with their lines. None in a document that
/// quotes earlier names.
fn file_names(text: &str) -> Vec<(usize, String)> {
    if text.contains(HISTORICAL) {
        return Vec::new();
    }
    let is_path = |name: &str| {
        name.contains('/')
            && name
                .chars()
                .all(|char| char.is_ascii_alphanumeric() || "_-./".contains(char))
    };
    let names = prose(text).flat_map(|(line, text)| {
        let quoted = text.split('`').skip(1).step_by(2);
        quoted.map(move |name| (line, name.to_owned()))
    });
    names.filter(|(_, name)| is_path(name)).collect()
}

/// Returns the paths that `name` may refer to: below the root, the document's directory, or
/// `crates`, there with or without `src`. Empty if it does not name a file of the tree.
fn candidates(root: &Path, directory: &Path, name: &str) -> Vec<PathBuf> {
    let Some((first, rest)) = name.split_once('/') else {
        return Vec::new();
    };
    let of_crate = root.join("crates").join(first);
    if ROOTS.contains(&first) {
        vec![root.join(name), directory.join(name)]
    } else if name.ends_with(".rs") && of_crate.is_dir() {
        let src = of_crate.join("src").join(rest);
        vec![of_crate.join(rest), src, directory.join(name)]
    } else {
        Vec::new()
    }
}

/// Returns the relative targets of inline links with their lines, without fragments. Skips code.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // Text at odd positions is between backticks.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        for part in prose.split("](").skip(1) {
            let target = part.split([')', ' ', '#']).next().unwrap_or("");
            if !target.is_empty() && !target.contains(':') {
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_links_are_collected() {
        let text = "[a](docs/A.md) [`b`](B.md#part) [c](https://c.org) \
            [d](#part)\n```\n[e](E.md)\n```\n`[f](F.md)` [g](G.md \"title\")\n";
        let expected = [(1, "docs/A.md"), (1, "B.md"), (5, "G.md")];
        let found = links(text);
        let found: Vec<(usize, &str)> = found.iter().map(|(line, t)| (*line, t.as_str())).collect();
        assert_eq!(found, expected);
    }
    #[test]
    fn file_names_are_collected_and_found() {
        let text = "`crates/hw/src/lib.rs` of `hw::Iommu`, `a b/c`, `x.rs` and `dma/*`\n\
            ```\n`docs/A.md`\n```\n`dma/map.rs` `target/guest`\n";
        let expected = [
            (1, "crates/hw/src/lib.rs"),
            (5, "dma/map.rs"),
            (5, "target/guest"),
        ];
        let found = file_names(text);
        let found: Vec<(usize, &str)> = found.iter().map(|(line, t)| (*line, t.as_str())).collect();
        assert_eq!(found, expected);
        assert_eq!(file_names(&format!("{text}{HISTORICAL}\n")), []);

        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        std::fs::create_dir_all(root.join("crates/dma/src")).unwrap();
        std::fs::write(root.join("crates/dma/src/map.rs"), "").unwrap();
        let exists = |directory: &str, name: &str| {
            let candidates = candidates(root, &root.join(directory), name);
            (!candidates.is_empty()).then(|| candidates.iter().any(|path| path.exists()))
        };
        for (directory, name, expected) in [
            ("docs", "crates/dma/src/map.rs", Some(true)),
            ("docs", "crates/dma/src/mapping.rs", Some(false)),
            ("docs", "dma/map.rs", Some(true)),
            ("docs", "dma/src/map.rs", Some(true)),
            ("docs", "dma/mapping.rs", Some(false)),
            ("docs", "tests/map.rs", Some(false)),
            ("docs", "target/guest", None),
            ("docs", "drivers/iommu/iova.c", None),
        ] {
            assert_eq!(exists(directory, name), expected, "{name}");
        }
    }
}
