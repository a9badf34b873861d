//! Processes that do not confine themselves are not used.

use std::os::fd::AsFd;
use std::sync::Arc;

use ringfence_live::caps::Caps;
use ringfence_live::isolate::{Image, Program, start};

use crate::rig::disk_file;

fn refused(program: &Program) -> String {
    let file = disk_file();
    let image = Image {
        file: file.as_fd(),
        read_only: false,
        caps: Caps::default(),
        errant: &[],
    };
    start(program, &image, &Arc::default())
        .unwrap_err()
        .to_string()
}

#[test]
fn programs_that_are_none() {
    let program = |path: &str| Program {
        path: path.into(),
        arguments: Vec::new(),
    };
    assert!(refused(&program("/no/such/program")).contains("os error 2"));
    assert!(refused(&program("/bin/true")).contains("gone"));
    // It says what no process says.
    let talks = Program {
        path: "/bin/sh".into(),
        arguments: ["-c", "head -c 1 >/dev/null; printf x >&0"]
            .map(Into::into)
            .to_vec(),
    };
    assert!(refused(&talks).contains("not to be said"));
}

#[test]
fn one_that_does_not_confine_all_of_itself() {
    assert!(refused(&crate::program("keeps-a-thread")).contains("did not confine"));
}
