//! Standard libraries of Rust for other targets, from Debian's archive, and the compiler of that
//! version. The compiler runs with its own dynamic loader and libraries, so that the host's C
//! library does not matter.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::GuestError;
use super::apt::Apt;
use super::architecture::Architecture;

/// Debian's stable suite has two compilers. `rustc-web`, which builds browsers, is the newer one.
const SUITE: &str = "trixie";
const COMPILER: &str = "rustc-web";
const LIBRARY: &str = "libstd-rust-web-dev";
/// The name of the package with the compiler's libraries begins so and ends with its version.
const DRIVER: &str = "libstd-rust-web-1";

/// Runs the unpacked compiler. It finds the standard libraries beside its program.
const WRAPPER: &str = r#"#!/bin/sh
root=$(dirname "$0")/root/usr
exec "$root/lib64/ld-linux-x86-64.so.2" --library-path "$root/lib/x86_64-linux-gnu" \
    "$root/bin/rustc" "$@"
"#;

/// Downloads the compiler and the standard libraries of `architectures` into `cache`, unless they
/// are there. Returns the path of the compiler, for the variable `RUSTC`. Passes progress messages
/// to `say`.
///
/// # Errors
/// [`GuestError`] names the missing part.
pub fn prepare_rust(
    architectures: &[Architecture],
    cache: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<PathBuf, GuestError> {
    let root = cache.join("root");
    let compiler = cache.join("rustc");
    if !compiler.is_file() {
        say("fetching Debian's Rust compiler (130 MB)");
        let _ = fs::remove_dir_all(&root);
        fetch_compiler(cache, &root)?;
        fs::write(&compiler, WRAPPER).map_err(GuestError::io(&compiler))?;
        let executable = Permissions::from_mode(0o755);
        fs::set_permissions(&compiler, executable).map_err(GuestError::io(&compiler))?;
    }
    for architecture in architectures {
        let complete = root.join(format!("complete-{architecture}"));
        if complete.is_file() {
            continue;
        }
        say(&format!(
            "fetching Rust's standard library for {architecture} (35 MB)"
        ));
        let apt = Apt::of(*architecture, cache, &[SUITE])?;
        apt.unpack(&[LIBRARY.into()], &root)?;
        fs::write(&complete, "").map_err(GuestError::io(&complete))?;
    }
    Ok(compiler)
}

/// Unpacks the compiler with its libraries and the host's standard library. The packages that only
/// a linker needs are left out: the host has one.
fn fetch_compiler(cache: &Path, root: &Path) -> Result<(), GuestError> {
    let apt = Apt::new(cache, &[SUITE])?;
    let driver = apt
        .depends(LIBRARY)
        .into_iter()
        .find(|name| name.starts_with(DRIVER))
        .ok_or_else(|| GuestError::Fetch {
            what: format!("a dependency {DRIVER}* of {LIBRARY}"),
            log: cache.join("apt.log"),
        })?;
    apt.unpack_with_dependencies(SUITE, &[&driver], root)?;
    apt.unpack(&[COMPILER.into(), LIBRARY.into()], root)
}
