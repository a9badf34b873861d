//! X21: cost of the paravirtual IOMMU's configurations in a guest, by counts (PVIOMMU section 5,
//! Table 1).
//!
//! The paper measures time on three network cards. Here a guest's assigned devices are models, so
//! the experiment counts the causes of that time: requests, exits and guest instructions. The
//! caller boots the guests and passes the counts in. Each row names the device and the cache that
//! ran.

mod as_published;
mod claims;
mod rows;
mod table_1;

use self::claims::{claims, host_side};
use self::rows::cell;
use self::table_1::table_1;
use super::experiment::Experiment;
use super::finding::Findings;
use super::guests::{GuestCell, Guests, Kind, Uncounted};
use super::setting::Setting;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X21",
    title: "Cost of four configurations of the para-virtual IOMMU in a guest",
    source: "PVIOMMU section 5, Table 1, Figs. 11 to 18",
    measure,
};

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let (kernel, cells) = match &setting.guests {
        Guests::None(why) | Guests::Failed(why) => {
            let mut found = Findings::with_method(
                "Stock guests, each configuration with each kind of device, counted under QEMU's \
                icount.",
            );
            found.explain(format!("Not run: {why}."));
            table_1(&mut found)?;
            return Ok(found);
        }
        Guests::Counted { kernel, cells } => (kernel, cells),
    };
    let mut found = Findings::with_method(format!(
        "Stock guests (Linux {kernel}) under QEMU's icount, where time is the number of guest \
        instructions and a doorbell completes before the guest continues. Requests and exits are \
        the difference between two samples of a guest with only the counted operations in between. \
        Instructions of a 4 KiB read are the median of the reads that waited for the disk; those \
        of a map and unmap are the smaller of two means, each of 256 maps and unmaps in a row."
    ));
    for one in cells {
        cell(one, &mut found);
    }
    for kind in Kind::ALL {
        claims(kind, cells, &mut found)?;
    }
    as_published::compare_with_fixed(cells, &mut found);
    table_1(&mut found)?;
    uncounted(cells, &mut found);
    found.explain(
        "The paper measured time, throughput and utilisation on real cards and hosts. Here the \
        guest is emulated and its devices are programs, so time is meaningless. The experiment \
        counts the causes of time instead: requests, the exits for them, and guest instructions. \
        Table 1 is shown for reference.",
    );
    found.note(host_side(cells));
    found.note(
        "Of the paper's cards, the assigned I210 and the simulated E1000 have stand-ins, which are \
        disks. QEMU emulates an E1000 in its own process. Its accesses never pass this \
        para-virtual IOMMU, whose devices are served over vfio-user. So it could run in the \
        baseline and behind QEMU's IOMMUs, and in none of the paper's other configurations. A \
        ConnectX-3 virtual function needs the card.",
    );
    found.note(
        "In the baseline, the simulated device equals the emulated one: in the paper, too, the \
        simulator can access all guest memory.",
    );
    found.note(
        "Instructions per frame are not counted: four processors send at once, each to its own \
        neighbour, and no counter in the guest separates them, as `guest bench-read` does for \
        reads. The IOMMU's share is known: the mappings per frame, each with the instructions per \
        map and unmap.",
    );
    found.note(
        "The cache keeps a mapping for up to 40 s after its unmap: this exposure is the price of \
        the savings (X24).",
    );
    Ok(found)
}

