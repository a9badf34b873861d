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
    let files = repo.files()?;
    let mut found = Vec::new();
    for path in &files {
        if path.extension().is_some_and(|extension| extension == "md") {
            found.extend(violations(&repo.root, &files, path, &repo.read(path)?));
        }
    }
    rules::verdict(&found)
}

/// Returns the references of a document to files that do not exist. `files` are those of the tree.
fn violations(root: &Path, files: &[PathBuf], path: &Path, text: &str) -> Vec<Violation> {
    let directory = root.join(path.parent().unwrap_or(Path::new("")));
    let mut found = Vec::new();
    let mut missing = |line, target: &str| {
        let message = format!("{target} does not exist");
        found.push(Violation::error(path, line, message));
    };
    for (line, target) in links(text) {
        if !directory.join(&target).exists() {
            missing(line, &target);
        }
    }
    for (line, name) in file_names(text) {
        if !names_a_file(root, files, &directory, &name) {
            missing(line, &name);
        }
    }
    found
}

/// Returns the lines of `text` outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    // Backticks of the open fence. A fence of at least as many, without a language, closes it.
    let mut open: Option<usize> = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let line = line.trim();
        let ticks = line.len() - line.trim_start_matches('`').len();
        let is_fence = ticks >= 3 && !line[ticks..].contains('`');
        match open {
            None if is_fence => open = Some(ticks),
            None => return true,
            Some(fence) if ticks >= fence && ticks == line.len() => open = None,
            Some(_) => {}
        }
        false
    })
}

/// Splits the lines of [`prose`] at backticks, and returns the pieces with the numbers of their
/// lines. Pieces at odd positions of a line's list are code. A code span may end on a later line of
/// its paragraph, which then begins with an empty piece of prose.
fn pieces(text: &str) -> Vec<(usize, Vec<&str>)> {
    let mut in_code = false;
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let begins_block = ["- ", "* ", "|", "#"]
            .iter()
            .any(|mark| line.trim_start().starts_with(mark));
        in_code &= !begins_block && !line.trim().is_empty();
        let mut pieces: Vec<&str> = line.split('`').collect();
        if in_code {
            pieces.insert(0, "");
        }
        in_code = pieces.len().is_multiple_of(2);
        found.push((number, pieces));
    }
    found
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
    let names = pieces(text).into_iter().flat_map(|(line, pieces)| {
        let quoted = pieces.into_iter().skip(1).step_by(2);
        quoted.map(move |name| (line, name.to_owned()))
    });
    names.filter(|(_, name)| is_path(name)).collect()
}

/// Returns false if `name` refers to this tree and no such file exists. A name that ends in .rs
/// refers to this tree unless it begins with a dot.
fn names_a_file(root: &Path, files: &[PathBuf], directory: &Path, name: &str) -> bool {
    let first = name.split('/').next().unwrap_or_default();
    if ROOTS.contains(&first) {
        return root.join(name).exists() || directory.join(name).exists();
    }
    // The end of a path, so that a document need not repeat `crates` and `src`.
    !name.ends_with(".rs")
        || name.starts_with('.')
        || files.iter().any(|file| ends_with(file, name))
}

/// Returns true if `name` is the end of `file`, which may have `src` between its folders.
fn ends_with(file: &Path, name: &str) -> bool {
    let without_src: PathBuf = file.iter().filter(|part| *part != "src").collect();
    file.ends_with(name) || without_src.ends_with(name)
}

/// Returns the relative targets of inline links with their lines, without fragments. Skips code.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, pieces) in pieces(text) {
        let prose = pieces.into_iter().step_by(2).collect::<Vec<_>>().join("``");
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
    fn a_code_span_may_end_on_a_later_line_of_its_paragraph() {
        let text = "`a\nb` [c](C.md) `d/e.rs` `f\n\n[g](G.md) `h\n- [i](I.md)\n";
        let expected = [(2, "C.md"), (4, "G.md"), (5, "I.md")];
        assert_eq!(
            links(text),
            expected.map(|(line, name)| (line, name.to_owned()))
        );
        assert_eq!(file_names(text), [(2, "d/e.rs".to_owned())]);
    }

    #[test]
    fn file_names_are_collected() {
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
    }

    #[test]
    fn nested_code_blocks_end_with_their_own_fence() {
        let text = "a\n````text\n```console\nb\n```\nc\n````\n```x```\n```\nd\n```\ne\n";
        let lines: Vec<&str> = prose(text).map(|(_, line)| line).collect();
        assert_eq!(lines, ["a", "```x```", "e"]);
    }

    #[test]
    fn references_to_missing_files_are_found() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let files = ["crates/dma/src/map.rs", "docs/A.md", "kmod/core.h"].map(PathBuf::from);
        for file in &files {
            std::fs::create_dir_all(root.join(file.parent().unwrap())).unwrap();
            std::fs::write(root.join(file), "").unwrap();
        }
        for (reference, exists) in [
            ("[a](A.md)", true),
            ("[a](B.md)", false),
            ("[a](../kmod/core.h)", true),
            ("`crates/dma/src/map.rs`", true),
            ("`crates/dma/src/mapping.rs`", false),
            ("`dma/map.rs`", true),
            ("`dma/src/map.rs`", true),
            ("`src/map.rs`", true),
            ("`dma/mapping.rs`", false),
            // A file of a crate that was renamed.
            ("`layer/map.rs`", false),
            ("`tests/map.rs`", false),
            ("`target/guest`", true),
            ("`drivers/iommu/iova.c`", true),
        ] {
            let found = violations(root, &files, Path::new("docs/A.md"), reference);
            assert_eq!(found.is_empty(), exists, "{reference}: {found:?}");
        }
    }
}
