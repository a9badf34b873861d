//! Builds the debug kernel of guest tests and prints its directory. The arguments are its
//! configuration and the cache of guests.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use ringfence_guest_harness::prepare_debug_kernel;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: debug_kernel CONFIGURATION CACHE";
    let configuration = arguments.next().context(usage)?;
    let cache = arguments.next().context(usage)?;
    let text =
        fs::read_to_string(&configuration).with_context(|| configuration.display().to_string())?;
    fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    // apt runs in a directory of its own.
    let cache = cache.canonicalize()?;
    let kernel = prepare_debug_kernel(&text, &cache, &mut |message| eprintln!("{message}"))?;
    println!("{}", kernel.display());
    Ok(())
}
