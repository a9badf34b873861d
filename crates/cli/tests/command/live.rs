//! `serve` and `top` without a guest: counters, wrong usage, and privileges of the threads.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use crate::{Scratch, failed, program, ringfence, stderr, succeeded};

#[test]
fn top_shows_the_counters() {
    let scratch = Scratch::new("top");
    let dir = scratch.path("");
    let listener = UnixListener::bind(scratch.path("metrics.sock")).unwrap();
    let serve = std::thread::spawn(move || {
        for text in [
            "ringfence_requests_total{device=\"blk\"} 1234\n",
            "no counters\n",
        ] {
            listener
                .accept()
                .unwrap()
                .0
                .write_all(text.as_bytes())
                .unwrap();
        }
    });
    let text = succeeded(&ringfence(&["top", "--once", &dir]));
    let row = text.lines().nth(1).unwrap();
    assert!(row.starts_with("blk ") && row.contains(" 1234 "), "{text}");
    let said = failed(&ringfence(&["top", "--once", &dir]), 1);
    assert!(said.contains("metrics.sock"), "{said}");
    serve.join().unwrap();
    // The listener has gone, its socket has not.
    failed(&ringfence(&["top", &dir]), 1);
}

#[test]
fn an_option_that_no_device_takes_is_wrong_usage() {
    for (net, expected) in [
        ("bridge=br0", "expected tap=NAME"),
        ("socket=a,queues=9", "queues must be 1 to 8"),
        ("socket=a,mac=ff:ff:ff:ff:ff:ff", "mac must be"),
        ("datagram=a", "expected a path"),
        ("tap=a,speed=9", "neither queues=N nor mac=ADDRESS"),
    ] {
        let output = ringfence(&["serve", "--dir", "nowhere", "--net", net]);
        assert_eq!(output.status.code(), Some(2), "{net}");
        let error = stderr(&output);
        assert!(error.contains(expected), "{net}: {error}");
    }
    for (words, expected) in [
        (
            &["--disk", "d,mode=apart"][..],
            "emulated, assigned or sandbox",
        ),
        (&["--iommu", "intel"], "qemu-intel"),
        (
            &["--iommu", "none", "--disk", "d,mode=sandbox"],
            "requires --iommu",
        ),
        (&["--take-over", "--iommu", "pviommu"], "--take-over"),
    ] {
        let output = ringfence(&[&["serve", "--dir", "nowhere"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let said = stderr(&output);
        assert!(said.contains(expected), "{words:?}: {said}");
    }
    for wrong in [&["top"][..], &["top", ".", "--interval", "0"]] {
        assert_eq!(ringfence(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

/// Every thread, the first one included: what one of them cannot do, none can do for it.
#[test]
fn server_drops_privileges() {
    for (mode, more) in [
        ("", &[][..]),
        (",mode=sandbox", &[]),
        ("", &["--iommu", "pviommu"]),
        ("", &["--iommu", "none"]),
        ("", &["--iommu", "qemu-virtio"]),
    ] {
        let scratch = Scratch::new("serves");
        let (dir, disk) = (scratch.path("run"), scratch.path("disk.img"));
        fs::write(&disk, [0; 512]).unwrap();
        let mut serve = Command::new(program())
            .args(["serve", "--dir", &dir, "--disk", &format!("{disk}{mode}")])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(serve.stdout.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        let tasks = format!("/proc/{}/task", serve.id());
        let statuses = || {
            let tasks = fs::read_dir(&tasks).unwrap();
            let statuses = tasks.map(|task| task.unwrap().path().join("status"));
            statuses
                .filter_map(|path| fs::read_to_string(path).ok())
                .collect::<Vec<_>>()
        };
        let confined = |status: &String| {
            [
                "CapPrm:\t0000000000000000",
                "CapEff:\t0000000000000000",
                "NoNewPrivs:\t1",
                "Seccomp:\t2",
            ]
            .iter()
            .all(|line| status.lines().any(|other| other == *line))
        };
        // The first thread confines itself last, after what it has printed.
        for tries in 0.. {
            if statuses().iter().all(confined) {
                break;
            }
            assert!(tries < 10_000, "{mode:?} {more:?}: {:?}", statuses());
            assert!(serve.try_wait().unwrap().is_none(), "{mode:?} {more:?}");
            std::thread::yield_now();
        }
        assert!(statuses().len() > 2, "{mode:?} {more:?}");
        let interrupted = Command::new("kill")
            .args(["-INT", &serve.id().to_string()])
            .status();
        assert!(interrupted.unwrap().success());
        assert!(serve.wait().unwrap().success(), "{mode:?} {more:?}");
        let left: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(
            left.iter().all(|name| name == "viot.bin"),
            "{mode:?} {more:?}: {left:?}"
        );
    }
}
