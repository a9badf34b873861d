//! Traces that mean harm: an error that names the limit and its option, or bounded memory.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use crate::{Scratch, failed, program, ringfence, root, succeeded};

fn map(device: &str, at: u64, bytes: u64) -> String {
    format!(
        "t-1 [000] ..... 1.0: dma_map_phys: {device} dir=TO_DEVICE dma_addr={at:x} size={bytes} \
         phys_addr={at:x} attrs=\n"
    )
}

const COMMANDS: [&[&str]; 3] = [
    &["compare", "--repeat", "0", "--modes", "strict"],
    &["size"],
    &["trace", "info"],
];

#[test]
fn limit_errors_name_line_and_option() {
    let scratch = Scratch::new("limits");
    let gib = 1_u64 << 30;
    let mark = "t-1 [0] ..... 1.0: tracing_mark_write: x\n".to_owned();
    let list = |count: u64| {
        let starts: Vec<String> = (0..count).map(|n| format!("{:#x}", n << 13)).collect();
        let (starts, sizes) = (starts.join(","), vec!["0x1"; count as usize].join(","));
        format!(
            "t-1 [0] ..... 1.0: dma_map_sg: d dir=TO_DEVICE nents={count}/{count} \
             ents={count}/{count} dma_addrs={{{starts}}} sizes={{{sizes}}} phys_addrs={{{starts}}} \
             attrs=\n"
        )
    };
    let cases: [(&str, String, u64, &str, &str); 7] = [
        ("mapping", map("d", 0, gib + 1), 1, "--max-mapping", "2G"),
        (
            "live",
            map("d", 0, gib) + &map("d", gib, gib),
            2,
            "--max-live",
            "2G",
        ),
        (
            "mapped",
            map("d", 0, gib).repeat(2),
            2,
            "--max-mapped",
            "3G",
        ),
        (
            "segments",
            map("d", 0, 1) + &map("d", 4096, 1),
            2,
            "--max-segments",
            "2",
        ),
        ("list", list(3), 1, "--max-list", "3"),
        ("marks", mark.repeat(2), 2, "--max-marks", "200"),
        (
            "line",
            format!("{}\n", "#".repeat(200)),
            1,
            "--max-line",
            "200",
        ),
    ];
    for (name, text, line, option, enough) in cases {
        let path = scratch.file(name, text.as_bytes());
        for command in COMMANDS {
            // Small limits where the default is large.
            let low: &[&str] = match option {
                "--max-live" | "--max-mapped" => &[option, "1G"],
                "--max-segments" => &[option, "1"],
                "--max-list" => &[option, "2"],
                "--max-marks" | "--max-line" => &[option, "100"],
                _ => &[],
            };
            let args = [command, low, &[path.as_str()]].concat();
            let text = failed(&ringfence(&args), 1);
            let prefix = format!("{path}:{line}: ");
            assert!(
                text.contains(&prefix) && text.contains(option),
                "{args:?}: {text}"
            );
            if command[0] == "trace" {
                let raised = [command, &[option, enough, path.as_str()]].concat();
                succeeded(&ringfence(&raised));
            }
        }
    }
    let devices = map("a", 0, 1) + &map("b", 4096, 1);
    let path = scratch.file("devices", devices.as_bytes());
    let args = [COMMANDS[0], &["--max-devices", "1", path.as_str()]].concat();
    let text = failed(&ringfence(&args), 1);
    assert!(
        text.contains("`--device`") && text.contains("`--max-devices`"),
        "{text}"
    );
    succeeded(&ringfence(&[&args[..], &["--device", "b"]].concat()));
}

#[test]
fn an_endless_input_is_refused() {
    for command in COMMANDS {
        let text = failed(&ringfence(&[command, &["/dev/zero"]].concat()), 1);
        assert!(
            text.contains("/dev/zero:1: longer than 1048576 bytes"),
            "{text}"
        );
    }
}

#[test]
fn standard_input_is_kept_up_to_a_limit() {
    let text = map("d", 4096, 1);
    for command in [
        &["size"][..],
        &["compare", "--repeat", "0", "--modes", "riommu"],
    ] {
        let run = |most: usize| {
            let most = most.to_string();
            let args = [command, &["-", "--max-spool", most.as_str()]].concat();
            crate::ringfence_with(&args, text.as_bytes())
        };
        succeeded(&run(text.len()));
        let error = failed(&run(text.len() - 1), 1);
        assert!(error.contains("`--max-spool`"), "{error}");
    }
}

