//! Guests for X29: one for each requested protection and kernel; prints each result immediately.

use std::io::{self, IsTerminal};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use ringfence_experiments::guest_loads::{
    GuestLoads, KernelLoads, Load, LoadGuest, Loads, PROTECTIONS, Protection,
};

use super::guest_runner::GuestRunner;
use super::interrupt::Interrupt;
use crate::args::{ReproduceGuestArgs, ReproduceLoadArgs};
use crate::directory::PrivateDir;
use crate::failure::Failure;
use crate::output::print_status;

/// Boots the requested guests, as many in parallel as there are CPUs. With `fetch` false the
/// function fetches nothing, and returns [`Loads::None`] if no guest was booted before. The boolean
/// is true if Ctrl-C interrupted it.
pub(super) fn count(
    args: &ReproduceGuestArgs,
    selected: &ReproduceLoadArgs,
    fetch: bool,
) -> Result<(Loads, bool), Failure> {
    if !fetch && !args.guest_cache.join("kernels").is_dir() {
        let none = format!(
            "no guest was prepared in {}; run `ringfence reproduce X29`, which fetches one, or \
            name another directory with --guest-cache",
            args.guest_cache.display()
        );
        return Ok((Loads::None(none), false));
    }
    let program = std::env::current_exe().map_err(Failure::io("ringfence".as_ref()))?;
    // Below the system's temporary directory, because socket paths must be short.
    let dir = PrivateDir::new()?;
    let stop = Arc::new(Interrupt::default());
    stop.install_handler()
        .map_err(Failure::io("Ctrl-C".as_ref()))?;
    let loads = loads(selected);
    let mut kernels = Vec::new();
    for kernel in &selected.load_kernel {
        let runner = GuestRunner {
            program: program.clone(),
            dir: dir.path().to_owned(),
            kernel,
            args,
            stop: &stop,
        };
        let prepared = ["pviommu", "riommu"].map(|iommu| runner.prepare(iommu));
        let version = match prepared {
            [Ok(version), Ok(_)] => version,
            [Err(why), _] | [_, Err(why)] => {
                return Ok((Loads::Failed(why), stop.is_requested()));
            }
        };
        let guests = all(protections(selected), &version, &stop, |protection| {
            runner.count_loads(protection, &loads)
        });
        kernels.push(KernelLoads {
            kernel: version,
            guests,
        });
    }
    stop.finish();
    Ok((Loads::Counted(kernels), stop.is_requested()))
}

/// Returns the requested loads, in the order in which a guest runs them.
fn loads(selected: &ReproduceLoadArgs) -> Vec<Load> {
    let asked = |load: &Load| selected.load.is_empty() || selected.load.contains(load);
    Load::ALL.into_iter().filter(asked).collect()
}

/// Returns the requested protections, in the order of the table.
fn protections(selected: &ReproduceLoadArgs) -> Vec<&'static Protection> {
    let asked = |one: &&Protection| {
        selected.load_iommu.is_empty() || selected.load_iommu.iter().any(|same| same == one)
    };
    PROTECTIONS.iter().filter(asked).collect()
}

/// Returns a guest for each protection. `count_loads` boots it and returns its counts.
fn all(
    protections: Vec<&'static Protection>,
    kernel: &str,
    stop: &Interrupt,
    count_loads: impl Fn(&'static Protection) -> Result<GuestLoads, String> + Sync,
) -> Vec<LoadGuest> {
    let count = protections.len();
    let mut guests: Vec<LoadGuest> = protections
        .into_iter()
        .map(|protection| LoadGuest {
            protection,
            counts: Err("interrupted".into()),
        })
        .collect();
    let next = Mutex::new(guests.iter_mut().enumerate());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers.min(count) {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().ok().and_then(|mut next| next.next());
                    let Some((place, guest)) = taken else { break };
                    if stop.is_requested() {
                        continue;
                    }
                    let name = format!(
                        "guest {}/{count} Linux {kernel}, {}",
                        place + 1,
                        guest.protection.name
                    );
                    if io::stderr().is_terminal() {
                        print_status(&name);
                    }
                    let begun = Instant::now();
                    guest.counts = count_loads(guest.protection);
                    let result = match &guest.counts {
                        Ok(counts) => line(counts),
                        Err(why) => format!("failed: {why}"),
                    };
                    let seconds = begun.elapsed().as_secs_f64();
                    print_status(&format!("{name}: {result} ({seconds:.0} s)"));
                }
            });
        }
    });
    guests
}

/// Returns the line with the counts of one guest.
fn line(counts: &GuestLoads) -> String {
    let mut text = format!("map and unmap: {:.0} instructions", counts.map_unmap);
    if let Some(uncopied) = counts.uncopied {
        text.push_str(&format!(", {uncopied:.0} without the copy"));
    }
    for (load, one) in &counts.loads {
        text.push_str(&format!(
            "; {}: {:.0} instructions, {:.3} exits, {:.3} invalidations",
            load.name(),
            one.instructions,
            one.exits,
            one.invalidations
        ));
    }
    if let Some(exposure) = counts.exposure {
        text.push_str(&format!(
            "; {} of {} accesses after unmap reached memory",
            exposure.reached, exposure.tried
        ));
    }
    text
}

#[cfg(test)]
mod tests;
