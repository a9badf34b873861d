//! Lengths of the documents that a reader reads in one sitting.

use std::path::Path;

use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;

/// Most words of each document. Details have a document of their own.
const MOST_WORDS: &[(&str, usize)] = &[
    ("README.md", 900),
    ("docs/CLAIMS.md", 1500),
    ("docs/REPRODUCE.md", 500),
];

/// Checks that no document has more words than its limit.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let mut found = Vec::new();
    for (path, most) in MOST_WORDS {
        found.extend(excess(Path::new(path), &repo.read(path)?, *most));
    }
    rules::verdict(&found)
}

/// Returns the violation of a document that is too long.
fn excess(path: &Path, text: &str, most: usize) -> Option<Violation> {
    let words = text.split_whitespace().count();
    let message = || format!("{words} words, at most {most} allowed");
    (words > most).then(|| Violation::error(path, 0, message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_above_its_limit_is_found() {
        let path = Path::new("README.md");
        assert_eq!(excess(path, "# One\n\ntwo\n", 3), None);
        let found = excess(path, "# One\n\ntwo `three four`\n", 4).unwrap();
        assert_eq!(
            found.to_string(),
            "error: README.md: 5 words, at most 4 allowed"
        );
    }
}
