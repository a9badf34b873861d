//! Journal of results for the current tree, so that an interrupted run can resume.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::outcome::MutantOutcome;

/// The journal: one JSON line per mutation, after a line that identifies the tree.
pub(super) struct Journal {
    file: File,
    known: BTreeMap<String, (MutantOutcome, Duration)>,
}

impl Journal {
    /// Opens the journal. With `resume`, the results of a journal for the tree `fingerprint` are
    /// known; otherwise the journal starts empty.
    pub(super) fn open(directory: &Path, fingerprint: u64, resume: bool) -> anyhow::Result<Self> {
        let path = directory.join("journal");
        let head = json!({ "tree": format!("{fingerprint:016x}") }).to_string();
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        let known = if resume { known(&old, &head) } else { None };
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        if known.is_none() {
            file.set_len(0)?;
            writeln!(file, "{head}")?;
        }
        Ok(Self {
            file,
            known: known.unwrap_or_default(),
        })
    }

    pub(super) fn known(&self, name: &str) -> Option<(MutantOutcome, Duration)> {
        self.known.get(name).cloned()
    }

    pub(super) fn add(
        &mut self,
        name: &str,
        fate: &MutantOutcome,
        time: Duration,
    ) -> anyhow::Result<()> {
        let mut line = fate.to_json();
        line["name"] = name.into();
        line["seconds"] = time.as_secs_f64().into();
        writeln!(self.file, "{line}")?;
        Ok(())
    }
}

/// Returns the kills of a journal; `None` if it belongs to another tree.
fn known(text: &str, head: &str) -> Option<BTreeMap<String, (MutantOutcome, Duration)>> {
    let mut lines = text.lines();
    if lines.next() != Some(head) {
        return None;
    }
    let entry = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        let time = Duration::try_from_secs_f64(line["seconds"].as_f64()?).ok()?;
        Some((
            line["name"].as_str()?.to_owned(),
            (MutantOutcome::parse(&line)?, time),
        ))
    };
    // Ignores a line that was truncated by an interruption.
    Some(lines.filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_of_the_same_tree_are_known() {
        let directory = tempfile::tempdir().unwrap().keep();
        let second = Duration::from_secs(1);
        let killed = MutantOutcome::Killed(vec!["a::b".into()]);
        let mut journal = Journal::open(&directory, 7, true).unwrap();
        journal.add("killed", &killed, second).unwrap();
        journal
            .add("survived", &MutantOutcome::Survived, second)
            .unwrap();
        journal.file.write_all(b"{\"name\": \"cut").unwrap();

        let again = Journal::open(&directory, 7, true).unwrap();
        assert_eq!(again.known("killed"), Some((killed, second)));
        assert_eq!(again.known("survived"), None);
        for (tree, resume) in [(8, true), (7, true), (7, false)] {
            let other = Journal::open(&directory, tree, resume).unwrap();
            assert_eq!(other.known("killed"), None, "tree {tree}, {resume}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