/// A shell makes a FIFO of `<(zstdcat t.zst)`. The commands read it several times, and have the
/// results of a file.
#[test]
fn a_fifo_is_kept_up_to_a_limit() {
    let scratch = Scratch::new("pipe");
    let text = map("d", 4096, 1) + &map("d", 8192, 1);
    let (file, fifo) = (scratch.file("t.txt", text.as_bytes()), scratch.path("t"));
    crate::files::make_fifo(&fifo);
    for command in [
        &["size", "--json"][..],
        &["compare", "--repeat", "0", "--modes", "riommu", "--json"],
        &["compare", "--repeat", "0", "--modes", "strict", "--json"],
    ] {
        let run = |path: &str, arguments: &[&str]| {
            let writer = (path == fifo).then(|| {
                let (fifo, text) = (fifo.clone(), text.clone());
                // Fails if the command stops reading at its limit.
                std::thread::spawn(move || drop(std::fs::write(fifo, text)))
            });
            let output = ringfence(&[command, arguments, &[path]].concat());
            if let Some(writer) = writer {
                writer.join().unwrap();
            }
            output
        };
        assert_eq!(succeeded(&run(&fifo, &[])), succeeded(&run(&file, &[])));
        if command.contains(&"strict") {
            continue;
        }
        let most = (text.len() - 1).to_string();
        let error = failed(&run(&fifo, &["--max-spool", &most]), 1);
        assert!(error.contains("t exceeds the"), "{error}");
    }
    for other in [&fifo, &scratch.path("./t")] {
        let twice = [&["compare", "--repeat", "0"][..], &[&fifo, other]].concat();
        assert!(failed(&ringfence(&twice), 2).contains("name it once"));
    }
    for names in [["-", "-"], ["-", "/dev/stdin"], ["/proc/self/fd/0", "-"]] {
        let twice = crate::ringfence_with(&[&["compare"][..], &names].concat(), b"");
        assert!(failed(&twice, 2).contains("name it once"), "{names:?}");
    }
}

/// A parent such as ssh passes a socket, which no path opens.
#[test]
fn standard_input_may_be_a_socket() {
    let text = map("d", 4096, 1);
    for name in ["-", "/dev/stdin"] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(text.as_bytes()).unwrap();
        drop(ours);
        let mut command = Command::new(program());
        command.args(["compare", "--repeat", "0", "--modes", "riommu", name]);
        command.stdin(OwnedFd::from(theirs));
        succeeded(&command.output().unwrap());
    }
    let scratch = Scratch::new("socket");
    let path = scratch.path("s");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = failed(&ringfence(&["compare", &path]), 1);
    assert!(error.contains("No such device or address"), "{error}");
}

#[test]
fn a_failed_read_of_standard_input_names_it() {
    let directory = std::fs::File::open("/").unwrap();
    let mut command = Command::new(program());
    command.args(["size", "-"]).stdin(directory);
    let error = failed(&command.output().unwrap(), 1);
    assert!(error.contains("standard input: Is a directory"), "{error}");
}

/// trace-cmd prints what the recording makes it print; here it never stops.
#[test]
fn output_of_trace_cmd_is_bounded() {
    let scratch = Scratch::new("trace-cmd");
    let trace_cmd = scratch.file("trace-cmd", b"#!/bin/sh\nexec yes '# nothing'\n");
    std::fs::set_permissions(&trace_cmd, PermissionsExt::from_mode(0o755)).unwrap();
    let path = scratch.file("endless.dat", b"\x17\x08\x44tracing, and more");
    let paths = format!("{}:{}", scratch.path(""), std::env::var("PATH").unwrap());
    for command in COMMANDS {
        let output = Command::new(program())
            .args(command)
            .arg(&path)
            .env("PATH", &paths)
            .output()
            .unwrap();
        let text = failed(&output, 1);
        assert!(text.contains("--max-text"), "{text}");
    }
}

#[test]
fn no_output_steers_the_terminal() {
    let scratch = Scratch::new("escape");
    let name = "\u{1b}]0;owned\u{7}dev";
    let text = format!(
        "t-1 [0] ..... 1.0: tracing_mark_write: \u{1b}[2J\n{}",
        map(name, 4096, 64)
    );
    for file in ["plain", "\u{1b}[31mfile"] {
        let path = scratch.file(file, text.as_bytes());
        for command in COMMANDS {
            for more in [&[][..], &["--device", "no"], &["--json"]] {
                if command[0] == "trace" && more.first() == Some(&"--device") {
                    continue;
                }
                let output = ringfence(&[command, more, &[path.as_str()]].concat());
                for stream in [&output.stdout, &output.stderr] {
                    let shown = String::from_utf8_lossy(stream);
                    assert!(
                        !shown.contains(['\u{1b}', '\u{7}']),
                        "{command:?}: {shown:?}"
                    );
                }
            }
        }
    }
    // The name as it is shown chooses the device.
    let path = scratch.file("plain", text.as_bytes());
    let shown = "\\u{1b}]0;owned\\u{7}dev";
    succeeded(&ringfence(
        &[COMMANDS[0], &["--device", shown, &path]].concat(),
    ));
}

#[test]
fn other_compressions_name_the_program_that_reads_them() {
    let scratch = Scratch::new("archives");
    for (head, program) in [
        (&b"\x1f\x8b\x08\0\0\0\0\0"[..], "zcat"),
        (b"\xfd7zXZ\0\0\x04", "xzcat"),
    ] {
        let path = scratch.file("packed", head);
        let text = failed(&ringfence(&["trace", "info", &path]), 1);
        assert!(text.contains(&format!("`{program} {path} |")), "{text}");
    }
}

/// `tests/limits/amplify.py` measures hostile traces of every format and fails if one takes more
/// memory than 100 bytes a byte of its file plus 64 MiB for each pass. Here it runs over small
/// texts; `cargo xtask test` runs all formats and commands with the optimised build.
#[test]
fn memory_is_bounded_by_the_size_of_the_file() {
    let output = Command::new("python3")
        .arg(root().join("tests/limits/amplify.py"))
        .arg(program())
        .args(["--megabytes", "0.02", "--case", "text-"])
        .args(["--command", "info,strict,rtc"])
        .output()
        .unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{table}{errors}");
    assert!(table.lines().count() > 2, "{table}");
}
