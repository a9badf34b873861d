//! The program, on QEMU's device and on Ringfence's: its table is the published one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The published table, and the line after which the program's output begins.
const TABLE: &str = "../../docs/VIRTIO-IOMMU-CONFORMANCE.md";
const MARK: &str = "<!-- output of virtio-iommu-conformance -->\n\n";

fn program(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_virtio-iommu-conformance");
    let output = Command::new(program).args(arguments).output();
    output.expect("the program starts")
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("UTF-8")
}

/// Returns the directory with QEMU: `QEMU_ROOT`, or the one in the target directory.
fn qemu() -> PathBuf {
    if let Some(root) = std::env::var_os("QEMU_ROOT") {
        return root.into();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_virtio-iommu-conformance"));
    let mut roots = program.ancestors().map(|at| at.join("qemu-judge/root"));
    roots.find(|root| root.is_dir()).expect(
        "QEMU is missing: run `cargo run -p ringfence-guest-harness --example fetch_qemu`, or set \
         QEMU_ROOT",
    )
}

/// `RINGFENCE_BLESS=1` rewrites the table.
#[test]
fn the_published_table_is_the_output() {
    let qemu = qemu();
    let qemu = qemu.to_str().expect("a path in UTF-8");
    let devices = ["--device", "qemu", "--device", "ringfence"];
    let output = program(&[&devices[..], &["--qemu", qemu, "--markdown"]].concat());
    let (errors, table) = (text(output.stderr), text(output.stdout));
    assert_eq!(errors, "");
    // QEMU's device does not conform.
    assert_eq!(output.status.code(), Some(1));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
    let published = std::fs::read_to_string(&path).expect("the table");
    let (head, expected) = published.split_once(MARK).expect("a mark");
    if std::env::var_os("RINGFENCE_BLESS").is_some() {
        std::fs::write(path, format!("{head}{MARK}{table}")).expect("written");
        return;
    }
    for (line, expected) in table.lines().zip(expected.lines()) {
        assert_eq!(line, expected);
    }
    assert_eq!(table, expected);
}

#[test]
fn the_exit_status_is_0_for_a_device_that_conforms() {
    let output = program(&["--device", "ringfence"]);
    assert_eq!(output.status.code(), Some(0));
    let table = text(output.stdout);
    let last = table.lines().last().unwrap_or_default();
    assert!(last.ends_with(", 0 fail, 0 not applicable"), "{table}");
}

#[test]
fn a_closed_standard_output_does_not_change_the_exit_status() {
    for arguments in [&["--list"][..], &["--device", "ringfence"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_virtio-iommu-conformance"));
        let output = command.args(arguments).stdout(writer).output();
        let output = output.expect("the program starts");
        let errors = text(output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {errors}");
    }
}

#[test]
fn json_has_each_statement_and_verdict() {
    let output = program(&["--device", "ringfence", "--json", "--only", "map-"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let statements = report["statements"].as_array().expect("statements");
    let results = report["devices"][0]["results"].as_array().expect("results");
    assert!(statements.len() > 5 && statements.len() == results.len());
    let names = |list: &[serde_json::Value]| -> Vec<String> {
        list.iter().map(|one| one["id"].to_string()).collect()
    };
    assert_eq!(names(statements), names(results));
    assert!(results.iter().all(|result| result["verdict"] == "pass"));
}

#[test]
fn a_device_that_cannot_start_is_an_error() {
    let output = program(&["--device", "qemu", "--qemu", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(2));
    let errors = text(output.stderr);
    assert!(errors.contains("cannot start /no/such/program"), "{errors}");
    let output = program(&["--device", "ringfence", "--only", "no-such-statement"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        text(output.stderr),
        "error: no statement's id contains `no-such-statement`: see --list\n"
    );
}
