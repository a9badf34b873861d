//! The paper's claims about the order of its configurations.

use super::rows::with_cache;
use crate::finding::{FindingRow, Findings, Published};
use crate::guests::{Configuration, GuestCell, GuestCounts, Kind};
use crate::published::Sheet;
use ringfence_lab::LabError;

/// Adds the paper's claims about the order of its configurations for one kind: the one-way latency
/// that they add to TCP_RR.
pub(super) fn claims(
    kind: Kind,
    cells: &[GuestCell],
    found: &mut Findings,
) -> Result<(), LabError> {
    let of = |configuration| counts(cells, kind, configuration);
    let (Some(plain), Some(cached)) = (of(Configuration::Pviommu), of(Configuration::PviommuRtc))
    else {
        return Ok(());
    };
    // P03 has both numbers. The second includes HOPT, which changes nothing that is counted here.
    let claims = Sheet::named("claims")?;
    let added = claims.printed(&[("id", "P03")], "value")?;
    let in_words = |text: &str, value, section: &str| {
        Published::new(text, value, format!("PVIOMMU section {section}, in words"))
    };
    let name = format!("{} ({})", kind.name(), kind.device(Configuration::Pviommu));
    let row = |what: String, value| FindingRow::counted(format!("{name}: {what}"), "", value);
    let [exits, instructions] = groups(kind);
    let ordered = [
        (
            Configuration::Pviommu,
            Some(plain),
            added.clone().read_as(21.0),
        ),
        (Configuration::PviommuRtc, Some(cached), added.read_as(13.0)),
        (
            Configuration::KvmBaseline,
            of(Configuration::KvmBaseline),
            in_words("BASELINE", 0.0, "5.2.1"),
        ),
    ];
    for (configuration, counts, printed) in ordered {
        let Some(counts) = counts else { continue };
        // Neither the baseline nor a cache that answers everything makes requests. The paper has no
        // such tie.
        if configuration != Configuration::PviommuRtc {
            let with = with_cache(configuration);
            let what = format!("added latency, by requests and exits, with {with}");
            let both = row(what, counts.requests + counts.exits);
            found.push(both.with_published(printed.clone()).ordered_within(exits));
        }
        let what = format!(
            "added latency, by instructions per map and unmap, with {}",
            with_cache(configuration)
        );
        let each = row(what, counts.map_unmap);
        found.push(each.with_published(printed).ordered_within(instructions));
    }
    let left = row(
        "share of requests and exits that the cache, the module's hash table, leaves".into(),
        (cached.requests + cached.exits) / (plain.requests + plain.exits),
    );
    let dramatically = Published::new(
        "RTC improves the latency dramatically",
        0.1,
        "claims.csv P12; read as: leaves a tenth at most",
    );
    found.push(left.at_most(dramatically));
    if let Some(strict) = of(Configuration::VirtioStrict) {
        for (configuration, counts) in [
            (Configuration::Pviommu, plain),
            (Configuration::PviommuRtc, cached),
        ] {
            let what = format!(
                "instructions per map and unmap, {} over virtio-strict",
                with_cache(configuration)
            );
            found.push(row(what, counts.map_unmap / strict.map_unmap));
        }
    }
    Ok(())
}

/// Compares the guests with and without the host's pool and pointer.
pub(super) fn host_side(cells: &[GuestCell]) -> String {
    let mut kinds = Vec::new();
    let (mut requests, mut exits, mut instructions) = (0.0_f64, 0.0_f64, 0.0_f64);
    for kind in Kind::ALL {
        let of = |configuration| counts(cells, kind, configuration);
        let (Some(without), Some(with)) = (
            of(Configuration::PviommuRtc),
            of(Configuration::PviommuRtcHopt),
        ) else {
            continue;
        };
        kinds.push(kind.name());
        requests = requests.max((with.requests - without.requests).abs());
        exits = exits.max((with.exits - without.exits).abs());
        instructions = instructions.max((with.map_unmap - without.map_unmap).abs());
    }
    let compared = match kinds.is_empty() {
        true => "No guests with and without them are compared here.".to_owned(),
        false => format!(
            "With and without them, the guests ({}) differ by at most {requests:.3} requests and \
            {exits:.3} exits per operation, and {instructions:.0} instructions per map and unmap.",
            kinds.join(", ")
        ),
    };
    format!(
        "The pool and the last-table pointer (HOPT) are on the host. {compared} The rows of walks \
        and frames, and X25, show their effect. Frames are those of the model: QEMU shares all \
        guest memory, so no byte moves when a page gets a frame."
    )
}

/// Returns the counts of a kind in a configuration, if they exist.
fn counts(cells: &[GuestCell], kind: Kind, configuration: Configuration) -> Option<&GuestCounts> {
    let same = |cell: &&GuestCell| cell.kind == kind && cell.configuration == configuration;
    cells.iter().find(same)?.counts.as_ref().ok()
}