/// Adds a note for the cells without counts; cells with the same reason share one.
fn uncounted(cells: &[GuestCell], found: &mut Findings) {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    let mut unasked = 0;
    for one in cells {
        let reason = match &one.counts {
            Ok(_) => continue,
            Err(Uncounted::Unasked) => {
                unasked += 1;
                continue;
            }
            // These cells have rows and a note of their own.
            Err(Uncounted::FalseFaults(_)) => continue,
            Err(Uncounted::Failed(why)) => format!("Failed, {why}"),
        };
        let name = format!("{}, {}", one.kind.name(), one.configuration.name());
        match reasons.iter_mut().find(|(same, _)| *same == reason) {
            Some((_, names)) => names.push(name),
            None => reasons.push((reason, vec![name])),
        }
    }
    for (reason, names) in reasons {
        found.note(format!("{reason}: {}.", names.join("; ")));
    }
    if unasked > 0 {
        found.note(format!(
            "Of {} guests, {unasked} were not requested.",
            cells.len()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Finding, Verdict};
    use super::super::guests::{Configuration, GuestCounts};
    use super::*;

    /// Counts with half as many exits as requests.
    pub(super) fn counts(requests: f64, map_unmap: f64) -> GuestCounts {
        GuestCounts {
            requests,
            exits: requests / 2.0,
            device_exits: 1.0,
            maps: Some(4.0),
            hits: Some(4.0 - requests / 2.0),
            instructions: Some(20_000.0 + requests * 1000.0),
            map_unmap,
            stopped: 0.0,
            unanswered: 0.0,
            host: None,
        }
    }

    /// Two kinds with different counts in four configurations, and a guest that failed.
    pub(super) fn cells() -> Vec<GuestCell> {
        let of = [
            Configuration::KvmBaseline,
            Configuration::Pviommu,
            Configuration::PviommuRtc,
            Configuration::VirtioStrict,
        ];
        let mut cells = Vec::new();
        for (kind, all) in [
            (
                Kind::Emulated,
                [(0.0, 100.0), (8.0, 3000.0), (0.0, 470.0), (8.0, 4800.0)],
            ),
            (
                Kind::ManyQueue,
                [(0.0, 120.0), (6.0, 3500.0), (0.5, 500.0), (7.0, 5000.0)],
            ),
        ] {
            for (configuration, (requests, map_unmap)) in of.into_iter().zip(all) {
                cells.push(GuestCell {
                    kind,
                    configuration,
                    counts: Ok(counts(requests, map_unmap)),
                });
            }
        }
        cells.push(GuestCell {
            kind: Kind::Assigned,
            configuration: Configuration::Pviommu,
            counts: Err(Uncounted::Failed("the guest has not booted".into())),
        });
        cells
    }

    pub(super) fn found(cells: Vec<GuestCell>) -> Finding {
        let mut setting = Setting::smoke();
        setting.guests = Guests::Counted {
            kernel: "6.12".into(),
            cells,
        };
        EXPERIMENT.run(&setting).unwrap()
    }

    #[test]
    fn verdict_without_guests_is_not_run() {
        let mut setting = Setting::smoke();
        setting.guests = Guests::None("QEMU is not installed".into());
        let found = EXPERIMENT.run(&setting).unwrap();
        assert_eq!(found.verdict, Verdict::NotRun);
        assert!(found.explanation[0].contains("Not run: QEMU is not installed"));
        // The paper's numbers are shown without measured ones, each in its own row.
        let rows = found.rows.iter();
        let printed = rows.map(|row| {
            let printed = row.published.as_ref().unwrap();
            (row.quantity.as_str(), row.unit, printed.value)
        });
        let a = |nic: &str, rest: &str| format!("Table 1a, {nic}), RTC and HOPT: {rest}");
        let b = |rest: &str| {
            let card = "ConnectX-3 VF (not run: no card)";
            format!("Table 1b, {card}, RTC and HOPT: {rest}")
        };
        let i210 = "Intel I210 (not run: no card";
        let e1000 = "Simulated E1000 (not run: no model behind this IOMMU";
        let wanted = [
            (a(i210, "TCP_STREAM"), "%", 0.0),
            (a(i210, "TCP_RR"), "%", -15.0),
            (a(i210, "UDP_RR"), "%", -6.0),
            (a(i210, "Apache bench/10000reqs"), "%", -12.0),
            (a(i210, "Apache bench/100000reqs"), "%", -3.5),
            (a(e1000, "TCP_STREAM"), "%", 0.0),
            (a(e1000, "TCP_RR"), "%", -7.0),
            (a(e1000, "UDP_RR"), "%", -8.0),
            (a(e1000, "Apache bench/10000reqs"), "%", 3.0),
            (a(e1000, "Apache bench/100000reqs"), "%", 5.0),
            (b("latency of send"), "us", 0.013),
            (b("latency of write"), "us", 0.002),
            (b("bandwidth of send"), "MB/s", -3.0),
            (b("bandwidth of write"), "MB/s", -5.0),
        ];
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(what, unit, value)| (what.as_str(), *unit, *value))
            .collect();
        assert_eq!(printed.collect::<Vec<_>>(), wanted);
        assert!(
            found
                .rows
                .iter()
                .all(|row| row.measured.is_none() && row.published.is_some())
        );
    }

    /// The scripts load the counting module twice, and the cheaper of its two means counts.
    #[test]
    fn method_names_the_mean_that_is_shown() {
        let method = found(cells()).method;
        let wanted = "those of a map and unmap are the smaller of two means, each of 256 maps and \
                      unmaps in a row.";
        assert!(method.ends_with(wanted), "{method}");
    }
}
