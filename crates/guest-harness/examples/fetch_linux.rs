//! Fetches the Linux guests whose page tables the decoders read (`tests/qemu`), and prints their
//! directories. The only argument is the cache; the default is `qemu-judge` in the target
//! directory.

use std::path::{Path, PathBuf};

use ringfence_guest_harness::{Architecture, GuestError, prepare_linux};

fn main() -> Result<(), GuestError> {
    let cache = match std::env::args_os().nth(1) {
        Some(cache) => cache.into(),
        None => default_cache(),
    };
    std::fs::create_dir_all(&cache).map_err(|error| GuestError::Io {
        path: cache.clone(),
        source: error,
    })?;
    // apt runs in a directory of its own.
    let cache = cache.canonicalize().unwrap_or(cache);
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/qemu/module");
    for architecture in Architecture::ALL {
        let say = &mut |message: &str| eprintln!("{message}");
        let guest = prepare_linux(architecture, &module, &cache, say)?;
        println!("{}", guest.display());
    }
    Ok(())
}

/// Returns the cache in the target directory, where this program lies in `debug/examples`.
fn default_cache() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().nth(3);
    let target = target.unwrap_or_else(|| Path::new("target"));
    target.join("qemu-judge")
}