/// Names of a kind's ordered groups of rows: requests and exits, and instructions.
const fn groups(kind: Kind) -> [&'static str; 2] {
    match kind {
        Kind::Assigned => ["assigned, exits", "assigned, instructions"],
        Kind::Emulated => ["emulated, exits", "emulated, instructions"],
        Kind::Simulated => ["simulated, exits", "simulated, instructions"],
        Kind::ManyQueue => ["many queues, exits", "many queues, instructions"],
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cells, counts, found};
    use crate::finding::Verdict;
    use crate::guests::{Configuration, GuestCell, GuestCounts, Kind};

    #[test]
    fn orders_and_the_share_of_the_cache_are_judged() {
        let right = found(cells());
        assert_eq!(right.verdict, Verdict::Reproduced, "{:#?}", right.rows);
        assert!(
            right
                .notes
                .iter()
                .any(|note| note.contains("the guest has not booted"))
        );
        // A cache that does not save all requests, and one that takes more instructions than none.
        // Each kind is judged.
        for (requests, map_unmap) in [(2.0, 470.0), (0.0, 3600.0)] {
            for index in [2, 6] {
                let mut cells = cells();
                assert_eq!(cells[index].configuration, Configuration::PviommuRtc);
                cells[index].counts = Ok(counts(requests, map_unmap));
                let wrong = found(cells).verdict;
                assert_ne!(
                    wrong,
                    Verdict::Reproduced,
                    "{index}: {requests} {map_unmap}"
                );
            }
        }
    }

    /// The rows of each kind have the values of its own guests.
    #[test]
    fn claims_of_each_kind_have_its_own_counts() {
        let found = found(cells());
        let device = "virtio network device of four queue pairs";
        for (name, exits, instructions, [plain, left, uncached, cached], [every, none]) in [
            (
                "emulated (virtio disk in the host's process)",
                "emulated, exits",
                "emulated, instructions",
                [12.0, 0.0, 3000.0, 470.0],
                [100.0, 4800.0],
            ),
            (
                &format!("many queues ({device})"),
                "many queues, exits",
                "many queues, instructions",
                [9.0, 0.75 / 9.0, 3500.0, 500.0],
                [120.0, 5000.0],
            ),
        ] {
            let begin = format!("{name}: ");
            let rows = found.rows.iter().filter_map(|row| {
                let what = row.quantity.strip_prefix(&begin)?;
                let printed = row.published.as_ref().map(|printed| printed.value);
                Some((what, row.measured?.median, printed, row.group))
            });
            let rtc = "pviommu+rtc (the module's hash table)";
            let by = |how, with: &str| format!("added latency, by {how}, with {with}");
            let each = "instructions per map and unmap";
            let wanted = [
                (
                    by("requests and exits", "pviommu"),
                    plain,
                    Some(21.0),
                    Some(exits),
                ),
                (
                    by(each, "pviommu"),
                    uncached,
                    Some(21.0),
                    Some(instructions),
                ),
                (by(each, rtc), cached, Some(13.0), Some(instructions)),
                (
                    by("requests and exits", "kvm-baseline"),
                    0.0,
                    Some(0.0),
                    Some(exits),
                ),
                (
                    by(each, "kvm-baseline"),
                    every,
                    Some(0.0),
                    Some(instructions),
                ),
                (
                    "share of requests and exits that the cache, the module's hash table, leaves"
                        .into(),
                    left,
                    Some(0.1),
                    None,
                ),
                (
                    format!("{each}, pviommu over virtio-strict"),
                    uncached / none,
                    None,
                    None,
                ),
                (
                    format!("{each}, {rtc} over virtio-strict"),
                    cached / none,
                    None,
                    None,
                ),
            ];
            let wanted = wanted.iter();
            let wanted = wanted
                .map(|(what, value, printed, group)| (what.as_str(), *value, *printed, *group));
            assert_eq!(
                rows.collect::<Vec<_>>(),
                wanted.collect::<Vec<_>>(),
                "{name}"
            );
        }
    }

    #[test]
    fn note_on_the_host_compares_its_guests() {
        let mut cells = cells();
        let note = |cells: &[GuestCell]| {
            let notes = found(cells.to_vec()).notes.into_iter();
            notes
                .filter(|note| note.contains("(HOPT)"))
                .collect::<Vec<_>>()
        };
        let [none] = &note(&cells)[..] else { panic!() };
        assert!(none.contains("No guests with and without them"), "{none}");
        for (kind, requests, map_unmap) in
            [(Kind::Emulated, 0.25, 470.0), (Kind::ManyQueue, 0.5, 493.0)]
        {
            let counts = GuestCounts {
                exits: 0.5,
                ..counts(requests, map_unmap)
            };
            cells.push(GuestCell {
                kind,
                configuration: Configuration::PviommuRtcHopt,
                counts: Ok(counts),
            });
        }
        let [some] = &note(&cells)[..] else { panic!() };
        let wanted = "the guests (emulated, many queues) differ by at most 0.250 requests and \
                      0.500 exits per operation, and 7 instructions per map and unmap.";
        assert!(some.contains(wanted), "{some}");
    }
}
