//! Finds the instances of killed recordings, whose buffers remain allocated.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the instances below `tracefs` that are named after a process that no longer exists. The
/// function does not remove them: a process of another PID namespace looks the same.
pub fn stale_instances(tracefs: &Path) -> Vec<PathBuf> {
    below(&tracefs.join("instances"), Path::new("/proc"))
}

/// Returns the name of the instance of process `id`.
pub(super) fn name(id: u32) -> String {
    format!("ringfence-{id}")
}

fn below(instances: &Path, processes: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(instances).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| {
            let file = entry.file_name();
            let id = file
                .to_str()
                .and_then(|file| file.strip_prefix("ringfence-"));
            let id = id.and_then(|id| id.parse::<u32>().ok());
            id.is_some_and(|id| !processes.join(id.to_string()).exists())
        })
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_instances_of_processes_that_have_ended_are_named() {
        let scratch = tempfile::tempdir().unwrap();
        let (instances, processes) = (scratch.path().join("i"), scratch.path().join("p"));
        for dir in [
            "ringfence-7",
            "ringfence-8",
            "ringfence-x",
            "other-9",
            "ringfence-",
        ] {
            fs::create_dir_all(instances.join(dir)).unwrap();
        }
        fs::create_dir_all(processes.join("8")).unwrap();
        assert_eq!(
            below(&instances, &processes),
            [instances.join("ringfence-7")]
        );
        assert_eq!(name(7), "ringfence-7");
        assert!(below(&scratch.path().join("none"), &processes).is_empty());
    }
}
