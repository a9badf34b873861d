//! Guests for X21: one for each configuration and kind of device; prints each result immediately.

use ringfence_experiments::guests::{
    Configuration, FalseFaults, GuestCell, GuestCounts, Guests, Kind, Uncounted,
};

use super::guest_session::{GuestSession, boot_all, not_prepared};
use super::interrupt::Interrupt;
use crate::args::ReproduceGuestArgs;
use crate::failure::Failure;

/// Boots a guest for every requested cell, as many in parallel as there are CPUs. With `fetch`
/// false the function fetches nothing, and returns [`Guests::None`] with the reason if no guest was
/// booted before. The boolean is true if Ctrl-C interrupted it.
pub(super) fn count(args: &ReproduceGuestArgs, fetch: bool) -> Result<(Guests, bool), Failure> {
    if !fetch && let Some(why) = not_prepared(args, "X21") {
        return Ok((Guests::None(why), false));
    }
    let session = GuestSession::new()?;
    let runner = session.runner(args, &args.guest_kernel);
    let guests = match runner.prepare("pviommu") {
        Err(why) => Guests::Failed(why),
        Ok(kernel) => Guests::Counted {
            kernel,
            cells: all(args, session.interrupt(), |kind, configuration| {
                runner.count_operation(kind, configuration)
            }),
        },
    };
    Ok((guests, session.finish()))
}

/// Returns every cell; cells that the user did not request have no guest.
fn cells(args: &ReproduceGuestArgs) -> Vec<GuestCell> {
    let pairs = Kind::ALL
        .into_iter()
        .flat_map(|kind| Configuration::ALL.map(|one| (kind, one)));
    let asked = |kind, configuration| {
        (args.guest_kind.is_empty() || args.guest_kind.contains(&kind))
            && (args.guest_configuration.is_empty()
                || args.guest_configuration.contains(&configuration))
    };
    let cells = pairs.map(|(kind, configuration)| {
        let why = match asked(kind, configuration) {
            false => Uncounted::Unasked,
            true => Uncounted::Failed("interrupted".into()),
        };
        GuestCell {
            kind,
            configuration,
            counts: Err(why),
        }
    });
    cells.collect()
}

/// Returns every cell. `count_operation` boots the guest of a requested cell, and returns its
/// counts.
fn all(
    args: &ReproduceGuestArgs,
    stop: &Interrupt,
    count_operation: impl Fn(Kind, Configuration) -> Result<GuestCounts, Uncounted> + Sync,
) -> Vec<GuestCell> {
    let mut cells = cells(args);
    let booted = cells.iter_mut().filter(|cell| cell.failed()).collect();
    let name =
        |cell: &&mut GuestCell| format!("{}, {}", cell.kind.name(), cell.configuration.name());
    boot_all(booted, stop, name, |cell| {
        cell.counts = count_operation(cell.kind, cell.configuration);
        match &cell.counts {
            Ok(counts) => line(cell.kind, counts),
            Err(Uncounted::FalseFaults(seen)) => no_line(cell.kind, seen),
            Err(Uncounted::Failed(why)) => format!("failed: {why}"),
            Err(Uncounted::Unasked) => "not requested".into(),
        }
    });
    cells
}

/// Returns the line with the counts of one guest.
fn line(kind: Kind, counts: &GuestCounts) -> String {
    let mut text = format!(
        "per {}: {:.3} requests, {:.3} exits for them, {:.3} for the device",
        kind.operation(),
        counts.requests,
        counts.exits,
        counts.device_exits
    );
    if let (Some(maps), Some(hits)) = (counts.maps, counts.hits) {
        text.push_str(&format!(", {maps:.2} mappings, {hits:.2} of them hits"));
    }
    if let Some(instructions) = counts.instructions {
        text.push_str(&format!(", {instructions:.0} instructions"));
    }
    text.push_str(&format!(
        "; map and unmap: {:.0} instructions",
        counts.map_unmap
    ));
    if counts.stopped > 0.0 {
        text.push_str(&format!(
            "; {:.0} accesses stopped, {:.0} requests without a status",
            counts.stopped, counts.unanswered
        ));
    }
    if let Some(host) = &counts.host {
        text.push_str(&format!(
            "; host: {:.3} second-stage walks, {:.3} pages through the pointer, {:.0} frames, \
            {:.0} of them waited for",
            host.lookups, host.through_pointer, host.frames, host.frames_awaited
        ));
    }
    text
}

