//! Subjects of commits: `crate: verb object`.

use anyhow::bail;

use crate::output;
use crate::process;
use crate::repo::Repo;

/// Number of the newest commits that are checked. A clone may have fewer.
const NEWEST: &str = "100";

/// Checks the subjects of the newest commits, without merges.
pub(crate) fn check(repo: &Repo) -> anyhow::Result<String> {
    let log = process::capture(process::command(&repo.root, "git").args([
        "log",
        "--no-merges",
        "--format=%h %s",
        "-n",
        NEWEST,
    ]))?;
    let mut wrong = 0;
    for line in log.lines() {
        let (commit, subject) = line.split_once(' ').unwrap_or((line, ""));
        if let Some(reason) = mistake(subject) {
            output::line(&format!("error: commit {commit}: `{subject}`: {reason}"));
            wrong += 1;
        }
    }
    if wrong > 0 {
        bail!("{wrong} subjects: write them as in `dma: map a scatterlist in one request`");
    }
    Ok(format!("{} commits", log.lines().count()))
}

/// Returns the mistake of a subject; `None` if it has the form.
fn mistake(subject: &str) -> Option<&'static str> {
    let Some((scope, text)) = subject.split_once(": ") else {
        return Some("it does not begin with the crate or directory that it changes");
    };
    if !scope.split(", ").all(is_name) {
        return Some("before the colon are names of crates or directories, in lower case");
    }
    let mut words = text.split(' ');
    let verb = words.next().unwrap_or_default();
    if verb.is_empty() || !verb.chars().all(|c| c.is_ascii_lowercase() || c == '-') {
        return Some("after the colon is a verb, in lower case");
    }
    if words.next().is_none_or(str::is_empty) {
        return Some("the verb has no object");
    }
    if text.ends_with('.') {
        return Some("it ends with a full stop");
    }
    None
}

/// Returns true for the name of a crate or a path.
fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_/.".contains(c);
    name.starts_with(|c: char| c.is_ascii_lowercase() || c == '.') && name.chars().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_names_what_it_changes_and_how() {
        for subject in [
            "dma: map a scatterlist in one request",
            "kmod, live: stop the ring IOMMU at a kexec, and lose no interrupt",
            "virtio-iommu-conformance: name the context of a test",
            "tests/qemu: read the tables of Linux",
            ".ci: run all steps",
            "trace: re-read a file: its size may change",
        ] {
            assert_eq!(mistake(subject), None, "{subject}");
        }
    }

    #[test]
    fn other_subjects_are_found() {
        for (subject, part) in [
            ("", "does not begin"),
            ("Map a scatterlist in one request", "does not begin"),
            ("dma:map a scatterlist", "does not begin"),
            ("README: cut a word", "names of crates"),
            ("docs of eight crates: wrap lines", "names of crates"),
            ("dma,iova: map a scatterlist", "names of crates"),
            ("dma, : map a scatterlist", "names of crates"),
            (": map a scatterlist", "names of crates"),
            ("Revert \"dma: map a scatterlist\"", "names of crates"),
            ("dma: Map a scatterlist", "a verb"),
            ("dma: `map` takes a scatterlist", "a verb"),
            ("dma:  map a scatterlist", "a verb"),
            ("dma: map", "no object"),
            ("dma: map a scatterlist.", "full stop"),
        ] {
            let found = mistake(subject).unwrap_or("nothing");
            assert!(found.contains(part), "{subject}: {found}");
        }
    }
}
