//! The library as a C program sees it: installed by `make install`, found by pkg-config, compiled
//! by gcc, and run under valgrind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const PREFIX: &str = "/opt/ringfence";

/// An installed library.
struct Installed {
    root: TempDir,
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder into which Cargo built the library that this test links.
fn libraries() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.parent().unwrap().to_owned()
}

/// Runs a command to its success, and returns its standard output.
fn run(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    stdout
}

impl Installed {
    fn new() -> Self {
        let root = TempDir::new().unwrap();
        let mut make = Command::new("make");
        // A jobserver of an outer make or of Cargo is not this make's.
        make.env_remove("MAKEFLAGS").env_remove("MFLAGS");
        make.arg("-C").arg(package()).arg("install");
        make.arg(format!("DESTDIR={}", root.path().display()));
        make.arg(format!("PREFIX={PREFIX}"));
        make.arg(format!("LIBRARIES={}", libraries().display()));
        run(&mut make);
        Self { root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(&PREFIX[1..]).join(name)
    }

    fn pkg_config(&self, arguments: &[&str]) -> Vec<String> {
        let mut pkg_config = Command::new("pkg-config");
        pkg_config.args(arguments).arg("ringfence");
        pkg_config.env("PKG_CONFIG_PATH", self.path("lib/pkgconfig"));
        pkg_config.env("PKG_CONFIG_SYSROOT_DIR", self.root.path());
        let flags = run(&mut pkg_config);
        flags.split_whitespace().map(str::to_owned).collect()
    }

    /// Compiles a source of this package, and returns the program.
    fn compile(&self, source: &str, flags: &[String]) -> PathBuf {
        let name = Path::new(source).file_stem().unwrap();
        let program = self.root.path().join(name);
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-o"]);
        gcc.arg(&program).arg(package().join(source)).args(flags);
        run(&mut gcc);
        program
    }

    /// Runs a program under valgrind, which fails on an error and on a leak.
    fn valgrind(&self, program: &Path) -> String {
        let mut valgrind = Command::new("valgrind");
        valgrind.args([
            "--quiet",
            "--error-exitcode=1",
            "--leak-check=full",
            "--errors-for-leak-kinds=all",
            "--show-leak-kinds=all",
        ]);
        valgrind.arg(program);
        run(valgrind.env("LD_LIBRARY_PATH", self.path("lib")))
    }
}

#[test]
fn the_examples_run_and_valgrind_finds_nothing() {
    let installed = Installed::new();
    let shared = installed.pkg_config(&["--cflags", "--libs"]);
    assert!(
        shared.iter().any(|flag| flag == "-lringfence"),
        "{shared:?}"
    );
    for (source, expected) in [
        (
            "examples/nic.c",
            "the device writes the mapped buffer: yes\n\
            the buffer is released: yes\n\
            a late write is stopped: yes\n\
            a second unmap is an error: yes\n\
            the layer withholds the burst's buffers: yes\n\
            32 buffers released after 1 invalidation(s)\n\
            all table frames are back: yes\n",
        ),
        (
            "examples/iotlb.c",
            "first read: the access is not translated or not permitted\n\
            after the update: hello\n\
            after the invalidation: the access is not translated or not permitted\n",
        ),
    ] {
        let program = installed.compile(source, &shared);
        assert_eq!(installed.valgrind(&program), expected, "{source}");
    }
}

#[test]
fn a_program_links_the_static_library() {
    let installed = Installed::new();
    let mut flags = installed.pkg_config(&["--cflags", "--libs", "--static"]);
    flags.retain(|flag| flag != "-lringfence");
    flags.insert(
        0,
        installed.path("lib/libringfence.a").display().to_string(),
    );
    let program = installed.compile("examples/nic.c", &flags);
    fs::remove_file(installed.path("lib/libringfence.so.1")).unwrap();
    assert!(run(&mut Command::new(program)).contains("all table frames are back: yes"));
}

#[test]
fn the_plug_in_allocates_disjoint_aligned_ranges() {
    let installed = Installed::new();
    for kind in ["0", "1", "2", "3", "4"] {
        let mut flags = installed.pkg_config(&["--cflags", "--libs"]);
        flags.insert(0, format!("-DKIND={kind}"));
        let program = installed.compile("tests/c/plugin.c", &flags);
        let expected = format!("c-library-{kind}\n");
        // The default one under valgrind: the others take minutes there.
        let output = if kind == "0" {
            installed.valgrind(&program)
        } else {
            run(Command::new(program).env("LD_LIBRARY_PATH", installed.path("lib")))
        };
        assert_eq!(output, expected);
    }
}

#[test]
fn structures_and_numbers_are_those_of_the_version() {
    let installed = Installed::new();
    let flags = installed.pkg_config(&["--cflags", "--libs"]);
    let program = installed.compile("tests/c/abi.c", &flags);
    let texts = run(Command::new(program).env("LD_LIBRARY_PATH", installed.path("lib")));
    let known: Vec<&str> = texts
        .lines()
        .filter(|line| !line.ends_with(" unknown status"))
        .collect();
    assert_eq!(known.len(), 32, "{texts}");
    let mut distinct: Vec<&str> = known
        .iter()
        .map(|line| line.split_once(' ').unwrap().1)
        .collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(
        distinct.len(),
        known.len(),
        "each status has a text of its own"
    );
}

#[test]
fn the_library_exports_the_listed_functions() {
    let library = libraries().join("libringfence.so");
    let listed = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library));
    let mut exported: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .collect();
    exported.sort_unstable();
    let expected = fs::read_to_string(package().join("tests/symbols.txt")).unwrap();
    assert_eq!(exported, expected.lines().collect::<Vec<_>>());
    let header = fs::read_to_string(package().join("include/ringfence.h")).unwrap();
    for name in exported {
        assert!(
            header.contains(&format!("{name}(")),
            "{name} is not in the header"
        );
    }
}
