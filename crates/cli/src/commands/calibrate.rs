//! `ringfence calibrate`: measures this machine and writes a cost profile.

mod host;

use std::fmt::Write as _;
use std::fs;
use std::hint::black_box;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringfence_lab::meter::cycles;
use ringfence_lab::{LabError, Profile};
use ringfence_memory::{Arena, WriteBack};
use ringfence_types::{PhysAddr, PhysMemory};
use serde::Serialize;

use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::out_file::{FileAccess, OutFile};
use crate::output::print;

/// Writes this machine's profile.
pub(crate) fn calibrate(args: &CalibrateArgs) -> Result<(), Failure> {
    let text = if args.host {
        host::profile(args)?
    } else {
        profile(&Measured::now()?)?
    };
    match &args.out {
        None => print(&text),
        Some(path) => {
            let mut out = OutFile::create(path, FileAccess::Umask)?;
            out.write_all(text.as_bytes()).map_err(Failure::io(path))?;
            out.finish()
        }
    }
}

/// Costs that a user program can measure; cycles are medians.
struct Measured {
    cycles_per_ns: f64,
    read_counter: f64,
    store_entry: f64,
    copy_page: f64,
    /// By instruction: cycles to write one line back and wait for it, and cycles per line if 64
    /// lines share the wait.
    write_back: Vec<(WriteBack, f64, f64)>,
    /// True if page walks of this host's IOMMUs are coherent; `None` if unknown.
    coherent: Option<bool>,
}

/// Number of samples per measurement.
const SAMPLES: usize = 101;
/// Repetitions within a sample: one read of the counter costs as much as one measured operation.
const TIMES: u64 = 512;

impl Measured {
    fn now() -> Result<Self, Failure> {
        let best = WriteBack::best();
        let store_entry = entries(best, |arena, at| {
            if let Ok(word) = arena.word(at) {
                word.store(black_box(at.get() | 3), Ordering::Release);
            }
        })?;
        let write_back = WriteBack::available()
            .into_iter()
            .map(|kind| {
                let single = entries(kind, |arena, at| {
                    touch(arena, at);
                    arena.drain();
                })?;
                let burst = entries(kind, |arena, at| {
                    touch(arena, at);
                    if at.get() % (64 * 64) == 0 {
                        arena.drain();
                    }
                })?;
                Ok((kind, single, burst))
            })
            .collect::<Result<_, Failure>>()?;
        Ok(Self {
            cycles_per_ns: rate(),
            read_counter: median(|| {
                let start = cycles();
                for _ in 0..TIMES {
                    black_box(cycles());
                }
                cycles().wrapping_sub(start)
            }),
            store_entry,
            copy_page: copy_page(),
            write_back,
            coherent: walks_snoop(Path::new("/sys/class/iommu")),
        })
    }
}

/// Stores a word and writes its line back.
fn touch(arena: &Arena, at: PhysAddr) {
    if let Ok(word) = arena.word(at) {
        word.store(black_box(at.get() | 3), Ordering::Release);
    }
    arena.write_back(at, 8);
}

/// Returns the median cycles of `each` for a line of memory, over many lines.
fn entries(kind: WriteBack, each: impl Fn(&Arena, PhysAddr)) -> Result<f64, Failure> {
    let arena = Arena::with_write_back(TIMES * 64, kind).map_err(LabError::from)?;
    Ok(median(|| {
        let start = cycles();
        for line in 0..TIMES {
            each(&arena, PhysAddr::new(line * 64));
        }
        cycles().wrapping_sub(start)
    }))
}

/// Returns the median of samples of [`TIMES`] repetitions each, per repetition.
fn median(mut sample: impl FnMut() -> u64) -> f64 {
    let mut samples: Vec<u64> = (0..SAMPLES).map(|_| sample()).collect();
    samples.sort_unstable();
    let middle = samples.get(SAMPLES / 2).copied().unwrap_or(0);
    middle as f64 / TIMES as f64
}

/// Returns the median cycles of copying a page of 4 KiB between warm buffers.
fn copy_page() -> f64 {
    let (from, mut to) = (vec![1_u8; 4096], vec![0_u8; 4096]);
    median(|| {
        let start = cycles();
        for _ in 0..TIMES {
            to.copy_from_slice(black_box(&from));
            black_box(&mut to);
        }
        cycles().wrapping_sub(start)
    })
}

