//! Fetches Debian's Rust compiler and standard libraries of other targets, and prints the path of
//! the compiler, for the variable `RUSTC`. The arguments are the cache and Debian's names of
//! architectures.

use std::path::Path;

use anyhow::{Context, bail};
use ringfence_guest_harness::{Architecture, prepare_rust};

const ALL: [Architecture; 4] = [
    Architecture::Arm64,
    Architecture::I386,
    Architecture::Riscv64,
    Architecture::S390x,
];

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let cache = arguments.next().context("no cache")?;
    let mut architectures = Vec::new();
    for name in arguments {
        match ALL.iter().find(|known| known.name() == name) {
            Some(known) => architectures.push(*known),
            None => bail!("no standard library for {name}: there are {ALL:?}"),
        }
    }
    std::fs::create_dir_all(&cache)?;
    // apt runs in a directory of its own.
    let cache = Path::new(&cache).canonicalize()?;
    let compiler = prepare_rust(&architectures, &cache, &mut |message| {
        eprintln!("{message}");
    })?;
    println!("{}", compiler.display());
    Ok(())
}
