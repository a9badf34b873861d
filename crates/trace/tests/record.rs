//! Records against a directory tree that resembles tracefs, and checks the tree afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ringfence_trace::{RecordError, Recording, Workload};

/// A fresh directory under the target directory; removed when dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tracefs-{name}"));
        let _ = fs::remove_dir_all(&path);
        for folder in [
            "instances",
            "events/dma",
            "events/iommu/map",
            "events/iommu/unmap",
        ] {
            fs::create_dir_all(path.join(folder)).unwrap();
        }
        fs::write(path.join("tracing_on"), "1").unwrap();
        Self(path)
    }

    fn recording(&self) -> Recording {
        Recording {
            tracefs: self.0.clone(),
            instance: "rf".to_owned(),
            buffer_kib: 1234,
            pages: None,
        }
    }

    /// Returns all files and their contents.
    fn state(&self) -> BTreeMap<PathBuf, String> {
        fn walk(folder: &Path, state: &mut BTreeMap<PathBuf, String>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => {
                        state.insert(path.clone(), "folder".to_owned());
                        walk(&path, state);
                    }
                    false => {
                        state.insert(path.clone(), fs::read_to_string(&path).unwrap());
                    }
                }
            }
        }
        let mut state = BTreeMap::new();
        walk(&self.0, &mut state);
        state
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn missing_requirements_are_named_and_cleaned_up() {
    let stop = AtomicBool::new(false);
    let run = |recording: &Recording| {
        recording.run(Workload::Time(Duration::ZERO), &stop, &mut Vec::new())
    };
    let tree = Tree::new("missing");
    let nowhere = Recording {
        tracefs: tree.0.join("nowhere"),
        ..tree.recording()
    };
    assert!(matches!(run(&nowhere), Err(RecordError::NoTracefs { .. })));

    fs::create_dir(tree.0.join("instances/rf")).unwrap();
    assert!(matches!(
        run(&tree.recording()),
        Err(RecordError::InstanceExists { .. })
    ));
    assert!(
        tree.0.join("instances/rf").is_dir(),
        "another's instance stays"
    );
    fs::remove_dir(tree.0.join("instances/rf")).unwrap();

    // A plain folder does not create files like tracefs does, so the first switch in a subfolder
    // fails and the guard must clean up. (`remove_dir` of tracefs also removes the files; that of a
    // plain folder does not.)
    let error = run(&tree.recording()).unwrap_err();
    assert!(matches!(error, RecordError::Io { .. }), "{error:?}");
    let _ = fs::remove_dir_all(tree.0.join("instances/rf"));

    fs::remove_dir_all(tree.0.join("events/dma")).unwrap();
    let before = tree.state();
    let error = run(&tree.recording()).unwrap_err();
    assert!(
        matches!(error, RecordError::NoDmaEvents { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("6.12"));
    assert_eq!(tree.state(), before);
}
