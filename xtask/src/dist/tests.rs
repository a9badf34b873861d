//! Tests with a script in place of the command, which needs no build.

use std::os::unix::fs::PermissionsExt;

use super::*;
use serde_json::{Value, json};

/// Prints what a release asks for.
const COMMAND: &str = "#!/bin/sh
case $1 in
completions) echo \": $2\" ;;
man) /bin/mkdir -p \"$2\" && printf '.TH ringfence 1\\n.SH SYNOPSIS\\nx\\n' >\"$2/ringfence.1\" ;;
-V) echo ringfence 0 ;;
esac
";

/// A release of the command, packed below a new directory.
fn packed(mode: u32) -> (tempfile::TempDir, Made) {
    let repo = Repo::find().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let binary = directory.path().join("command");
    // Another process writes the file: a thread that forks could keep it open for writing, and
    // executing it would fail.
    let mut write = process::command(directory.path(), "sh");
    write.args(["-c", r#"printf %s "$1" >"$0""#]);
    process::capture(write.arg(&binary).arg(COMMAND)).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(mode)).unwrap();
    let made = pack(&repo, &binary, &directory.path().join("out")).unwrap();
    (directory, made)
}

/// Returns the lines that `program` prints in the directory of a release.
fn lines(directory: &tempfile::TempDir, program: &str, arguments: &[&str]) -> Vec<String> {
    let out = directory.path().join("out");
    let text = process::capture(process::command(&out, program).args(arguments)).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn equal_inputs_give_equal_bytes() {
    let (first, made) = packed(0o755);
    let (second, _) = packed(0o700);
    for name in [&made.archive, &made.package, &"SHA256SUMS".to_owned()] {
        let read = |directory: &tempfile::TempDir| {
            fs::read(directory.path().join("out").join(name)).unwrap()
        };
        assert!(read(&first) == read(&second), "{name} differs");
    }
    let sums = lines(&first, "sha256sum", &["--check", "SHA256SUMS"]);
    assert_eq!(sums.len(), 2, "{sums:?}");
}

#[test]
fn files_belong_to_root_and_have_the_time_of_the_commit() {
    let (directory, made) = packed(0o700);
    let epoch = epoch(&Repo::find().unwrap()).unwrap();
    let time = format!("--date=@{epoch}");
    let expected = lines(&directory, "date", &["--utc", &time, "+%Y-%m-%d %H:%M:%S"]);
    let arguments = ["--list", "--verbose", "--utc", "--full-time", "--file"];
    for line in lines(
        &directory,
        "tar",
        &[&arguments[..], &[&made.archive]].concat(),
    ) {
        assert!(line.contains("0/0") || line.contains("root/root"), "{line}");
        assert!(line.contains(&expected[0]), "{line}");
        let program = line.ends_with("/bin/ringfence") || line.starts_with('d');
        let mode = if program { "rwxr-xr-x" } else { "rw-r--r--" };
        assert_eq!(&line[1..10], mode, "{line}");
    }
    let arguments = ["TZ=UTC", "dpkg-deb", "--contents", &made.package];
    let minute = &expected[0][..16];
    for line in lines(&directory, "env", &arguments) {
        assert!(
            line.contains("root/root") && line.contains(minute),
            "{line}"
        );
    }
}

#[test]
fn archive_and_package_have_all_parts() {
    let (directory, made) = packed(0o755);
    let version = Release::of(&Repo::find().unwrap()).unwrap().version;
    let source = format!("src/ringfence-{version}/dkms.conf");
    let archived = lines(&directory, "tar", &["--list", "--file", &made.archive]);
    let mut shared = vec![
        "bin/ringfence",
        "share/doc/ringfence/ringfence.cdx.json",
        &source,
    ];
    shared.extend(COMPLETIONS.iter().map(|(_, path)| *path));
    shared.extend(["LICENSE-MIT", "LICENSE-APACHE", "README.md", "THIRD-PARTY"]);
    for path in shared.iter().chain(&["share/man/man1/ringfence.1"]) {
        assert!(
            archived.iter().any(|line| line.ends_with(path)),
            "{path}: {archived:?}"
        );
    }
    assert!(
        !archived.iter().any(|line| line.contains("/tests/")),
        "{archived:?}"
    );
    let packaged = lines(&directory, "dpkg-deb", &["--contents", &made.package]);
    let own = [
        "man1/ringfence.1.gz",
        "doc/ringfence/copyright",
        "doc/ringfence/changelog.gz",
    ];
    for path in shared.iter().chain(&own) {
        assert!(
            packaged.iter().any(|line| line.ends_with(path)),
            "{path}: {packaged:?}"
        );
    }
    verify(&directory.path().join("out"), &made).unwrap();
}

/// A program that links one crate, expands a macro and is built by another.
fn metadata() -> Value {
    let package = |name: &str, kind: &str| {
        json!({
            "id": name, "name": name, "version": "1.0.0+x", "license": "MIT/Apache-2.0",
            "manifest_path": format!("/r/{name}/Cargo.toml"), "targets": [{"kind": [kind]}],
        })
    };
    let dependency = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
    let of_root = [
        dependency("linked", Value::Null),
        dependency("macro", Value::Null),
        dependency("builder", json!("build")),
        dependency("tester", json!("dev")),
    ];
    json!({
        "packages": [
            package("root", "bin"), package("linked", "lib"), package("macro", "proc-macro"),
            package("builder", "lib"), package("tester", "lib"), package("other", "lib"),
        ],
        "resolve": {"nodes": [
            {"id": "root", "deps": of_root}, {"id": "linked", "deps": []},
            {"id": "builder", "deps": []}, {"id": "tester", "deps": []},
        ]},
    })
}

#[test]
fn bill_of_materials_names_what_is_linked() {
    let lock = "[[package]]\nname = \"linked\"\nversion = \"1.0.0+x\"\nchecksum = \"ab\"\n";
    let graph = Graph::of(&metadata(), lock, "root").unwrap();
    let bill: Value = serde_json::from_str(&sbom::write(&graph, "2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(bill["metadata"]["component"]["name"], "root");
    let purl = "pkg:cargo/linked@1.0.0%2Bx";
    assert_eq!(
        bill["components"],
        json!([{
            "type": "library", "bom-ref": purl, "name": "linked", "version": "1.0.0+x",
            "purl": purl, "licenses": [{"expression": "MIT OR Apache-2.0"}],
            "hashes": [{"alg": "SHA-256", "content": "ab"}],
        }])
    );
    assert_eq!(
        bill["dependencies"],
        json!([
            {"ref": purl, "dependsOn": []},
            {"ref": "pkg:cargo/root@1.0.0%2Bx", "dependsOn": [purl]},
        ])
    );
}

#[test]
fn a_crate_without_a_licence_is_refused() {
    let lock = "[[package]]\nname = \"linked\"\nversion = \"1.0.0+x\"\nchecksum = \"ab\"\n";
    let mut graph = Graph::of(&metadata(), lock, "root").unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("LICENSE"), "the text").unwrap();
    for package in &mut graph.packages {
        directory.path().clone_into(&mut package.directory);
    }
    let text = notices::write(&graph.packages).unwrap();
    assert!(
        text.ends_with("==== linked 1.0.0+x: MIT/Apache-2.0 ====\n\nthe text\n"),
        "{text}"
    );
    graph.packages[0].licence = None;
    let error = notices::write(&graph.packages).unwrap_err().to_string();
    assert_eq!(error, "linked 1.0.0+x names no licence");
}
