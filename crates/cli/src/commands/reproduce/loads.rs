//! Guests for X29: one for each requested protection and kernel; prints each result immediately.

use ringfence_experiments::guest_loads::{
    GuestLoads, KernelLoads, Load, LoadGuest, Loads, PROTECTIONS, Protection,
};

use super::guest_session::{GuestSession, boot_all, not_prepared};
use super::interrupt::Interrupt;
use crate::args::{ReproduceGuestArgs, ReproduceLoadArgs};
use crate::failure::Failure;

/// Boots the requested guests, as many in parallel as there are CPUs. With `fetch` false the
/// function fetches nothing, and returns [`Loads::None`] if no guest was booted before. The boolean
/// is true if Ctrl-C interrupted it.
pub(super) fn count(
    args: &ReproduceGuestArgs,
    selected: &ReproduceLoadArgs,
    fetch: bool,
) -> Result<(Loads, bool), Failure> {
    if !fetch && let Some(why) = not_prepared(args, "X29") {
        return Ok((Loads::None(why), false));
    }
    let session = GuestSession::new()?;
    let loads = loads(selected);
    let mut kernels = Vec::new();
    for kernel in &selected.load_kernel {
        let runner = session.runner(args, kernel);
        let prepared = ["pviommu", "riommu"].map(|iommu| runner.prepare(iommu));
        let version = match prepared {
            [Ok(version), Ok(_)] => version,
            [Err(why), _] | [_, Err(why)] => return Ok((Loads::Failed(why), session.finish())),
        };
        let guests = all(
            protections(selected),
            &version,
            session.interrupt(),
            |protection| runner.count_loads(protection, &loads),
        );
        kernels.push(KernelLoads {
            kernel: version,
            guests,
        });
    }
    Ok((Loads::Counted(kernels), session.finish()))
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
    let mut guests: Vec<LoadGuest> = protections
        .into_iter()
        .map(|protection| LoadGuest {
            protection,
            counts: Err("interrupted".into()),
        })
        .collect();
    let name = |guest: &&mut LoadGuest| format!("Linux {kernel}, {}", guest.protection.name);
    boot_all(guests.iter_mut().collect(), stop, name, |guest| {
        guest.counts = count_loads(guest.protection);
        match &guest.counts {
            Ok(counts) => line(counts),
            Err(why) => format!("failed: {why}"),
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
