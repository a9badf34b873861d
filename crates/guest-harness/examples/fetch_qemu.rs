//! Fetches the QEMUs that judge the drivers of IOMMUs (`tests/qemu`), and prints the directory with
//! the unpacked packages. The only argument is the cache; the default is `target/qemu-judge`.

use std::path::PathBuf;

use ringfence_guest_harness::{GuestError, Qemu};

fn main() -> Result<(), GuestError> {
    let cache = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from("target/qemu-judge"), PathBuf::from);
    std::fs::create_dir_all(&cache).map_err(|error| GuestError::Io {
        path: cache.clone(),
        source: error,
    })?;
    // apt runs in a directory of its own.
    let cache = cache.canonicalize().unwrap_or(cache);
    let root = Qemu::prepare_all(&cache, &mut |message| eprintln!("{message}"))?;
    println!("{}", root.display());
    Ok(())
}
