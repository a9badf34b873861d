//! `random TARGET SECONDS [SEED]`: the plain random run of a target, on any toolchain. The last line says how many inputs it
//! ran; an input that breaks the target is kept under `artifacts/`.

use std::collections::hash_map::DefaultHasher;
use std::error::Error;
use std::fs;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_fuzz::random::{Random, input};
use ringfence_fuzz::{TARGETS, Target, corpus};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, seconds, seed) = match arguments.as_slice() {
        [name, seconds] => (name, seconds.parse()?, 1),
        [name, seconds, seed] => (name, seconds.parse()?, seed.parse()?),
        _ => return Err("usage: random TARGET SECONDS [SEED]".into()),
    };
    let target = TARGETS
        .iter()
        .find(|target| target.name == name)
        .ok_or("no such target")?;
    run(target, Duration::from_secs(seconds), seed)
}

fn run(target: &Target, time: Duration, seed: u64) -> Result<(), Box<dyn Error>> {
    let seeds = corpus::read(target.name)?;
    let mut random = Random::new(seed);
    let mut runs = 0_u64;
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..256 {
            let data = input(&mut random, &seeds);
            let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(&data, &mut |_| {})));
            if outcome.is_err() {
                return Err(keep(target.name, &data)?.into());
            }
        }
        runs += 256;
    }
    println!("{}: {runs} random inputs, seed {seed}", target.name);
    Ok(())
}

/// Writes the input down and says where.
fn keep(target: &str, data: &[u8]) -> Result<String, Box<dyn Error>> {
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("artifacts")
        .join(target);
    fs::create_dir_all(&directory)?;
    let path = directory.join(format!("random-{:016x}", hasher.finish()));
    fs::write(&path, data)?;
    Ok(format!("{target} fails on {}", path.display()))
}
