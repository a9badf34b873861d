//! Links between documents: checks that the target of each relative link exists.

use std::path::Path;

use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;

/// Checks every Markdown file of the repository.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let mut found = Vec::new();
    for path in repo.files()? {
        if path.extension().is_some_and(|extension| extension == "md") {
            let directory = repo.root.join(path.parent().unwrap_or(Path::new("")));
            for (line, target) in links(&repo.read(&path)?) {
                if !directory.join(&target).exists() {
                    found.push(Violation::error(
                        &path,
                        line,
                        format!("{target} does not exist"),
                    ));
                }
            }
        }
    }
    rules::verdict(&found)
}

/// Returns the relative targets of inline links with their lines, without fragments. Skips code.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        // Text at odd positions is between backticks.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        for part in prose.split("](").skip(1) {
            let target = part.split([')', ' ', '#']).next().unwrap_or("");
            if !target.is_empty() && !target.contains(':') {
                found.push((index + 1, target.to_owned()));
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
}
