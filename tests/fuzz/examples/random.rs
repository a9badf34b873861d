//! `random TARGET SECONDS|--runs N [SEED]`: runs a target on random inputs, on any toolchain. The
//! last line shows the number of inputs. An input that makes the target panic, or that takes a
//! minute, is stored below `fuzz/artifacts/`.

use std::collections::hash_map::DefaultHasher;
use std::error::Error;
use std::fs;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringfence_fuzz::random::{Random, input};
use ringfence_fuzz::{TARGETS, Target, corpus};

/// Maximum run time of one input; normal ones take milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The current input and its number.
type Current = Arc<Mutex<(u64, Vec<u8>)>>;

/// Ends the process if one input runs longer than [`PATIENCE`].
fn watch(target: &'static str, current: Current) {
    thread::spawn(move || {
        let mut last = 0;
        loop {
            thread::sleep(PATIENCE);
            let (number, data) = &*current.lock().unwrap_or_else(PoisonError::into_inner);
            if *number == last {
                let kept = keep(target, data).unwrap_or_else(|error| error.to_string());
                eprintln!("an input runs for more than {PATIENCE:?}: {kept}");
                std::process::exit(1);
            }
            last = *number;
        }
    });
}

/// End of a run.
enum Bound {
    Time(Duration),
    /// After this number of inputs.
    Runs(u64),
}

fn main() -> Result<(), Box<dyn Error>> {
    ringfence_fuzz::serve::run_if_sandboxed();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (name, bound, seed) = match arguments.as_slice() {
        [name, "--runs", runs, seed @ ..] if seed.len() < 2 => {
            (*name, Bound::Runs(runs.parse()?), seed.first())
        }
        [name, seconds, seed @ ..] if seed.len() < 2 => {
            let time = Duration::from_secs(seconds.parse()?);
            (*name, Bound::Time(time), seed.first())
        }
        _ => return Err("usage: random TARGET SECONDS|--runs N [SEED]".into()),
    };
    let target = TARGETS
        .iter()
        .find(|target| target.name == name)
        .ok_or("no such target")?;
    run(target, &bound, seed.map_or(Ok(1), |seed| seed.parse())?)
}

fn run(target: &Target, bound: &Bound, seed: u64) -> Result<(), Box<dyn Error>> {
    let seeds = corpus::read(target.name)?;
    let mut random = Random::new(seed);
    let mut runs = 0_u64;
    let start = Instant::now();
    let goes_on = |runs| match *bound {
        Bound::Time(time) => start.elapsed() < time,
        Bound::Runs(wanted) => runs < wanted,
    };
    let current = Current::default();
    watch(target.name, Arc::clone(&current));
    while goes_on(runs) {
        let data = input(&mut random, &seeds);
        *current.lock().unwrap_or_else(PoisonError::into_inner) = (runs + 1, data.clone());
        let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(&data, &mut |_| {})));
        if outcome.is_err() {
            return Err(keep(target.name, &data)?.into());
        }
        runs += 1;
    }
    println!("{}: {runs} random inputs, seed {seed}", target.name);
    Ok(())
}

/// Stores the input and returns a message with its path.
fn keep(target: &str, data: &[u8]) -> Result<String, Box<dyn Error>> {
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/artifacts")
        .join(target);
    fs::create_dir_all(&directory)?;
    let path = directory.join(format!("random-{:016x}", hasher.finish()));
    fs::write(&path, data)?;
    Ok(format!("{target} fails on {}", path.display()))
}
