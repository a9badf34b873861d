//! Outputs: whole or not at all, in place where a device is named, and never somebody else's file.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use ringfence_trace::SAMPLE;

use crate::ringfence_with;
use crate::{Scratch, failed, program, ringfence, succeeded};

fn anonymise(trace: &str, output: &str) -> std::process::Output {
    ringfence(&["trace", "anonymise", trace, "--seed", "1", "-o", output])
}

fn mode(path: &str) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

pub(crate) fn make_fifo(path: &str) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_fifo_is_written_in_place() {
    let scratch = Scratch::new("fifo");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    let fifo = scratch.path("fifo");
    make_fifo(&fifo);
    let (path, link) = (fifo.clone(), scratch.path("link"));
    symlink(&fifo, &link).unwrap();
    let reader = std::thread::spawn(move || {
        let read = || fs::read_to_string(&path).unwrap();
        [read(), read()]
    });
    succeeded(&anonymise(&trace, &fifo));
    succeeded(&anonymise(&trace, &link));
    assert!(fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    for text in reader.join().unwrap() {
        assert!(text.contains("dma_map"), "{text}");
    }
    assert_eq!(scratch.names(), ["fifo", "link", "sample.trace.zst"]);
}

/// A second open of a FIFO waits for another writer, and a second read of a terminal for another
/// trace.
#[test]
fn anonymise_refuses_a_trace_that_it_can_read_once() {
    let scratch = Scratch::new("once");
    let (fifo, output) = (scratch.path("fifo"), scratch.path("out"));
    make_fifo(&fifo);
    for trace in ["/dev/null", fifo.as_str()] {
        let text = failed(&anonymise(trace, &output), 2);
        let advice = format!("name a regular file, not {trace}");
        assert!(text.contains(&advice), "{text}");
    }
    assert_eq!(scratch.names(), ["fifo"]);
}

/// Needs root, as the defect does: another user cannot replace a device node.
#[test]
fn a_device_is_written_in_place() {
    let scratch = Scratch::new("device");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    let device = scratch.path("null");
    let made = Command::new("mknod")
        .args([device.as_str(), "c", "1", "3"])
        .stderr(Stdio::null())
        .status();
    if !made.unwrap().success() {
        return;
    }
    succeeded(&anonymise(&trace, &device));
    let about = fs::symlink_metadata(&device).unwrap();
    assert!(about.file_type().is_char_device());
    assert_eq!(about.rdev(), fs::metadata("/dev/null").unwrap().rdev());
}

#[test]
fn a_planted_part_is_neither_followed_nor_removed() {
    let scratch = Scratch::new("planted");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    let victim = scratch.file("victim", b"precious");
    let output = scratch.path("out.trace");
    let part = scratch.path("out.trace.part");
    symlink(&victim, &part).unwrap();
    succeeded(&anonymise(&trace, &output));
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(fs::symlink_metadata(&part).unwrap().is_symlink());
    assert!(fs::symlink_metadata(&output).unwrap().is_file());
    // The user's own, when the trace is bad.
    let bad = scratch.file("bad.trace", b"no trace\n");
    fs::remove_file(&part).unwrap();
    fs::write(&part, "mine").unwrap();
    failed(&anonymise(&bad, &scratch.path("out.trace")), 1);
    assert_eq!(fs::read(&part).unwrap(), b"mine");
    assert!(
        fs::metadata(&output).unwrap().len() > 0,
        "the old output stays"
    );
    let left = scratch.names();
    assert_eq!(left.len(), 5, "{left:?}");
}

#[test]
fn a_file_that_is_replaced_keeps_its_permissions() {
    let scratch = Scratch::new("modes");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    for (before, after) in [(0o600, 0o600), (0o640, 0o640), (0o4755, 0o755)] {
        let output = scratch.file("out", b"old");
        fs::set_permissions(&output, fs::Permissions::from_mode(before)).unwrap();
        succeeded(&anonymise(&trace, &output));
        assert_eq!(mode(&output), after, "{before:o}");
        assert_ne!(fs::read(&output).unwrap(), b"old");
    }
    // A new one has those of any new file.
    let plain = scratch.file("plain", b"");
    let new = scratch.path("new");
    succeeded(&anonymise(&trace, &new));
    assert_eq!(mode(&new), mode(&plain));
}

#[test]
fn a_link_is_followed_to_the_file_and_stays() {
    let scratch = Scratch::new("links");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    fs::create_dir(scratch.path("elsewhere")).unwrap();
    let target = scratch.file("elsewhere/target", b"old");
    let link = scratch.path("link");
    symlink("elsewhere/target", &link).unwrap();
    succeeded(&anonymise(&trace, &link));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::metadata(&target).unwrap().len() > 3);
    assert_eq!(fs::read_dir(scratch.path("elsewhere")).unwrap().count(), 1);
    let dangling = scratch.path("dangling");
    symlink("nowhere", &dangling).unwrap();
    failed(&anonymise(&trace, &dangling), 1);
    assert!(!Path::new(&scratch.path("nowhere")).exists());
}