/// Returns the counter's cycles per nanosecond.
fn rate() -> f64 {
    let (start, from) = (Instant::now(), cycles());
    while start.elapsed() < Duration::from_millis(50) {
        std::hint::spin_loop();
    }
    cycles().wrapping_sub(from) as f64 / start.elapsed().as_nanos().max(1) as f64
}

/// Reads bit 0 of the extended capabilities of every VT-d unit (VT-d specification, ECAP_REG.C):
/// true if page walks of all units snoop the caches. `None` without such a unit or without
/// permission.
fn walks_snoop(class: &Path) -> Option<bool> {
    let mut answer = None;
    for unit in fs::read_dir(class).ok()?.flatten() {
        let file = unit.path().join("intel-iommu/ecap");
        let Ok(text) = fs::read_to_string(file) else {
            continue;
        };
        let snoops = u64::from_str_radix(text.trim(), 16).ok()? & 1 == 1;
        answer = Some(answer.unwrap_or(true) && snoops);
    }
    answer
}

/// Returns the file: the profile as TOML, preceded by comments that list measured and unmeasured
/// values.
fn profile(measured: &Measured) -> Result<String, Failure> {
    let source = Profile::r210_2015();
    let profile = Profile {
        name: "calibrated".into(),
        source: format!(
            "measured: this machine; invalidation, miss, baseline_cycles and geometry: {} ({})",
            source.name, source.source
        ),
        coherent: measured.coherent.unwrap_or(source.coherent),
        ..source.clone()
    };
    let mut out = String::from(
        "# A cost profile of `ringfence calibrate`. Cycles are those of the processor's \
        counter.\n#\n",
    );
    out.push_str(
        "# Measured on this machine. `compare` executes these operations, and models none of \
        them:\n",
    );
    let mut say = |what: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "#   {what:<52} {value}");
    };
    say(
        "cycles per nanosecond",
        format!("{:.3}", measured.cycles_per_ns),
    );
    say(
        "reading the counter",
        format!("{:.1}", measured.read_counter),
    );
    say(
        "storing a table entry, one a line",
        format!("{:.1}", measured.store_entry),
    );
    for (kind, single, burst) in &measured.write_back {
        let name = format!("{kind:?}").to_lowercase();
        say(
            &format!("storing and {name}, waiting for each line"),
            format!("{single:.1}"),
        );
        say(
            &format!("storing and {name}, waiting once for 64 lines"),
            format!("{burst:.1}"),
        );
    }
    out.push_str("#\n# Not measurable by a user program and taken from ");
    let _ = writeln!(
        out,
        "{}: invalidation_cycles, miss_cycles, baseline_cycles,",
        source.name
    );
    out.push_str("# iotlb_sets, iotlb_ways, walk_cache_entries. Edit the numbers that you know.\n");
    out.push_str(match measured.coherent {
        Some(_) => "# coherent: reported by this host's IOMMU.\n\n",
        None => "# coherent: this host has no IOMMU; taken from the same profile.\n\n",
    });
    out.push_str(&toml_of(&profile)?);
    Ok(out)
}

/// Returns the TOML of a profile.
fn toml_of(profile: &impl Serialize) -> Result<String, Failure> {
    toml::to_string(profile)
        .map_err(|e| Failure::io(Path::new("profile"))(std::io::Error::other(e)))
}

#[cfg(test)]
mod tests {
    use ringfence_lab::MachineProfile;

    use super::*;

    #[test]
    fn the_file_is_a_profile() {
        let measured = Measured {
            cycles_per_ns: 2.0,
            read_counter: 30.0,
            store_entry: 1.5,
            copy_page: 90.0,
            write_back: vec![(WriteBack::best(), 600.0, 20.0)],
            coherent: Some(true),
        };
        let text = profile(&measured).unwrap();
        let read: MachineProfile = toml::from_str(&text).unwrap();
        assert_eq!(read.validate(), Ok(()));
        assert_eq!(read.coherent, Some(true));
        assert_eq!(
            read.invalidation_cycles,
            Some(Profile::r210_2015().invalidation_cycles)
        );
        assert!(text.contains("taken from r210-2015"), "{text}");
    }

    #[test]
    fn coherency_is_unknown_without_an_iommu() {
        assert_eq!(walks_snoop(Path::new("/nonexistent")), None);
    }
}