/// Returns the line for a guest without operations to count.
fn no_line(kind: Kind, seen: &FalseFaults) -> String {
    format!(
        "no {} to count: of {:.0} requests {:.0} failed and {:.0} got no status; {:.0} accesses \
        stopped; map and unmap: {:.0} instructions",
        kind.operation(),
        seen.requests,
        seen.failed,
        seen.unanswered,
        seen.stopped,
        seen.map_unmap
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    fn args() -> ReproduceGuestArgs {
        ReproduceGuestArgs {
            guest_cache: "there/is/none".into(),
            guest_kernel: "6.12".into(),
            guest_timeout: 1,
            guest_kind: Vec::new(),
            guest_configuration: Vec::new(),
            module_source: "kmod".into(),
        }
    }

    #[test]
    fn all_does_not_fetch() {
        let args = args();
        let (Guests::None(why), false) = count(&args, false).unwrap() else {
            panic!("guests from nowhere");
        };
        assert!(
            why.contains("there/is/none") && why.contains("reproduce X21"),
            "{why}"
        );
        assert!(!args.guest_cache.exists());
    }

    #[test]
    fn only_requested_guests_boot() {
        let mut args = args();
        let every = Kind::ALL.len() * Configuration::ALL.len();
        let booted = |args: &ReproduceGuestArgs| {
            let cells = cells(args);
            assert_eq!(cells.len(), every);
            cells.iter().filter(|cell| cell.failed()).count()
        };
        assert_eq!(booted(&args), every);
        args.guest_kind = vec![Kind::Emulated];
        assert_eq!(booted(&args), Configuration::ALL.len());
        args.guest_configuration = vec![Configuration::PviommuRtc, Configuration::VirtioStrict];
        assert_eq!(booted(&args), 2);
        args.guest_kind = Vec::new();
        assert_eq!(booted(&args), 2 * Kind::ALL.len());
    }

    /// Counts that differ for each cell.
    fn counts(kind: Kind, configuration: Configuration) -> GuestCounts {
        let kind = Kind::ALL.iter().position(|one| *one == kind).unwrap();
        let mut all = Configuration::ALL.iter();
        let configuration = all.position(|one| *one == configuration).unwrap();
        GuestCounts {
            requests: kind as f64,
            exits: configuration as f64,
            device_exits: 0.0,
            maps: None,
            hits: None,
            instructions: None,
            map_unmap: (10 * kind + configuration) as f64,
            stopped: 0.0,
            unanswered: 0.0,
            host: None,
        }
    }

    #[test]
    fn each_requested_cell_boots_one_guest_and_gets_its_counts() {
        let two = vec![Configuration::PviommuRtc, Configuration::VirtioStrict];
        for (kinds, configurations) in [
            (vec![], vec![]),
            (vec![Kind::ManyQueue, Kind::Assigned], two.clone()),
            (vec![], two),
            (vec![Kind::Simulated], vec![]),
        ] {
            let mut args = args();
            (args.guest_kind, args.guest_configuration) = (kinds.clone(), configurations.clone());
            let booted = Mutex::new(Vec::new());
            let found = all(&args, &Interrupt::default(), |kind, configuration| {
                booted.lock().unwrap().push((kind, configuration));
                Ok(counts(kind, configuration))
            });
            let booted = booted.into_inner().unwrap();
            let mut cells = found.into_iter();
            for kind in Kind::ALL {
                for configuration in Configuration::ALL {
                    let asked = (kinds.is_empty() || kinds.contains(&kind))
                        && (configurations.is_empty() || configurations.contains(&configuration));
                    let boots = booted.iter().filter(|one| **one == (kind, configuration));
                    assert_eq!(
                        boots.count(),
                        usize::from(asked),
                        "{kind:?} {configuration:?}"
                    );
                    let wanted = GuestCell {
                        kind,
                        configuration,
                        counts: match asked {
                            true => Ok(counts(kind, configuration)),
                            false => Err(Uncounted::Unasked),
                        },
                    };
                    assert_eq!(cells.next(), Some(wanted));
                }
            }
            assert_eq!(cells.next(), None);
        }
    }

    #[test]
    fn no_guest_boots_after_an_interrupt() {
        let stop = Interrupt::default();
        stop.request();
        let found = all(&args(), &stop, |_, _| panic!("a guest was booted"));
        let interrupted = Err(Uncounted::Failed("interrupted".into()));
        assert!(found.iter().all(|cell| cell.counts == interrupted));
        assert_eq!(found.len(), Kind::ALL.len() * Configuration::ALL.len());
        // A request while guests run ends the series: each worker finishes one guest at most.
        let stop = Interrupt::default();
        let found = all(&args(), &stop, |kind, configuration| {
            stop.request();
            Ok(counts(kind, configuration))
        });
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let counted = found.iter().filter(|cell| cell.counts.is_ok()).count();
        assert!((1..=workers).contains(&counted), "{counted}");
        let others = found.iter().filter(|cell| cell.counts == interrupted);
        assert_eq!(counted + others.count(), found.len());
    }
}