#[test]
fn a_directory_is_refused_before_any_work() {
    let scratch = Scratch::new("directory");
    let bad = scratch.file("bad.trace", b"no trace\n");
    let dir = scratch.path("dir");
    fs::create_dir(&dir).unwrap();
    let text = failed(&anonymise(&bad, &dir), 1);
    assert!(
        text.contains("dir: ") && text.contains("directory"),
        "{text}"
    );
    failed(&ringfence(&["calibrate", "--out", &dir]), 1);
    assert_eq!(scratch.names(), ["bad.trace", "dir"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn the_trace_itself_is_no_output() {
    let scratch = Scratch::new("same");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    let other = scratch.path("other");
    fs::hard_link(&trace, &other).unwrap();
    for output in [&trace, &other] {
        let text = failed(&anonymise(&trace, output), 2);
        assert!(
            text.contains("the output is also the input trace"),
            "{text}"
        );
    }
    assert_eq!(fs::read(&trace).unwrap(), SAMPLE);
    // A device may be both: this command refuses it for another reason.
    let text = failed(&anonymise("/dev/null", "-"), 2);
    assert!(text.contains("name a regular file"), "{text}");
}

#[test]
fn file_name_selects_the_format() {
    let scratch = Scratch::new("form");
    let trace = scratch.file("sample.trace.zst", SAMPLE);
    let text = failed(&anonymise(&trace, &scratch.path("x.parquet")), 2);
    assert!(text.contains("trace convert"), "{text}");
    let record = ["trace", "record", "--seconds", "1", "-o", "x.parquet"];
    failed(&ringfence(&record), 2);
    {
        let convert = |input: &str, output: &str| {
            ringfence_with(&["trace", "convert", input, "-o", output], SAMPLE)
        };
        for name in ["x.csv", "x", "x.parquet.zst"] {
            let text = failed(&convert(&trace, &scratch.path(name)), 2);
            assert!(text.contains(".parquet"), "{text}");
        }
        let table = scratch.path("x.parquet");
        succeeded(&convert("-", &table));
        let text = failed(&convert(&table, &table), 2);
        assert!(
            text.contains("the output is also the input trace"),
            "{text}"
        );
        assert!(fs::read(&table).unwrap().starts_with(b"PAR1"));
        let standard = ringfence_with(&["trace", "convert", "-", "-o", "-"], SAMPLE);
        assert!(standard.stdout.starts_with(b"PAR1"));
    }
}

#[test]
fn a_signal_leaves_no_part() {
    for signal in ["INT", "TERM", "HUP"] {
        let scratch = Scratch::new("signal");
        let fifo = scratch.path("trace");
        make_fifo(&fifo);
        let old = scratch.file("out.parquet", b"old");
        let mut child = Command::new(program())
            .args(["trace", "convert", &fifo, "-o", &old])
            .spawn()
            .unwrap();
        // Opening waits until the command reads the trace, and by then its output has begun.
        let writer = File::options().write(true).open(&fifo).unwrap();
        assert_eq!(scratch.names().len(), 3, "{:?}", scratch.names());
        let killed = Command::new("kill")
            .args(["-s", signal, &child.id().to_string()])
            .status();
        assert!(killed.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{signal}");
        drop(writer);
        assert_eq!(scratch.names(), ["out.parquet", "trace"], "{signal}");
        assert_eq!(fs::read(&old).unwrap(), b"old");
    }
}

#[test]
fn files_of_a_named_directory_replace_links() {
    let scratch = Scratch::new("inside");
    let victim = scratch.file("victim", b"precious");
    for (dir, link) in [("plots", "sample-search.svg"), ("man", "ringfence.1")] {
        fs::create_dir(scratch.path(dir)).unwrap();
        symlink(&victim, scratch.path(&format!("{dir}/{link}"))).unwrap();
    }
    let plots = scratch.path("plots");
    let compare = ["compare", "--repeat", "0", "--modes", "fence", "--plot"];
    let args: Vec<&str> = compare.into_iter().chain([plots.as_str()]).collect();
    succeeded(&ringfence(&args));
    succeeded(&ringfence(&["man", &scratch.path("man")]));
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    for file in ["plots/sample-search.svg", "man/ringfence.1"] {
        let about = fs::symlink_metadata(scratch.path(file)).unwrap();
        assert!(about.is_file() && about.len() > 100, "{file}");
    }
    let mut text = String::new();
    let mut page = File::open(scratch.path("man/ringfence.1")).unwrap();
    page.read_to_string(&mut text).unwrap();
    assert!(text.contains(".TH ringfence 1"), "{text}");
}

#[test]
fn profiles_and_reports_have_a_limit() {
    let scratch = Scratch::new("limits");
    let report = scratch.file("a.json", b"{}");
    for args in [
        &["compare", "--profile", "/dev/zero"][..],
        &["diff", "/dev/zero", &report],
    ] {
        let text = failed(&ringfence(args), 1);
        assert!(text.contains("/dev/zero: longer than"), "{text}");
    }
}

#[test]
fn an_instance_of_a_killed_recording_is_named() {
    let scratch = Scratch::new("instances");
    // No process has such a number.
    for instance in ["ringfence-4194999", "ringfence-1", "other"] {
        fs::create_dir_all(scratch.path(&format!("instances/{instance}"))).unwrap();
    }
    let tracefs = scratch.path("");
    let args = [
        "trace",
        "record",
        "--seconds",
        "1",
        "-o",
        "-",
        "--tracefs",
        &tracefs,
    ];
    let output = ringfence(&args);
    let text = crate::stderr(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].contains("instances/ringfence-4194999 was left"),
        "{text}"
    );
    assert!(lines[0].contains("rmdir"), "{text}");
    assert!(!text.contains("ringfence-1 "), "{text}");
}

/// Whoever opens a FIFO for writing waits for its reader, and a signal ends the wait.
#[test]
fn signal_ends_a_recording_without_a_reader() {
    let scratch = Scratch::new("unread");
    let fifo = scratch.path("fifo");
    make_fifo(&fifo);
    let mut record = Command::new(program())
        .args(["trace", "record", "-o", &fifo, "--", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let call = format!("/proc/{}/syscall", record.id());
    // openat(2), on this architecture, of a thread that sleeps.
    let waits = || fs::read_to_string(&call).map(|call| call.starts_with("257 "));
    loop {
        match waits() {
            // Twice: the first open of all may wait for a disk.
            Ok(true) if waits().is_ok_and(|waits| waits) => break,
            Ok(_) => std::thread::yield_now(),
            // The host does not show it.
            Err(_) => {
                record.kill().unwrap();
                record.wait().unwrap();
                return;
            }
        }
        assert!(record.try_wait().unwrap().is_none(), "it waits for nobody");
    }
    let number = record.id().to_string();
    let signalled = Command::new("kill").args(["-TERM", &number]).status();
    assert!(signalled.unwrap().success());
    // A reader that comes later is not written to: it would end the wait of a broken command.
    let mut ended = None;
    // Less than the time limit of a mutant, which does not end a process that catches SIGTERM.
    for _ in 0..1_500 {
        ended = record.try_wait().unwrap();
        if ended.is_some() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    if ended.is_none() {
        record.kill().unwrap();
        record.wait().unwrap();
    }
    assert!(ended.is_some_and(|status| !status.success()));
    assert_eq!(scratch.names(), ["fifo"]);
}
