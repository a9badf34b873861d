//! Journal of results, so that an interrupted run can resume.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::outcome::MutantOutcome;

/// First line of a journal. Another one belongs to another version of this program.
const HEAD: &str = "mutations by inputs";

/// The journal: one JSON line per mutation, with its inputs.
pub(super) struct Journal {
    file: File,
    known: BTreeMap<(String, u64), (MutantOutcome, Duration)>,
}

impl Journal {
    /// Opens the journal. With `resume`, the kills in it are known; otherwise it starts empty.
    pub(super) fn open(directory: &Path, resume: bool) -> anyhow::Result<Self> {
        let path = directory.join("journal");
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        let known = if resume { known(&old) } else { None };
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        if known.is_none() {
            file.set_len(0)?;
            writeln!(file, "{}", json!(HEAD))?;
        }
        Ok(Self {
            file,
            known: known.unwrap_or_default(),
        })
    }

    /// Returns the result of the mutation with these [inputs](super::inputs::Inputs::of).
    pub(super) fn known(&self, name: &str, inputs: u64) -> Option<(MutantOutcome, Duration)> {
        self.known.get(&(name.to_owned(), inputs)).cloned()
    }

    pub(super) fn add(
        &mut self,
        name: &str,
        inputs: u64,
        fate: &MutantOutcome,
        time: Duration,
    ) -> anyhow::Result<()> {
        let mut line = fate.to_json();
        line["name"] = name.into();
        line["inputs"] = inputs.into();
        line["seconds"] = time.as_secs_f64().into();
        writeln!(self.file, "{line}")?;
        Ok(())
    }
}

/// Returns the kills of a journal; `None` if its first line is another.
fn known(text: &str) -> Option<BTreeMap<(String, u64), (MutantOutcome, Duration)>> {
    let mut lines = text.lines();
    if lines.next() != Some(json!(HEAD).to_string().as_str()) {
        return None;
    }
    let entry = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        let time = Duration::try_from_secs_f64(line["seconds"].as_f64()?).ok()?;
        let name = line["name"].as_str()?.to_owned();
        let inputs = line["inputs"].as_u64()?;
        Some(((name, inputs), (MutantOutcome::parse(&line)?, time)))
    };
    // Ignores a line that was truncated by an interruption.
    Some(lines.filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_with_the_same_inputs_are_known() {
        let directory = tempfile::tempdir().unwrap().keep();
        let second = Duration::from_secs(1);
        let killed = MutantOutcome::Killed(vec!["a::b".into()]);
        let mut journal = Journal::open(&directory, true).unwrap();
        journal.add("killed", 7, &killed, second).unwrap();
        journal
            .add("survived", 7, &MutantOutcome::Survived, second)
            .unwrap();
        journal.file.write_all(b"{\"name\": \"cut").unwrap();

        let again = Journal::open(&directory, true).unwrap();
        assert_eq!(again.known("killed", 7), Some((killed, second)));
        assert_eq!(again.known("killed", 8), None);
        assert_eq!(again.known("survived", 7), None);
        let without = Journal::open(&directory, false).unwrap();
        assert_eq!(without.known("killed", 7), None);
        let emptied = Journal::open(&directory, true).unwrap();
        assert_eq!(emptied.known("killed", 7), None);
        std::fs::write(directory.join("journal"), "{\"tree\":\"7\"}\n").unwrap();
        assert!(Journal::open(&directory, true).unwrap().known.is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
