//! Processes that do not confine themselves are refused.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_live::limits::GuestLimits;
use ringfence_live::sandbox::windows::{END, FIRST};
use ringfence_live::sandbox::{SandboxDisk, SandboxProgram, start};
use rustix::process::{Resource, getrlimit};

use crate::guest::Virtio;
use crate::rig::{disk_file, image_on_disk};
use crate::{SandboxedGuest, sandboxed_guest};

fn refused(program: &SandboxProgram) -> String {
    let file = disk_file();
    let image = SandboxDisk {
        file: file.as_fd(),
        read_only: false,
        limits: GuestLimits::default(),
        injected: &[],
    };
    start(program, &image, &Arc::default())
        .unwrap_err()
        .to_string()
}

#[test]
fn programs_that_are_none() {
    let program = |path: &str| SandboxProgram {
        path: path.into(),
        arguments: Vec::new(),
    };
    assert!(refused(&program("/no/such/program")).contains("os error 2"));
    assert!(refused(&program("/bin/true")).contains("has exited"));
    // A process that sends a malformed message.
    let talks = SandboxProgram {
        path: "/bin/sh".into(),
        arguments: ["-c", "head -c 1 >/dev/null; printf x >&0"]
            .map(Into::into)
            .to_vec(),
    };
    assert!(refused(&talks).contains("malformed or unexpected message"));
}

#[test]
fn one_that_does_not_confine_all_of_itself() {
    assert!(
        refused(&crate::program("keeps-a-thread")).contains("unexpected threads or descriptors")
    );
}

/// CAP_SETPCAP, which changes the bounding set.
const SETPCAP: u64 = 1 << 8;

/// Returns the processes that this one has started with this argument.
fn processes(behaviour: &str) -> Vec<PathBuf> {
    let parent = format!("PPid:\t{}", std::process::id());
    let all = fs::read_dir("/proc")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let ours = all.filter(|path| {
        let read = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        read("status").lines().any(|line| line == parent)
            && read("cmdline").split('\0').nth(1) == Some(behaviour)
    });
    ours.collect()
}

#[test]
fn it_has_no_privileges_and_bounded_resources() {
    let image = image_on_disk();
    let length = image.metadata().unwrap().len();
    let _sandboxed: SandboxedGuest<Virtio> = sandboxed_guest("obeys", &[], &image);
    let [process] = &processes("obeys")[..] else {
        panic!("one process");
    };
    let mut threads = 0;
    for thread in fs::read_dir(process.join("task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        for line in [
            "CapInh:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "CapAmb:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ] {
            assert!(
                status.lines().any(|other| other == line),
                "{line}: {status}"
            );
        }
        // If this process may drop them, the bounding set is empty as well.
        let own = fs::read_to_string("/proc/thread-self/status").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("CapEff:\t"));
        let own = u64::from_str_radix(own.unwrap(), 16).unwrap();
        if own & SETPCAP != 0 {
            assert!(status.contains("CapBnd:\t0000000000000000"), "{status}");
        }
        threads += 1;
    }
    assert_eq!(threads, 2);
    let limits = fs::read_to_string(process.join("limits")).unwrap();
    let bytes = length.to_string();
    let windows = (END - FIRST + (1 << 30)).to_string();
    for (name, most) in [
        ("Max file size", bytes.as_str()),
        ("Max core file size", "1"),
        ("Max open files", "80"),
        ("Max processes", "0"),
        ("Max address space", &windows),
        ("Max data size", "268435456"),
        ("Max stack size", "8388608"),
        ("Max locked memory", "0"),
    ] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        let [soft, hard, ..] = line[name.len()..].split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        assert_eq!((soft, hard), (most, most), "{name}");
    }
}

/// A page of the program that the host reclaims makes the mapping thread wait for the host's disk.
#[test]
fn its_own_pages_stay_in_memory() {
    let _sandboxed: SandboxedGuest<Virtio> = sandboxed_guest("obeys-in-memory", &[], &disk_file());
    let [process] = &processes("obeys-in-memory")[..] else {
        panic!("one process");
    };
    let maps = fs::read_to_string(process.join("smaps")).unwrap();
    let mut mapping = "";
    let (mut code, mut locked) = (0, 0);
    for line in maps.lines() {
        let (first, rest) = line.split_once(char::is_whitespace).unwrap();
        let is_code = mapping.contains(" r-xp ") && mapping.contains('/');
        match first {
            "Size:" if is_code => {
                let kib = rest.trim().strip_suffix(" kB").unwrap();
                code += kib.parse::<u64>().unwrap() << 10;
            }
            "VmFlags:" if is_code => {
                locked += u64::from(rest.split(' ').any(|flag| flag == "lo"));
            }
            _ if !first.ends_with(':') => mapping = line,
            _ => {}
        }
    }
    // The program, libc and the loader; a host with a lower limit locks what fits.
    let most = getrlimit(Resource::Memlock).maximum;
    if most.is_none_or(|most| code <= most) {
        assert!(locked >= 3, "{locked} of {code} bytes of code: {maps}");
    }
}
